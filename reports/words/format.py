"""The format of numbers, intervals, counts and tables, the same in pages, figures and verdict.

Percentages carry a sign and one decimal, losses four decimals, counts of tokens three significant digits with
k, M, B (10⁹) or T. None is written as a dash. A table is text in cells, so that its HTML, Markdown and LaTeX
cannot differ in a figure.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from ablate.base.counts import count_text

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from ablate.reports.findings.results import ArmResult
    from ablate.reports.findings.speed import Throughput
    from ablate.results.cost import Cost
    from ablate.results.intervals import Interval
    from ablate.results.losses import Band, LossDifference
    from ablate.run.outcome import Outcome
    from ablate.store.plan_file import LockedPlan, StopRule

DASH = "–"
NBSP = "\u00a0"
MINUS = "−"
_LATEX = {c: f"\\{c}" for c in "&%$#_{}"} | {
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}",
    ">": r"\textgreater{}", NBSP: "~", MINUS: "$-$", "×": r"$\times$", "≤": r"$\le$", "±": r"$\pm$",
    "→": r"$\to$", "–": "--", "—": "---", "…": r"\dots{}",
}  # fmt: skip


def signed(value: float, decimals: int = 4) -> str:
    """Write a number with its sign and a real minus; a number that rounds to zero has no sign."""
    text = f"{value:+z.{decimals}f}"
    if float(text) == 0:
        return text[1:]
    return text.replace("-", MINUS)


def loss(value: float | None) -> str:
    """Write a validation loss, with four decimals."""
    if value is None:
        return DASH
    return f"{value:.4f}".replace("-", MINUS)


def tokens(value: float | None) -> str:
    """Write a count of tokens or parameters, e.g. ``1.5 M``."""
    if value is None:
        return DASH
    return count_text(value, NBSP)


def percent(value: float | None) -> str:
    """Write a fraction as a signed percentage."""
    if value is None:
        return DASH
    return f"{_hundredths(value)}{NBSP}%"


def share(value: float | None) -> str:
    """Write the size of a fraction as a percentage without a sign."""
    if value is None:
        return DASH
    return percent(abs(value)).removeprefix("+")


def _hundredths(value: float) -> str:
    decimals = 0 if abs(value) >= 9.995 else 1
    return signed(100 * value, decimals)


def interval(
    value: Interval, write: Callable[[float], str] = loss, unit: str = ""
) -> str:
    """Write an estimate, with its interval in brackets if it has one; without an estimate, the bounds."""
    low = "" if value.low is None else write(value.low)
    high = "" if value.high is None else write(value.high)
    if value.estimate is not None:
        text = write(value.estimate) + unit
        if low and high:
            text += f" [{low}, {high}]"
        return text
    if low and high:
        return f"between {low} and {high}{unit}"
    if low:
        return f"> {low}{unit}"
    if high:
        return f"≤ {high}{unit}"
    return DASH


def percents(value: Interval) -> str:
    """Write a fraction as a signed percentage, with its interval or bound."""
    return interval(value, _hundredths, f"{NBSP}%")


def times(value: Interval) -> str:
    """Write a factor, with its interval or bound."""
    return interval(value, "{:.2f}".format, "×")


def difference(value: Interval) -> str:
    """Write a difference of losses, with its interval."""
    return interval(value, signed)


def cost(value: Cost | None) -> str:
    """Write a token cost, with its interval or bound, and the fork from which it is counted."""
    if value is None or value.kind == "none":
        return DASH
    if value.kind == "baseline":
        return "baseline"
    text = percents(value)
    if value.near_budget:
        text += ", near the budget"
    return text + from_fork(value.counted_from)


def from_fork(origin: int) -> str:
    """Say that figures are counted from a fork after ``origin`` tokens; empty for 0."""
    return f" from {tokens(origin)} on" if origin else ""


def forked(arms: Iterable[ArmResult]) -> str:
    """Name the arms whose cost counts from a fork; empty without any."""
    named = [arm.name + from_fork(arm.counted_from) for arm in arms if arm.counted_from]
    if named:
        return f" Counted from a fork, no cost of whole runs: {'; '.join(named)}."
    return ""


def ends(runs: Iterable[Outcome]) -> str:
    """Write counts of runs as ``hit / censored / diverged``."""
    count = Counter(run.end for run in runs)
    return f"{count['hit']} / {count['censored']} / {count['diverged']}"


def sample(value: Cost | Band | LossDifference) -> str:
    """Say how many results or pairs a comparison has, and how many results have no partner.

    One number if both sides have as many results.
    """
    pairs = getattr(value, "pairs", None)
    if pairs is not None:
        text = plural(pairs, "pair")
    elif value.n == value.n_baseline:
        text = str(value.n)
    else:
        text = f"{value.n} against {value.n_baseline}"
    return text + left_out(value)


def left_out(value: Cost | Band | LossDifference) -> str:
    """Say how many results are left out of a comparison of pairs; empty if none is."""
    count = getattr(value, "left_out", 0)
    return f" ({plural(count, 'run')} without a partner left out)" if count else ""


def counts(value: Cost | Band | LossDifference) -> str:
    """Write ``sample`` in a sentence: ``n = 5``."""
    return f"n{NBSP}={NBSP}{sample(value)}"


def setting(value: object) -> str:
    """Write a value of a study file; None is ``off``."""
    if value is None:
        return "off"
    if isinstance(value, float):
        return f"{value:g}"
    return str(value)


def plural(count: int, noun: str) -> str:
    """Write a count with its noun: ``1 run``, ``2 runs``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def listed(parts: Sequence[str]) -> str:
    """Join texts: ``a``, ``a and b``, ``a, b and c``."""
    if len(parts) == 1:
        return parts[0]
    return f"{', '.join(parts[:-1])} and {parts[-1]}"


def grouped(pairs: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Collect the names of each reason, from pairs of a name and its reason."""
    names: dict[str, list[str]] = {}
    for name, reason in pairs:
        names.setdefault(reason, []).append(name)
    return names


def moment(unix: float | None) -> str:
    """Write a Unix time in UTC, to the minute."""
    if unix is None:
        return DASH
    return datetime.fromtimestamp(unix, UTC).strftime("%Y-%m-%d %H:%M UTC")


def timed_alone(value: Throughput) -> str:
    """Say on what device, how long and when ``ablate check steps STUDY`` measured."""
    size = f"{plural(value.repeats, 'repeat')} of {plural(value.steps, 'step')}"
    return f"{value.device}, {size}, {moment(value.measured_unix)}"


def margin(plan: LockedPlan) -> str:
    """Write a study's margin: ``±5 % in token cost`` or ``±0.01 nats/token in final loss``."""
    assert plan.margin is not None
    if plan.margin.kind == "cost":
        return f"±{100 * plan.margin.value:g}{NBSP}% in token cost"
    return f"±{plan.margin.value:g} {plan.unit} in final loss"


def coverage(*rules: StopRule | None) -> str:
    """Name the kind of interval: ``95 %``, or ``repeated 95 %`` if any rule has looks."""
    if any(rule is not None and rule.settled is not None for rule in rules):
        return f"repeated 95{NBSP}%"
    return f"95{NBSP}%"


@dataclass(frozen=True)
class Column:
    """A column of a table: its heading, the value that it shows of a row's record, and how it is written.

    ``read``: the path of an attribute of the record, or a function of the record. None is a dash.
    ``is_number``: whether the column is aligned to the right.
    """

    heading: str
    read: str | Callable[[Any], Any]
    write: Callable[[Any], str] = str
    is_number: bool = False

    def cell(self, record: object) -> str:
        """Write the cell of a record."""
        value = read_value(record, self.read)
        return DASH if value is None else self.write(value)


def read_value(record: object, read: str | Callable[[Any], Any]) -> Any:
    """Read a record's attribute, by its path, or apply a function to the record."""
    if isinstance(read, str):
        read = attrgetter(read)
    return read(record)


def number(
    heading: str, read: str | Callable[[Any], Any], write: Callable[[Any], str] = str
) -> Column:
    """Declare a column of numbers."""
    return Column(heading, read, write, is_number=True)


@dataclass(frozen=True, kw_only=True)
class Table:
    """Text in cells. The first column names the row; ``numeric``: indices of right-aligned columns.

    ``name``: of its file and its place on a page. ``tones``: what was found in each cell, empty where there
    is none, by which a page colours the cell; no rows without any. ``sentences``: the same in words.
    """

    name: str
    title: str
    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numeric: Collection[int] = ()
    tones: tuple[tuple[str, ...], ...] = ()
    sentences: tuple[str, ...] = ()


def make_table(
    name: str,
    title: str,
    caption: str,
    columns: Iterable[Column],
    records: Iterable[object],
    **more: Any,
) -> Table:
    """Make a table with a row for each record; columns of dashes are left out."""
    records = list(records)
    shown = []
    cells = []
    for column in columns:
        texts = [column.cell(record) for record in records]
        if set(texts) - {DASH}:
            shown.append(column)
            cells.append(texts)
    return Table(
        name=name,
        title=title,
        caption=caption,
        columns=tuple(column.heading for column in shown),
        rows=tuple(zip(*cells, strict=True)),
        numeric=[i for i, column in enumerate(shown) if column.is_number],
        **more,
    )


def escape_latex(text: str) -> str:
    """Escape text for LaTeX; line breaks become spaces, characters that do not print are removed."""
    # without an argument strip would remove NBSP too
    flat = re.sub(r"[ \t\r\n]+", " ", text).strip(" ")
    return "".join(_LATEX.get(c, c if c.isprintable() else "") for c in flat)
