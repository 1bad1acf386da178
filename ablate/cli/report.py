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
from ablate.base.errors import UserError, as_user_error
from ablate.base.files import open_private
from ablate.cli.common import (
    FOLDER,
    count_option,
    deliver,
    echo_lines,
    find_study,
    flag,
    json_option,
    storage_option,
    study_argument,
    table_text,
    target_of,
    tracking_option,
    verdict_lines,
)

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator

    from ablate.reports.findings.compare import Comparison
    from ablate.store import StudyStore
    from ablate.store.plan_file import Target


_ENDED = ("finished", "diverged", "failed", "stopped", "damaged")


def _target(text: str) -> float | Target:
    try:
        return float(text)
    except ValueError:
        return target_of(text)


@click.command(
    epilog="Examples:  ablate report quickstart   ·   ablate report my-study --watch   ·   "
    "ablate report my-study --baseline fp8 --out against-fp8"
)
@study_argument
@storage_option
@click.option(
    "--out",
    type=FOLDER,
    help="Folder of the report (default: report/ in the study's folder).",
)
@click.option(
    "--baseline",
    metavar="ARM",
    help="State costs against this arm instead of the study's baseline; needs --out.",
)
@click.option(
    "--target",
    type=_target,
    metavar="TARGET",
    help="Use this target: val_loss=3.3, perplexity=27.1 or a number of the study's kind; needs --out.",
)
@flag(
    "--watch",
    help="Update the report while the study runs, until Ctrl-C.",
)
@count_option(
    "--every",
    default=30,
    metavar="SECONDS",
    help="Seconds between two updates of --watch.",
)
@flag("--json", "as_json", help="Print report.json instead of the verdict.")
def report(
    study: str,
    storage: Path,
    out: Path | None,
    every: int,
    watch: bool,
    as_json: bool,
    **reading: Any,
) -> int:
    """Write the report of STUDY (its name or its YAML file): HTML, Markdown, LaTeX, JSON, CSV, figures.

    It also works while the study is running: the top of the report says what is missing.
    """
    store = find_study(storage, study)
    if out is None and not (reading["baseline"] is None and reading["target"] is None):
        raise UserError(
            "--baseline and --target write another report (give it a folder with --out)"
        )
    from ablate.execute.progress import RunProgress, read_progress
    from ablate.reports import write_report
    from ablate.study import load_study

    plan = store.plan()
    run = command_line(
        "run", study, *set_words(plan.settings), storage=store.path.parent
    )
    is_file = study.endswith((".yaml", ".yml"))
    keys: list[str] = []
    with contextlib.nullcontext() if is_file else contextlib.suppress(UserError):
        filed = load_study(study)
        if filed.name == plan.study and not plan.imported:
            keys = filed.differs_from(plan)
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
    folder = store.path / "report" if out is None else out
    with as_user_error(f"--out: cannot write {folder}"):
        try:
            # write again whenever a run has moved, until every run has ended
            while watch:
                runs = read_progress(store, store.plan())  # a search adds runs
                num_ended = sum(run.state in _ENDED for run in runs)
                if num_ended == len(runs):
                    break
                if runs != seen:
                    written = write_report(store, out, refresh_sec=every, **reading)
                    seen = runs
                    moment = time.strftime("%H:%M:%S")
                    click.echo(
                        f"{moment}  {num_ended} of {len(runs)} runs have ended; {written.html}"
                    )
                time.sleep(every)
        except KeyboardInterrupt:
            code = 130
        # a last page that does not reload itself
        written = write_report(store, out, **reading)
    if as_json and not watch:
        click.echo(written.json.read_text(encoding="utf-8"), nl=False)
    else:
        echo_lines([*verdict_lines(written), ""])
        for path in (
            written.html, written.markdown, written.json, written.tables, written.figures
        ):  # fmt: skip
            echo_lines([str(path)])
    return code


@click.command(
    "compare",
    epilog="\b\nExamples:\n  ablate compare quickstart quickstart-long\n"
    "  ablate compare width-64 width-128 width-256 --out trend/\n"
    "  ablate compare width-64 width-128 width-256 --baseline mxfp4 --after 400_000",
)
@click.argument("studies", nargs=-1, required=True, metavar="STUDY STUDY [STUDY]...")
@click.option(
    "--baseline",
    metavar="ARM",
    help="State costs against this arm instead of each study's baseline.",
)
@count_option(
    "--after",
    metavar="TOKENS",
    help="Take as target what each study's baseline reaches after this many tokens.",
)
@storage_option
@click.option(
    "--out",
    type=FOLDER,
    help="Also write compare.html, .md, .json and the figure to this folder.",
)
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
    """Put studies side by side: whether an arm's cost differs in two, how it changes with size in more.

    Each STUDY is a study's name, its YAML file, or its folder in another storage. Arms are matched by name.
    Three studies or more should differ in the size of the model or, at one size, in the budget alone.
    """
    if len(studies) < 2:
        raise UserError(
            f"'{studies[0]}' alone compares with nothing (name two studies at least)"
        )
    from ablate.store.runs import study_at

    stores = [study_at(Path(study)) or find_study(storage, study) for study in studies]
    if len({store.path.resolve() for store in stores}) < len(stores):
        raise UserError(
            f"two of {', '.join(studies)} are the same study: name each once"
        )
    from ablate.reports import analyse, load_frames
    from ablate.reports.findings import compare as findings
    from ablate.reports.pages.compare import write_comparison
    from ablate.reports.pages.document import plain
    from ablate.reports.read.rebase import read_against, target_after

    frames = []
    for store in stores:
        frame = load_frames(store)
        for fault in frame.faults:
            click.echo(f"Left out: {fault}", err=True)
        target = None if after is None else target_after(frame, after)
        frames.append(read_against(frame, baseline=baseline, target=target))
    if len({frame.plan.study for frame in frames}) < len(frames):
        frames = [
            replace(frame, plan=replace(frame.plan, study=str(store.path)))
            for frame, store in zip(frames, stores, strict=True)
        ]
    comparison = findings.compare([analyse(frame) for frame in frames], frames)
    if out is not None:
        with as_user_error(f"--out: cannot write {out}"):
            written = write_comparison(comparison, out)
        for path in written:
            click.echo(path, err=as_json)
    deliver(plain(comparison), _comparison_lines(comparison), as_json=as_json)


def _comparison_lines(comparison: Comparison) -> Iterator[str]:
    from ablate.reports.words.compare import (
        comparison_sentences,
        line_tables,
        study_tables,
    )

    for table in (*line_tables(comparison), *study_tables(comparison)):
        text = table_text(table)
        if text:
            yield text
            yield f"\n{' '.join(table.caption.split())}\n"
    yield from comparison_sentences(comparison)


@click.command(
    "dashboard",
    epilog="\b\nExamples:\n  ablate dashboard quickstart --port 5001\n"
    "  ablate dashboard my-study --sync --tracking-uri http://mlflow:5000",
)
@study_argument
@storage_option
@tracking_option
@flag(
    "--sync",
    help="Only send MLflow what it lacks of the study; open no page.",
)
@click.option(
    "--port",
    type=click.IntRange(1, 65535),
    help="Port on this machine (default: 5000, else a free one).",
)
@flag("--no-browser", help="Only print the address.")
def dashboard(
    study: str,
    storage: Path,
    tracking_uri: str | None,
    port: int | None,
    *,
    sync: bool,
    no_browser: bool,
) -> int:
    """Send MLflow what it lacks of STUDY (a name or its YAML file), and serve its pages until Ctrl-C.

    Nothing is sent twice. With --tracking-uri the study is sent to another MLflow server.
    """
    from ablate.base.command_hints import redact
    from ablate.track.mirror import Mirror
    from ablate.track.server import listen
    from ablate.track.sink import is_database, resolve_tracking_uri, scheme

    store = find_study(storage, study)
    store.refuse_unsafe()
    uri = resolve_tracking_uri(storage, tracking_uri)
    if not sync:
        _check_pages(uri, storage)
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
        click.echo(
            f"{report.runs_sent} runs looked at, {report.metrics_sent} metric points sent"
        )
        return 1 if report.problem else 0
    if scheme(uri) in ("http", "https"):
        _show(page(uri, experiment), no_browser)
    else:
        artifacts = storage / "mlartifacts"
        _serve(store, uri, experiment, sockets, artifacts, no_browser=no_browser)
    return 0


def _check_pages(uri: str, storage: Path) -> None:
    """Refuse an address of MLflow that has no pages, before anything is sent."""
    from ablate.base.command_hints import redact
    from ablate.track.sink import default_tracking_uri, is_database, scheme, sqlite_path

    if scheme(uri) not in ("http", "https") and not is_database(uri):
        raise UserError(
            f"no pages to open for '{redact(uri)}' (expected http(s)://… or a database)"
        )
    database = sqlite_path(uri)
    if database and not database.exists() and uri != default_tracking_uri(storage):
        hint = f"leave --tracking-uri out for {storage}/mlflow.db"
        raise UserError(f"no MLflow database {database} ({hint})")


def _serve(
    store: StudyStore,
    uri: str,
    experiment: str,
    sockets: list[socket.socket],
    artifacts: Path,
    *,
    no_browser: bool,
) -> None:
    """Serve MLflow's pages of a database until Ctrl-C."""
    from ablate.track.cursor import private_dir
    from ablate.track.server import local_server

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # `nohup`
            signal.signal(number, signal.default_int_handler)
    log = private_dir(store) / "server.log"
    redirect = private_dir(store) / "pages.html"
    name = f"{secrets.token_hex(16)}.localhost"  # nobody can guess it
    with (
        contextlib.suppress(KeyboardInterrupt),  # the way to end it
        local_server(uri, artifacts, log, sockets, name=name) as (url, process),
        contextlib.ExitStack() as at_end,
    ):
        at_end.callback(redirect.unlink, missing_ok=True)
        _show(page(url, experiment), no_browser, redirect)
        click.echo(
            "Whoever has this address can open the pages. Ctrl-C ends the server.",
            err=True,
        )
        while process.poll() is None:
            time.sleep(0.2)
        raise UserError(f"MLflow's server has ended (see {log})")


def page(base: str, experiment_id: str) -> str:
    """Return the address of an experiment's charts."""
    from ablate.track.sink import VIEW

    # Charts instead of the table of runs, the sidebar for training instead of that for agents, our columns.
    view = (
        f"workflowType=machine_learning&compareRunsMode=CHART&viewStateShareKey={VIEW}"
    )
    return f"{base.rstrip('/')}/#/experiments/{experiment_id}/runs?{view}"


def _show(address: str, no_browser: bool, redirect: Path | None = None) -> None:
    """Print an address and open it; ``redirect``: by this file, because others can read command lines."""
    from ablate.base.command_hints import redact

    click.echo(redact(address))
    sys.stdout.flush()
    # Without a display the "browser" would be a text browser that takes over the terminal.
    displays = ("DISPLAY", "WAYLAND_DISPLAY")
    has_display = sys.platform == "darwin" or any(
        os.environ.get(name) for name in displays
    )
    if no_browser or not has_display:
        return
    if redirect is not None:
        from html import escape

        with open_private(redirect, "w") as file:
            file.write(
                f'<meta http-equiv="refresh" content="0; url={escape(address)}">'
            )
        address = redirect.absolute().as_uri()
    webbrowser.open(address)
