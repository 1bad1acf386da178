"""``run_study``: what ``ablate run`` does between its options and its last lines.

In a notebook::

    from pathlib import Path
    from ablate.workflow.run import run_study
    from ablate.workflow import Where

    end = run_study("quickstart", Where(storage=Path("ablate-runs")))
    end.report

The steps: study file → plan and chosen runs → lock of the study's folder → devices and tokens → mirror → runs
without a result → Ray → report. If a study tunes its arms, its trials go through the steps first
(``workflow.tune``).

How it fails: with a ``UserError`` before any run starts. A failed run stops no other. The returned value
tells of failed runs and interruptions, and the same call resumes.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING

from ablate.base.errors import UserError, likely
from ablate.plan import Plan, build_plan, code_warning, known_plan, runs_lost_by
from ablate.store import StudyStore
from ablate.store.study_lock import running
from ablate.study import load_study
from ablate.study.search_space import tuned_name
from ablate.workflow import Listener, StudyEnd, end_of, say_mirror

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
    from pathlib import Path

    from ablate.execute.driver import ExecutionEnd
    from ablate.execute.pending_runs import Todo
    from ablate.store import State
    from ablate.workflow import Where


def run_study(
    study: str | Path,
    where: Where,
    listener: Listener | None = None,
    *,
    only: Collection[str] = (),
    seeds: Collection[int] | None = None,
    retry_failed: bool = False,
    as_pilot: bool = False,
    settings: Sequence[str] = (),
) -> StudyEnd:
    """Run what a study (a YAML file, or the name of a shipped study) lacks, then write its report.

    ``only`` and ``seeds``: run these arms and seeds alone. ``retry_failed``: run failed runs again, too.
    ``as_pilot``: neither tune the arms first nor write a report.
    ``settings``: ``KEY=VALUE`` each, which win over the file.

    Raises:
        UserError: a study, device, corpus, cluster or storage that cannot be used.
    """
    listener = listener or Listener()
    loaded = load_study(study, tuple(settings))
    if not (where.storage / loaded.name).exists() and (warning := code_warning(loaded)):
        listener.say(warning)
    plan = build_plan(loaded)
    if plan.tune is not None:
        plan = known_plan(plan, StudyStore(where.storage / plan.study))
    chosen = _choose_runs(plan, only, seeds)
    runs = sum(len(arm.runs) for arm in plan.arms)
    listener.say(f"Study {plan.study}: {len(plan.arms)} arms, {runs} runs. Loading torch …")
    folder = where.storage / plan.study
    lost, lock = runs_lost_by(plan, folder), plan
    store = StudyStore(folder)
    if lost:
        former = "1 run" if lost == 1 else f"{lost} runs"
        listener.say(
            f"The study has changed: {former} of its former plan stay in {store.path}, and do not count."
        )
    from ablate.execute.pending_runs import find_todo, requests_of, stop_unneeded
    from ablate.track.process import start_mirror
    from ablate.workflow.prepare import prepare

    try:
        with running(store, lock) as shared:
            if shared:
                listener.say("Somebody else runs this study, too: its runs are shared.")
            if plan.tune is not None and not plan.tune.is_done and not as_pilot:
                from ablate.workflow.tune import tune

                tuned = tune(plan, where, listener, retry_failed=retry_failed)
                if isinstance(tuned, StudyEnd):
                    return tuned
                plan = tuned
                store.write_plan(plan)
                chosen = _choose_runs(plan, only, seeds)
            arms = [arm for arm in plan.arms if any(run.id in chosen for run in arm.runs)]
            corpora = prepare(where.storage, plan.arms, arms, listener, here=where.address is None)
            unneeded = _unneeded(store, plan)

            def find(asked: Collection[str]) -> Todo:
                requests = requests_of(plan, asked, corpora)
                return find_todo(store, requests, unneeded, retry_failed=retry_failed, take=not shared)

            mirror = start_mirror(store.path, where.tracking_uri)
            try:
                waves = _waves(store, plan, chosen)
                outcome = _execute(store, plan, waves, find, where, listener, unneeded)
                if _in_waves(plan):
                    stop_unneeded(store, requests_of(plan, chosen, corpora), unneeded())
                report = None if outcome.interrupted or as_pilot else _report(store, listener)
            finally:
                left = mirror.stop()
            if plan.keep_weights:
                listener.say(_weights_text(store, chosen))
            named = plan.study if settings else str(study)
            say_mirror(left, mirror.tracking_uri, named, where, listener)
            return end_of(store, plan, chosen - unneeded().keys(), outcome, report=report)
    except OSError as error:
        raise UserError(f"cannot write to {where.storage}: {error.strerror or error}") from error


def _choose_runs(plan: Plan, only: Collection[str], seeds: Collection[int] | None) -> set[str]:
    """Return the ids of the runs of these arms (empty: all arms) and seeds (None: all seeds).

    Raises:
        UserError: the study lacks an arm or a seed; the message names the command line's option.
    """
    names = {arm.name for arm in plan.arms}
    if plan.tune is not None:  # an arm whose best values are the study's own is its own tuned arm
        stands_for = {tuned_name(name): name for name in names if tuned_name(name) not in names}
        only = tuple(stands_for.get(name, name) for name in only)
    for name in only:
        if name not in names:
            hint = likely(name, names, f"arms: {', '.join(sorted(names))}")
            raise UserError(f"--only: no arm '{name}' in study '{plan.study}' ({hint})")
    known = {run.seed for _, run in plan.runs()}
    if seeds is not None and (unknown := sorted(set(seeds) - known)):
        there = ", ".join(map(str, sorted(known)))
        raise UserError(f"--seeds: {unknown[0]} is not a seed of study '{plan.study}' (seeds: {there})")
    return {
        run.id
        for arm, run in plan.runs()
        if (not only or arm.name in only) and (seeds is None or run.seed in seeds)
    }


def _execute(
    store: StudyStore,
    plan: Plan,
    waves: Iterator[set[str]],
    find: Callable[[Collection[str]], Todo],
    where: Where,
    listener: Listener,
    unneeded: Callable[[], Mapping[str, str]],
) -> ExecutionEnd:
    """Execute what each wave of runs lacks; ``find`` finds that."""
    from ablate.execute.cluster import connection
    from ablate.execute.driver import Cancellation, ExecutionEnd, execute_study

    states: dict[str, State] = {}
    # Between two waves Ray goes on, and a request to stop is heard.
    cancellation = Cancellation(store.path) if _in_waves(plan) else None
    with contextlib.ExitStack() as ray:
        begun = False
        for number, asked in enumerate(waves):
            todo = find(asked)
            if number == 0 or todo.runs:
                listener.say(_todo_text(todo))
            if not todo.runs:
                continue
            if not begun:
                begun = True
                listener.say(
                    f"Starting Ray {f'at {where.address}' if where.address else 'on this machine'} …"
                )
                if _in_waves(plan):
                    ray.enter_context(connection(where.address, listener.say))
            if cancellation is not None and cancellation.requested:
                return ExecutionEnd(states=states, interrupted=True)
            with listener.executing(store, [run.run_id for run in todo.runs]) as poll:
                ended = execute_study(
                    store,
                    todo.runs,
                    address=where.address,
                    say=listener.say,
                    on_poll=poll,
                    unneeded=unneeded,
                    plan=plan,
                )
            states |= ended.states
            if ended.interrupted or ended.problem:
                return replace(ended, states=states)
    return ExecutionEnd(states=states, interrupted=False)


def _in_waves(plan: Plan) -> bool:
    return plan.stop is not None and plan.stop.settled is not None


def _waves(store: StudyStore, plan: Plan, chosen: Collection[str]) -> Iterator[set[str]]:
    """Yield the ids of the runs to ask for: all at once, or of as many seeds as the results allow.

    With seeds until settled the runs of one more seed begin when a look has found which arms need them.
    """
    seeds: int | None = None
    while True:
        if _in_waves(plan):
            from ablate.results.frames import load_frames
            from ablate.results.stops import seeds_to_begin

            before, seeds = seeds, seeds_to_begin(load_frames(store))
            if before is not None and seeds == before:
                return
        yield {run.id for arm in plan.arms for run in arm.runs[:seeds] if run.id in chosen}
        if seeds is None:
            return


def _unneeded(store: StudyStore, plan: Plan) -> Callable[[], Mapping[str, str]]:
    """Return a function for the runs that the study's stop rule makes unneeded; free without a rule."""
    if plan.stop is None:
        return dict
    from ablate.results.stops import Unneeded

    return Unneeded(store)


def _todo_text(todo: Todo) -> str:
    from ablate.execute.pending_runs import taken_text

    ended = f"{todo.num_ended} of those asked for have ended before"
    if todo.num_unneeded:
        ended += f", {todo.num_unneeded} are not needed"
    if todo.taken:
        ended += f", {taken_text(todo.taken)}"
    return f"{len(todo.runs)} to run, {ended}."


def _weights_text(store: StudyStore, asked: Collection[str]) -> str:
    """Say where the weights are, and how many runs ended before they were asked to keep theirs."""
    ended = [run for run in map(store.run, asked) if run.status().state == "finished"]
    lacking = sum(not run.weights.is_dir() for run in ended)
    text = f"Weights: {store.path}/runs/ID/weights, of {len(ended) - lacking} of {len(ended)} finished runs"
    return f"{text} (the others ended without; another study name trains them again)" if lacking else text


def _report(store: StudyStore, listener: Listener) -> Path:
    """Write the report and tell of it; return its page."""
    from ablate.reports import write_report

    written = write_report(store)
    listener.reported(written)
    return written.html
