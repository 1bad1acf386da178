"""Runs of any MLflow tracking server: one metric by step, arms by a filter or a tag."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ablate.base.errors import UserError
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
_PAGE = 1000


def read_mlflow(
    uri: str, experiment: str, *, metric: str, arms: Mapping[str, Sequence[str]], stages: Mapping[str, Stages]
) -> tuple[dict[str, list[ImportedRun]], list[str]]:
    """Read the runs of an experiment.

    Args:
        uri: the tracking server or store.
        experiment: its name.
        metric: the validation loss in nats per token, logged by step.
        arms: arm → MLflow's search filters (``tags.recipe = 'fp8' and params.width = '512'``).
        stages: arm → the tokens of a step; 1 where the step is the token count already.

    Raises:
        UserError: a server that does not answer, an unknown experiment, a filter that MLflow refuses.
    """
    import mlflow
    from mlflow.exceptions import MlflowException

    client = mlflow.MlflowClient(tracking_uri=uri)
    faults = []
    imported: dict[str, list[ImportedRun]] = {arm: [] for arm in arms}
    try:
        found = client.get_experiment_by_name(experiment)
        if found is None:
            known = ", ".join(sorted(one.name for one in client.search_experiments())[:8])
            raise UserError(f"no experiment '{experiment}' at {uri} (there are: {known})")
        for arm, query in ((arm, query) for arm, queries in arms.items() for query in queries):
            for run in client.search_runs([found.experiment_id], filter_string=query, max_results=_PAGE):
                if history := client.get_metric_history(run.info.run_id, metric):
                    imported[arm].append(_run(run, history, stages[arm]))
                else:
                    faults.append(f"run '{run.info.run_name}' ({run.info.run_id}): no metric '{metric}'")
    except (MlflowException, OSError) as error:
        first = str(error).strip().splitlines()[0]
        raise UserError(f"MLflow at {uri}: {first}") from None
    return imported, faults


def _run(run: Any, history: Any, stages: Stages) -> ImportedRun:
    # The history is in no order; of several values at one step the one logged last counts.
    points = {
        round(tokens_at(one.step, stages)): one.value for one in sorted(history, key=lambda m: m.timestamp)
    }
    seed = run.data.params.get("seed", run.data.tags.get("seed", ""))
    return run_of_losses(
        points,
        [run.info.run_id],
        state=_STATES.get(run.info.status, "failed"),
        source=f"MLflow run '{run.info.run_name}' ({run.info.run_id})",
        seed=int(seed) if seed.lstrip("-").isdecimal() else None,
        started_unix=None if run.info.start_time is None else run.info.start_time / 1e3,
        ended_unix=None if run.info.end_time is None else run.info.end_time / 1e3,
    )
