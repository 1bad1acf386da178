"""``ablate compare``: two studies side by side."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import click

from ablate.base.errors import safe_text
from ablate.cli.common import find_studies, shown_names, storage_option, writing_to

_LONGEST_VALUE = 60


@click.command(epilog="Example:  ablate compare quickstart quickstart-long")
@click.argument("a")
@click.argument("b")
@storage_option
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    help="Write compare.html, .md, .json and the figure there, too.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for scripts.")
def command(a: str, b: str, storage: Path, out: Path | None, *, as_json: bool) -> None:
    """Put study A beside study B: each arm's token cost in both, and whether they differ.

    Each is a study's name, its YAML file, or its folder in another storage. Arms are matched by name.
    """
    stores = find_studies(storage, (a, b))
    from ablate.reports import analyse, load_frames
    from ablate.reports.findings.compare import compare
    from ablate.reports.pages.document import comparison_document
    from ablate.reports.words.beside import compare_table

    frames = (load_frames(stores[0]), load_frames(stores[1]))
    left, right = (analyse(frame) for frame in frames)
    names = shown_names(stores, (left.study, right.study))
    found = compare(left, right, frames, (names[0], names[1]))
    if {arm.name for arm in left.others}.isdisjoint(arm.name for arm in right.others):
        click.echo("No arm is in both studies, by name.", err=True)
    if out is not None:
        from ablate.reports.pages.beside import write_comparison

        with writing_to(out):
            pages = write_comparison(found, out)
        for path in pages:
            click.echo(str(path), err=as_json)
    if as_json:
        click.echo(json.dumps(comparison_document(found), indent=1, allow_nan=False, ensure_ascii=False))
        return
    from ablate.cli.table import format_table

    width = shutil.get_terminal_size((100, 24)).columns
    table = compare_table(found)
    click.echo(safe_text(format_table(table.columns, table.rows, width=width), keep="\n"))
    click.echo()
    click.echo(safe_text(" ".join(table.caption.split())))
    if found.differs:
        click.echo("\nThe studies differ in")
        rows = [(key, *map(_short, pair)) for key, pair in found.differs.items()]
        click.echo(safe_text(format_table(("", *names), rows, width=width), keep="\n"))


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 1] + "…"
