"""Trials as runs under Ray: what ``ablate search`` and the tuning of a study's arms share."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ablate.data import TokenFiles
    from ablate.execute.driver import Outcome
    from ablate.execute.todo import RunRequest
    from ablate.search.runs import TrialRuns
    from ablate.store import StudyStore
    from ablate.workflow.listener import Listener


def trial_runs(
    store: StudyStore,
    corpora: Mapping[str, TokenFiles],
    address: str | None,
    listener: Listener,
    *,
    retry_failed: bool,
) -> TrialRuns:
    """Return the trainer of trials in ``store``. ``corpora``: token files by the digest of their data."""
    from ablate.execute.driver import Cancellation, Outcome, execute_study
    from ablate.execute.todo import requests_of
    from ablate.search.runs import TrialRuns

    cancellation = Cancellation(store.path)

    def execute(todo: list[RunRequest], unneeded: Callable[[], Mapping[str, str]]) -> Outcome:
        try:
            cancellation.raise_if_requested()  # between two rounds
        except KeyboardInterrupt:
            return Outcome(states={}, interrupted=True)
        with listener.executing(store, [run.run_id for run in todo]) as on_poll:
            return execute_study(store, todo, address=address, on_poll=on_poll, unneeded=unneeded)

    return TrialRuns(
        store=store,
        requests=lambda plan: requests_of(plan, {run.id for _, run in plan.runs()}, corpora),
        execute=execute,
        retry_failed=retry_failed,
    )
