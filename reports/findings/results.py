"""The result of a study's analysis, as plain frozen data: every number in the report."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ablate.results.claims import may_be_least
from ablate.results.cost import Cost
from ablate.results.intervals import ALPHA, Interval
from ablate.results.losses import LossDifference
from ablate.results.stop_rule import level_of
from ablate.run.schedule import decay_begins, plan_steps

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ablate.reports.findings.gemms import Matrix, Published, Step
    from ablate.reports.findings.power import Power
    from ablate.reports.findings.speed import Measured, Modelled, RunTiming, Throughput
    from ablate.reports.findings.targets import Moved
    from ablate.results.claims import Claim
    from ablate.results.ends import RunResult, SetApart
    from ablate.results.intervals import Estimate
    from ablate.results.losses import Curve
    from ablate.results.stop_rule import Stopped
    from ablate.run.config import RunConfig
    from ablate.run.outcome import End
    from ablate.store.plan_file import LockedArm, LockedPlan, LockedTuning


_NONE = Interval()
_NO_COST = Cost(kind="baseline")
_NO_DIFFERENCE = LossDifference(note="baseline")


@dataclass(frozen=True, kw_only=True)
class InBf16:
    """One arm by its evaluations in bf16, and how its own evaluation differs from them.

    ``token_cost``, ``difference``, ``final_loss``: as in ``ArmResult``, by bf16. ``tokens_alone``: (1 + cost
    by its own evaluation) / (1 + cost by bf16) − 1. ``share``: log (1 + ``tokens_alone``) as a share of
    log (1 + cost by its own evaluation), without an interval; None unless that cost's interval excludes zero.
    ``loss_alone``: loss difference by its own evaluation minus the one by bf16. The
    intervals of ``tokens_alone`` and ``loss_alone`` are from the arm's own variance, because the spread of
    this difference varies between arms.
    """

    token_cost: Cost
    tokens_alone: Interval
    share: float | None
    final_loss: Interval
    difference: LossDifference
    loss_alone: LossDifference


@dataclass(frozen=True, kw_only=True)
class ArmResult:
    """One arm with its runs, in the order of the study's seeds, against the baseline.

    ``config``: None if no run has one, as in imported logs. ``alpha``: the study's nominal level.
    ``stopped``: why it was stopped early; ``unused`` runs then do not count, not even as missing.
    ``counted_from``: tokens of the fork, from which its outcomes, tokens to target and token cost are
    counted; 0 from the beginning. ``measured``: None without valid timing, see ``speed``. ``fp4_share``,
    ``modelled``: None and empty without a configuration. ``claims``: what holds of it beside the same claims on
    all other arms; ``standing``: by them within, outside or open to the margin; None without one. ``moved``: at
    other targets; None for the baseline, and where there are none. ``in_bf16``: by the second evaluation;
    None for the baseline, and if it or the arm has none.
    """

    planned: LockedArm
    runs: tuple[RunResult, ...]
    config: RunConfig | None = None
    alpha: float = ALPHA
    stopped: Stopped | None = None
    counted_from: int = 0
    tokens_to_target: Interval = _NONE
    token_cost: Cost = _NO_COST
    final_loss: Interval = _NONE
    difference: LossDifference = _NO_DIFFERENCE
    claims: frozenset[Claim] = frozenset()
    standing: str | None = None
    moved: Moved | None = None
    power: Power | None = None
    measured: Measured | None = None
    fp4_share: float | None = None
    modelled: tuple[Modelled, ...] = ()
    published: tuple[Published, ...] = ()
    in_bf16: InBf16 | None = None

    @property
    def used(self) -> list[RunResult]:
        """The runs that count."""
        return [run for run in self.runs if run.end != "unused"]

    @property
    def seeds(self) -> int | None:
        """The number of seeds, on both sides, of the look that stopped the arm; None without such a look."""
        return None if self.stopped is None else self.stopped.seeds

    @property
    def stopped_by_divergence(self) -> bool:
        """Whether it was stopped because too many of its runs diverged."""
        return self.stopped is not None and self.stopped.kind == "diverged"

    @property
    def decay_begins(self) -> int | None:
        """Tokens after which the learning rate falls at the end; None if it does not, or is unknown."""
        if self.config is None:
            return None
        return decay_begins(self.config.training)

    @property
    def name(self) -> str:
        """The arm's name."""
        return self.planned.name

    @property
    def recipe(self) -> str:
        """The recipe in a few words."""
        return self.planned.recipe or ""

    @property
    def n(self) -> int:
        """How many of its runs have a result."""
        return len(self.used) - self.count("missing")

    def count(self, end: End) -> int:
        """Return how many of its runs have this end."""
        return sum(run.end == end for run in self.runs)

    @property
    def break_even(self) -> Interval:
        """The throughput relative to the baseline's from which the arm pays: 1 + token cost."""
        return self.token_cost.each(lambda part: 1 + part)


@dataclass(frozen=True, kw_only=True)
class TunedArm:
    """One arm: the values chosen for it, the trials behind them, and its token cost before and after.

    ``name``: as in the study; ``tuned``: the arm that runs at the values found. The trials are its group's.
    ``outermost``: the fields whose value is the lowest or highest tried.
    """

    name: str
    tuned: str
    group: str
    shared: dict[str, Any]
    chosen: dict[str, Any]
    outermost: tuple[str, ...]
    trials_complete: int
    trials_pruned: int
    trials_diverged: int
    tokens_of_the_trials: int
    loss_shared: float | None
    loss_chosen: float | None
    token_cost_shared: Cost
    token_cost_tuned: Cost


@dataclass(frozen=True, kw_only=True)
class TuningResult:
    """The tuning before the seeds. Until it has ended only ``plan`` is set.

    ``share``: a trial run's tokens as a share of a full run's. ``total_tokens``: trained in all trials,
    ``run_tokens`` in the runs compared. ``others``: arms at the study's own values that are not in the main
    comparison.
    """

    plan: LockedTuning
    share: float | None = None
    total_tokens: int = 0
    run_tokens: int = 0
    arms: tuple[TunedArm, ...] = ()
    others: tuple[ArmResult, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two arms that differ in one factor, and what it changes the tokens to target by; None: left out."""

    from_arm: str
    to_arm: str
    change: float | None


@dataclass(frozen=True, kw_only=True)
class Effect(Interval):
    """The average effect of one level of a factor over another, as a fraction of the tokens to target.

    ``factor``: ``gemm``, ``stabiliser`` or a key of the study file. ``n``: seeds that all arms have.
    ``p_same``: of the test that all pairs have the same effect; None without two pairs and two seeds.
    """

    factor: str
    over: str
    level: str
    n: int
    p_same: float | None
    pairs: tuple[Pair, ...]

    @property
    def changes(self) -> list[float]:
        """What the pairs that are averaged change the tokens by."""
        return [pair.change for pair in self.pairs if pair.change is not None]


@dataclass(frozen=True, kw_only=True)
class Resolution:
    """The evaluation interval, in tokens and as a share of the baseline's tokens to target."""

    tokens: float | None
    share_of_tokens_to_target: float | None


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """Every number of the report. ``plan``: what was compared, and how.

    ``over_rivals``: by arm, for those of lowest cost, all others compared with it. ``accumulators``: the arms
    by what their sums keep, for runs that measured it before they trained. ``tuning``: None unless the study
    tunes its arms; ``arms`` are then those at the values found. ``curves_in_bf16``: by the evaluation in bf16,
    for the runs that have one.
    """

    plan: LockedPlan
    arms: tuple[ArmResult, ...]
    matrices: tuple[Matrix, ...]
    steps: tuple[Step, ...]
    effects: tuple[Effect, ...]
    over_rivals: Mapping[str, Mapping[str, ArmResult]]
    resolution: Resolution
    timing: RunTiming
    throughput: Throughput | None
    environments: tuple[tuple[dict[str, Any], int], ...]
    backends: tuple[tuple[str, int], ...]
    failed_self_tests: int
    accumulators: dict[str, tuple[str, ...]]
    resumed_differently: int
    log_notes: tuple[str, ...]
    markers: tuple[str, ...]
    set_apart: tuple[SetApart, ...]
    last_ended_unix: float | None
    curves: tuple[Curve, ...]
    curves_in_bf16: tuple[Curve, ...]
    tuning: TuningResult | None = None

    @property
    def baseline(self) -> str:
        """The name of the arm that costs are relative to."""
        return self.plan.baseline

    @property
    def baseline_arm(self) -> ArmResult:
        """The arm that costs are relative to."""
        return next(arm for arm in self.arms if arm.name == self.baseline)

    def other(self, name: str) -> ArmResult | None:
        """Find an arm that is compared with the baseline; None without one of this name."""
        return next((arm for arm in self.others if arm.name == name), None)

    @property
    def reached_by_all(self) -> float | None:
        """The lowest loss that all runs but diverged ones have reached and confirmed."""
        highest = None
        for curve in self.curves:
            loss = curve.loss
            if curve.end in ("diverged", "missing"):
                continue
            if len(loss) < 2:
                return None
            reached = float(np.maximum(loss[1:], loss[:-1]).min())
            highest = reached if highest is None else max(highest, reached)
        return highest

    @property
    def has_curves(self) -> bool:
        """Whether losses have token counts; imported final losses do not."""
        return self.plan.target is not None or any(
            curve.tokens.any() for curve in self.curves
        )

    @property
    def is_moderated(self) -> bool:
        """Whether other arms' spread is in any interval of costs or, without a target, of differences."""
        if self.plan.target is None:
            return any(arm.difference.moderated for arm in self.others)
        return any(arm.token_cost.own is not None for arm in self.others)

    @property
    def others(self) -> tuple[ArmResult, ...]:
        """The arms compared with the baseline."""
        return tuple(arm for arm in self.arms if arm.name != self.baseline)

    def least_costly(self, arms: Sequence[ArmResult]) -> dict[str, Interval]:
        """Return those of the arms that may need the fewest tokens, each over the best other one.

        Empty for one arm, and if any two cannot be compared, as when they are counted from different places.
        """
        names = {arm.name for arm in arms}
        figures: dict[str, dict[str, Estimate]] = {}
        for rival in names & self.over_rivals.keys():
            figures[rival] = {
                name: arm.token_cost.figure
                for name, arm in self.over_rivals[rival].items()
                if name in names and arm.token_cost.figure is not None
            }
            if len(figures[rival]) < len(names) - 1:
                return {}
        return may_be_least(figures, partial(level_of, self.plan.stop))

    @property
    def judged(self) -> tuple[ArmResult, ...]:
        """The arms on which something can be stated: not the baseline, nor the baseline once more."""
        return tuple(arm for arm in self.others if not arm.planned.again)

    @property
    def decay_begins(self) -> int | None:
        """Tokens after which the learning rate falls at the end; None unless the same in all arms."""
        starts = {arm.decay_begins for arm in self.arms}
        return starts.pop() if len(starts) == 1 else None

    @property
    def tokens_per_step(self) -> int | None:
        """Training tokens of a step; None unless the same in all arms."""
        configs = [arm.config for arm in self.arms if arm.config is not None]
        sizes = {plan_steps(config.training).tokens_per_step for config in configs}
        return sizes.pop() if len(sizes) == 1 else None

    @property
    def every_arm(self) -> tuple[ArmResult, ...]:
        """All arms of the plan; in a tuned study first those at the study's own values, then those tuned."""
        if self.tuning is None:
            return self.arms
        return (*self.tuning.others, *self.arms)

    @property
    def missing(self) -> int:
        """How many needed runs of the plan have no result yet."""
        return sum(arm.count("missing") for arm in self.every_arm)

    @property
    def planned(self) -> int:
        """How many runs the plan has."""
        return sum(len(arm.runs) for arm in self.every_arm)
