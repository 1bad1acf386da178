"""``ablate report``: write a study's report and print its verdict."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any, get_args

import click

from ablate.base.command_hints import command_line, set_words
from ablate.base.errors import UserError, safe_text
from ablate.cli.common import AT_LEAST_1, FOLDER, find_study, price_option, storage_option
from ablate.cli.output import verdict_lines, writing_to

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ablate.reports import ReportPaths
    from ablate.store import StudyStore

_ENDED = ("finished", "diverged", "failed", "stopped")


def _settings(_context: click.Context, _option: click.Parameter, names: tuple[str, ...]) -> tuple[str, ...]:
    """Check the names of settings to waive."""
    from ablate.run.config import Setting

    for name in names:
        if name not in get_args(Setting):
            raise UserError(f"--waive: no setting '{name}' (expected {', '.join(get_args(Setting))})")
    return names


@click.command(
    epilog="Examples:  ablate report quickstart   ·   ablate report my-study --watch   ·   "
    "ablate report my-study --price MI355X=2.5   ·   ablate report my-study --baseline fp8 --out against-fp8"
)
@click.argument("study")
@storage_option
@click.option("--out", type=FOLDER, help="Folder for the report (default: report/ in the study's folder).")
@click.option(
    "--baseline", metavar="ARM", help="State costs against this arm, not the study's baseline; needs --out."
)
@click.option(
    "--target",
    type=float,
    metavar="VALUE",
    help="Take this target, of the kind that the study's is; needs --out.",
)
@click.option(
    "--waive",
    multiple=True,
    metavar="SETTING",
    callback=_settings,
    help="Pool runs although they differ in this: data, tokenizer, evaluation, code, device, arithmetic, "
    "world_size.",
)
@price_option("adds GPU-hours and money to target")
@click.option("--watch", is_flag=True, help="Write it anew while the study runs; Ctrl-C ends it.")
@click.option(
    "--every",
    type=AT_LEAST_1,
    default=30,
    show_default=True,
    metavar="SECONDS",
    help="How often --watch looks.",
)
@click.option("--json", "as_json", is_flag=True, help="Print report.json instead of the verdict.")
def command(
    study: str, storage: Path, out: Path | None, every: int, watch: bool, as_json: bool, **reading: Any
) -> int:
    """Write the report of STUDY (its name or its YAML file): HTML, Markdown, LaTeX, JSON, CSV, figures.

    Works on a study that is still running: what is missing is said at the top.
    """
    store = find_study(storage, study)
    if out is None and not (reading["baseline"] is None and reading["target"] is None):
        raise UserError("--baseline and --target write another report (give it a folder with --out)")
    from ablate.reports import write_report

    _say_what_the_file_asks(study, store)
    write = partial(write_report, store, out, **reading)
    code = 0
    with writing_to(store.path / "report" if out is None else out):
        if watch:
            code = _watch(store, write, every)
        written = write()  # after watching, a last page that does not reload itself
    if as_json and not watch:
        click.echo(written.json.read_text(encoding="utf-8"), nl=False)
    else:
        _show(written)
    return code


def _say_what_the_file_asks(study: str, store: StudyStore) -> None:
    """Say where a study file has been edited since it ran: the report is of the plan that ran."""
    if not study.endswith((".yaml", ".yml")):
        return
    if settings := store.plan().settings:
        ran = command_line("run", study, *set_words(settings), storage=store.path.parent)
        click.echo(f"{study}: this report is of the study as it ran: {ran}", err=True)
        return
    from ablate.study import load_study

    if keys := load_study(study).differs_from(store.plan()):
        run = command_line("run", study, storage=store.path.parent)
        click.echo(
            f"{study}: {', '.join(keys)} edited since the study ran. This report is of the plan that ran; "
            f"adopt the file with: {run}",
            err=True,
        )


def _show(written: ReportPaths) -> None:
    for line in verdict_lines(written):
        click.echo(safe_text(line, keep="\n"))
    click.echo()
    for path in written.paths():
        click.echo(str(path))


def _watch(store: StudyStore, write: Callable[..., ReportPaths], every: int) -> int:
    """Write the report whenever the run store has changed, until every run has ended: the exit code."""
    seen: list[tuple[str, int]] = []
    try:
        while True:
            now = _stamp(store)
            ended = sum(state in _ENDED for state, _ in now)
            if ended == len(now):
                return 0
            if now != seen:
                written, seen = write(refresh_sec=every), now
                moment = time.strftime("%H:%M:%S")
                click.echo(f"{moment}  {ended} of {len(now)} runs have ended; {written.html}")
            time.sleep(every)
    except KeyboardInterrupt:
        return 130


def _stamp(store: StudyStore) -> list[tuple[str, int]]:
    """Return the state of every run, and how many bytes of metrics it has."""
    runs = (store.run(entry.id) for _, entry in store.plan().runs())
    return [
        (run.status().state, run.metrics_path.stat().st_size if run.metrics_path.exists() else 0)
        for run in runs
    ]
