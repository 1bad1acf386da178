"""What a search found, in tables and sentences that promise no more than single runs can."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ablate.reports.words import words
from ablate.reports.words.table import Table, make_table
from ablate.search.halving import short_tokens
from ablate.search.spaces import IRRELEVANT

if TYPE_CHECKING:
    from collections.abc import Callable

    from ablate.reports.findings.search import Found, Rung, TrialPoint


def value_text(found: Found, point: TrialPoint) -> str:
    """Return a point's loss or token cost, with how it ended where that is no result."""
    if point.value is None:
        return point.end
    text = words.loss(point.value) if found.objective == "loss" else words.percent(point.value)
    if point.end == "ok":
        return text
    # "> +39 %" reads badly: the sign says no more than "more than".
    return f"{point.end} (> {text.removeprefix('+')})" if point.end == "missed" else point.end


def _over_baseline(rung: Rung, point: TrialPoint) -> str:
    """Return how far a point's loss is over the baseline's."""
    base = rung.baseline
    if point.is_baseline:
        return "baseline"
    if base is None or base.value is None or point.value is None or point.end != "ok":
        return words.DASH
    return words.signed(point.value - base.value, 4)


def time_text(point: TrialPoint) -> str:
    """Return a modelled step time over the baseline's."""
    return f"{point.time:.3f}×"


def front_table(found: Found) -> Table:
    """Return the front of the largest budget that was reached, the fastest recipe first."""
    rung = found.last
    of_loss = found.objective == "loss"
    columns: dict[str, Callable[[TrialPoint], str]] = {
        "Recipe": lambda one: one.name,
        "Loss" if of_loss else "Token cost": lambda one: value_text(found, one),
        "Over the baseline's": lambda one: _over_baseline(rung, one),
        "Step time (modelled)": time_text,
        "GEMMs": lambda one: one.recipe,
    }
    if not of_loss:
        del columns["Over the baseline's"]
    return make_table(
        f"Recipes that no other tried at {short_tokens(rung.tokens)} tokens beats in both. One run each, "
        f"so no intervals. Step time over that of {found.baseline}: modelled on {found.hardware} at "
        f"{found.shapes}, not measured."
        + (" Loss: on the validation text at the end, nats/token." if of_loss else ""),
        rung.front,
        columns,
        numeric=range(1, len(columns) - 1),
    )


def trials_table(found: Found, rung: Rung) -> Table:
    """Return every trial of a budget in the order tried."""
    factors = tuple(factor.removeprefix("recipe.") for factor in found.factors)
    value = "Loss" if found.objective == "loss" else "Token cost"
    return Table(
        caption=f"Trials at {short_tokens(rung.tokens)} tokens in the order in which they were picked; "
        f"{IRRELEVANT}: the factor means nothing for the recipe. Run: its folder, and its name in MLflow.",
        columns=("Recipe", "#", *factors, value, "Step time (modelled)", "Front", "Run"),
        rows=tuple(
            (
                one.name + (" (started from)" if one.started_from else ""),
                str(one.number),
                *one.levels.values(),
                value_text(found, one),
                time_text(one),
                "front" if one.on_front else "",
                one.run_id,
            )
            for one in rung.points
        ),
        numeric={1, len(factors) + 2, len(factors) + 3},
    )


def importance_table(found: Found) -> Table:
    """Return the share of each objective's variance that each factor explains; no row with too few trials."""
    value, time = found.importances
    return make_table(
        f"Share of the variance that each factor explains, by fANOVA over the {found.weighed} trials of "
        "the first budget that have a level and a result. With so few trials, picked where results were "
        "good, the shares are rough: a guide, no test.",
        tuple(found.factors) if value or time else (),
        {
            "Factor": str,
            found.value_words.capitalize(): lambda factor: words.share(value[factor] if value else None),
            "Step time (modelled)": lambda factor: words.share(time[factor] if time else None),
        },
        numeric={1, 2},
    )


def search_sentences(found: Found) -> tuple[str, ...]:
    """Return what was found, in a few sentences that promise no more than single runs can."""
    rung, first = found.last, found.rungs[0]
    tried = f"{words.plural(len(first.points), 'recipe')} of {found.candidates} were tried"
    if len(first.points) == found.candidates:
        tried = f"All {words.plural(found.candidates, 'recipe')} were tried"
    said = [f"{tried} at {short_tokens(first.tokens)} tokens, one run each."]
    if rung is not first:
        said.append(f"{len(rung.points)} of them went on to {short_tokens(rung.tokens)} tokens.")
    if not found.is_done:
        said.append("The search has not ended.")
    names = [one.name for one in rung.front]
    if names:
        said.append(f"On the front: {', '.join(names)}.")
    for end in ("diverged", "missed", "failed"):
        count = sum(one.end == end for other in found.rungs for one in other.points)
        if count:
            what = {"missed": "missed the target"}.get(end, end)
            said.append(f"{words.plural(count, 'run')} {what}.")
    if any(not one.is_baseline for one in rung.front):
        said.append(
            "The winner of a search is biased upward: the best of many single runs is partly the luckiest. "
            "Confirm the front with fresh seeds before you believe it."
        )
    elif rung.front and found.is_done:
        said.append(f"No recipe beats {found.baseline} in either objective, so there is nothing to confirm.")
    return tuple(said)
