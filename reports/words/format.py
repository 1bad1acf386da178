"""The format of numbers, intervals, counts and tables, the same in pages, figures and verdict.

Percentages carry a sign and one decimal, losses four decimals, counts of tokens three significant digits with
k, M, B (10⁹) or T. None is written as a dash. A table is text in cells, so that its HTML, Markdown and LaTeX
cannot differ in a figure.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from ablate.reports.findings.results import ArmResult
    from ablate.reports.findings.speed import Throughput
    from ablate.results.cost import Cost
    from ablate.results.intervals import Interval
    from ablate.results.losses import Band, LossDifference
    from ablate.run.outcome import Outcome
    from ablate.store.plan_file import Margin, StopRule

DASH = "–"
NBSP = "\u00a0"
MINUS = "−"
_LATEX = {c: f"\\{c}" for c in "&%$#_{}"} | {
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}",
    ">": r"\textgreater{}", NBSP: "~", MINUS: "$-$", "×": r"$\times$", "≤": r"$\le$", "±": r"$\pm$",
    "→": r"$\to$", "–": "--", "—": "---", "…": r"\dots{}",
}  # fmt: skip


def signed(value: float, decimals: int = 4) -> str:
    """Format a number with its sign and a real minus; a number that rounds to zero has no sign."""
    text = f"{value:+z.{decimals}f}"
    return text.replace("-", MINUS) if float(text) else text[1:]


def loss(value: float | None) -> str:
    """Format a validation loss, with four decimals."""
    return DASH if value is None else f"{value:.4f}".replace("-", MINUS)


def tokens(value: float | None) -> str:
    """Format a count of tokens or parameters, e.g. ``1.5 M``."""
    if value is None:
        return DASH
    units = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))
    size, unit = next(((size, NBSP + unit) for size, unit in units if value >= 0.9995 * size), (1, ""))
    return f"{value / size:.3g}{unit}"


def percent(value: float | None) -> str:
    """Format a fraction as a signed percentage."""
    return DASH if value is None else f"{_hundredths(value)}{NBSP}%"


def share(value: float | None) -> str:
    """Format the size of a fraction as a percentage without a sign."""
    return DASH if value is None else percent(abs(value)).removeprefix("+")


def _hundredths(value: float) -> str:
    return signed(100 * value, 0 if abs(value) >= 9.995 else 1)


def interval(value: Interval, number: Callable[[float], str] = loss, unit: str = "") -> str:
    """Format an estimate, with its interval in brackets if it has one; without an estimate, the bounds."""
    low, high = (None if end is None else number(end) for end in (value.low, value.high))
    if value.estimate is not None:
        brackets = "" if low is None or high is None else f" [{low}, {high}]"
        return f"{number(value.estimate)}{unit}{brackets}"
    if low and high:
        return f"between {low} and {high}{unit}"
    return f"> {low}{unit}" if low else f"≤ {high}{unit}" if high else DASH


def percents(value: Interval) -> str:
    """Format a fraction as a signed percentage, with its interval or bound."""
    return interval(value, _hundredths, f"{NBSP}%")


def times(value: Interval) -> str:
    """Format a factor, with its interval or bound."""
    return interval(value, "{:.2f}".format, "×")


def cost(value: Cost | None) -> str:
    """Format a token cost, with its interval or bound, and the fork from which it is counted."""
    if value is None or value.kind == "none":
        return DASH
    if value.kind == "baseline":
        return "baseline"
    return percents(value) + ", near the budget" * value.near_budget + from_fork(value.counted_from)


def from_fork(origin: int) -> str:
    """Say that figures are counted from a fork after ``origin`` tokens; empty for 0."""
    return f" from {tokens(origin)} on" if origin else ""


def forked(arms: Iterable[ArmResult]) -> str:
    """Name the arms whose cost counts from a fork; empty without any."""
    named = "; ".join(f"{arm.name}{from_fork(arm.counted_from)}" for arm in arms if arm.counted_from)
    return f" Counted from a fork, no cost of whole runs: {named}." if named else ""


def ends(runs: Iterable[Outcome]) -> str:
    """Format counts of runs as ``hit / censored / diverged``."""
    count = Counter(run.end for run in runs)
    return f"{count['hit']} / {count['censored']} / {count['diverged']}"


def counts(value: Cost | Band | LossDifference) -> str:
    """Say how many results or pairs a comparison has; one number if both sides have as many results."""
    pairs = getattr(value, "pairs", None)
    if pairs is not None:
        return f"n{NBSP}={NBSP}{pairs} pairs"
    own = f"n{NBSP}={NBSP}{value.n}"
    return own if value.n == value.n_baseline else f"{own} against {value.n_baseline}"


def setting(value: object) -> str:
    """Format a value of a study file; None is ``off``."""
    return "off" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def plural(count: int, noun: str) -> str:
    """Format a count with its noun: ``1 run``, ``2 runs``."""
    return f"{count} {noun}" + "s" * (count != 1)


def listed(parts: Sequence[str]) -> str:
    """Join texts: ``a``, ``a and b``, ``a, b and c``."""
    return " and ".join(filter(None, [", ".join(parts[:-1]), parts[-1]]))


def moment(unix: float | None) -> str:
    """Format a Unix time in UTC, to the minute."""
    return DASH if unix is None else datetime.fromtimestamp(unix, UTC).strftime("%Y-%m-%d %H:%M UTC")


def timed_alone(value: Throughput) -> str:
    """Say on what device, how long and when ``ablate check steps STUDY`` measured."""
    size = f"{plural(value.repeats, 'repeat')} of {plural(value.steps, 'step')}"
    return f"{value.device}, {size}, {moment(value.measured_unix)}"


def margin(value: Margin, unit: str) -> str:
    """Format a margin: ``±5 % in token cost`` or ``±0.01 nats/token in final loss``."""
    if value.kind == "cost":
        return f"±{100 * value.value:g}{NBSP}% in token cost"
    return f"±{value.value:g} {unit} in final loss"


def coverage(*rules: StopRule | None) -> str:
    """Name the kind of interval: ``95 %``, or ``repeated 95 %`` if any rule has looks."""
    repeated = any(rule is not None and rule.settled is not None for rule in rules)
    return "repeated " * repeated + f"95{NBSP}%"


@dataclass(frozen=True, kw_only=True)
class Table:
    """Text in cells. The first column names the row; ``numeric``: indices of right-aligned columns.

    ``name``: of its file and its place on a page. ``tones``: by (row, column), what was found there, by which
    a page colours the cell. ``sentences``: the same in words.
    """

    name: str
    title: str
    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numeric: Collection[int] = ()
    tones: Mapping[tuple[int, int], str] = field(default_factory=dict)
    sentences: tuple[str, ...] = ()


def make_table(
    name: str,
    title: str,
    caption: str,
    rows: Iterable[Mapping[str, object]],
    numeric: Collection[int] = (),
    **more: Any,
) -> Table:
    """Make a table of rows, each head → cell, all with the same heads; columns of dashes are left out."""
    cells = [{head: DASH if cell is None else str(cell) for head, cell in row.items()} for row in rows]
    heads = [*cells[0]] if cells else []
    shown = [i for i, head in enumerate(heads) if any(row[head] != DASH for row in cells)]
    return Table(
        name=name,
        title=title,
        caption=caption,
        columns=tuple(heads[i] for i in shown),
        rows=tuple(tuple(row[heads[i]] for i in shown) for row in cells),
        numeric=[place for place, i in enumerate(shown) if i in numeric],
        **more,
    )


def escape_latex(text: str) -> str:
    """Escape text for LaTeX; line breaks become spaces, characters that do not print are removed."""
    flat = re.sub(r"[ \t\r\n]+", " ", text).strip(" ")  # without an argument strip would remove NBSP too
    return "".join(_LATEX.get(c, c if c.isprintable() else "") for c in flat)
