"""What a search found, in tables and sentences that claim no more than single runs can show."""

from __future__ import annotations

from collections import Counter
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING

from ablate.reports.words.format import (
    Column,
    loss,
    make_table,
    number,
    percent,
    plural,
    share,
    signed,
)
from ablate.search.halving import IRRELEVANT, short_tokens

if TYPE_CHECKING:
    from ablate.reports.findings.search import Rung, SearchResult, TrialPoint
    from ablate.reports.words.format import Table

_RECIPE = Column("Recipe", "name")
_STEP_TIME = number("Step time (modelled)", "modelled_time", "{:.3f}×".format)
_ENDS = {"diverged": "diverged", "missed": "missed the target", "failed": "failed"}


def value_column(search: SearchResult) -> Column:
    """Declare the column of a point's loss or token cost or, without a result, of how it ended."""
    is_loss = search.objective == "loss"

    def text(point: TrialPoint) -> str:
        if point.value is None or point.end not in ("ok", "missed"):
            return point.end
        value = loss(point.value) if is_loss else percent(point.value)
        return value if point.end == "ok" else f"missed (> {value})"

    return number("Loss" if is_loss else "Token cost", text)


def front_table(search: SearchResult) -> Table:
    """Make the table of the front at the largest budget with trials, the fastest recipe first."""
    rung = search.last
    base = next((point.value for point in rung.points if point.is_baseline), None)

    def over_baseline(point: TrialPoint) -> str | None:
        if point.is_baseline or base is None or point.value is None:
            return None
        difference = point.value - base
        if search.objective == "loss":
            return signed(difference)
        return percent(difference)

    return make_table(
        "front-table",
        "Recipes on the front",
        f"Recipes that no other tried at {short_tokens(rung.tokens)} tokens beats in both. One run each, so "
        f"no intervals. Step time over that of {search.baseline}: modelled on {search.hardware} at "
        f"{search.shapes}, not measured. Loss, if given: on the validation text at the end, "
        f"{search.loss_unit}.",
        [
            _RECIPE,
            value_column(search),
            number("Over the baseline's", over_baseline),
            _STEP_TIME,
            Column("GEMMs", "recipe"),
        ],
        rung.front,
    )


def trials_table(search: SearchResult, rung: Rung) -> Table:
    """Make the table of a budget's trials, in the order tried."""
    columns = [
        Column(
            "Recipe",
            lambda point: (
                f"{point.name} (started from)" if point.started_from else point.name
            ),
        ),
        number("#", "number"),
    ]
    for factor in search.factors:
        level = partial(_level, factor)
        columns.append(Column(factor.removeprefix("recipe."), level))
    columns += [
        value_column(search),
        _STEP_TIME,
        Column("Front", lambda point: "front" if point.on_front else ""),
        Column("Run", "run_id"),
    ]
    return make_table(
        f"trials-{rung.tokens}",
        f"Trials at {short_tokens(rung.tokens)} tokens",
        f"In the order in which they were picked; {IRRELEVANT}: the factor means nothing for the recipe. "
        "Run: its folder, and its name in MLflow.",
        columns,
        rung.points,
    )


def _level(factor: str, point: TrialPoint) -> str:
    return point.levels[factor]


def importance_table(search: SearchResult) -> Table:
    """Make the table of each factor's importance for both objectives."""
    of_value, of_time = search.importances.values()
    records = [
        (factor, of_value and of_value[factor], of_time and of_time[factor])
        for factor in search.factors
    ]
    if not of_value and not of_time:
        nothing = "Too few trials, or one factor alone: there is nothing to weigh"
        records = [(nothing, None, None)]
    return make_table(
        "importances",
        "Which factors mattered",
        f"Share of each factor in what tells the best trials, by PED-ANOVA over the {search.weighed} trials "
        "of the first budget that have a level and a result. With so few trials, picked where results were "
        "good, the shares are rough: a guide, no test.",
        [
            Column("Factor", itemgetter(0)),
            number(search.value_words.capitalize(), itemgetter(1), share),
            number(_STEP_TIME.heading, itemgetter(2), share),
        ],
        records,
    )


def search_sentences(search: SearchResult) -> tuple[str, ...]:
    """Sum up the search: what was tried, the front, failures, and what to do next."""
    first = search.rungs[0]
    rung = search.last
    tried = f"{len(first.points)} of {plural(search.candidates, 'recipe')} tried, one run each"
    sentences = [f"{tried}, at {short_tokens(first.tokens)} tokens."]
    if rung is not first:
        sentences.append(
            f"{len(rung.points)} of them went on to {short_tokens(rung.tokens)} tokens."
        )
    if not search.is_done:
        sentences.append("The search has not ended.")
    if rung.front:
        sentences.append(
            f"On the front: {', '.join(point.name for point in rung.front)}."
        )
    ends: Counter[str] = Counter()
    for other in search.rungs:
        ends.update(point.end for point in other.points)
    for end, words in _ENDS.items():
        if ends[end]:
            sentences.append(f"{plural(ends[end], 'run')} {words}.")
    if any(not point.is_baseline for point in rung.front):
        sentences.append(
            "The winner of a search is biased upward: the best of many single runs is partly the luckiest. "
            "Confirm the front with fresh seeds before you believe it."
        )
    elif rung.front and search.is_done:
        sentences.append(
            f"No recipe beats {search.baseline} in either objective, so there is nothing to confirm."
        )
    return tuple(sentences)
