"""``ablate sync``: send what MLflow lacks of a study."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ablate.cli.common import find_study, storage_option, tracking_option

if TYPE_CHECKING:
    from pathlib import Path


@click.command(epilog="Example:  ablate sync my-study --tracking-uri http://mlflow:5000")
@click.argument("study")
@tracking_option
@click.option("--rebuild", is_flag=True, help="Look at everything anew, whatever was sent before.")
@storage_option
def command(study: str, tracking_uri: str | None, *, rebuild: bool, storage: Path) -> int:
    """Send what MLflow lacks of STUDY (a name or its YAML file), from the run store alone.

    Safe to repeat: what is there already is not sent twice. Also puts a study into another MLflow server.
    """
    from ablate.track.cursor import cursor_path
    from ablate.track.mirror import Mirror
    from ablate.track.uri import redact, resolve_tracking_uri

    store = find_study(storage, study)
    uri = resolve_tracking_uri(storage, tracking_uri)
    if rebuild:
        cursor_path(store, uri).unlink(missing_ok=True)
    report = Mirror(store, uri).sync_once()
    click.echo(
        f"{report.runs_sent} runs looked at, {report.metrics_sent} metric points sent to {redact(uri)}"
    )
    if report.problem:
        click.echo(f"Not everything could be sent: {report.problem}", err=True)
        return 1
    return 0
