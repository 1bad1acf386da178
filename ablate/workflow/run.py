"""``run_study``: what ``ablate run`` does between its options and its last lines.

In a notebook::

    from pathlib import Path
    from ablate.workflow.run import run_study
    from ablate.workflow.where import Where

    end = run_study("quickstart", Where(storage=Path("ablate-runs")))
    end.report

The steps: study file → plan and chosen runs → lock of the study's folder → devices and tokens → mirror → runs
without a result → Ray → report. If a study tunes its arms, its trials go through the steps first
(``workflow.tune``).

How it fails: with a ``UserError`` before any run starts. A failed run stops no other. The returned value
tells of failed runs and interruptions, and the same call resumes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ablate.base.errors import UserError
from ablate.workflow.listener import Listener

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping
    from pathlib import Path

    from ablate.execute.todo import Todo
    from ablate.plan import Plan
    from ablate.store import StudyStore
    from ablate.workflow.end import StudyEnd
    from ablate.workflow.where import Where


def run_study(
    study: str | Path,
    where: Where,
    listener: Listener | None = None,
    *,
    only: Collection[str] = (),
    seeds: Collection[int] | None = None,
    retry_failed: bool = False,
) -> StudyEnd:
    """Run what a study (a YAML file, or the name of a shipped study) lacks, then write its report.

    ``only`` and ``seeds``: run these arms and seeds alone. ``retry_failed``: run failed runs again, too.

    Raises:
        UserError: a study, device, corpus, cluster or storage that cannot be used.
    """
    from ablate.plan import build_plan, known_plan, to_lock
    from ablate.plan.choose import choose_runs
    from ablate.store import StudyStore
    from ablate.store.running import running
    from ablate.study import load_study

    listener = listener or Listener()
    plan = build_plan(load_study(study))
    if plan.tuning is not None:
        plan = known_plan(plan, StudyStore(where.storage / plan.study))
    chosen, lock = choose_runs(plan, only, seeds), to_lock(plan)
    store = StudyStore(where.storage / plan.study)
    try:
        with running(store, lock) as shared:
            if shared:
                listener.say("Somebody else runs this study, too: its runs are shared.")
            if plan.tuning is not None and not plan.tuning.is_done:
                from ablate.workflow.tune import tune

                tuned = tune(plan, where, listener, retry_failed=retry_failed)
                if tuned.end is not None:
                    return tuned.end
                plan = tuned.plan
                store.write_plan(to_lock(plan))
                chosen = choose_runs(plan, only, seeds)
            return _run(
                store, plan, chosen, where, listener,
                study=str(study), retry_failed=retry_failed, alone=not shared,
            )  # fmt: skip
    except OSError as error:
        raise UserError(f"cannot write to {where.storage}: {error.strerror or error}") from error


def _run(
    store: StudyStore,
    plan: Plan,
    chosen: set[str],
    where: Where,
    listener: Listener,
    *,
    study: str,
    retry_failed: bool,
    alone: bool,
) -> StudyEnd:
    """Run the chosen runs of a locked study; ``alone``: no other process runs it."""
    from ablate.execute.driver import Outcome, execute_study
    from ablate.execute.todo import find_todo, requests_of
    from ablate.track.process import start_mirror
    from ablate.workflow.end import end_of
    from ablate.workflow.mirror import say_mirror
    from ablate.workflow.prepare import prepare

    arms = [arm for arm in plan.arms if any(run.id in chosen for run in arm.runs)]
    ready = prepare(where.storage, plan.arms, arms, listener, here=where.address is None)
    unneeded = _unneeded(store, plan)
    mirror = start_mirror(store.path, where.tracking_uri)
    try:
        requests = requests_of(plan, chosen, ready.corpora)
        todo = find_todo(store, requests, unneeded, retry_failed=retry_failed, take=alone)
        listener.say(_todo_text(plan, todo))
        if todo.runs:
            if ready.warning:
                listener.say(ready.warning)
            listener.say(f"Starting Ray {f'at {where.address}' if where.address else 'on this machine'} …")
            with listener.executing(store, [run.run_id for run in todo.runs]) as on_poll:
                outcome = execute_study(
                    store, todo.runs, address=where.address, on_poll=on_poll, unneeded=unneeded
                )
        else:
            outcome = Outcome(states={}, interrupted=False)
        report = None if outcome.interrupted else _report(store, listener)
    finally:
        left = mirror.stop()
    say_mirror(left, mirror.tracking_uri, study, listener)
    return end_of(store, plan, chosen - unneeded().keys(), outcome, report=report)


def _unneeded(store: StudyStore, plan: Plan) -> Callable[[], Mapping[str, str]]:
    """Return a function for the runs that the study's stop rule makes unneeded; free without a rule."""
    if plan.stop is None:
        return dict
    from ablate.reports.findings.ends import Unneeded

    return Unneeded(store)


def _todo_text(plan: Plan, todo: Todo) -> str:
    from ablate.execute.todo import taken_text

    ended = f"{todo.num_ended} of those asked for have ended before"
    if todo.num_unneeded:
        ended += f", {todo.num_unneeded} are not needed"
    if todo.taken:
        ended += f", {taken_text(todo.taken)}"
    runs = sum(len(arm.runs) for arm in plan.arms)
    return f"Study {plan.study}: {len(plan.arms)} arms, {runs} runs; {len(todo.runs)} to run, {ended}."


def _report(store: StudyStore, listener: Listener) -> Path:
    """Write the report and say its verdict; return its page."""
    from ablate.reports import write_report

    written = write_report(store)
    for sentence in ("", *written.notices, *written.verdict.sentences, f"\nReport:  {written.html}"):
        listener.say(sentence)
    return written.html
