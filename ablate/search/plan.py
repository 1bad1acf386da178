"""A search as it is planned: one plan for each budget, and each recipe's step time on the hardware. Pure.

The step time is *modelled* (``speed``), relative to the baseline's, as the mean over a run of the last
budget, whose phases may differ; nothing is measured here. A recipe with a format that the hardware has no
unit for is dropped with that reason.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from ablate.base.errors import UserError
from ablate.modelled.speed import LLAMA_8B, mean_token_time, workload_of
from ablate.plan import Plan, build_plan
from ablate.search.halving import COST, STEP_TIME, Halving
from ablate.search.ledger import LOSS
from ablate.search.spaces import Candidate, Grid
from ablate.store.plan_file import DroppedCell

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ablate.data import DataIdentity
    from ablate.plan.plan import PlannedArm
    from ablate.run.config import DataConfig
    from ablate.store.plan_file import Target
    from ablate.study import Study
    from ablate.study.search_space import Search


@dataclass(frozen=True, kw_only=True)
class SearchPlan:
    """What a search may run. ``plans``: one for each budget, with the same arms.

    ``first``: the arms to start from, the baseline before all. ``times``: modelled step time over the
    baseline's, by arm.
    """

    study: Study
    plans: tuple[Plan, ...]
    first: tuple[str, ...]
    times: Mapping[str, float]

    @property
    def search(self) -> Search:
        """What the study file says of the search."""
        assert self.study.search is not None
        return self.study.search

    @property
    def name(self) -> str:
        """The search's name, and its folder in the storage."""
        return self.plans[0].study

    @property
    def baseline(self) -> str:
        """The arm that all are held against."""
        return self.plans[0].baseline

    @property
    def target(self) -> Target:
        """The study's target; a search without one is refused."""
        target = self.plans[0].target
        assert target is not None
        return target

    @cached_property
    def halving(self) -> Halving:
        """What is searched, as the engine takes it."""
        cells: dict[str, list[dict[str, str]]] = {name: [] for name in self.times}
        for cell in self.search.cells:
            if cell.arm in cells:
                cells[cell.arm].append(cell.levels)
        grid = Grid(
            factors=self.search.factors,
            candidates=tuple(Candidate(name=name, cells=tuple(own)) for name, own in cells.items()),
            first=self.first,
            sampler=self.search.sampler,
            seed=self.search.seed,
        )
        return Halving(
            name=self.name,
            grid=grid,
            trials=self.search.trials,
            budgets=self.search.budgets,
            keep=self.search.keep,
            at_once=self.search.at_once,
            objectives=(LOSS if self.search.objective == "loss" else COST, STEP_TIME),
        )

    def arm(self, budget: int, name: str) -> PlannedArm:
        """Return an arm as it is run at a budget."""
        return self.plans[self.search.budgets.index(budget)].arm(name)


def plan_search(study: Study, identify: Callable[[DataConfig], DataIdentity] | None = None) -> SearchPlan:
    """Plan a search; see ``build_plan`` for ``identify``.

    Raises:
        UserError: data that cannot be used; a baseline without a modelled time; fewer trials than arms.
    """
    search = study.search
    assert search is not None
    plans = [_at(study, budget, identify) for budget in search.budgets]
    times, dropped = _times(study, search, plans[0])
    kept = tuple(
        replace(
            plan, arms=tuple(arm for arm in plan.arms if arm.name in times), dropped=(*plan.dropped, *dropped)
        )
        for plan in plans
    )
    first = (study.baseline, *(name for name in search.named if name in times and name != study.baseline))
    if search.trials < len(first):
        what = f"search.trials: {search.trials} are fewer than the baseline and the named arms ({len(first)})"
        raise UserError(study.problem(("search", "trials"), what, "these are tried first"))
    return SearchPlan(study=study, plans=kept, first=first, times=times)


def _at(study: Study, budget: int, identify: Callable[[DataConfig], DataIdentity] | None) -> Plan:
    training = replace(study.training, tokens=budget)
    arms = tuple(replace(arm, training=training) for arm in study.arms)
    return build_plan(replace(study, search=None, training=training, arms=arms), identify)


def _times(study: Study, search: Search, plan: Plan) -> tuple[dict[str, float], tuple[DroppedCell, ...]]:
    baseline = plan.arm(plan.baseline)
    if search.shapes == "study" and not baseline.config.model.describes(baseline.config.trainer):
        what = "search.shapes: the step time is modelled at a study's own shapes for built-in models alone"
        raise UserError(study.problem(("search", "shapes"), what, "set shapes: llama-8b"))
    work = LLAMA_8B
    if search.shapes == "study":
        work = workload_of(baseline.config)
    against = mean_token_time(work, baseline.config.recipe, search.hardware, search.budgets[-1])
    if against is None:
        what = f"search.hardware: {search.hardware} has no unit for a format of the baseline"
        hint = f"'{baseline.name}' is {baseline.recipe}"
        raise UserError(study.problem(("search", "hardware"), what, hint))
    times, dropped = {}, []
    for arm in plan.arms:
        found = mean_token_time(work, arm.config.recipe, search.hardware, search.budgets[-1])
        if found is None:
            reason = f"{search.hardware} has no unit for one of its formats"
            dropped.append(DroppedCell(name=arm.name, reason=reason))
        else:
            times[arm.name] = found / against
    return times, tuple(dropped)
