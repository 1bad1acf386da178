"""Runs of any MLflow tracking server: one metric by step, arms by a filter or a tag."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ablate.base.errors import UserError, first_line
from ablate.reports.read.imported import run_of_losses
from ablate.reports.read.tables import tokens_at

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ablate.reports.read.imported import ImportedRun
    from ablate.reports.read.tables import Stages
    from ablate.store import State

_STATES: dict[str, State] = {
    "FINISHED": "finished", "RUNNING": "running", "SCHEDULED": "pending", "FAILED": "failed",
    "KILLED": "interrupted",
}  # fmt: skip


def read_mlflow(
    uri: str,
    experiment: str,
    faults: list[str],
    *,
    metric: str,
    arms: Mapping[str, Sequence[str]],
    stages: Mapping[str, Stages | None],
) -> dict[str, list[ImportedRun]]:
    """Read the runs of an experiment, by arm.

    Args:
        uri: the tracking server or store.
        experiment: its name.
        faults: gets a line for each run without the metric.
        metric: the validation loss in nats per token, logged by step.
        arms: arm → MLflow's search filters (``tags.recipe = 'fp8' and params.width = '512'``).
        stages: arm → the tokens of a step; 1 if a step is one token.

    Raises:
        UserError: the server does not answer, the experiment is unknown, or MLflow refuses a filter.
    """
    import mlflow
    from mlflow.exceptions import MlflowException

    client = mlflow.MlflowClient(tracking_uri=uri)
    imported: dict[str, list[ImportedRun]] = {arm: [] for arm in arms}
    try:
        found = client.get_experiment_by_name(experiment)
        if found is None:
            known = ", ".join(sorted(one.name for one in client.search_experiments())[:8])
            raise UserError(f"no experiment '{experiment}' at {uri} (there are: {known})")
        for arm, query in ((arm, query) for arm, queries in arms.items() for query in queries):
            for run in client.search_runs([found.experiment_id], filter_string=query, max_results=50_000):
                info, source = run.info, f"run '{run.info.run_name}' ({run.info.run_id})"
                # MLflow gives no order; of several values at one step the last logged counts.
                history = sorted(client.get_metric_history(info.run_id, metric), key=lambda m: m.timestamp)
                if not history:
                    faults.append(f"{source}: no metric '{metric}'")
                    continue
                seed = run.data.params.get("seed", run.data.tags.get("seed", ""))
                begun, ended = (time and time / 1e3 for time in (info.start_time, info.end_time))
                imported[arm].append(
                    run_of_losses(
                        {_tokens(point.step, stages[arm]): point.value for point in history},
                        [info.run_id],
                        state=_STATES.get(info.status, "failed"),
                        source=f"MLflow {source}",
                        seed=int(seed) if seed.lstrip("-").isdecimal() else None,
                        started_unix=begun,
                        ended_unix=ended,
                    )
                )
    except (MlflowException, OSError) as error:
        raise UserError(f"MLflow at {uri}: {first_line(error)}") from None
    return imported


def _tokens(step: int, stages: Stages | None) -> int:
    return step if stages is None else round(tokens_at(step, stages))
