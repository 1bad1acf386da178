"""``ablate trend``: the token cost of each arm over the size of the model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import click

from ablate.base.errors import Problem, UserError, safe_text
from ablate.cli.common import find_studies, shown_names, storage_option, writing_to


@click.command(
    epilog="\b\nExamples:\n  ablate trend width-64 width-128 width-256 --out trend/\n"
    "  ablate trend width-64 width-128 width-256 --baseline mxfp4 --after 400_000"
)
@click.argument("studies", nargs=-1, required=True, metavar="STUDY STUDY [STUDY]...")
@click.option("--baseline", metavar="ARM", help="State costs against this arm, not each study's baseline.")
@click.option(
    "--after",
    type=click.IntRange(min=1),
    metavar="TOKENS",
    help="Read each study where its file's baseline is after so many tokens, not at its target.",
)
@storage_option
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    help="Write trend.html, .md, .json and the figure there, too.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for scripts.")
def command(
    studies: tuple[str, ...],
    baseline: str | None,
    after: int | None,
    storage: Path,
    out: Path | None,
    *,
    as_json: bool,
) -> None:
    """Tell whether what each arm costs grows or shrinks with the size of the model.

    Each STUDY is a study's name, its YAML file, or its folder in another storage: the same study but for the
    model, with its own baseline and its own target. Arms are matched by name.
    """
    if len(studies) < 2:
        raise UserError(
            Problem(what=f"'{studies[0]}' alone has no trend", hint="name two studies at least, of two sizes")
        )
    stores = find_studies(storage, studies)
    from ablate.reports import analyse, load_frames
    from ablate.reports.findings.trend import trend
    from ablate.reports.pages.document import trend_document
    from ablate.reports.read.against import read_against, target_after
    from ablate.reports.words.beside import differences_text, trend_sentences, trend_table

    frames = [load_frames(store) for store in stores]
    targets = [None if after is None else target_after(frame, after) for frame in frames]
    frames = [
        read_against(frame, baseline=baseline, target=target)
        for frame, target in zip(frames, targets, strict=True)
    ]
    analyses = [analyse(frame) for frame in frames]
    found = trend(analyses, frames, shown_names(stores, [one.study for one in analyses]))
    if out is not None:
        from ablate.reports.pages.beside import write_trend

        with writing_to(out):
            pages = write_trend(found, out)
        for path in pages:
            click.echo(str(path), err=as_json)
    if as_json:
        click.echo(json.dumps(trend_document(found), indent=1, allow_nan=False, ensure_ascii=False))
        return
    from ablate.cli.table import format_table

    width = shutil.get_terminal_size((100, 24)).columns
    table = trend_table(found)
    click.echo(safe_text(format_table(table.columns, table.rows, width=width), keep="\n"))
    click.echo()
    click.echo(safe_text(table.caption))
    click.echo()
    for line in (*trend_sentences(found), *differences_text(found)):
        click.echo(safe_text(line))
