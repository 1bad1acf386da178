"""``ablate run``: plan, execute what is missing, mirror to MLflow, report.

Exit codes: 0 every run asked for has a result; 1 one of them failed; 2 bad input; 130 interrupted.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from ablate.cli.common import storage_option
from ablate.errors import UserError

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console
    from rich.progress import TaskID

    from ablate.data import TokenFiles
    from ablate.execute.driver import Outcome, RunRequest
    from ablate.plan import Plan, PlannedArm
    from ablate.store import StudyStore
    from ablate.track import MirrorReport

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
    from ablate.plan import build_plan, to_lock
    from ablate.spec import load_study
    from ablate.store import StudyStore
    from ablate.track import resolve_tracking_uri

    uri = resolve_tracking_uri(storage, tracking_uri)
    console = Console(highlight=False)
    if address is not None and (warning := use_token()):
        console.print(warning, markup=False, soft_wrap=True)
    plan = build_plan(load_study(study))
    chosen = _choose(plan, only, seeds)
    store = StudyStore(storage / plan.study)
    try:
        with running(store, json.loads(json.dumps(to_lock(plan)))) as shared:
            if shared:
                console.print("Somebody else runs this study, too: its runs are shared.", markup=False)
            return _run(
                console, store, plan, chosen, study=study, retry_failed=retry_failed, address=address, uri=uri
            )
    except OSError as error:
        raise UserError(f"cannot write to {storage}: {error.strerror or error}") from error


def _choose(plan: Plan, only: tuple[str, ...], seeds: str | None) -> set[str]:
    """Return the ids of the runs that the options ask for."""
    import difflib

    names = {arm.name for arm in plan.arms}
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
) -> int:
    from ablate.execute.driver import Outcome, missing_runs
    from ablate.track import redact, start_mirror

    if address is None:
        _check_devices(plan)
    requests = _requests(console, store, plan, chosen)
    todo = missing_runs(store, requests, retry_failed=retry_failed)
    console.print(
        f"Study {plan.study}: {len(plan.arms)} arms, {sum(1 for _ in plan.runs())} runs; "
        f"{len(todo)} to run, {len(requests) - len(todo)} of those asked for have ended before.",
        markup=False,
        soft_wrap=True,
    )
    if todo:
        _prepare_kernel(console, plan)
    mirror = start_mirror(store.path, uri)
    outcome = Outcome(states={}, interrupted=False)
    try:
        if todo:
            outcome = _execute(console, store, todo, address)
        if not outcome.interrupted:
            _report(console, store)
    finally:
        left = mirror.stop()
    _say_mirror(console, left, redact(uri), study)
    return _conclude(console, store, plan, chosen, outcome, study=study)


def _requests(console: Console, store: StudyStore, plan: Plan, chosen: set[str]) -> list[RunRequest]:
    """Prepare the tokens of every corpus once, and return the runs seed by seed: early results compare."""
    from dataclasses import asdict

    from ablate.execute.driver import RunRequest

    arms = [arm for arm in plan.arms if any(run.id in chosen for run in arm.runs)]
    corpora = _prepare_tokens(console, store, arms)
    _check_tokens(console, corpora, arms)
    order = sorted(((run.seed, n, arm, run) for n, (arm, run) in enumerate(plan.runs())), key=lambda t: t[:2])
    return [
        RunRequest(
            run_id=run.id,
            arm=arm.name,
            seed=run.seed,
            config=asdict(arm.config(run.seed)),
            tokens_dir=str(corpora[arm.data_digest].folder.resolve()),
            resources=arm.resources,
            diagnostics=plan.diagnostics,
        )
        for _, _, arm, run in order
        if run.id in chosen
    ]


def _prepare_tokens(console: Console, store: StudyStore, arms: list[PlannedArm]) -> dict[str, TokenFiles]:
    """Return the token files of each corpus, by its digest."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from ablate.data import prepare

    corpora: dict[str, TokenFiles] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        for arm in arms:
            if arm.data_digest in corpora:
                continue
            task = bar.add_task("tokens", total=1.0)

            def show(done: float, what: str, task: TaskID = task) -> None:
                bar.update(task, completed=done, description=what)

            files = prepare(arm.data, store.path.parent / "tokens", progress=show)
            corpora[arm.data_digest] = files
            console.print(
                f"Corpus {arm.data.source}: {files.train_tokens:,} training and {files.validation_tokens:,} "
                f"validation tokens ({files.tokenizer}).",
                markup=False,
                soft_wrap=True,
            )
    return corpora


def _check_tokens(console: Console, corpora: dict[str, TokenFiles], arms: list[PlannedArm]) -> None:
    """Refuse a corpus with too little text before anything starts, and say how often a run repeats one."""
    from ablate.data.batches import num_train_windows, num_validation_windows

    repeated: dict[str, None] = {}
    for arm in arms:
        files, training = corpora[arm.data_digest], arm.training
        num_validation_windows(files.validation_tokens, training.seq_len, training.eval_tokens)
        epoch = num_train_windows(files.train_tokens, training.seq_len) * training.seq_len
        times = f"{training.tokens / epoch:,.1f}"
        if training.tokens > epoch and times != "1.0":
            there = f"its {files.train_tokens:,} training tokens"
            repeated[f"A run of {training.tokens:,} tokens sees {there} {times} times."] = None
    for sentence in repeated:
        console.print(sentence, markup=False, soft_wrap=True)


def _check_devices(plan: Plan) -> None:
    """Refuse what this machine cannot do before anything starts; a cluster's workers check for themselves."""
    from ablate.execute.preflight import UnfitDeviceError, fit_choices

    problems = []
    for arm in plan.arms:
        try:
            fit_choices(arm.config(0), arm.resources, "cuda" if arm.resources.gpus else "cpu")
        except UnfitDeviceError as error:
            problems.append(f"arm '{arm.name}': {error}")
    if problems:
        raise UserError(*problems)


def _prepare_kernel(console: Console, plan: Plan) -> None:
    """Compile the CPU quantiser once, before workers ask for it."""
    if all(arm.resources.gpus or arm.recipe_text == "bf16" for arm in plan.arms):
        return
    from ablate.backends.cpu_kernel import availability

    kernel = availability()
    if not kernel.usable:
        console.print(f"Emulating with plain torch, several times slower: {kernel.reason}.", markup=False)


def _execute(console: Console, store: StudyStore, todo: list[RunRequest], address: str | None) -> Outcome:
    from ablate.execute.display import LiveDisplay
    from ablate.execute.driver import execute_study
    from ablate.execute.progress import ProgressReader

    console.print(f"Starting Ray {f'at {address}' if address else 'on this machine'} …", markup=False)
    with LiveDisplay(ProgressReader(store), [run.run_id for run in todo], console) as display:
        return execute_study(store, todo, address=address, on_poll=display.update)


def _report(console: Console, store: StudyStore) -> None:
    from ablate.reports import write_report

    written = write_report(store)
    console.print()
    for sentence in (*written.notices, *written.verdict.sentences):
        console.print(sentence, markup=False, soft_wrap=True)
    console.print(f"\nReport:  {written.html}", markup=False, soft_wrap=True)


def _say_mirror(console: Console, left: MirrorReport, uri: str, study: str) -> None:
    if not left.complete:
        why = left.problem or f"{len(left.unsent)} runs not sent"
        console.print(f"MLflow:  not up to date at {uri}: {why}", markup=False, soft_wrap=True)
    console.print(f"MLflow:  ablate dashboard {study}", markup=False, soft_wrap=True)


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
