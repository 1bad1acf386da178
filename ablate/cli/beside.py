"""``ablate compare`` and ``ablate trend``: studies side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from ablate.base.errors import UserError, safe_text
from ablate.cli.common import AT_LEAST_1, FILE, FOLDER, find_studies, json_option, shown_names, storage_option
from ablate.cli.output import echo_json, format_table, table_text, terminal_width, writing_to

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from ablate.reports.findings.trend import Trend
    from ablate.reports.read.load import StudyFrames
    from ablate.reports.statistics.scaling import Scaling
    from ablate.reports.words.table import Table
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


def _number(text: str, option: str) -> int:
    """Return a count such as 160B, 7.5M or 120_000."""
    unit = {"k": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}.get(text[-1:], 1)
    try:
        number = float(text if unit == 1 else text[:-1]) * unit
    except ValueError:
        number = 0.0
    if not 1 <= number < 1e18:
        raise UserError(f"{option}: '{text}' is no count (expected a number such as 160B, 7.5M or 120_000)")
    return round(number)


def _parameters(_context: click.Context, _option: click.Parameter, text: str | None) -> list[int] | None:
    return None if text is None else [_number(part.strip(), "--parameters") for part in text.split(",")]


def _places(
    _context: click.Context, _option: click.Parameter, texts: tuple[str, ...]
) -> tuple[tuple[int, int], ...]:
    pairs = [text.split(",") for text in texts]
    for text, pair in zip(texts, pairs, strict=True):
        if len(pair) != 2:
            raise UserError(f"--at: '{text}' is no size and budget (expected N,D such as 8B,160B)")
    return tuple((_number(size.strip(), "--at"), _number(budget.strip(), "--at")) for size, budget in pairs)


@click.command(
    "trend",
    epilog="\b\nExamples:\n  ablate trend width-64 width-128 width-256 --out trend/\n"
    "  ablate trend width-64 width-128 width-256 --baseline mxfp4 --after 400_000\n"
    "  ablate trend --losses sweep.csv --baseline bf16 --at 8B,160B",
)
@click.argument("studies", nargs=-1, metavar="STUDY STUDY [STUDY]...")
@click.option("--baseline", metavar="ARM", help="State costs against this arm, not each study's baseline.")
@click.option(
    "--after",
    type=AT_LEAST_1,
    metavar="TOKENS",
    help="Read each study where its file's baseline is after so many tokens, not at its target.",
)
@click.option(
    "--parameters",
    metavar="N,N,...",
    callback=_parameters,
    help="The studies' sizes in the order named, such as 120k,8B, where their files do not tell them.",
)
@click.option(
    "--at",
    "places",
    multiple=True,
    metavar="N,D",
    callback=_places,
    help="Say what the scaling law makes of a size and budget, such as 8B,160B; repeat it.",
)
@click.option(
    "--losses",
    type=FILE,
    metavar="FILE",
    help="A CSV of final losses in place of studies: arm, parameters, tokens, val_loss and seed.",
)
@click.option("--paired", is_flag=True, help="With --losses: equal seeds of one size share weights and data.")
@storage_option
@_out_option("trend")
@json_option
def trend(
    studies: tuple[str, ...], losses: Path | None, out: Path | None, *, as_json: bool, **options: Any
) -> None:
    """Tell how what each arm costs goes with the size of the model, and with the budget.

    Each STUDY is a study's name, its YAML file, or its folder in another storage: the same study but for
    model or budget, with its own baseline and its own target. Arms are matched by name.
    """
    found, law = _trend_of(studies, **options) if losses is None else _law_of(losses, studies, **options)
    from ablate.reports.pages.beside import write_trend
    from ablate.reports.pages.document import trend_document
    from ablate.reports.words import beside as words

    def write(pair: tuple[Trend | None, Scaling | str], folder: Path) -> tuple[Path, ...]:
        return write_trend(*pair, folder)

    if _deliver((found, law), write, lambda pair: trend_document(*pair), out, as_json=as_json):
        return
    if found is not None:
        _show(words.trend_table(found), [*words.trend_sentences(found), *words.differences_text(found)])
        click.echo()
    for line in words.law_sentences(law):
        click.echo(safe_text(line))
    for _, table in words.law_tables(law):
        click.echo()
        _show(table, [])


def _show(table: Table, lines: Sequence[str]) -> None:
    click.echo(f"{table_text(table)}\n\n{safe_text(table.caption)}")
    if lines:
        click.echo()
    for line in lines:
        click.echo(safe_text(line))


def _trend_of(
    studies: tuple[str, ...],
    *,
    baseline: str | None,
    after: int | None,
    parameters: list[int] | None,
    places: tuple[tuple[int, int], ...],
    paired: bool,
    storage: Path,
) -> tuple[Trend | None, Scaling | str]:
    if not studies:
        raise UserError("expected two studies at least, or --losses FILE")
    if len(studies) < 2:
        raise UserError(f"'{studies[0]}' alone has no trend (name two studies at least, of two sizes)")
    if paired:
        raise UserError("--paired is for --losses: a study's own file says whether its seeds are pairs")
    stores = find_studies(storage, studies)
    from ablate.reports import analyse
    from ablate.reports.findings.trend import NO_TARGET, trend_and_law
    from ablate.reports.read.against import read_against, target_after

    frames = _read(stores)
    targets = [None if after is None else target_after(frame, after) for frame in frames]
    pairs = zip(frames, targets, strict=True)
    frames = [read_against(frame, baseline=baseline, target=target) for frame, target in pairs]
    analyses = [analyse(frame) for frame in frames]
    names = shown_names(stores, [one.plan.study for one in analyses])
    found, law = trend_and_law(analyses, frames, names, parameters=parameters, at=places)
    if found is None and all(one.plan.target is None for one in analyses):
        click.echo(f"No trend: {NO_TARGET}.", err=True)
    return found, law


def _law_of(losses: Path, studies: tuple[str, ...], **options: Any) -> tuple[None, Scaling]:
    told = click.get_current_context().get_parameter_source("storage") is ParameterSource.COMMANDLINE
    given = {
        "STUDY": studies,
        "--after": options["after"],
        "--parameters": options["parameters"],
        "--storage": told,
    }
    if extra := [name for name, value in given.items() if value]:
        raise UserError(f"--losses: {extra[0]} has no meaning beside it (leave one of them out)")
    if options["baseline"] is None:
        raise UserError("--losses: which arm is the baseline? (--baseline ARM)")
    from ablate.reports.findings.scaling import law_of_table
    from ablate.reports.read.losses import read_losses

    points, left_out = read_losses(losses)
    more = {"paired": options["paired"], "at": options["places"]}
    return None, law_of_table(points, left_out, losses.name, options["baseline"], **more)
