"""``ablate compare``: studies side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ablate.base.errors import UserError, safe_text
from ablate.cli.common import AT_LEAST_1, FOLDER, find_studies, json_option, shown_names, storage_option
from ablate.cli.output import echo_json, format_table, table_text, terminal_width, writing_to

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ablate.reports.findings.compare import Comparison
    from ablate.reports.findings.trend import Trend
    from ablate.reports.words.table import Table

_LONGEST_VALUE = 60


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
    stores = find_studies(storage, studies)
    from ablate.reports import analyse, load_frames
    from ablate.reports.pages import compare as pages
    from ablate.reports.pages.document import comparison_document, trend_document
    from ablate.reports.read.rebase import read_against, target_after

    frames = [load_frames(store) for store in stores]
    for fault in (fault for frame in frames for fault in frame.faults):
        click.echo(safe_text(f"Left out: {fault}"), err=True)
    targets = [None if after is None else target_after(frame, after) for frame in frames]
    pairs = zip(frames, targets, strict=True)
    frames = [read_against(frame, baseline=baseline, target=target) for frame, target in pairs]
    analyses = [analyse(frame) for frame in frames]
    names = shown_names(stores, [one.plan.study for one in analyses])
    write: Callable[[Any, Path], tuple[Path, ...]]
    show: Callable[[Any], None]
    if len(studies) == 2:
        from ablate.reports.findings import compare as comparing

        found: Any = comparing.compare(analyses[0], analyses[1], (frames[0], frames[1]), (names[0], names[1]))
        write, document, show = pages.write_comparison, comparison_document(found), _show_two
        if all(arm.left is None or arm.right is None for arm in found.arms):
            click.echo("No arm is in both studies, by name.", err=True)
    else:
        from ablate.reports.findings.trend import trend

        found = trend(analyses, frames, names)
        write, document, show = pages.write_trend, trend_document(found), _show_more
    if out is not None:
        with writing_to(out):
            written = write(found, out)
        for path in written:
            click.echo(str(path), err=as_json)
    if as_json:
        echo_json(document, allow_nan=False, ensure_ascii=False)
    else:
        show(found)


def _show_two(found: Comparison) -> None:
    from ablate.reports.findings.trend import cut
    from ablate.reports.words.compare import compare_table

    _show(compare_table(found))
    if found.differs:
        click.echo("\nThe studies differ in")
        rows = [(key, *(cut(value, _LONGEST_VALUE) for value in pair)) for key, pair in found.differs.items()]
        table = format_table(("", found.left, found.right), rows, width=terminal_width())
        click.echo(safe_text(table, keep="\n"))


def _show_more(found: Trend) -> None:
    from ablate.reports.words import compare as words

    for _, table in words.trend_tables(found):
        _show(table)
        click.echo()
    for line in (*words.trend_sentences(found), *words.differences_text(found)):
        click.echo(safe_text(line))


def _show(table: Table) -> None:
    click.echo(f"{table_text(table)}\n\n{safe_text(' '.join(table.caption.split()))}")
