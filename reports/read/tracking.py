"""Runs of any MLflow tracking server: one metric by step, arms by a filter or a tag."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ablate.base.errors import UserError, first_line
from ablate.reports.read.imported import run_of_losses
from ablate.reports.read.tables import tokens_at

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mlflow.entities import Metric, Run

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
    imported: dict[str, list[ImportedRun]] = {}
    try:
        of_name = client.get_experiment_by_name(experiment)
        if of_name is None:
            known = sorted(other.name for other in client.search_experiments())[:8]
            raise UserError(
                f"no experiment '{experiment}' at {uri} (there are: {', '.join(known)})"
            )
        for arm, queries in arms.items():
            imported[arm] = []
            for query in queries:
                for run in client.search_runs(
                    [of_name.experiment_id], query, max_results=50_000
                ):
                    name = f"run '{run.info.run_name}' ({run.info.run_id})"
                    history = client.get_metric_history(run.info.run_id, metric)
                    if history:
                        imported[arm].append(_imported(run, name, history, stages[arm]))
                    else:
                        faults.append(f"{name}: no metric '{metric}'")
    except (MlflowException, OSError) as error:
        raise UserError(f"MLflow at {uri}: {first_line(error)}") from None
    return imported


def _imported(
    run: Run, name: str, history: Sequence[Metric], stages: Stages | None
) -> ImportedRun:
    losses: dict[int, float] = {}
    # MLflow gives no order; of several values at one step the last logged counts.
    for point in sorted(history, key=lambda point: point.timestamp):
        tokens = point.step if stages is None else round(tokens_at(point.step, stages))
        losses[tokens] = point.value
    started_ms = run.info.start_time
    ended_ms = run.info.end_time
    seed = run.data.params.get("seed", run.data.tags.get("seed", ""))
    return run_of_losses(
        losses,
        [run.info.run_id],
        state=_STATES.get(run.info.status, "failed"),
        source=f"MLflow {name}",
        seed=int(seed) if seed.lstrip("-").isdecimal() else None,
        started_unix=started_ms and started_ms / 1e3,
        ended_unix=ended_ms and ended_ms / 1e3,
    )
