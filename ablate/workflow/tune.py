"""Trials as runs under Ray, and by them the part of ``run_study`` before the seeds: every arm's own values.

How it fails: as ``run_study`` does. Told trials are kept, and the same call resumes.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from ablate.base.errors import UserError
from ablate.execute.driver import Cancellation, ExecutionEnd
from ablate.execute.pending_runs import requests_of
from ablate.plan.tuning import tuned_plan, values_text
from ablate.search.runs import TrialRuns
from ablate.search.tune import first_trials, tune_arms
from ablate.store import StudyStore
from ablate.store.study_lock import running
from ablate.workflow import end_of, say_mirror
from ablate.workflow.prepare import prepare

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ablate.data import TokenFiles
    from ablate.execute.pending_runs import RunRequest
    from ablate.plan import Plan
    from ablate.store.plan_file import GroupTuning
    from ablate.workflow import Listener, StudyEnd, Where


def tune(plan: Plan, where: Where, listener: Listener, *, retry_failed: bool) -> Plan | StudyEnd:
    """Find the values of a study's arms by trials, which are runs of a study beside it.

    Returns the plan with these values, or how the call ended without them.

    Raises:
        UserError: as ``run_study``; or another process runs the trials now.
    """
    from ablate.execute.cluster import connection
    from ablate.track.process import start_mirror

    tuning = plan.tune
    assert tuning is not None
    corpora = prepare(where.storage, plan.arms, plan.arms, listener, here=where.address is None)
    store = StudyStore(where.storage / tuning.study)
    store.path.mkdir(parents=True, exist_ok=True)
    mirror = start_mirror(store.path, where.tracking_uri)
    try:
        trials = f"{tuning.trials} trials of {tuning.tokens:,} tokens"
        listener.say(f"Tuning {len(tuning.groups)} groups of arms, {trials} each.")
        with running(store, first_trials(plan, tuning)) as shared:
            if shared:
                raise UserError(
                    f"{store.path} is being run by another process (wait for it, and run this again)"
                )
            with connection(where.address, listener.say):
                runs = trial_runs(store, corpora, where.address, listener, retry_failed=retry_failed)
                found = tune_arms(plan, tuning, runs)
        for group in found.tuning.groups if found.tuning.is_done else ():
            listener.say(f"  {_found_text(group)}")
    finally:
        left = mirror.stop()
    if found.tuning.is_done:
        return tuned_plan(plan, found.tuning)
    say_mirror(left, mirror.tracking_uri, tuning.study, where, listener)
    return end_of(store, found.plan, found.open_runs, found.outcome, is_tuned=False)


def _found_text(group: GroupTuning) -> str:
    assert group.chosen is not None
    losses = {json.dumps(trial.values): trial.loss for trial in group.trials}
    chosen, shared = (losses.get(json.dumps(values)) for values in (group.chosen, group.shared))
    if group.chosen == group.shared:
        return f"{group.name}: {values_text(group.chosen)}, as in the study"
    assert chosen is not None
    than = "" if shared is None else f", with the study's own {shared:.4f}"
    return f"{group.name}: {values_text(group.chosen)} (loss {chosen:.4f}{than})"


def trial_runs(
    store: StudyStore,
    corpora: Mapping[str, TokenFiles],
    address: str | None,
    listener: Listener,
    *,
    retry_failed: bool,
) -> TrialRuns:
    """Return the trainer of trials in ``store``. ``corpora``: token files by the digest of their data."""
    from ablate.execute.driver import execute_study

    cancellation = Cancellation(store.path)

    def execute(todo: list[RunRequest], unneeded: Callable[[], Mapping[str, str]]) -> ExecutionEnd:
        try:
            cancellation.raise_if_requested()  # between two rounds
        except KeyboardInterrupt:
            return ExecutionEnd(states={}, interrupted=True)
        with listener.executing(store, [run.run_id for run in todo]) as on_poll:
            return execute_study(store, todo, address=address, on_poll=on_poll, unneeded=unneeded)

    return TrialRuns(
        store=store,
        requests=lambda plan: requests_of(plan, {run.id for _, run in plan.runs()}, corpora),
        execute=execute,
        retry_failed=retry_failed,
    )
