"""The part of ``run_study`` before the seeds: every arm's own values, where the study asks for them.

How it fails: as ``run_study`` does. Told trials are kept, and the same call resumes.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ablate.base.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ablate.data import TokenFiles
    from ablate.plan import Plan
    from ablate.search.tune import Searched
    from ablate.store import StudyStore
    from ablate.store.lock import GroupTuning
    from ablate.workflow.end import StudyEnd
    from ablate.workflow.listener import Listener
    from ablate.workflow.where import Where


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """The plan with the values found, or ``end`` if the search is not done."""

    plan: Plan
    end: StudyEnd | None = None


def tune(plan: Plan, where: Where, listener: Listener, *, retry_failed: bool) -> Tuned:
    """Find the values of a study's arms by trials, which are runs of a study beside it.

    Raises:
        UserError: as ``run_study``; or another process runs the trials now.
    """
    from ablate.plan.tuning import tuned_plan
    from ablate.store import StudyStore
    from ablate.track.process import start_mirror
    from ablate.workflow.end import end_of
    from ablate.workflow.mirror import say_mirror
    from ablate.workflow.prepare import prepare

    assert plan.tuning is not None
    ready = prepare(where.storage, plan.arms, plan.arms, listener, here=where.address is None)
    if ready.warning:
        listener.say(ready.warning)
    trials = StudyStore(where.storage / plan.tuning.study)
    trials.path.mkdir(parents=True, exist_ok=True)
    mirror = start_mirror(trials.path, where.tracking_uri)
    try:
        found = _search(trials, plan, ready.corpora, where, listener, retry_failed=retry_failed)
    finally:
        left = mirror.stop()
    if found.tuning.is_done:
        return Tuned(plan=tuned_plan(plan, found.tuning))
    say_mirror(left, mirror.tracking_uri, shlex.quote(plan.tuning.study), listener)
    end = end_of(trials, found.plan, found.open_runs, found.outcome, is_tuned=False)
    return Tuned(plan=plan, end=end)


def _search(
    store: StudyStore,
    plan: Plan,
    corpora: Mapping[str, TokenFiles],
    where: Where,
    listener: Listener,
    *,
    retry_failed: bool,
) -> Searched:
    """Run the trials in their own ``store``, and say what was found."""
    from ablate.execute.cluster import connection
    from ablate.plan import to_lock
    from ablate.search.tune import first_trials, tune_arms
    from ablate.store.running import running
    from ablate.workflow.trials import trial_runs

    tuning = plan.tuning
    assert tuning is not None
    trials = f"{tuning.tune.trials} trials of {tuning.tune.tokens:,} tokens"
    listener.say(f"Tuning {len(tuning.groups)} groups of arms, {trials} each.")
    with running(store, to_lock(first_trials(plan, tuning))) as shared:
        if shared:
            raise UserError(f"{store.path} is being run by another process (wait for it, and run this again)")
        with connection(where.address):
            runs = trial_runs(store, corpora, where.address, listener, retry_failed=retry_failed)
            found = tune_arms(plan, tuning, runs)
    if found.tuning.is_done:
        for group in found.tuning.groups:
            listener.say(f"  {_found_text(group)}")
    return found


def _found_text(group: GroupTuning) -> str:
    from ablate.plan.tuning import values_text

    assert group.chosen is not None
    losses = {json.dumps(trial.values): trial.loss for trial in group.trials}
    chosen, shared = (losses.get(json.dumps(values)) for values in (group.chosen, group.shared))
    if group.chosen == group.shared:
        return f"{group.name}: {values_text(group.chosen)}, as in the study"
    assert chosen is not None
    than = "" if shared is None else f", with the study's own {shared:.4f}"
    return f"{group.name}: {values_text(group.chosen)} (loss {chosen:.4f}{than})"
