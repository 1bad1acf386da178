"""Effects of factors in tables and sentences: no more than the test of the interaction allows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ablate.reports.words.format import (
    NBSP,
    Column,
    Table,
    coverage,
    listed,
    make_table,
    number,
    percent,
    percents,
    plural,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ablate.reports.findings.results import Analysis, Effect

_ALPHA = 0.05
_TITLES = {
    "gemm": "What each GEMM adds",
    "stabiliser": "What each stabiliser does",
}


def effect_tables(analysis: Analysis) -> Iterator[Table]:
    """Show the average effects, a table for each factor."""
    for factor in dict.fromkeys(effect.factor for effect in analysis.effects):
        effects = [effect for effect in analysis.effects if effect.factor == factor]
        yield make_table(
            f"effects-{factor.replace('.', '-')}",
            _TITLES.get(factor, f"What {factor} does"),
            "Tokens to target with the first over those with the second, minus one: the average over all pairs "
            f"of arms that differ in nothing else, with its {coverage(analysis.plan.stop)} interval over seeds, "
            "moderated by the others in the table. p: of the test that all pairs have the same effect.",
            [
                Column("Effect", effect_name),
                number("Average", lambda effect: effect, percents),
                number("Seeds", "n"),
                number("p", "p_same", "{:.2f}".format),
                Column("Single pairs", _single_pairs),
            ],
            effects,
            sentences=tuple(map(effect_sentence, effects)),
        )


def effect_name(effect: Effect) -> str:
    """Name what is compared: ``Fprop in FP4``, ``SR over none``."""
    if effect.factor == "gemm":
        return f"{effect.level.capitalize()} in FP4"
    return f"{effect.level} over {effect.over}"


def _single_pairs(effect: Effect) -> str:
    return "; ".join(
        f"{pair.from_arm} → {pair.to_arm} {percent(pair.change)}"
        for pair in effect.pairs
    )


def effect_sentence(effect: Effect) -> str:
    """State the average, and what the test says of the single pairs."""
    text = (
        f"{effect_name(effect)} changes the tokens to target by {percents(effect)} on average over "
        f"{plural(len(effect.changes), 'pair')} (n{NBSP}={NBSP}{effect.n})"
    )
    if effect.note:
        text += f"; {effect.note}"
    elif (effect.low or 0) <= 0 <= (effect.high or 0):
        text += "; the interval holds zero"
    text += "."
    if effect.p_same is not None:
        test = f"(p{NBSP}={NBSP}{effect.p_same:.2g})"
        text += f" The pairs go from {percent(min(effect.changes))} to {percent(max(effect.changes))}"
        if effect.p_same < _ALPHA:
            text += f", and differ {test}: the average is that of no single pair."
        else:
            text += f"; the test does not show that they differ {test}."
    left_out = [
        f"{pair.from_arm} → {pair.to_arm}"
        for pair in effect.pairs
        if pair.change is None
    ]
    if left_out:
        text += (
            f" Left out, because not every run reached the target: {listed(left_out)}."
        )
    return text
