"""What a search found, in tables and sentences that claim no more than single runs can show."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ablate.reports.words.format import DASH, loss, make_table, percent, plural, share, signed
from ablate.search.halving import IRRELEVANT, short_tokens

if TYPE_CHECKING:
    from ablate.reports.findings.search import Found, Rung, TrialPoint
    from ablate.reports.words.format import Table

STEP_TIME = "Step time (modelled)"


def value_text(found: Found, point: TrialPoint) -> str:
    """Say a point's loss or token cost or, without a result, how it ended."""
    if point.value is None or point.end not in ("ok", "missed"):
        return point.end
    text = loss(point.value) if found.objective == "loss" else percent(point.value)
    return text if point.end == "ok" else f"missed (> {text})"


def front_table(found: Found) -> Table:
    """Make the table of the front at the largest budget with trials, the fastest recipe first."""
    rung = found.last
    base = next((one.value for one in rung.points if one.is_baseline), None)

    def over(point: TrialPoint) -> str:
        if point.is_baseline or base is None or point.value is None:
            return DASH
        return signed(point.value - base) if found.objective == "loss" else percent(point.value - base)

    return make_table(
        "front-table",
        "Recipes on the front",
        f"Recipes that no other tried at {short_tokens(rung.tokens)} tokens beats in both. One run each, so "
        f"no intervals. Step time over that of {found.baseline}: modelled on {found.hardware} at "
        f"{found.shapes}, not measured. Loss, if given: on the validation text at the end, "
        f"{found.loss_unit}.",
        [
            {
                "Recipe": one.name,
                _objective(found): value_text(found, one),
                "Over the baseline's": over(one),
                STEP_TIME: f"{one.modelled_time:.3f}×",
                "GEMMs": one.recipe,
            }
            for one in rung.front
        ],
        range(1, 4),
    )


def _objective(found: Found) -> str:
    return "Loss" if found.objective == "loss" else "Token cost"


def trials_table(found: Found, rung: Rung) -> Table:
    """Make the table of a budget's trials, in the order tried."""
    factors = [factor.removeprefix("recipe.") for factor in found.factors]
    return make_table(
        f"trials-{rung.tokens}",
        f"Trials at {short_tokens(rung.tokens)} tokens",
        f"In the order in which they were picked; {IRRELEVANT}: the factor means nothing for the recipe. "
        "Run: its folder, and its name in MLflow.",
        [
            {
                "Recipe": one.name + " (started from)" * one.started_from,
                "#": one.number,
                **dict(zip(factors, one.levels.values(), strict=True)),
                _objective(found): value_text(found, one),
                STEP_TIME: f"{one.modelled_time:.3f}×",
                "Front": "front" * one.on_front,
                "Run": one.run_id,
            }
            for one in rung.points
        ],
        {1, len(factors) + 2, len(factors) + 3},
    )


def importance_table(found: Found) -> Table:
    """Make the table of each factor's importance for both objectives."""
    value, time = found.importances.values()
    return make_table(
        "importances",
        "Which factors mattered",
        f"Share of each factor in what tells the best trials, by PED-ANOVA over the {found.weighed} trials "
        "of the first budget that have a level and a result. With so few trials, picked where results were "
        "good, the shares are rough: a guide, no test.",
        [
            {
                "Factor": factor,
                found.value_words.capitalize(): share(value[factor] if value else None),
                STEP_TIME: share(time[factor] if time else None),
            }
            for factor in found.factors
            if value or time
        ]
        or [{"Factor": "Too few trials, or one factor alone: there is nothing to weigh"}],
        {1, 2},
    )


def search_sentences(found: Found) -> tuple[str, ...]:
    """Sum up the search: what was tried, the front, failures, and what to do next."""
    first, rung = found.rungs[0], found.last
    tried = f"{len(first.points)} of {plural(found.candidates, 'recipe')} tried, one run each"
    said = [f"{tried}, at {short_tokens(first.tokens)} tokens."]
    if rung is not first:
        said.append(f"{len(rung.points)} of them went on to {short_tokens(rung.tokens)} tokens.")
    if not found.is_done:
        said.append("The search has not ended.")
    if rung.front:
        said.append(f"On the front: {', '.join(one.name for one in rung.front)}.")
    for end, what in {"diverged": "diverged", "missed": "missed the target", "failed": "failed"}.items():
        if count := sum(one.end == end for other in found.rungs for one in other.points):
            said.append(f"{plural(count, 'run')} {what}.")
    if any(not one.is_baseline for one in rung.front):
        said.append(
            "The winner of a search is biased upward: the best of many single runs is partly the luckiest. "
            "Confirm the front with fresh seeds before you believe it."
        )
    elif rung.front and found.is_done:
        said.append(f"No recipe beats {found.baseline} in either objective, so there is nothing to confirm.")
    return tuple(said)
