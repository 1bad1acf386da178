"""``ablate compare`` and ``ablate trend``: studies side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ablate.base.errors import UserError, safe_text
from ablate.cli.common import AT_LEAST_1, FOLDER, find_studies, json_option, shown_names, storage_option
from ablate.cli.output import echo_json, format_table, table_text, terminal_width, writing_to

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from ablate.reports.read.load import StudyFrames
    from ablate.store import StudyStore

_LONGEST_VALUE = 60


def _out_option(name: str) -> Callable[..., Any]:
    return click.option(
        "--out", type=FOLDER, help=f"Write {name}.html, .md, .json and the figure there, too."
    )


def _deliver(found: Any, write: Any, document: Any, out: Path | None, *, as_json: bool) -> bool:
    """Write pages to the folder of ``--out``; print the document and return True for ``--json``."""
    if out is not None:
        with writing_to(out):
            pages = write(found, out)
        for path in pages:
            click.echo(str(path), err=as_json)
    if as_json:
        echo_json(document(found), allow_nan=False, ensure_ascii=False)
    return as_json


@click.command("compare", epilog="Example:  ablate compare quickstart quickstart-long")
@click.argument("a")
@click.argument("b")
@storage_option
@_out_option("compare")
@json_option
def compare(a: str, b: str, storage: Path, out: Path | None, *, as_json: bool) -> None:
    """Put study A beside study B: each arm's token cost in both, and whether they differ.

    Each is a study's name, its YAML file, or its folder in another storage. Arms are matched by name.
    """
    stores = find_studies(storage, (a, b))
    from ablate.reports import analyse
    from ablate.reports.findings import compare as comparing
    from ablate.reports.pages.beside import write_comparison
    from ablate.reports.pages.document import comparison_document
    from ablate.reports.words.beside import compare_table

    frames = _read(stores)
    left, right = (analyse(frame) for frame in frames)
    names = shown_names(stores, (left.plan.study, right.plan.study))
    found = comparing.compare(left, right, (frames[0], frames[1]), (names[0], names[1]))
    if {arm.name for arm in left.others}.isdisjoint(arm.name for arm in right.others):
        click.echo("No arm is in both studies, by name.", err=True)
    if _deliver(found, write_comparison, comparison_document, out, as_json=as_json):
        return
    table = compare_table(found)
    click.echo(f"{table_text(table)}\n\n{safe_text(' '.join(table.caption.split()))}")
    if found.differs:
        click.echo("\nThe studies differ in")
        rows = [(key, *map(_short, pair)) for key, pair in found.differs.items()]
        click.echo(safe_text(format_table(("", *names), rows, width=terminal_width()), keep="\n"))


def _read(stores: Sequence[StudyStore]) -> list[StudyFrames]:
    """Read studies, and say what of them is left out."""
    from ablate.reports import load_frames

    frames = [load_frames(store) for store in stores]
    for fault in (fault for frame in frames for fault in frame.faults):
        click.echo(safe_text(f"Left out: {fault}"), err=True)
    return frames


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 1] + "…"


@click.command(
    "trend",
    epilog="\b\nExamples:\n  ablate trend width-64 width-128 width-256 --out trend/\n"
    "  ablate trend width-64 width-128 width-256 --baseline mxfp4 --after 400_000",
)
@click.argument("studies", nargs=-1, required=True, metavar="STUDY STUDY [STUDY]...")
@click.option("--baseline", metavar="ARM", help="State costs against this arm, not each study's baseline.")
@click.option(
    "--after", type=AT_LEAST_1, metavar="TOKENS",
    help="Read each study where its file's baseline is after so many tokens, not at its target.",
)  # fmt: skip
@storage_option
@_out_option("trend")
@json_option
def trend(
    studies: tuple[str, ...],
    baseline: str | None,
    after: int | None,
    storage: Path,
    out: Path | None,
    as_json: bool,
) -> None:
    """Tell whether what each arm costs grows or shrinks with the size of the model.

    Each STUDY is a study's name, its YAML file, or its folder in another storage: the same study but for the
    model, with its own baseline and its own target. Arms are matched by name.
    """
    if len(studies) < 2:
        raise UserError(f"'{studies[0]}' alone has no trend (name two studies at least, of two sizes)")
    stores = find_studies(storage, studies)
    from ablate.reports import analyse
    from ablate.reports.findings import trend as trends
    from ablate.reports.pages.beside import write_trend
    from ablate.reports.pages.document import trend_document
    from ablate.reports.read.against import read_against, target_after
    from ablate.reports.words.beside import differences_text, trend_sentences, trend_table

    frames = _read(stores)
    targets = [None if after is None else target_after(frame, after) for frame in frames]
    pairs = zip(frames, targets, strict=True)
    frames = [read_against(frame, baseline=baseline, target=target) for frame, target in pairs]
    analyses = [analyse(frame) for frame in frames]
    found = trends.trend(analyses, frames, shown_names(stores, [one.plan.study for one in analyses]))
    if _deliver(found, write_trend, trend_document, out, as_json=as_json):
        return
    table = trend_table(found)
    click.echo(f"{table_text(table)}\n\n{safe_text(table.caption)}\n")
    for line in (*trend_sentences(found), *differences_text(found)):
        click.echo(safe_text(line))
