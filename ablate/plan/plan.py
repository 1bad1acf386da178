"""A plan as data: its arms and runs, with what the run store knows of them."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

from ablate.run.ids import run_ids
from ablate.store.metrics import number_in
from ablate.store.plan_file import LockedArm, LockedPlan, LockedRun

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ablate.base.errors import Problem
    from ablate.recipes.coverage import Coverage
    from ablate.run.architecture import LinearLayer, ModelSize
    from ablate.run.config import ArmConfig, ResourcesConfig, RunConfig
    from ablate.run.diagnostics import Diagnostics
    from ablate.run.schedule import StepPlan
    from ablate.store import RunDir, State, StudyStore
    from ablate.study.search_space import Tune

_MEASURED_RUNS_PER_ARM = 3


@dataclass(frozen=True, kw_only=True)
class PlannedArm(LockedArm):
    """One arm: what the run store keeps of it, its configuration, and derived figures.

    The id of a run hashes the data too, and is empty if they are missing. ``size``, ``layers``: None and
    empty if the user's own trainer builds a model that the study does not describe. ``coverage``: what the
    recipe reaches in a model that is not built in, else None.
    """

    recipe: str
    tokens: int
    config: ArmConfig
    resources: ResourcesConfig
    batches: StepPlan
    size: ModelSize | None
    layers: tuple[LinearLayer, ...]
    coverage: Coverage | None


@dataclass(frozen=True, kw_only=True)
class Plan(LockedPlan):
    """Everything that a study will run: what the run store keeps of it, and what only this process needs.

    ``folded``: cells of the grid with the configuration of an arm, and its name. ``missing``: faults of the
    data; runs without their data have no id. ``tuning``: the search before the seeds; arms with the tuned
    values are added once it is done. ``keep_weights``: each run keeps its weights.
    """

    arms: tuple[PlannedArm, ...]
    folded: dict[str, str]
    diagnostics: Diagnostics | None = None
    missing: tuple[Problem, ...] = ()
    tuning: Tune | None = None
    keep_weights: bool = False

    def arm(self, name: str) -> PlannedArm:
        """Look up an arm by name; raises ``KeyError``."""
        return {arm.name: arm for arm in self.arms}[name]

    def runs(self) -> Iterator[tuple[PlannedArm, LockedRun]]:
        """Yield every run with its arm."""
        return ((arm, run) for arm in self.arms for run in arm.runs)


def configured_runs(plan: Plan) -> list[tuple[str, RunConfig, ResourcesConfig]]:
    """List the id, configuration and resources of each run, seed by seed, with forks after the other runs.

    Empty if no two runs of the plan can have their first steps in common.
    """
    configs = [arm.config for arm in plan.arms]
    changes = any(config.fork is not None or config.recipe.later for config in configs)
    replays = any(config.replayed for config in configs)
    if plan.missing or plan.diagnostics is not None or replays or not changes:
        return []
    pairs = sorted(
        plan.runs(), key=lambda pair: (pair[1].seed, pair[0].config.fork is not None)
    )
    return [
        (run.id, arm.config.with_seed(run.seed), arm.resources) for arm, run in pairs
    ]


def planned_runs(config: ArmConfig, seeds: Sequence[int]) -> tuple[LockedRun, ...]:
    """Make the runs of an arm; their ids are empty if the data are missing."""
    ids = run_ids(config, seeds) if config.data_digest else [""] * len(seeds)
    return tuple(
        LockedRun(id=run_id, seed=seed) for run_id, seed in zip(ids, seeds, strict=True)
    )


@dataclass(frozen=True, kw_only=True)
class StudyProgress:
    """States by run id (pending runs are left out), and measured tokens per second by arm."""

    states: dict[str, State]
    tokens_per_sec: dict[str, float]

    def state(self, run_id: str) -> State:
        """Return the state of a run; an unknown run is pending."""
        return self.states.get(run_id, "pending")


def read_progress(plan: Plan, store: StudyStore) -> StudyProgress:
    """Look up the runs of a plan in the store; what cannot be read is pending, or not measured."""
    begun = store.begun()
    states: dict[str, State] = {}
    speeds: dict[str, list[float]] = defaultdict(list)
    for arm, run in plan.runs():
        if run.id not in begun:
            continue
        run_dir = store.run(run.id)
        try:
            state = run_dir.state()
        except OSError:
            continue
        if state != "pending":
            states[run.id] = state
        if state == "finished" and len(speeds[arm.name]) < _MEASURED_RUNS_PER_ARM:
            speed = _speed(run_dir, after=0 if arm.fork is None else arm.fork.tokens)
            if speed is not None:
                speeds[arm.name].append(speed)
    means = {arm: fmean(values) for arm, values in speeds.items() if values}
    return StudyProgress(states=states, tokens_per_sec=means)


def _speed(run: RunDir, after: int) -> float | None:
    """Return a run's mean tokens per second in the rows after so many tokens; None if none has it."""
    speeds = []
    for row in run.metrics("train"):
        speed = number_in(row, "tokens_per_sec")
        if row["tokens"] > after and speed:
            speeds.append(speed)
    return fmean(speeds) if speeds else None
