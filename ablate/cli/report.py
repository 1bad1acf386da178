"""``ablate report``, ``compare`` and ``dashboard``: what studies show, on pages and in a few lines.

How the dashboard fails: an unknown study, a taken port, a missing database and a server that does not answer
each give one line and exit code 2.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import sys
import time
import webbrowser
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ablate.base.command_hints import command_line, set_words
from ablate.base.errors import UserError
from ablate.base.files import open_private
from ablate.cli.common import (
    AT_LEAST_1,
    FOLDER,
    deliver,
    echo_lines,
    find_study,
    json_option,
    storage_option,
    table_text,
    target_of,
    tracking_option,
    verdict_lines,
    writing_to,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ablate.reports.findings.compare import Comparison
    from ablate.store.plan_file import Target


_ENDED = ("finished", "diverged", "failed", "stopped", "damaged")


def _target(_context: click.Context, _option: click.Parameter, text: str | None) -> float | Target | None:
    if text is None:
        return None
    try:
        return float(text)
    except ValueError:
        return target_of(text)


@click.command(
    epilog="Examples:  ablate report quickstart   ·   ablate report my-study --watch   ·   "
    "ablate report my-study --baseline fp8 --out against-fp8"
)
@click.argument("study")
@storage_option
@click.option("--out", type=FOLDER, help="Folder for the report (default: report/ in the study's folder).")
@click.option(
    "--baseline", metavar="ARM", help="State costs against this arm, not the study's baseline; needs --out."
)
@click.option(
    "--target",
    callback=_target,
    help="Take val_loss=3.3, perplexity=27.1 or a number of the study's kind as target; needs --out.",
)
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
def report(
    study: str, storage: Path, out: Path | None, every: int, watch: bool, as_json: bool, **reading: Any
) -> int:
    """Write the report of STUDY (its name or its YAML file): HTML, Markdown, LaTeX, JSON, CSV, figures.

    Works on a study that is still running: what is missing is said at the top.
    """
    store = find_study(storage, study)
    if out is None and not (reading["baseline"] is None and reading["target"] is None):
        raise UserError("--baseline and --target write another report (give it a folder with --out)")
    from ablate.execute.progress import RunProgress, read_progress
    from ablate.reports import write_report
    from ablate.study import load_study

    plan = store.plan()
    run = command_line("run", study, *set_words(plan.settings), storage=store.path.parent)
    is_file = study.endswith((".yaml", ".yml"))
    keys: list[str] = []
    with contextlib.nullcontext() if is_file else contextlib.suppress(UserError):
        filed = load_study(study)
        keys = filed.differs_from(plan) if filed.name == plan.study and not plan.imported else []
    if is_file and plan.settings:
        click.echo(f"{study}: this report is of the study as it ran: {run}", err=True)
    elif keys and not plan.settings:
        click.echo(
            f"{study}: {', '.join(keys)} edited since the study ran. This report is of the plan that ran; "
            f"adopt the file with: {run}",
            err=True,
        )
    code = 0
    seen: list[RunProgress] = []
    with writing_to(store.path / "report" if out is None else out):
        try:
            while watch:  # write again whenever a run has moved, until every run has ended
                now = read_progress(store, store.plan())  # a search adds runs
                ended = sum(run.state in _ENDED for run in now)
                if ended == len(now):
                    break
                if now != seen:
                    written, seen = write_report(store, out, refresh_sec=every, **reading), now
                    moment = time.strftime("%H:%M:%S")
                    click.echo(f"{moment}  {ended} of {len(now)} runs have ended; {written.html}")
                time.sleep(every)
        except KeyboardInterrupt:
            code = 130
        written = write_report(store, out, **reading)  # a last page that does not reload itself
    if as_json and not watch:
        click.echo(written.json.read_text(encoding="utf-8"), nl=False)
    else:
        files = (written.html, written.markdown, written.json, written.tables, written.figures)
        echo_lines([*verdict_lines(written), "", *map(str, files)])
    return code


@click.command(
    "compare",
    epilog="\b\nExamples:\n  ablate compare quickstart quickstart-long\n"
    "  ablate compare width-64 width-128 width-256 --out trend/\n"
    "  ablate compare width-64 width-128 width-256 --baseline mxfp4 --after 400_000",
)
@click.argument("studies", nargs=-1, required=True, metavar="STUDY STUDY [STUDY]...")
@click.option("--baseline", metavar="ARM", help="State costs against this arm, not each study's baseline.")
@click.option(
    "--after",
    type=AT_LEAST_1,
    metavar="TOKENS",
    help="Read each study where its file's baseline is after so many tokens, not at its target.",
)
@storage_option
@click.option("--out", type=FOLDER, help="Write compare.html, .md, .json and the figure there, too.")
@json_option
def compare(
    studies: tuple[str, ...],
    baseline: str | None,
    after: int | None,
    storage: Path,
    out: Path | None,
    *,
    as_json: bool,
) -> None:
    """Put studies side by side: of two, whether an arm's cost differs; of more, how it goes with size.

    Each STUDY is a study's name, its YAML file, or its folder in another storage. Arms are matched by name.
    Three studies or more should differ in the size of the model or, at one size, in the budget alone.
    """
    if len(studies) < 2:
        raise UserError(f"'{studies[0]}' alone compares with nothing (name two studies at least)")
    from ablate.store.runs import study_at

    stores = [study_at(Path(study)) or find_study(storage, study) for study in studies]
    known: dict[Path, str] = {}
    for study, store in zip(studies, stores, strict=True):
        path = store.path.resolve()
        if path in known:
            raise UserError(f"'{known[path]}' and '{study}' are the same study: name each once")
        known[path] = study
    from ablate.reports import analyse, load_frames
    from ablate.reports.findings import compare as findings
    from ablate.reports.pages.compare import write_comparison
    from ablate.reports.pages.document import plain
    from ablate.reports.read.rebase import read_against, target_after

    frames = [load_frames(store) for store in stores]
    for fault in (fault for frame in frames for fault in frame.faults):
        click.echo(f"Left out: {fault}", err=True)
    frames = [
        read_against(frame, baseline=baseline, target=None if after is None else target_after(frame, after))
        for frame in frames
    ]
    if len({frame.plan.study for frame in frames}) < len(frames):
        frames = [
            replace(frame, plan=replace(frame.plan, study=str(store.path)))
            for frame, store in zip(frames, stores, strict=True)
        ]
    found = findings.compare([analyse(frame) for frame in frames], frames)
    if out is not None:
        with writing_to(out):
            written = write_comparison(found, out)
        for path in written:
            click.echo(str(path), err=as_json)
    deliver(plain(found), _comparison_lines(found), as_json=as_json)


def _comparison_lines(found: Comparison) -> Iterator[str]:
    from ablate.reports.words.compare import comparison_sentences, line_tables, study_tables

    for table in filter(table_text, (*line_tables(found), *study_tables(found))):
        yield from (table_text(table), f"\n{' '.join(table.caption.split())}\n")
    yield from comparison_sentences(found)


@click.command(
    "dashboard",
    epilog="\b\nExamples:\n  ablate dashboard quickstart --port 5001\n"
    "  ablate dashboard my-study --sync --tracking-uri http://mlflow:5000",
)
@click.argument("study")
@storage_option
@tracking_option
@click.option("--sync", is_flag=True, help="Only send MLflow what it lacks of the study; open nothing.")
@click.option(
    "--port", type=click.IntRange(1, 65535), help="Port on this machine (default: 5000, else a free one)."
)
@click.option("--no-browser", is_flag=True, help="Only print the address.")
def dashboard(
    study: str,
    storage: Path,
    tracking_uri: str | None,
    port: int | None,
    *,
    sync: bool,
    no_browser: bool,
) -> int:
    """Send MLflow what it lacks of STUDY (a name or its YAML file), and open its pages until Ctrl-C.

    What is there already is not sent twice. --tracking-uri also puts a study into another MLflow server.
    """
    from ablate.base.command_hints import redact
    from ablate.track.cursor import private_dir
    from ablate.track.mirror import Mirror
    from ablate.track.sink import (
        default_tracking_uri,
        is_database,
        resolve_tracking_uri,
        scheme,
        sqlite_path,
    )

    store = find_study(storage, study)
    store.refuse_unsafe()
    uri = resolve_tracking_uri(storage, tracking_uri)
    is_http = scheme(uri) in ("http", "https")
    if not sync:
        if not is_http and not is_database(uri):
            raise UserError(f"no pages to open for '{redact(uri)}' (expected http(s)://… or a database)")
        database = sqlite_path(uri)
        if database and not database.exists() and uri != default_tracking_uri(storage):
            hint = f"leave --tracking-uri out for {storage}/mlflow.db"
            raise UserError(f"no MLflow database {database} ({hint})")

    from ablate.track.server import listen, local_server

    # Early, so that a taken port is reported at once.
    sockets = listen(port) if is_database(uri) and not sync else []
    click.echo(f"Sending what is new to {redact(uri)} …", err=True)
    try:
        report = Mirror(store, uri).sync_once()
    except KeyboardInterrupt:
        click.echo("Stopped; the same command sends the rest.", err=True)
        return 130
    experiment = report.experiment_id
    if experiment is None and not sync:
        raise UserError(f"MLflow at {redact(uri)} cannot be used: {report.problem}")
    if report.problem:
        click.echo(f"Not everything could be sent: {report.problem}", err=True)
    if sync or experiment is None:
        click.echo(f"{report.runs_sent} runs looked at, {report.metrics_sent} metric points sent")
        return 1 if report.problem else 0
    if is_http:
        _show(page(uri, experiment), no_browser)
        return 0
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # `nohup`
            signal.signal(number, signal.default_int_handler)
    log, hidden = private_dir(store) / "server.log", private_dir(store) / "pages.html"
    name = f"{secrets.token_hex(16)}.localhost"  # nobody can guess it
    with (
        contextlib.suppress(KeyboardInterrupt),  # the way to end it
        local_server(uri, storage / "mlartifacts", log, sockets, name=name) as (url, process),
        contextlib.ExitStack() as at_end,
    ):
        at_end.callback(hidden.unlink, missing_ok=True)
        _show(page(url, experiment), no_browser, hidden=hidden)
        click.echo("The address is a key: whoever has it can open the pages. Ctrl-C ends it.", err=True)
        while process.poll() is None:
            time.sleep(0.2)
        raise UserError(f"MLflow's server has ended (see {log})")
    return 0


def page(base: str, experiment_id: str) -> str:
    """Return the address of an experiment's charts."""
    from ablate.track.sink import VIEW

    # Charts instead of the table of runs, the sidebar for training instead of that for agents, our columns.
    view = f"workflowType=machine_learning&compareRunsMode=CHART&viewStateShareKey={VIEW}"
    return f"{base.rstrip('/')}/#/experiments/{experiment_id}/runs?{view}"


def _show(address: str, no_browser: bool, hidden: Path | None = None) -> None:
    """Print an address and open it; ``hidden``: through this file, because others can read command lines."""
    from ablate.base.command_hints import redact

    click.echo(redact(address))
    sys.stdout.flush()
    # Without a display the "browser" would be a text browser that takes over the terminal.
    has_display = sys.platform == "darwin" or any(os.environ.get(k) for k in ("DISPLAY", "WAYLAND_DISPLAY"))
    if not has_display or no_browser:
        return
    if hidden is not None:
        from html import escape

        with open_private(hidden, "w") as file:
            file.write(f'<meta http-equiv="refresh" content="0; url={escape(address)}">')
    webbrowser.open(address if hidden is None else hidden.absolute().as_uri())
