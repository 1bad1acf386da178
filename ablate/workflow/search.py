"""``search_study``: what ``ablate search`` does between its options and its last lines.

Only this process writes Optuna's storage; Ray's tasks train runs and never see it. Each trial is therefore
asked and told exactly once, even after a kill, and the same call resumes.

How it fails: with a ``UserError`` before any run starts. An incomplete round ends the call, with
pages of the results so far.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ablate.base.command_hints import command_line
from ablate.base.errors import UserError, as_user_error
from ablate.search.engine import open_storage
from ablate.search.recipes import (
    StoppedError,
    check_same,
    confirm_study,
    search_recipes,
    tried_plan,
)
from ablate.store import StudyStore
from ablate.workflow.prepare import prepare
from ablate.workflow.run import mirrored, running_alone, trial_runs

if TYPE_CHECKING:
    from pathlib import Path

    from optuna.storages import BaseStorage

    from ablate.reports.findings.search import SearchResult
    from ablate.search.halving import SearchPlan
    from ablate.workflow import Listener, Where


@dataclass(frozen=True, kw_only=True)
class SearchEnd:
    """What a search found so far, and where its pages are. ``exit_code``: 0 where it came to its end."""

    found: SearchResult
    pages: Path
    exit_code: int


def search_study(
    planned: SearchPlan, where: Where, listener: Listener, *, file: str
) -> SearchEnd:
    """Start or resume a search, and write its front. ``file``: the search as the user named it.

    Raises:
        UserError: another search of that name, or this one in another process; a device, corpus, cluster or
            journal of Optuna's that cannot be used; a storage that cannot be written.
    """
    from ablate.reports.findings.search import result_of
    from ablate.reports.pages.compare import write_search

    store = StudyStore(where.storage / planned.name)
    pages = store.path / "search"
    try:
        begun = store.plan()
    except (OSError, UserError):
        begun = tried_plan(planned)
    with (
        as_user_error(f"cannot write to {where.storage}"),
        running_alone(store, begun),
    ):
        check_same(planned, store)
        trials = open_storage(store.path)
        with mirrored(store, planned.name, where, listener):
            again = command_line(
                "search",
                file,
                storage=where.storage,
                address=where.address,
                tracking_uri=where.tracking_uri,
            )
            code = _search_on(store, planned, trials, where, listener, again)
            result = result_of(planned, planned.read(trials))
            front = [arm.name for arm in result.last.front if not arm.is_baseline]
            confirm = None
            if front and result.is_done:
                confirm = confirm_study(planned, front, file)
            write_search(result, pages, confirm)
        return SearchEnd(found=result, pages=pages, exit_code=code)


def _search_on(
    store: StudyStore,
    planned: SearchPlan,
    trials: BaseStorage,
    where: Where,
    listener: Listener,
    again: str,
) -> int:
    """Search as far as possible; return the exit code."""
    from ablate.execute.cluster import connection

    trials_by_budget = planned.read(trials)
    num_ended = sum(
        trial.state.is_finished() for trial in itertools.chain(*trials_by_budget)
    )
    listener.say(
        f"Search {planned.name}: {len(planned.cells)} recipes, {planned.num_trials} to try at the first "
        f"budget; {num_ended} trials have ended before."
    )
    if planned.is_done(trials_by_budget):
        return 0
    # all arms have the same data
    arms = [plan.arm(planned.baseline) for plan in planned.plans]
    corpora = prepare(where, planned.plans[0].arms, arms, listener)
    runs = trial_runs(store, corpora, where, listener, retry_failed=True)
    store.write_plan(tried_plan(planned, trials_by_budget))
    listener.say(f"Starting Ray {where.cluster} …")
    try:
        with connection(where.address, listener.say):
            search_recipes(planned, trials, runs, listener.say)
    except StoppedError as stopped:
        listener.say(f"\n{stopped}; go on with: {again}")
        return 130 if runs.outcome.interrupted else 1
    return 0
