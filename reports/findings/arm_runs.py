"""One arm's runs, in the order of the study's seeds, and the token costs between arms."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypedDict

from ablate.reports.findings import speed
from ablate.reports.findings.results import RunResult
from ablate.results.cost import Cost, token_costs
from ablate.results.ends import is_paired, number_in, run_ends
from ablate.results.intervals import ALPHA
from ablate.results.losses import final_differences
from ablate.results.stops import decide_stops, unused_places
from ablate.run.schedule import decay_begins

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from ablate.results.frames import StudyFrames
    from ablate.results.losses import Curve, LossDifference
    from ablate.results.stop_rule import Stopped
    from ablate.run.config import RunConfig
    from ablate.run.outcome import Outcome
    from ablate.store.plan_file import LockedPlan
    from ablate.store.records import Environment

    class _How(TypedDict):
        """How sides are compared."""

        paired: bool
        moderated: bool


@dataclass(frozen=True, kw_only=True)
class ArmRuns:
    """One arm's runs, in the order of the study's seeds: how they ended, their curves, their results.

    Of a stopped arm, runs that count for nothing stand among the ``results`` alone. ``config``: None where no
    run has one, as of logs that others wrote. ``alpha``: the nominal level of the arm's intervals.
    ``origin``: the tokens from which the outcomes are counted.
    """

    outcomes: Sequence[Outcome]
    curves: Sequence[Curve]
    results: Sequence[RunResult]
    stopped: Stopped | None
    config: RunConfig | None
    alpha: float = ALPHA
    origin: int = 0

    @property
    def whole(self) -> list[Outcome]:
        """The outcomes counted from the beginning."""
        return [run.after(-self.origin) for run in self.outcomes]

    @property
    def seeds(self) -> int | None:
        """At a look both sides have its number of seeds; None where the arm was not stopped at one."""
        return None if self.stopped is None else self.stopped.seeds

    @property
    def used_ids(self) -> list[str]:
        """The ids of the runs that count, in the order of the outcomes."""
        return [run.run_id for run in self.results if run.end != "unused"]

    @property
    def is_selected(self) -> bool:
        """Whether its runs are those that happened to end before a stop: no interval comes of them."""
        return self.stopped is not None and self.stopped.kind == "diverged"

    @property
    def decay_begins(self) -> int | None:
        """Tokens after which the learning rate falls at the end; None where it does not, or is not known."""
        return None if self.config is None else decay_begins(self.config.training)

    @property
    def have_ended(self) -> bool:
        """Whether no run is still to come: failed ones are not, unless somebody asks for them again."""
        return all(run.state in ("finished", "diverged", "failed") for run in self.results)

    def went_on(self, seeds: int) -> bool:
        """Whether it was not stopped before so many seeds, and has results of all of them."""
        runs = self.outcomes[:seeds]
        return (self.seeds or seeds) >= seeds == len(runs) and all(run.end != "missing" for run in runs)

    def first(self, seeds: int | None) -> ArmRuns:
        """Return the first so many of the runs, all for None."""
        return replace(
            self, outcomes=self.outcomes[:seeds], curves=self.curves[:seeds], results=self.results[:seeds]
        )


def arm_runs(frames: StudyFrames, apart: Collection[str], origin: int) -> dict[str, ArmRuns]:
    """Return every arm's runs, counted from ``origin``, in the order of the plan; ``apart``: no results."""
    plan = frames.plan
    ends: dict[str, list[tuple[Outcome, Curve, RunResult]]] = {arm.name: [] for arm in plan.arms}
    whole_steps = {arm.name: arm.tokens for arm in plan.arms}
    for row, curve, end in run_ends(frames, apart, origin):
        budget = int(whole_steps[curve.arm] or number_in(row["budget_tokens"]) or 0)
        result = _run_result(row, end, curve, frames.environments, budget=budget)
        ends[curve.arm].append((end, curve, result))
    runs = {arm: [(end, curve) for end, curve, _ in own] for arm, own in ends.items()}
    stops = decide_stops(plan, runs, origin).stopped
    configs = speed.read_configs(frames.configs)
    return {
        arm: replace(_used(own, stops.get(arm), configs.get(arm)), origin=origin) for arm, own in ends.items()
    }


def _used(
    runs: Sequence[tuple[Outcome, Curve, RunResult]], stopped: Stopped | None, config: RunConfig | None
) -> ArmRuns:
    """Return an arm's runs; those that a stop made needless are among the results alone."""
    places = unused_places([end for end, _, _ in runs], stopped) if stopped else frozenset()
    used = [run for i, run in enumerate(runs) if i not in places]
    return ArmRuns(
        outcomes=[end for end, _, _ in used],
        # A run that diverged before its first evaluation has an empty curve, and still counts as diverged.
        curves=[curve for end, curve, _ in used if len(curve.tokens) or end.end != "missing"],
        results=[
            replace(
                run, end="unused", tokens_to_target=None, interpolated=None, fitted=None, left_bound=False
            )
            if i in places
            else run
            for i, (_, _, run) in enumerate(runs)
        ],
        stopped=stopped,
        config=config,
    )


def _run_result(
    row: dict[str, Any], end: Outcome, curve: Curve, environments: dict[str, Environment], *, budget: int
) -> RunResult:
    environment = environments.get(curve.run_id)
    started, ended = number_in(row["started_unix"]), number_in(row["ended_unix"])
    mode = row["backend_mode"]
    return RunResult(
        run_id=curve.run_id,
        arm=curve.arm,
        seed=curve.seed,
        state=str(row["state"]),
        end=end.end,
        # The status tells it at the end of an attempt; an evaluation may be later than a killed one's.
        tokens=max(int(row["tokens"]), int(curve.tokens[-1]) if len(curve.tokens) else 0),
        budget=budget,
        tokens_to_target=end.high if end.end == "hit" else None,
        interpolated=end.interpolated,
        fitted=end.fitted,
        left_bound=end.end == "hit" and not end.exact,
        last_loss=float(curve.loss[-1]) if len(curve.loss) else None,
        message=row["message"] if isinstance(row["message"], str) else None,
        seconds=ended - started if started is not None and ended is not None else None,
        tokens_per_sec=number_in(row["tokens_per_sec"]),
        devices=(environment and environment.world_size) or 1,
        backend_mode=mode if isinstance(mode, str) else None,
    )


def _pools(runs: Mapping[str, ArmRuns], other: ArmRuns) -> Iterator[tuple[list[str], dict[str, int | None]]]:
    """Yield arms that are compared with ``other`` by as many runs, and how many of which arms moderate them.

    An arm that was stopped at a look has the interval of that look: by the first runs of all that went on.
    """
    counts = {
        name: min((one.seeds for one in (own, other) if one.seeds is not None), default=None)
        for name, own in runs.items()
    }
    for n in dict.fromkeys(counts.values()):
        wanted = [name for name, count in counts.items() if count == n]
        if n is None:
            yield wanted, counts
        else:
            yield wanted, {name: n for name, own in runs.items() if name in wanted or own.went_on(n)}


def costs_over(base: str, runs: Mapping[str, ArmRuns], plan: LockedPlan, origin: int) -> dict[str, Cost]:
    """Return each arm's cost over one of them, of as many seeds as both count, at the stricter level."""
    other = runs[base]
    others = {name: own for name, own in runs.items() if name != base}
    alphas = {name: min(own.alpha, other.alpha) for name, own in others.items()}
    how: _How = {"paired": is_paired(plan, origin), "moderated": plan.is_moderated}
    found = {}
    for wanted, counts in _pools(others, other):
        sides = {name: (others[name].outcomes[:n], other.outcomes[:n]) for name, n in counts.items()}
        costs = token_costs(sides, alpha=alphas, **how)
        for name in wanted:
            selected = others[name].is_selected or other.is_selected
            restricted = None if selected else costs[name].restricted
            found[name] = replace(costs[name], counted_from=origin, restricted=restricted)
    return found


def differences_over(
    base: str, runs: Mapping[str, ArmRuns], plan: LockedPlan, origin: int
) -> dict[str, LossDifference]:
    """Return each arm's difference in final loss over one of them, of as many seeds as both count."""
    other = runs[base]
    others = {name: own for name, own in runs.items() if name != base}
    alphas = {name: own.alpha for name, own in others.items()}
    how: _How = {"paired": is_paired(plan, origin), "moderated": plan.is_moderated}
    found: dict[str, LossDifference] = {}
    for wanted, counts in _pools(others, other):
        sides = {name: (others[name].curves[:n], other.curves[:n]) for name, n in counts.items()}
        differences = final_differences(sides, alphas, **how)
        found |= {name: differences[name] for name in wanted}
    return found
