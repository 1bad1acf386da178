"""``ablate search``: try recipes round by round at rising budgets, then write the front to confirm.

This process alone writes Optuna's storage: Ray's tasks train runs and never see it. So a trial is asked and
told exactly once, whatever is killed when, and the same command goes on.

Exit codes: 0 the search is done; 1 the baseline failed, or something ended it; 2 bad input; 130 interrupted.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from typing import TYPE_CHECKING, Any

import click

from ablate.base.errors import UserError, safe_text
from ablate.cli.common import storage_option
from ablate.cli.display import ConsoleListener
from ablate.workflow.mirror import say_mirror
from ablate.workflow.prepare import check_devices, prepare_kernel, prepare_tokens, requests_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from optuna.storages import BaseStorage
    from rich.console import Console

    from ablate.data import TokenFiles
    from ablate.reports.findings.search import Found
    from ablate.search.ledger import Trial
    from ablate.search.plan import SearchPlan
    from ablate.search.search import Batch, Plan, Result
    from ablate.store import StudyStore
    from ablate.study import Study


@click.command("search")
@click.argument("file")
@click.option("--plan", "only_plan", is_flag=True, help="Show what would be searched; start nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for scripts.")
@click.option("--address", metavar="ADDRESS", help="A running Ray cluster (default: Ray on this machine).")
@click.option("--tracking-uri", metavar="URI", help="MLflow server (default: a database in the storage).")
@click.option(
    "--optuna-storage",
    metavar="URL",
    help="grpc://HOST:PORT or a database's URL (default: a journal in the search's folder).",
)
@storage_option
def command(
    file: str,
    *,
    only_plan: bool,
    as_json: bool,
    address: str | None,
    tracking_uri: str | None,
    optuna_storage: str | None,
    storage: Path,
) -> int:
    """Search the recipes of FILE (a study file with `search:`, or a shipped one) for the best.

    Two objectives: loss at equal tokens, or token cost; and modelled step time on named hardware. The same
    command goes on after an interruption and never repeats a trial.

    \b
    Examples:
      ablate search tiny-search --plan
      ablate search tiny-search
      ablate search my-search.yaml --address ray://head:10001 --optuna-storage grpc://head:13000
    """  # noqa: D301  \b is click's mark for a paragraph that keeps its line breaks
    from ablate.search.plan import plan_search
    from ablate.search.recipes import candidates_of
    from ablate.study import load_study

    study = load_study(file)
    if study.search is None:
        raise UserError(f"{file}: it has no 'search:', so it is a study (start it with: ablate run {file})")
    planned = plan_search(study)
    engine = candidates_of(planned)
    if only_plan:
        _show_plan(planned, engine, as_json=as_json)
        return 0
    return _search(
        study, planned, engine, file=file, as_json=as_json, address=address, tracking_uri=tracking_uri,
        optuna_storage=optuna_storage, storage=storage,
    )  # fmt: skip


def _search(
    study: Study,
    planned: SearchPlan,
    engine: Plan,
    *,
    file: str,
    as_json: bool,
    address: str | None,
    tracking_uri: str | None,
    optuna_storage: str | None,
    storage: Path,
) -> int:
    from rich.console import Console

    from ablate.execute.lock import running
    from ablate.execute.token import use_token
    from ablate.search.ledger import open_storage
    from ablate.search.recipes import check_same
    from ablate.search.search import read
    from ablate.store import StudyStore
    from ablate.track import resolve_tracking_uri, start_mirror

    uri = resolve_tracking_uri(storage, tracking_uri)
    console = Console(highlight=False, stderr=as_json)
    if address is not None and (warning := use_token()):
        console.print(warning, markup=False, soft_wrap=True)
    store = StudyStore(storage / planned.name)
    try:
        with running(store, _plan_there(store, planned)) as shared:
            if shared:
                raise UserError(
                    f"the search '{planned.name}' is being run already (follow it with: ablate status "
                    f"{planned.name})"
                )
            check_same(planned, store)
            trials = open_storage(optuna_storage, store.path)
            mirror = start_mirror(store.path, uri)
            code = 0
            try:
                code = _go_on(console, store, planned, engine, trials, file=file, address=address)
                found = _write(study, planned, engine, read(engine, trials), store, file)
            finally:
                left = mirror.stop()
            _conclude(console, store, found, as_json=as_json)
            say_mirror(left, uri, planned.name, ConsoleListener(console))
            return code
    except OSError as error:
        raise UserError(f"cannot write to {storage}: {error.strerror or error}") from error


def _plan_there(store: StudyStore, planned: SearchPlan) -> dict[str, Any]:
    """Return the lock file as it is, or that of a search of which nothing was tried."""
    from ablate.plan import to_lock
    from ablate.search.recipes import tried_in, tried_plan

    try:
        return store.plan()
    except (OSError, ValueError):
        nothing = tried_in(planned, [()] * len(planned.search.budgets))
        content: dict[str, Any] = json.loads(json.dumps(to_lock(tried_plan(planned, nothing))))
        return content


class _StoppedError(Exception):
    """A round came to no end. ``code``: the exit code; the trials of the round are open."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


def _go_on(
    console: Console,
    store: StudyStore,
    planned: SearchPlan,
    engine: Plan,
    trials: BaseStorage,
    *,
    file: str,
    address: str | None,
) -> int:
    """Search to the end, or as far as it goes; return the exit code."""
    from ablate.execute.driver import connection
    from ablate.search.recipes import tried_in
    from ablate.search.search import read, search

    if address is None:
        check_devices(planned.plans[0])
    before = read(engine, trials)
    ended = sum(trial.state != "open" for one in before for trial in one)
    console.print(
        f"Search {planned.name}: {len(engine.space.candidates)} recipes, {engine.num_trials} to try at the "
        f"first budget; {ended} trials have ended before.",
        markup=False,
        soft_wrap=True,
    )
    arms = [plan.arm(planned.baseline) for plan in planned.plans]  # all arms have the same data
    listener = ConsoleListener(console)
    corpora = prepare_tokens(store.path.parent, arms, listener)
    prepare_kernel(planned.plans[0], listener)
    runner = _Runner(console, store, planned, corpora, tried_in(planned, before), address)
    runner.write_plan()
    is_done = _is_done(engine, before)
    if not is_done:
        console.print(f"Starting Ray {f'at {address}' if address else 'on this machine'} …", markup=False)
    try:
        with contextlib.nullcontext() if is_done else connection(address):
            search(engine, trials, runner.run, runner.attrs)
    except _StoppedError as stopped:
        console.print(f"\n{stopped}; go on with: ablate search {file}", markup=False, soft_wrap=True)
        return stopped.code
    return 0


class _Runner:
    """Runs batches as Ray tasks; the plan's lock file grows with them."""

    def __init__(
        self,
        console: Console,
        store: StudyStore,
        planned: SearchPlan,
        corpora: dict[str, TokenFiles],
        tried: Sequence[tuple[int, str]],
        address: str | None,
    ) -> None:
        self._console, self._store, self._planned = console, store, planned
        self._corpora, self._address = corpora, address
        self._tried = dict.fromkeys(tried)

    def attrs(self, budget: int, candidate: str) -> dict[str, Any]:
        """Return what the ledger says of a trial beside its place."""
        arm = self._planned.arm(budget, candidate)
        return {"runs": [run.id for run in arm.runs], "recipe": arm.recipe_text, "tokens": budget}

    def write_plan(self) -> None:
        """Write what was tried so far, for all who read the run store."""
        from ablate.plan import to_lock
        from ablate.search.recipes import tried_plan

        self._store.write_plan(to_lock(tried_plan(self._planned, list(self._tried))))

    def run(self, batch: Batch) -> Mapping[str, Result]:
        """Run a round's recipes and say what they came to.

        Raises:
            _StoppedError: interrupted, a run that came to no end, or a baseline that failed.
        """
        from ablate.execute.driver import Outcome, execute_study, missing_runs
        from ablate.search.recipes import result_of, tried_plan
        from ablate.search.search import short_tokens
        from ablate.store import END_STATES

        self._tried |= dict.fromkeys((batch.budget, name) for name in batch.candidates)
        self.write_plan()
        shown = f"{batch.numbers[0] + 1}–{batch.numbers[-1] + 1}" if len(batch.numbers) > 1 else ""
        self._console.print(
            f"Round {batch.round + 1} at {short_tokens(batch.budget)} tokens: trials "
            f"{shown or batch.numbers[0] + 1} of {batch.of}",
            markup=False,
        )
        arms = {name: self._planned.arm(batch.budget, name) for name in batch.candidates}
        plan = tried_plan(self._planned, [(batch.budget, name) for name in batch.candidates])
        ids = {run.id for arm in arms.values() for run in arm.runs}
        requests = requests_of(plan, ids, self._corpora)
        todo = missing_runs(self._store, requests, retry_failed=True)
        outcome = Outcome(states={}, interrupted=False)
        if todo:
            live = ConsoleListener(self._console).executing(self._store, [run.run_id for run in todo])
            with live as on_poll:
                outcome = execute_study(self._store, todo, address=self._address, on_poll=on_poll)
        if outcome.interrupted:
            raise _StoppedError("Stopped. Trials that have ended are kept", 130)
        states = {name: self._store.run(arm.runs[0].id).state() for name, arm in arms.items()}
        if outcome.problem or any(state not in {*END_STATES, "failed"} for state in states.values()):
            raise _StoppedError(outcome.problem or "A run has no result", 1)
        failed = [name for name, state in states.items() if state == "failed"]
        for name in failed:
            message = self._store.run(arms[name].runs[0].id).status().message
            self._console.print(f"Failed: {name}: {message}", markup=False, soft_wrap=True)
        if self._planned.baseline in failed:
            raise _StoppedError("Without the baseline there is nothing to hold recipes against", 1)
        return {name: result_of(self._planned, self._store, batch.budget, name) for name in batch.candidates}


def _is_done(engine: Plan, budgets: Sequence[Sequence[Trial]]) -> bool:
    """Tell whether nothing is left to run; a search whose trials became more is not done."""
    trials = [trial for one in budgets for trial in one]
    return (
        all(trial.state != "open" for trial in trials)
        and len(budgets[0]) >= engine.num_trials
        and all(budgets)
    )


def _write(
    study: Study,
    planned: SearchPlan,
    engine: Plan,
    budgets: Sequence[Sequence[Trial]],
    store: StudyStore,
    file: str,
) -> Found:
    """Write the pages as far as the search is, and the study that confirms a search that is done."""
    from ablate.reports.findings.search import found_of
    from ablate.reports.pages.search_page import write_search
    from ablate.search.confirm import confirm_study

    found = found_of(planned, engine, budgets)
    names = [one.name for one in found.last.front if not one.is_baseline]
    confirm = confirm_study(study, planned, names, file) if names and found.is_done else None
    write_search(found, store.path / "search", confirm)
    return found


def _conclude(console: Console, store: StudyStore, found: Found, *, as_json: bool) -> None:
    from ablate.cli.table import format_table
    from ablate.reports.findings.search import front_table, search_document, sentences
    from ablate.reports.pages.search_page import CONFIRM

    if as_json:
        click.echo(json.dumps(search_document(found), indent=1, allow_nan=False, ensure_ascii=False))
    else:
        width = shutil.get_terminal_size((100, 24)).columns
        table = front_table(found)
        click.echo("\n" + safe_text(format_table(table.columns, table.rows, width=width), keep="\n") + "\n")
    for sentence in sentences(found):
        console.print(sentence, markup=False, soft_wrap=True)
    folder = store.path / "search"
    console.print(f"\nReport:  {folder / 'search.html'}", markup=False, soft_wrap=True)
    if (folder / CONFIRM).exists():
        console.print(f"Confirm: ablate run {folder / CONFIRM}", markup=False, soft_wrap=True)


def _show_plan(planned: SearchPlan, engine: Plan, *, as_json: bool) -> None:
    """Print candidates, what is dropped, presets, rounds and tokens."""
    from ablate.cli.table import format_table
    from ablate.search.candidates import IRRELEVANT
    from ablate.search.search import most_trials, short_tokens

    search = planned.search
    rounds = -(-engine.num_trials // engine.at_once)
    counts = most_trials(engine)
    most_tokens = sum(
        count * plan.arm(planned.baseline).batches.tokens
        for count, plan in zip(counts, planned.plans, strict=True)
    )
    if as_json:
        content = {
            "search": planned.name,
            "baseline": planned.baseline,
            "first": list(planned.first),
            "objective": search.objective,
            "hardware": search.hardware,
            "shapes": search.shapes,
            "budgets": list(search.budgets),
            "trials": list(counts),
            "rounds": rounds,
            "tokens": most_tokens,
            "recipes": [
                {
                    "name": candidate.name,
                    "gemms": planned.plans[0].arm(candidate.name).recipe_text,
                    "levels": candidate.levels,
                    "step_time_over_baseline": planned.times[candidate.name],
                    "runs": [plan.arm(candidate.name).runs[0].id for plan in planned.plans],
                }
                for candidate in engine.space.candidates
            ],
            "dropped": [{"name": one.name, "reason": one.reason} for one in planned.plans[0].dropped],
        }
        click.echo(json.dumps(content, indent=1, ensure_ascii=False))
        return
    width = max(80, shutil.get_terminal_size((100, 24)).columns)
    factors = [factor.removeprefix("recipe.") for factor in search.factors]
    rows = [
        (
            candidate.name,
            *(candidate.levels.get(factor, IRRELEVANT) for factor in search.factors),
            f"{planned.times[candidate.name]:.3f}×",
            "first" if candidate.name in planned.first else "",
        )
        for candidate in engine.space.candidates
    ]
    click.echo(format_table(("recipe", *factors, "step time", ""), rows, width=width))
    where = "this study's own shapes" if search.shapes == "study" else "the shapes of Llama 3.1 8B"
    click.echo(f"\nstep time  over that of {planned.baseline}, modelled on {search.hardware} at {where}")
    click.echo(f"objective  {'validation loss at the end' if search.objective == 'loss' else 'token cost'}")
    for count, budget, word in zip(counts, search.budgets, ("", *["at most "] * len(counts)), strict=False):
        click.echo(f"budget     {short_tokens(budget)} tokens: {word}{count} trials of {len(rows)} recipes")
    click.echo(f"rounds     {rounds} of {engine.at_once} at the first budget; {most_tokens:,} tokens at most")
    dropped = planned.plans[0].dropped
    if dropped:
        click.echo(f"\ndropped: {len(dropped)}")
    for one in dropped:
        click.echo(f"  {one.name}: {one.reason}")
