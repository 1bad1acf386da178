"""``run_study``: what ``ablate run`` does between its options and its last lines.

In a notebook::

    from pathlib import Path
    from ablate.workflow.run import run_study
    from ablate.workflow import Where

    end = run_study("quickstart", Where(storage=Path("ablate-runs")))
    end.report

``run_study`` goes the way of docs/architecture.md: the study file is read; the plan is made and locked; the
runs without a result are executed; MLflow mirrors the store meanwhile; the report is written. If the study
tunes its arms, its trials go this way first (``tune``).

How it fails: with a ``UserError`` before any run starts. A failed run stops no other. The returned value
tells of failed runs and interruptions, and the same call resumes. Trials that were told are kept.
"""

from __future__ import annotations

import contextlib
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ablate.base.command_hints import command_line, redact
from ablate.base.errors import UserError, as_user_error, likely
from ablate.base.files import write_bytes_atomic
from ablate.plan import Plan, build_plan, known_plan, warnings_of
from ablate.plan.shares import sharing_text
from ablate.store import StudyStore
from ablate.store.study_lock import kept_still, running
from ablate.study.load import find_file, load_study
from ablate.study.search_space import tuned_name
from ablate.workflow import Listener, StudyEnd, end_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from ablate.data import TokenFiles
    from ablate.execute.pending_runs import RunRequest, Todo
    from ablate.execute.queue import ExecutionEnd
    from ablate.search.engine import TrialRuns
    from ablate.store import State
    from ablate.store.plan_file import LockedPlan
    from ablate.study import Study
    from ablate.workflow import Where

    Unneeded = Callable[[], Mapping[str, str]]
    """Returns the ids of runs whose results are not needed, with the reasons."""
    Allowed = Callable[[], int | None]
    """Returns how many seeds of each arm may begin by the results so far; None: all."""


def run_study(
    study: str | Path,
    where: Where,
    listener: Listener | None = None,
    *,
    only: Collection[str] = (),
    seeds: Collection[int] | None = None,
    retry_failed: bool = False,
    settings: Sequence[str] = (),
    seeds_allowed: Allowed | None = None,
) -> StudyEnd:
    """Run what a study (a YAML file, or the name of a shipped study) lacks, then write its report.

    ``only`` and ``seeds``: run these arms and seeds alone. ``retry_failed``: run failed runs again, too.
    ``settings``: ``KEY=VALUE`` each, which win over the file. ``seeds_allowed``: the runs are for another
    question than the study's own: this takes the place of its stop rule, its arms are not tuned first, and
    no report is written.

    Raises:
        UserError: a study, device, corpus, cluster or storage that cannot be used.
    """
    listener = listener or Listener()
    is_for_study = seeds_allowed is None
    loaded = load_known(study, where, settings)
    store = StudyStore(where.storage / loaded.name)
    plan = _plan(loaded, store, where, listener)
    choose_runs(plan, only, seeds)  # refuses names that the study lacks
    from ablate.execute.environment import read_otherwise
    from ablate.execute.pending_runs import requests_of, stop_unneeded
    from ablate.reports import write_report
    from ablate.results import stops
    from ablate.workflow.prepare import prepare

    with (
        _refusal_leaves_nothing(store, where),
        running(store, plan) as is_shared,
    ):
        # for `run NAME`
        write_bytes_atomic(store.path / "source", str(loaded.path.absolute()).encode())
        if is_shared:
            listener.say("Somebody else runs this study, too: its runs are shared.")
        if is_for_study and plan.tuning is not None and not plan.tuning.done:
            tuned = tune(plan, where, listener, retry_failed=retry_failed)
            if isinstance(tuned, StudyEnd):
                return tuned
            plan = tuned
            store.write_plan(plan)
        chosen = choose_runs(plan, only, seeds)
        outdated = {
            run.id
            for arm, run in plan.runs()
            if read_otherwise(store.run(run.id), arm.config.trainer)
        }
        if outdated:
            chosen |= outdated
            listener.say(
                f"Logs are read again, as the study now says: {len(outdated)} runs."
            )
        arms = [arm for arm in plan.arms if any(run.id in chosen for run in arm.runs)]
        requests = requests_of(plan, chosen, prepare(where, plan.arms, arms, listener))
        unneeded: Unneeded = dict
        if plan.stop is not None and is_for_study:
            unneeded = stops.Unneeded(store)
        report = None
        with mirrored(store, plan.study if settings else str(study), where, listener):
            waves = _waves(
                store,
                plan,
                requests,
                seeds_allowed,
                unneeded=unneeded,
                retry_failed=retry_failed,
                take=not is_shared,
            )
            outcome = _execute(store, plan, waves, where, listener, unneeded)
            if plan.settled is not None:
                stop_unneeded(store, requests, unneeded())
            if is_for_study and not outcome.interrupted:
                written = write_report(store)
                listener.reported(written)
                report = written.html
            if plan.keep_weights:
                num_kept = sum(store.run(run_id).weights.is_dir() for run_id in chosen)
                listener.say(
                    f"Weights: {store.path}/runs/ID/weights, of {num_kept} runs; "
                    "runs that ended before they were asked to keep theirs have none."
                )
        return end_of(store, plan, chosen - unneeded().keys(), outcome, report)


def load_known(study: str | Path, where: Where, settings: Sequence[str]) -> Study:
    """Load a study by its file or name; also one that ran in this storage before, by its name.

    Raises:
        UserError: there is no such study, or it cannot be used.
    """
    try:
        file = find_file(study)
    except UserError:
        source = where.storage / study / "source"
        if not source.is_file():
            raise
        file = Path(source.read_text(encoding="utf-8"))
        settings = [*StudyStore(source.parent).plan().settings, *settings]
    return load_study(file, tuple(settings))


def choose_runs(
    plan: Plan, only: Collection[str], seeds: Collection[int] | None
) -> set[str]:
    """Return the ids of the runs of these arms (empty: all arms) and seeds (None: all seeds).

    Raises:
        UserError: the study lacks an arm or a seed; the message names the command line's option.
    """
    runs = {arm.name: arm.runs for arm in plan.arms}
    # an arm whose best values are the study's own is its own tuned arm
    if plan.tuning is not None:
        for name in list(runs):
            runs.setdefault(tuned_name(name), runs[name])
    for name in only:
        if name not in runs:
            hint = likely(name, runs, f"arms: {', '.join(sorted(runs))}")
            raise UserError(f"--only: no arm '{name}' in study '{plan.study}' ({hint})")
    known_seeds = sorted({run.seed for _, run in plan.runs()})
    for seed in seeds or ():
        if seed not in known_seeds:
            listed = ", ".join(map(str, known_seeds))
            raise UserError(
                f"--seeds: {seed} is not a seed of study '{plan.study}' (seeds: {listed})"
            )
    chosen = set()
    for name in only or runs:
        for run in runs[name]:
            if seeds is None or run.seed in seeds:
                chosen.add(run.id)
    return chosen


def _plan(study: Study, store: StudyStore, where: Where, listener: Listener) -> Plan:
    """Plan a study as its store knows it, and say so."""
    for warning in warnings_of(study, is_new=not store.path.exists()):
        listener.say(warning)
    plan = known_plan(build_plan(study, machines=where.machines), store)
    num_runs = sum(len(arm.runs) for arm in plan.arms)
    summary = f"{len(plan.arms)} arms, {num_runs} runs"
    devices = sharing_text(study, plan.arms, where.machines)
    if devices:
        summary += f", {devices}"
    listener.say(f"Study {plan.study}: {summary}. Loading torch …")
    if lost := store.runs_lost_by(plan):
        listener.say(
            f"The study has changed: runs of its former plan stay in {store.path}, and do not count: {lost}."
        )
    return plan


@contextlib.contextmanager
def _refusal_leaves_nothing(store: StudyStore, where: Where) -> Iterator[None]:
    """Remove the folder of a new study that is refused; turn errors of writing into a ``UserError``."""
    is_new = not store.path.exists()
    try:
        with as_user_error(f"cannot write to {where.storage}"):
            yield
    except UserError:
        with contextlib.suppress(OSError), kept_still(store.path) as is_alone:
            if is_alone and is_new and not any(store.path.glob("runs/*")):
                shutil.rmtree(store.path)
                where.storage.rmdir()  # only if nothing else is there
        raise


def _waves(
    store: StudyStore,
    plan: Plan,
    requests: Sequence[RunRequest],
    seeds_allowed: Allowed | None,
    **options: Any,
) -> Iterator[Todo]:
    """Find the requested runs that lack a result: all at once, or those of the seeds that may begin.

    The latter again after each look at the results, until it changes nothing. ``options``: of ``find_todo``.
    """
    from ablate.execute.pending_runs import find_todo
    from ablate.results.frames import load_frames
    from ablate.results.stops import seeds_to_begin

    if plan.settled is None:
        yield find_todo(store, requests, **options)
        return
    before = None
    allowed = seeds_allowed or (lambda: seeds_to_begin(load_frames(store)))
    while (num_seeds := allowed()) != before:
        in_wave = {run.id for arm in plan.arms for run in arm.runs[:num_seeds]}
        begun = [request for request in requests if request.run_id in in_wave]
        yield find_todo(store, begun, **options)
        before = num_seeds


def _execute(
    store: StudyStore,
    plan: Plan,
    waves: Iterator[Todo],
    where: Where,
    listener: Listener,
    unneeded: Unneeded,
) -> ExecutionEnd:
    """Execute one wave of runs after the other; Ray is started for the first, and stays up."""
    from ablate.execute.cluster import connection
    from ablate.execute.driver import execute_study, stop_request
    from ablate.execute.queue import ExecutionEnd

    states: dict[str, State] = {}
    is_stop_requested = stop_request(store.path)
    with contextlib.ExitStack() as ray:
        for wave, todo in enumerate(waves):
            if todo.runs or wave == 0:
                listener.say(_todo_text(todo))
            if not todo.runs:
                continue
            if is_stop_requested():
                return ExecutionEnd(states=states, interrupted=True)
            if not states:
                listener.say(f"Starting Ray {where.cluster} …")
                ray.enter_context(connection(where.address, listener.say))
            with listener.executing(store, [run.run_id for run in todo.runs]) as poll:
                outcome = execute_study(
                    store,
                    todo.runs,
                    address=where.address,
                    on_poll=poll,
                    unneeded=unneeded,
                    plan=plan,
                )
            states |= outcome.states
            if outcome.interrupted or outcome.problem:
                return replace(outcome, states=states)
    return ExecutionEnd(states=states, interrupted=False)


def _todo_text(todo: Todo) -> str:
    parts = [
        f"{len(todo.runs)} to run",
        f"{todo.num_ended} of those asked for have ended before",
    ]
    if todo.num_unneeded:
        parts.append(f"{todo.num_unneeded} are not needed")
    for study, num_taken in Counter(todo.taken.values()).items():
        parts.append(f"{num_taken} taken from {study}")
    return f"{', '.join(parts)}."


def tune(
    plan: Plan, where: Where, listener: Listener, *, retry_failed: bool
) -> Plan | StudyEnd:
    """Find the values of a study's arms by trials, which are runs of a second study.

    Returns the plan with these values, or how the call ended without them.

    Raises:
        UserError: as ``run_study``; or another process runs the trials now.
    """
    from ablate.execute.cluster import connection
    from ablate.plan.tuning import trial_arms, trials_plan, tuned_plan, values_text
    from ablate.search.tune import tune_arms
    from ablate.workflow.prepare import prepare

    tuning = plan.tuning
    assert tuning is not None
    corpora = prepare(where, plan.arms, plan.arms, listener)
    store = StudyStore(where.storage / tuning.study)
    store.path.mkdir(parents=True, exist_ok=True)
    trials = f"{tuning.trials} trials of {tuning.tokens:,} tokens"
    listener.say(f"Tuning {len(tuning.groups)} groups of arms, {trials} each.")
    first_trials = [
        arm
        for group in tuning.groups
        for arm in trial_arms(plan, tuning, group, 0, group.shared)
    ]
    with (
        mirrored(store, tuning.study, where, listener),
        running_alone(store, trials_plan(plan, tuning, first_trials)),
        connection(where.address, listener.say),
    ):
        runs = trial_runs(store, corpora, where, listener, retry_failed=retry_failed)
        tuned, open_runs = tune_arms(plan, tuning, runs)
    if not tuned.done:
        return end_of(store, store.plan(), open_runs, runs.outcome)
    for group in tuned.groups:
        listener.say(f"  {group.name}: {values_text(group.chosen or {})}")
    return tuned_plan(plan, tuned)


@contextlib.contextmanager
def mirrored(
    store: StudyStore, name: str, where: Where, listener: Listener
) -> Iterator[None]:
    """Mirror a study to MLflow during the block; then say how to open its pages, and what they lack."""
    from ablate.track.process import start_mirror

    mirror = start_mirror(store.path, where.tracking_uri)
    try:
        yield
    finally:
        report = mirror.stop()
    if not report.complete:
        why = report.problem or f"{len(report.unsent)} runs not sent"
        listener.say(f"MLflow:  not up to date at {redact(mirror.tracking_uri)}: {why}")
    pages = command_line(
        "dashboard", name, storage=where.storage, tracking_uri=where.tracking_uri
    )
    listener.say(f"MLflow:  {pages}")


@contextlib.contextmanager
def running_alone(store: StudyStore, plan: LockedPlan) -> Iterator[None]:
    """Write the plan and hold the study's lock for the block, as ``running`` does.

    Raises:
        UserError: another process runs the study.
    """
    with running(store, plan) as is_shared:
        if is_shared:
            raise UserError(
                f"{store.path} is being run by another process (wait for it, and run this again)"
            )
        yield


def trial_runs(
    store: StudyStore,
    corpora: Mapping[str, TokenFiles],
    where: Where,
    listener: Listener,
    *,
    retry_failed: bool,
) -> TrialRuns:
    """Make the trainer of trials in ``store``. ``corpora``: token files by the digest of their data."""
    from ablate.execute.driver import execute_study, stop_request
    from ablate.execute.queue import ExecutionEnd
    from ablate.search.engine import TrialRuns

    is_stop_requested = stop_request(store.path)

    def execute(todo: list[RunRequest], unneeded: Unneeded) -> ExecutionEnd:
        if is_stop_requested():  # between two rounds
            return ExecutionEnd(states={}, interrupted=True)
        with listener.executing(store, [run.run_id for run in todo]) as on_poll:
            return execute_study(
                store, todo, address=where.address, on_poll=on_poll, unneeded=unneeded
            )

    return TrialRuns(
        store=store, corpora=corpora, execute=execute, retry_failed=retry_failed
    )
