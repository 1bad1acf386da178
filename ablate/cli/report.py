"""``ablate report``: write a study's report and print its verdict."""

from __future__ import annotations

from pathlib import Path

import click

from ablate.cli.common import find_study, storage_option


@click.command()
@click.argument("study")
@storage_option
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder for the report (default: report/ in the study's folder).",
)
@click.option("--json", "as_json", is_flag=True, help="Print report.json instead of the verdict.")
def command(study: str, storage: Path, out: Path | None, *, as_json: bool) -> None:
    """Write the report of STUDY (its name or its YAML file): HTML, Markdown, JSON, CSV, figures.

    Works on a study that is still running: what is missing is said at the top.
    """
    store = find_study(storage, study)
    from ablate.reports import write_report

    written = write_report(store, out)
    if as_json:
        click.echo(written.json.read_text(encoding="utf-8"), nl=False)
        return
    for line in (*written.notices, *written.verdict.sentences):
        click.echo(line)
    click.echo()
    for path in written.paths():
        click.echo(str(path))
