"""The part of ``ablate run`` before the seeds: every arm's own values, where the study asks for them.

How it fails: as the runs after it do. What was told is kept, and the same command goes on.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from ablate.base.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from rich.console import Console

    from ablate.execute.driver import Outcome, RunRequest
    from ablate.plan import Plan
    from ablate.plan.found import GroupTuning
    from ablate.search.tune import Searched
    from ablate.store import StudyStore


def tune(
    console: Console,
    store: StudyStore,
    plan: Plan,
    *,
    requests: Callable[[Plan], list[RunRequest]],
    retry_failed: bool,
    address: str | None,
) -> Searched:
    """Run the trials of a study in ``store``, which is theirs, and say what was found.

    Raises:
        UserError: another process runs them now.
    """
    from ablate.cli.display import ConsoleListener
    from ablate.execute.cancel import Cancellation
    from ablate.execute.driver import connection, execute_study
    from ablate.execute.lock import running
    from ablate.plan import to_lock
    from ablate.search.runs import TrialRuns
    from ablate.search.tune import first_trials, tune_arms

    tuning = plan.tuning
    assert tuning is not None

    cancellation = Cancellation(store.path)

    def execute(todo: list[RunRequest], unneeded: Callable[[], Mapping[str, str]]) -> Outcome:
        cancellation.raise_if_requested()  # between two rounds
        with ConsoleListener(console).executing(store, [run.run_id for run in todo]) as on_poll:
            return execute_study(store, todo, address=address, on_poll=on_poll, unneeded=unneeded)

    trials = f"{tuning.tune.trials} trials of {tuning.tune.tokens:,} tokens"
    console.print(f"Tuning {len(tuning.groups)} groups of arms, {trials} each.", markup=False)
    first = json.loads(json.dumps(to_lock(first_trials(plan, tuning))))
    with running(store, first) as shared:
        if shared:
            raise UserError(f"{store.path} is being run by another process (wait for it, and run this again)")
        with connection(address):
            runs = TrialRuns(store=store, requests=requests, execute=execute, retry_failed=retry_failed)
            found = tune_arms(plan, tuning, runs)
    if found.tuning.is_done:
        for group in found.tuning.groups:
            console.print(f"  {_found_text(group)}", markup=False, soft_wrap=True)
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
