"""What a search found: its points, its front, its factors' importances, as tables and as plain data.

Every point is one run of one recipe, so nothing here has an interval. Step times are modelled.

How it fails: it does not raise; a search that has not ended is shown as far as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ablate.reports.words import words
from ablate.reports.words.table import Table
from ablate.search.front import front, is_feasible
from ablate.search.grid import IRRELEVANT, candidate_of
from ablate.search.halving import DIVERGED, short_tokens
from ablate.search.importance import importances, with_levels

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ablate.search.ledger import Trial
    from ablate.search.plan import SearchPlan

_SHAPES = {"study": "this study's own shapes", "llama-8b": "the shapes of Llama 3.1 8B"}


@dataclass(frozen=True, kw_only=True)
class Point:
    """One trial. ``value``: loss in nats per token, or token cost; a bound where ``end`` is no result.

    ``time``: modelled step time over the baseline's. ``end``: ``ok``, ``missed``, ``diverged``, ``failed`` or
    ``open``.
    """

    number: int
    name: str
    recipe: str
    run_id: str
    levels: Mapping[str, str]
    started_from: bool
    is_baseline: bool
    on_front: bool
    end: str
    value: float | None
    time: float
    why: str | None


@dataclass(frozen=True, kw_only=True)
class Rung:
    """The points of one budget, in the order in which they were tried."""

    tokens: int
    points: tuple[Point, ...]

    @property
    def front(self) -> tuple[Point, ...]:
        """Return those that nothing dominates, the fastest first."""
        return tuple(
            sorted((one for one in self.points if one.on_front), key=lambda p: (p.time, p.value, p.number))
        )

    @property
    def baseline(self) -> Point | None:
        """Return the baseline's point, if it was tried."""
        return next((one for one in self.points if one.is_baseline), None)


@dataclass(frozen=True, kw_only=True)
class Found:
    """A whole search. ``importances``: those for the value and for the step time, over ``weighed`` trials.

    ``wanted``: how many recipes were to be tried at the first budget, of ``candidates`` in all.
    """

    name: str
    description: str | None
    objective: str
    hardware: str
    shapes: str
    sampler: str
    seed: int
    baseline: str
    factors: Mapping[str, tuple[str, ...]]
    rungs: tuple[Rung, ...]
    importances: tuple[Mapping[str, float] | None, Mapping[str, float] | None]
    weighed: int
    wanted: int
    candidates: int
    dropped: tuple[tuple[str, str], ...]

    @property
    def last(self) -> Rung:
        """Return the largest budget that has any points, the first where none has."""
        return next((rung for rung in reversed(self.rungs) if rung.points), self.rungs[0])

    @property
    def is_done(self) -> bool:
        """Whether every budget has its trials and none is open."""
        return all(rung.points and all(one.end != "open" for one in rung.points) for rung in self.rungs)

    @property
    def value_words(self) -> str:
        """Return what is on the first axis."""
        return "validation loss (nats/token)" if self.objective == "loss" else "token cost"


def found_of(planned: SearchPlan, budgets: Sequence[Sequence[Trial]]) -> Found:
    """Put together what the ledger holds of a search."""
    search, grid = planned.search, planned.halving.grid
    rungs = []
    for budget, trials in zip(search.budgets, budgets, strict=True):
        best = {trial.number for trial in front(trials)}
        points = []
        for trial in trials:
            arm = planned.arm(budget, candidate_of(trial))
            end = "open" if trial.state == "open" else "failed"
            if trial.state == "complete":
                end = "ok" if is_feasible(trial) else "missed"
                end = "diverged" if (trial.violation or 0.0) >= DIVERGED else end
            points.append(
                Point(
                    number=trial.number,
                    name=arm.name,
                    recipe=arm.recipe_text,
                    run_id=arm.runs[0].id,
                    levels={
                        factor: trial.params.get(factor, IRRELEVANT) if trial.params else words.DASH
                        for factor in search.factors
                    },
                    started_from=bool(trial.attrs.get("started_from")) or arm.name in planned.first,
                    is_baseline=arm.name == planned.baseline,
                    on_front=trial.number in best,
                    end=end,
                    value=trial.values[0] if trial.values else None,
                    time=planned.times[arm.name],
                    why=trial.attrs.get("failed"),
                )
            )
        rungs.append(Rung(tokens=budget, points=tuple(points)))
    first = budgets[0]
    return Found(
        name=planned.name,
        description=planned.plans[0].description,
        objective=search.objective,
        hardware=search.hardware,
        shapes=_SHAPES[search.shapes],
        sampler=search.sampler,
        seed=search.seed,
        baseline=planned.baseline,
        factors=search.factors,
        rungs=tuple(rungs),
        importances=(importances(grid, first, 0), importances(grid, first, 1)),
        weighed=len(with_levels(first)),
        wanted=planned.halving.num_trials,
        candidates=len(grid.candidates),
        dropped=tuple((cell.name, cell.reason) for cell in planned.plans[0].dropped),
    )


def value_text(found: Found, point: Point) -> str:
    """Return a point's loss or token cost, with how it ended where that is no result."""
    if point.value is None:
        return point.end
    text = words.loss(point.value) if found.objective == "loss" else words.percent(point.value)
    if point.end == "ok":
        return text
    # "> +39 %" reads badly: the sign says no more than "more than".
    return f"{point.end} (> {text.removeprefix('+')})" if point.end == "missed" else point.end


def against_text(found: Found, rung: Rung, point: Point) -> str:
    """Return how far a point's loss is over the baseline's."""
    base = rung.baseline
    if point.is_baseline:
        return "baseline"
    if base is None or base.value is None or point.value is None or point.end != "ok":
        return words.DASH
    if found.objective == "loss":
        return words.signed(point.value - base.value, 4)
    return words.percent(point.value)


def time_text(point: Point) -> str:
    """Return a modelled step time over the baseline's."""
    return f"{point.time:.3f}×"


def front_table(found: Found) -> Table:
    """Return the front of the largest budget that was reached, the fastest recipe first."""
    rung = found.last
    columns = ["Recipe", "Loss" if found.objective == "loss" else "Token cost"]
    if found.objective == "loss":
        columns.append("Over the baseline's")
    columns += ["Step time (modelled)", "GEMMs"]
    return Table(
        caption=(
            f"Recipes that no other tried at {short_tokens(rung.tokens)} tokens beats in both. One run each, "
            f"so no intervals. Step time over that of {found.baseline}: modelled on {found.hardware} at "
            f"{found.shapes}, not measured."
            + (" Loss: on the validation text at the end, nats/token." if found.objective == "loss" else "")
        ),
        columns=tuple(columns),
        rows=tuple(
            (
                one.name,
                value_text(found, one),
                *((against_text(found, rung, one),) if found.objective == "loss" else ()),
                time_text(one),
                one.recipe,
            )
            for one in rung.front
        ),
        numeric=frozenset(range(1, len(columns) - 1)),
    )


def trials_table(found: Found, rung: Rung) -> Table:
    """Return every trial of a budget in the order tried."""
    factors = tuple(factor.removeprefix("recipe.") for factor in found.factors)
    value = "Loss" if found.objective == "loss" else "Token cost"
    return Table(
        caption=(
            f"Trials at {short_tokens(rung.tokens)} tokens in the order in which they were picked; "
            f"{IRRELEVANT}: the factor means nothing for the recipe. Run: its folder, and its name in MLflow."
        ),
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
        numeric=frozenset({1, len(factors) + 2, len(factors) + 3}),
    )


def importance_table(found: Found) -> Table | None:
    """Return the share of each objective's variance that each factor explains; None with too few trials."""
    value, time = found.importances
    if value is None and time is None:
        return None
    return Table(
        caption=(
            f"Share of the variance that each factor explains, by fANOVA over the {found.weighed} trials of "
            "the first budget that have a level and a result. With so few trials, picked where results were "
            "good, the shares are rough: a guide, no test."
        ),
        columns=("Factor", found.value_words.capitalize(), "Step time (modelled)"),
        rows=tuple(
            (
                factor,
                words.DASH if value is None else words.share(value[factor]),
                words.DASH if time is None else words.share(time[factor]),
            )
            for factor in found.factors
        ),
        numeric=frozenset({1, 2}),
    )


def sentences(found: Found) -> tuple[str, ...]:
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


def search_document(found: Found) -> dict[str, Any]:
    """Return the search as plain data."""
    value, time = found.importances
    return {
        "search": found.name,
        "description": found.description,
        "objective": found.objective,
        "step_time": {"figures_are": "modelled", "hardware": found.hardware, "shapes": found.shapes},
        "baseline": found.baseline,
        "sampler": found.sampler,
        "seed": found.seed,
        "done": found.is_done,
        "recipes": found.candidates,
        "to_try": found.wanted,
        "findings": list(sentences(found)),
        "front": [one.name for one in found.last.front],
        "budgets": [
            {
                "tokens": rung.tokens,
                "trials": [
                    {
                        "number": one.number,
                        "recipe": one.name,
                        "gemms": one.recipe,
                        "run": one.run_id,
                        "levels": dict(one.levels),
                        "started_from": one.started_from,
                        "end": one.end,
                        "why": one.why,
                        found.objective: one.value,
                        "step_time_over_baseline": one.time,
                        "on_front": one.on_front,
                    }
                    for one in rung.points
                ],
            }
            for rung in found.rungs
        ],
        "importances": {
            "method": "fANOVA",
            "trials": found.weighed,
            found.objective: None if value is None else dict(value),
            "step_time": None if time is None else dict(time),
        },
        "dropped": [{"name": name, "reason": reason} for name, reason in found.dropped],
    }
