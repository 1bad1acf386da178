"""What a search found: its points, its front and its factors' importances, as plain data.

Each point is one run of one recipe, so nothing here has an interval. Step times are modelled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ablate.reports.findings.compare import NOT_TOLD
from ablate.search.engine import is_feasible, violation
from ablate.search.halving import (
    DIVERGED,
    IRRELEVANT,
    candidate_of,
    fronts,
    importances,
    with_levels,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from optuna.trial import FrozenTrial

    from ablate.search.halving import SearchPlan
    from ablate.store.plan_file import DroppedCell

_SHAPES = {"study": "this study's own shapes", "llama-8b": "the shapes of Llama 3.1 8B"}


@dataclass(frozen=True, kw_only=True)
class TrialPoint:
    """One trial. ``value``: loss or token cost; only a bound unless ``end`` is ``ok``.

    ``modelled_time``: of a step, over the baseline's. ``end``: ``ok``, ``missed``, ``diverged``, ``failed``
    or ``open``.
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
    modelled_time: float
    why: str | None


@dataclass(frozen=True, kw_only=True)
class Rung:
    """The points of one budget, in the order tried."""

    tokens: int
    points: tuple[TrialPoint, ...]

    @property
    def front(self) -> tuple[TrialPoint, ...]:
        """The points that no other point dominates, the fastest first."""
        front = [point for point in self.points if point.on_front]
        front.sort(key=lambda point: (point.modelled_time, point.value, point.number))
        return tuple(front)


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """A whole search. ``importances``: of factors for the value and the step time, by ``weighed`` trials."""

    name: str
    description: str | None
    objective: str
    loss_unit: str
    hardware: str
    shapes: str
    sampler: str
    seed: int
    baseline: str
    factors: Mapping[str, tuple[str, ...]]
    rungs: tuple[Rung, ...]
    importances: Mapping[str, Mapping[str, float] | None]
    weighed: int
    candidates: int
    dropped: tuple[DroppedCell, ...]

    @property
    def last(self) -> Rung:
        """The largest budget with points; the first budget if none has any."""
        for rung in reversed(self.rungs):
            if rung.points:
                return rung
        return self.rungs[0]

    @property
    def is_done(self) -> bool:
        """Whether every budget has its trials and none is open."""
        for rung in self.rungs:
            if not rung.points or any(point.end == "open" for point in rung.points):
                return False
        return True

    @property
    def value_words(self) -> str:
        """The name of the value, with its unit."""
        if self.objective == "loss":
            return f"validation loss ({self.loss_unit})"
        return "token cost"


def result_of(
    planned: SearchPlan, budgets: Sequence[Sequence[FrozenTrial]]
) -> SearchResult:
    """Collect the result of a search from its plan and the trials of each budget."""
    search = planned.search
    rungs = []
    for budget, trials in zip(search.budgets, budgets, strict=True):
        front = {trial.number for trial in next(fronts(trials), [])}
        points = []
        for trial in trials:
            on_front = trial.number in front
            points.append(_point(planned, budget, trial, on_front=on_front))
        rungs.append(Rung(tokens=budget, points=tuple(points)))
    first = budgets[0]
    return SearchResult(
        name=planned.name,
        description=planned.plans[0].description,
        objective=search.objective,
        loss_unit=planned.plans[0].unit,
        hardware=search.hardware,
        shapes=_SHAPES[search.shapes],
        sampler=search.sampler,
        seed=search.seed,
        baseline=planned.baseline,
        factors=search.factors,
        rungs=tuple(rungs),
        importances={
            search.objective: importances(search.factors, first, 0),
            "modelled_time": importances(search.factors, first, 1),
        },
        weighed=len(with_levels(first)),
        candidates=len(planned.cells),
        dropped=planned.plans[0].dropped,
    )


def _point(
    planned: SearchPlan, budget: int, trial: FrozenTrial, *, on_front: bool
) -> TrialPoint:
    arm = planned.arm(budget, candidate_of(trial))
    no_level = IRRELEVANT if trial.params else NOT_TOLD
    return TrialPoint(
        number=trial.number,
        name=arm.name,
        recipe=arm.recipe,
        run_id=arm.runs[0].id,
        levels={
            factor: trial.params.get(factor, no_level)
            for factor in planned.search.factors
        },
        started_from=arm.name in planned.first,
        is_baseline=arm.name == planned.baseline,
        on_front=on_front,
        end=_end_of(trial),
        value=trial.values[0] if trial.values else None,
        modelled_time=planned.times[arm.name],
        why=trial.user_attrs.get("failed"),
    )


def _end_of(trial: FrozenTrial) -> str:
    if trial.state.name != "COMPLETE":
        return "failed" if trial.state.is_finished() else "open"
    if violation(trial) >= DIVERGED:
        return "diverged"
    return "ok" if is_feasible(trial) else "missed"
