"""``ablate report``: write a study's report and print its verdict."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from ablate.base.errors import UserError, safe_text
from ablate.cli.common import find_study, parse_prices, storage_option, writing_to

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ablate.reports import ReportPaths
    from ablate.store import StudyStore

_ENDED = ("finished", "diverged", "failed", "stopped")


@click.command(
    epilog="Examples:  ablate report quickstart   ·   ablate report my-study --watch   ·   "
    "ablate report my-study --price MI355X=2.5   ·   ablate report my-study --baseline fp8 --out against-fp8"
)
@click.argument("study")
@storage_option
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder for the report (default: report/ in the study's folder).",
)
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
    help="Pool runs although they differ in this: data, tokenizer, evaluation, code, device, world_size.",
)
@click.option(
    "--price",
    "prices",
    multiple=True,
    metavar="HARDWARE=USD",
    help="USD for a device-hour, such as B200=4: adds GPU-hours and money to target.",
)
@click.option("--watch", is_flag=True, help="Write it anew while the study runs; Ctrl-C ends it.")
@click.option(
    "--every",
    type=click.IntRange(min=1),
    default=30,
    show_default=True,
    metavar="SECONDS",
    help="How often --watch looks.",
)
@click.option("--json", "as_json", is_flag=True, help="Print report.json instead of the verdict.")
def command(
    study: str,
    storage: Path,
    out: Path | None,
    baseline: str | None,
    target: float | None,
    waive: tuple[str, ...],
    prices: tuple[str, ...],
    every: int,
    *,
    watch: bool,
    as_json: bool,
) -> int:
    """Write the report of STUDY (its name or its YAML file): HTML, Markdown, LaTeX, JSON, CSV, figures.

    Works on a study that is still running: what is missing is said at the top.
    """
    store = find_study(storage, study)
    if out is None and not (baseline is None and target is None):
        raise UserError("--baseline and --target write another report (give it a folder with --out)")
    options: dict[str, Any] = {
        "baseline": baseline,
        "target": target,
        "waive": _settings(waive),
        "prices": parse_prices(prices),
    }
    with writing_to(store.path / "report" if out is None else out):
        if watch:
            return _watch(store, out, options, every)
        from ablate.reports import write_report

        written = write_report(store, out, **options)
    if as_json:
        click.echo(written.json.read_text(encoding="utf-8"), nl=False)
        return 0
    _show(written)
    return 0


def _show(written: ReportPaths) -> None:
    for line in (*written.notices, *written.verdict.sentences):
        click.echo(safe_text(line))
    click.echo()
    for path in written.paths():
        click.echo(str(path))


def _watch(store: StudyStore, out: Path | None, options: dict[str, Any], every: int) -> int:
    """Write the report whenever the run store has changed, until every run has ended."""
    from ablate.reports import write_report

    seen: object = None
    try:
        while True:
            now = _stamp(store)
            running = not all(state in _ENDED for state in now[0])
            if not running:
                break
            if now != seen:
                written = write_report(store, out, **options, refresh_sec=every)
                seen = now
                ended = sum(state in _ENDED for state in now[0])
                moment = time.strftime("%H:%M:%S")
                click.echo(f"{moment}  {ended} of {len(now[0])} runs have ended; {written.html}")
            time.sleep(every)
    except KeyboardInterrupt:
        # The last page must not reload itself.
        _show(write_report(store, out, **options))
        return 130
    _show(write_report(store, out, **options))
    return 0


def _stamp(store: StudyStore) -> tuple[list[str], list[int]]:
    """Return every run's state, and how much each has written."""
    states: list[str] = []
    sizes: list[int] = []
    for _, entry in store.plan().runs():
        run = store.run(entry.id)
        states.append(run.status().state)
        sizes.append(run.metrics_path.stat().st_size if run.metrics_path.exists() else 0)
    return states, sizes


def _settings(names: Sequence[str]) -> tuple[str, ...]:
    if not names:
        return ()
    from ablate.run.config import Setting

    known = get_args(Setting)
    for name in names:
        if name not in known:
            raise UserError(f"--waive: no setting '{name}' (expected {', '.join(known)})")
    return tuple(names)
