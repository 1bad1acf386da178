"""The verdict as a matrix: GEMMs in FP4 by stabiliser, each cell with a word and a figure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ablate.reports.findings.gemms import PLAIN
from ablate.reports.words import words
from ablate.reports.words.table import Table

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ablate.recipes import Gemm
    from ablate.reports.findings.gemms import Matrix
    from ablate.reports.findings.results import Analysis, ArmResult
    from ablate.reports.words.headline import Tone
    from ablate.reports.words.verdict import Finding

_WORDS: dict[Tone, str] = {
    "fewer": "fewer tokens",
    "within": "within the margin",
    "more": "more tokens",
    "bound": "bound alone",
    "diverged": "diverged",
    "open": "not settled",
    "none": "cannot be judged",
}
_STABILISERS = {
    "SR": "SR: stochastic rounding",
    "RHT": "RHT: random Hadamard and its size",
    "DHT": "DHT: deterministic Hadamard and its size",
    "*": "*: on a part of the operands",
}


def matrix_tables(analysis: Analysis, findings: Sequence[Finding]) -> tuple[Table, ...]:
    """Return a table for each matrix of arms; none without a target, as there is then no token cost."""
    if analysis.plan.target is None:
        return ()
    return tuple(_table(matrix, analysis, findings) for matrix in analysis.matrices)


def gemms_text(gemms: Sequence[Gemm]) -> str:
    """Return ``Fprop + Dgrad``, which breaks before a plus alone."""
    return f" +{words.NBSP}".join(gemm.capitalize() for gemm in gemms)


def _table(matrix: Matrix, analysis: Analysis, findings: Sequence[Finding]) -> Table:
    arms = {arm.name: arm for arm in analysis.arms}
    tones = {finding.arm: finding.tone for finding in findings}

    def cell(name: str | None) -> str:
        if name is None:
            return words.DASH
        return _cell(arms[name], tones[name]) if name in tones else "baseline"

    return Table(
        caption=" ".join(_caption(matrix, analysis)),
        columns=("GEMMs in FP4", *(_head(stabiliser) for stabiliser in matrix.stabilisers)),
        rows=tuple(
            (gemms_text(gemms), *map(cell, row)) for gemms, row in zip(matrix.gemms, matrix.arms, strict=True)
        ),
        tones={
            (i, j): tones.get(name or "", "absent")
            for i, row in enumerate(matrix.arms)
            for j, name in enumerate(row, 1)
            if name is None or name in tones
        },
    )


def _head(stabiliser: str) -> str:
    return "no stabiliser" if stabiliser == PLAIN else stabiliser


def _cell(arm: ArmResult, tone: Tone) -> str:
    if arm.token_cost.kind == "none" or tone == "diverged":
        return _WORDS[tone]
    return f"{_WORDS[tone]}:\n{words.cost(arm.token_cost)}"


def _caption(matrix: Matrix, analysis: Analysis) -> Iterator[str]:
    base = analysis.baseline
    yield (
        f"Token cost against {base} by what is in {matrix.format.upper()} and how it is stabilised; the arms "
        f"differ in nothing else. Brackets: {words.coverage(analysis.plan.stop)} intervals. More, fewer: the "
        "interval leaves zero out; not settled: it holds zero."
    )
    if analysis.plan.margin is not None:
        yield f"Margin: {words.margin(analysis.plan.margin)}."
    shown = "".join(matrix.stabilisers)
    if used := [text for name, text in _STABILISERS.items() if name in shown]:
        yield f"{'; '.join(used)}."
    if setting := _setting(matrix, analysis):
        yield f"All with {setting}."
    if any(name is None for row in matrix.arms for name in row):
        yield f"{words.DASH}: not in the study."
    left = [arm.name for arm in analysis.others if arm.name not in matrix.names]
    if left:
        yield f"Not in this table: {', '.join(left)}."


def _setting(matrix: Matrix, analysis: Analysis) -> str:
    """Return in what all arms of the matrix differ from the baseline besides their recipe."""
    differs = [dict(arm.planned.differs) for arm in analysis.arms if arm.name in matrix.names]
    first = differs[0]
    return ", ".join(
        f"{key} {words.plain(pair[1])}"
        for key, pair in first.items()
        if not key.startswith("recipe") and all(one.get(key) == pair for one in differs)
    )
