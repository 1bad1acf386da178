"""``ablate sync`` and ``ablate dashboard``: a study in MLflow, and MLflow's pages at it.

How it fails: an unknown study, a port that is taken, a database that is not there and a server that does
not answer are one line each, exit code 2.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import webbrowser
from typing import TYPE_CHECKING

import click

from ablate.base.errors import UserError
from ablate.cli.common import find_study, storage_option, tracking_option

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from ablate.track.cursor import MirrorReport


@click.command("sync", epilog="Example:  ablate sync my-study --tracking-uri http://mlflow:5000")
@click.argument("study")
@tracking_option
@click.option("--rebuild", is_flag=True, help="Look at everything anew, whatever was sent before.")
@storage_option
def sync(study: str, tracking_uri: str | None, *, rebuild: bool, storage: Path) -> int:
    """Send what MLflow lacks of STUDY (a name or its YAML file), from the run store alone.

    Safe to repeat: what is there already is not sent twice. Also puts a study into another MLflow server.
    """
    from ablate.base.command_hints import redact
    from ablate.track.cursor import cursor_path
    from ablate.track.mirror import Mirror
    from ablate.track.uri import resolve_tracking_uri

    store = find_study(storage, study)
    uri = resolve_tracking_uri(storage, tracking_uri)
    if rebuild:
        cursor_path(store, uri).unlink(missing_ok=True)
    with _stoppable() as stopped:
        report = Mirror(store, uri).sync_once(stopped)
        sent = f"{report.metrics_sent} metric points sent"
        click.echo(f"{report.runs_sent} runs looked at, {sent} to {redact(uri)}")
        if stopped():
            click.echo("Stopped; the same command sends the rest.", err=True)
            return 130
    return _say_problem(report)


@contextlib.contextmanager
def _stoppable() -> Iterator[Callable[[], bool]]:
    """Yield whether Ctrl-C was pressed: between two runs one can stop without loss. A second one ends it."""
    asked = threading.Event()

    def ask(number: int, _frame: object) -> None:
        asked.set()
        signal.signal(number, signal.default_int_handler)

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield asked.is_set
    finally:
        signal.signal(signal.SIGINT, before)


def _say_problem(report: MirrorReport) -> int:
    """Say what could not be sent; return the exit code."""
    if report.problem:
        click.echo(f"Not everything could be sent: {report.problem}", err=True)
    return 1 if report.problem else 0


@click.command("dashboard", epilog="Example:  ablate dashboard quickstart --port 5001")
@click.argument("study")
@storage_option
@click.option(
    "--tracking-uri",
    help="MLflow's address (default: $MLFLOW_TRACKING_URI, else the database in the storage folder).",
)
@click.option(
    "--port", type=click.IntRange(1, 65535), help="Port on 127.0.0.1 (default: 5000, else a free one)."
)
@click.option("--no-browser", is_flag=True, help="Only print the address.")
def command(study: str, storage: Path, tracking_uri: str | None, port: int | None, no_browser: bool) -> None:
    """Open MLflow's pages at STUDY (a name or its YAML file) until Ctrl-C."""
    from ablate.base.command_hints import redact
    from ablate.track.cursor import mirror_dir
    from ablate.track.mirror import Mirror
    from ablate.track.uri import (
        default_tracking_uri,
        is_database,
        is_http,
        resolve_tracking_uri,
        sqlite_path,
    )

    store = find_study(storage, study)
    uri = resolve_tracking_uri(storage, tracking_uri)
    if not is_http(uri) and not is_database(uri):
        raise UserError(f"no pages to open for '{redact(uri)}' (expected http(s)://… or a database)")
    database = sqlite_path(uri)
    if database and not database.exists() and uri != default_tracking_uri(storage):
        raise UserError(f"no MLflow database {database} (leave --tracking-uri out for {storage}/mlflow.db)")

    from ablate.track.server import choose_port, local_server, secret_name

    chosen = choose_port(port) if is_database(uri) else 0  # early, so that a taken port is reported at once
    click.echo("Sending what is new to MLflow …", err=True)
    with _stoppable() as stopped:
        report = Mirror(store, uri).sync_once(stopped)
        if stopped():
            return
    if report.experiment_id is None:
        raise UserError(f"MLflow at {redact(uri)} cannot be used: {report.problem}")
    _say_problem(report)
    if is_http(uri):
        _show(page(uri, report.experiment_id), no_browser)
        return
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    try:
        log = mirror_dir(store) / "server.log"
        name = secret_name()
        with local_server(uri, storage / "mlartifacts", log, chosen, name=name) as (url, process):
            _show(page(url, report.experiment_id), no_browser, hidden=mirror_dir(store) / "pages.html")
            click.echo("The address is a key: whoever has it can open the pages. Ctrl-C ends it.", err=True)
            while process.poll() is None:
                time.sleep(0.2)
            raise UserError(f"MLflow's server has ended (see {log})")
    except KeyboardInterrupt:
        return  # the way to end it


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

        hidden.unlink(missing_ok=True)
        with os.fdopen(os.open(hidden, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(f'<meta http-equiv="refresh" content="0; url={escape(address)}">')
    webbrowser.open(address if hidden is None else hidden.absolute().as_uri())
