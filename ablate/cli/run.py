"""``ablate run``: plan, execute what is missing, mirror to MLflow, report.

Exit codes: 0 every run asked for has a result; 1 one of them failed; 2 bad input; 130 interrupted.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from ablate.base.errors import UserError
from ablate.cli.common import storage_option
from ablate.cli.display import ConsoleListener
from ablate.workflow.mirror import say_mirror
from ablate.workflow.prepare import check_devices, prepare_kernel, prepare_tokens, requests_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from rich.console import Console

    from ablate.execute.driver import Outcome, RunRequest
    from ablate.plan import Plan
    from ablate.store import StudyStore

_LOG_LINES = 6


@click.command("run")
@click.argument("study")
@click.option("--only", multiple=True, metavar="ARM", help="Run this arm alone (may be repeated).")
@click.option("--seeds", metavar="LIST", help="Run these seeds of the study alone, such as 0,1,4.")
@click.option("--retry-failed", is_flag=True, help="Run failed runs again, too.")
@click.option("--address", metavar="ADDRESS", help="A running Ray cluster (default: Ray on this machine).")
@click.option("--tracking-uri", metavar="URI", help="MLflow server (default: a database in the storage).")
@storage_option
def command(
    study: str,
    *,
    only: tuple[str, ...],
    seeds: str | None,
    retry_failed: bool,
    address: str | None,
    tracking_uri: str | None,
    storage: Path,
) -> int:
    """Run STUDY (a YAML file, or the name of a shipped study): what is missing of it, then its report.

    The same command goes on after an interruption and never repeats a finished run.

    \b
    Examples:
      ablate run quickstart
      ablate run my-study.yaml --only fprop --seeds 0,1
      ablate run my-study.yaml --address ray://head:10001 --tracking-uri http://mlflow:5000
    """  # noqa: D301  \b is click's mark for a paragraph that keeps its line breaks
    from rich.console import Console

    from ablate.execute.lock import running
    from ablate.execute.token import use_token
    from ablate.plan import build_plan, known_plan, to_lock
    from ablate.store import StudyStore
    from ablate.study import load_study
    from ablate.track import resolve_tracking_uri

    uri = resolve_tracking_uri(storage, tracking_uri)
    console = Console(highlight=False)
    if address is not None and (warning := use_token()):
        console.print(warning, markup=False, soft_wrap=True)
    plan = build_plan(load_study(study))
    store = StudyStore(storage / plan.study)
    plan = known_plan(plan, store)
    chosen = _choose(plan, only, seeds)
    try:
        with running(store, json.loads(json.dumps(to_lock(plan)))) as shared:
            if shared:
                console.print("Somebody else runs this study, too: its runs are shared.", markup=False)
            if plan.tuning is not None and not plan.tuning.is_done:
                tuned = _tune(
                    console, store, plan, study=study, retry_failed=retry_failed, address=address, uri=uri
                )
                if isinstance(tuned, int):
                    return tuned
                plan = tuned
                store.write_plan(to_lock(plan))
                chosen = _choose(plan, only, seeds)
            return _run(
                console, store, plan, chosen,
                study=study, retry_failed=retry_failed, address=address, uri=uri, alone=not shared,
            )  # fmt: skip
    except OSError as error:
        raise UserError(f"cannot write to {storage}: {error.strerror or error}") from error


def _choose(plan: Plan, only: tuple[str, ...], seeds: str | None) -> set[str]:
    """Return the ids of the runs that the options ask for."""
    import difflib

    from ablate.study.space import tuned_name

    names = {arm.name for arm in plan.arms}
    if plan.tuning is not None:  # an arm that found what the study gives it is its own tuned arm
        stands_for = {tuned_name(name): name for name in names if tuned_name(name) not in names}
        only = tuple(stands_for.get(name, name) for name in only)
    for name in only:
        if name not in names:
            likely = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean '{likely[0]}'?" if likely else f"arms: {', '.join(sorted(names))}"
            raise UserError(f"--only: no arm '{name}' in study '{plan.study}' ({hint})")
    known = {run.seed for _, run in plan.runs()}
    wanted = known
    if seeds is not None:
        try:
            wanted = {int(part) for part in seeds.split(",")}
        except ValueError:
            raise UserError(f"--seeds: '{seeds}' is no list of seeds (expected such as 0,1,4)") from None
        if unknown := sorted(wanted - known):
            there = ", ".join(map(str, sorted(known)))
            raise UserError(f"--seeds: {unknown[0]} is not a seed of study '{plan.study}' (seeds: {there})")
    return {run.id for arm, run in plan.runs() if (not only or arm.name in only) and run.seed in wanted}


def _tune(
    console: Console,
    store: StudyStore,
    plan: Plan,
    *,
    study: str,
    retry_failed: bool,
    address: str | None,
    uri: str,
) -> Plan | int:
    """Find the arms' own values, and return the plan with them; or the exit code, if none are found."""
    import shlex

    from ablate.cli.tune import tune
    from ablate.plan.tuning import tuned_plan
    from ablate.store import StudyStore
    from ablate.track import start_mirror

    assert plan.tuning is not None
    if address is None:
        check_devices(plan)
    listener = ConsoleListener(console)
    prepare_kernel(plan, listener)
    corpora = prepare_tokens(store.path.parent, plan.arms, listener)
    trials = StudyStore(store.path.parent / plan.tuning.study)
    trials.path.mkdir(parents=True, exist_ok=True)
    mirror = start_mirror(trials.path, uri)
    try:
        found = tune(
            console,
            trials,
            plan,
            requests=lambda part: requests_of(part, {run.id for _, run in part.runs()}, corpora),
            retry_failed=retry_failed,
            address=address,
        )
    finally:
        left = mirror.stop()
    if found.tuning.is_done:
        return tuned_plan(plan, found.tuning)
    say_mirror(left, uri, shlex.quote(plan.tuning.study), listener)
    return _conclude(console, trials, found.plan, set(found.open_runs), found.outcome, study=study) or 1


def _run(
    console: Console,
    store: StudyStore,
    plan: Plan,
    chosen: set[str],
    *,
    study: str,
    retry_failed: bool,
    address: str | None,
    uri: str,
    alone: bool,
) -> int:
    from ablate.execute.driver import Outcome, missing_runs
    from ablate.execute.reuse import take_results, taken_text
    from ablate.track import start_mirror

    if address is None:
        check_devices(plan)
    requests = _requests(console, store, plan, chosen)
    missing = missing_runs(store, requests, retry_failed=retry_failed)
    unneeded = _unneeded(store, plan)
    settled = unneeded()
    needed = [run for run in missing if run.run_id not in settled]
    taken = take_results(store, needed) if alone else {}
    todo = [run for run in needed if run.run_id not in taken]
    ended = f"{len(requests) - len(missing)} of those asked for have ended before"
    if len(missing) > len(needed):
        ended += f", {len(missing) - len(needed)} are not needed"
    if taken:
        ended += f", {taken_text(taken)}"
    console.print(
        f"Study {plan.study}: {len(plan.arms)} arms, {sum(1 for _ in plan.runs())} runs; "
        f"{len(todo)} to run, {ended}.",
        markup=False,
        soft_wrap=True,
    )
    if todo:
        prepare_kernel(plan, ConsoleListener(console))
    mirror = start_mirror(store.path, uri)
    outcome = Outcome(states={}, interrupted=False)
    try:
        if todo:
            outcome = _execute(console, store, todo, address, unneeded)
        if not outcome.interrupted:
            _report(console, store)
    finally:
        left = mirror.stop()
    say_mirror(left, uri, study, ConsoleListener(console))
    return _conclude(console, store, plan, chosen - unneeded().keys(), outcome, study=study)


def _unneeded(store: StudyStore, plan: Plan) -> Callable[[], Mapping[str, str]]:
    """Return what tells which runs the study's stop rule makes unneeded; without a rule it costs nothing."""
    if plan.stop is None:
        return dict
    from ablate.reports.findings.unneeded import Unneeded

    return Unneeded(store)


def _requests(console: Console, store: StudyStore, plan: Plan, chosen: set[str]) -> list[RunRequest]:
    """Prepare the tokens of every corpus once, and return the runs."""
    arms = [arm for arm in plan.arms if any(run.id in chosen for run in arm.runs)]
    corpora = prepare_tokens(store.path.parent, arms, ConsoleListener(console))
    return requests_of(plan, chosen, corpora)


def _execute(
    console: Console,
    store: StudyStore,
    todo: list[RunRequest],
    address: str | None,
    unneeded: Callable[[], Mapping[str, str]],
) -> Outcome:
    from ablate.execute.driver import execute_study

    console.print(f"Starting Ray {f'at {address}' if address else 'on this machine'} …", markup=False)
    with ConsoleListener(console).executing(store, [run.run_id for run in todo]) as on_poll:
        return execute_study(store, todo, address=address, on_poll=on_poll, unneeded=unneeded)


def _report(console: Console, store: StudyStore) -> None:
    from ablate.reports import write_report

    written = write_report(store)
    console.print()
    for sentence in (*written.notices, *written.verdict.sentences):
        console.print(sentence, markup=False, soft_wrap=True)
    console.print(f"\nReport:  {written.html}", markup=False, soft_wrap=True)


def _conclude(
    console: Console, store: StudyStore, plan: Plan, chosen: set[str], outcome: Outcome, *, study: str
) -> int:
    """Show what failed with its last lines, say how to go on, and return the exit code."""
    from ablate.store import END_STATES

    failed = [run_id for run_id, state in outcome.states.items() if state == "failed"]
    names = {run.id: f"{arm.name} seed {run.seed}" for arm, run in plan.runs()}
    for run_id in failed:
        run = store.run(run_id)
        status = run.status()
        log = run.attempt_log(status.attempt)
        console.print(
            f"\nFailed: {names[run_id]}: {status.message}  (log: {log})", markup=False, soft_wrap=True
        )
        if log.exists():
            for line in log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_LINES:]:
                console.print(f"    {line}", markup=False, soft_wrap=True)
    if outcome.problem:
        console.print(f"\n{outcome.problem}; what it ran goes on from its checkpoints.", markup=False)
    if outcome.interrupted:
        console.print(f"\nStopped. Finished runs are kept; go on with: ablate run {study}", markup=False)
        return 130
    states = [store.run(run_id).state() for run_id in chosen]
    failures = states.count("failed")
    if failures:
        console.print(
            f"\n{failures} {'run' if failures == 1 else 'runs'} failed; "
            f"try again with: ablate run {study} --retry-failed",
            markup=False,
        )
    missing = sum(state not in END_STATES and state != "failed" for state in states)
    if missing:
        console.print(
            f"\n{missing} {'run has' if missing == 1 else 'runs have'} no result yet; "
            f"go on with: ablate run {study}",
            markup=False,
        )
    return 1 if failures or missing else 0
