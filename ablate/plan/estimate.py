"""What a plan will take and find: time and storage, with the basis of each figure, and what its seeds show.

An arm whose steps were measured uses their speed. The time of any other arm is modelled from the model's
shapes and an assumed rate, then scaled by the model's error on measured arms, which leaves out what emulation
takes. Without a measured arm that is an order of magnitude alone, and not printed. If the user's own trainer
builds a model that the study does not describe, only measured arms of that kind tell the time.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from statistics import NormalDist, median_high
from typing import TYPE_CHECKING, Literal

from ablate.plan.plan import configured_runs
from ablate.run.schedule import evaluated_in, shared_prefixes, steady_spans
from ablate.store import END_STATES

if TYPE_CHECKING:
    from collections.abc import Callable

    from ablate.plan.plan import Plan, PlannedArm, StudyProgress

FLOPS_PER_CPU_CORE = 60e9
FLOPS_PER_GPU = 100e12
"""Assumed rates of useful work in operations per second; for a GPU about a tenth of a current peak."""

START_SEC = 30.0
"""Until Ray and torch have started, on two cores."""
SPREAD = 0.043
"""Standard deviation of the log ratio of tokens to target of two runs with one seed, in the arms of
docs/findings that cost 10 % or more. Others spread by 0.035, a single arm by up to 0.109."""
INTERPOLATED = 1.29
"""By how much more pairs spread where crossings are interpolated, not fitted, in the same arms."""
MOST_SEEDS = 30
_MOST_D0 = 3.0
_BYTES_PER_ROW = 180
_BYTES_PER_RUN = 12 * 1024  # configuration, status, environment and a short log

Ground = Literal["measured", "scaled", "modelled"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanCosts:
    """Time and storage. ``wall_seconds``: of the runs still to do, on ``cores`` cores and one GPU.

    ``run_seconds``: of one run, by arm, without arms whose time is unknown. If such an arm has runs to do,
    ``wall_seconds`` is None. ``shared_tokens``: for each run still to do that starts like another run, how
    many first tokens the other run trains for it.
    """

    run_seconds: dict[str, float]
    ground: dict[str, Ground]
    wall_seconds: float | None
    cores: int
    uses_gpu: bool
    storage_bytes: int
    shared_tokens: dict[str, int]


def estimate(plan: Plan, progress: StudyProgress, *, cores: int) -> PlanCosts:
    """Estimate a plan's costs on a machine with this many CPU cores."""

    def is_open(run_id: str) -> bool:
        return progress.state(run_id) not in END_STATES

    modelled = {arm.name: _modelled_seconds(arm) for arm in plan.arms}
    measured = {}
    for arm in plan.arms:
        if arm.name in progress.tokens_per_sec:
            measured[arm.name] = _work(arm) / progress.tokens_per_sec[arm.name]
    run_seconds = _scaled(plan, modelled, measured) | measured
    ground: dict[str, Ground] = dict.fromkeys(
        run_seconds, "scaled" if measured else "modelled"
    )
    ground |= dict.fromkeys(measured, "measured")
    shared = shared_tokens(plan, is_open)
    longest = 0.0
    cpu_work = 0.0
    gpu_work = 0.0
    is_known = True
    for arm in plan.arms:
        resources = arm.resources
        shares = [
            1 - shared.get(run.id, 0) / arm.batches.tokens
            for run in arm.runs
            if is_open(run.id)
        ]
        if not shares:
            continue
        is_known = is_known and arm.name in run_seconds
        seconds = run_seconds.get(arm.name, 0.0)
        longest = max(longest, seconds)
        work = sum(shares) * seconds
        if resources.num_gpus >= 1:
            gpu_work += work
        elif resources.num_gpus:
            # Runs side by side do not compute faster than the GPU does.
            alone = 0.0
            if arm.size is not None and seconds:
                alone = modelled[arm.name] * resources.num_gpus / seconds
            gpu_work += work * max(resources.num_gpus, alone)
        else:
            cores_taken = resources.cpus * resources.devices_per_run
            cpu_work += work * min(1.0, cores_taken / cores)
    wall_seconds = None
    if is_known:
        wall_seconds = max(longest, cpu_work, gpu_work) + START_SEC if longest else 0.0
    return PlanCosts(
        run_seconds=run_seconds,
        ground=ground,
        wall_seconds=wall_seconds,
        cores=cores,
        uses_gpu=any(arm.resources.num_gpus for arm in plan.arms),
        storage_bytes=sum(
            _storage_bytes(arm, keep_weights=plan.keep_weights) for arm in plan.arms
        ),
        shared_tokens=shared,
    )


def _work(arm: PlannedArm) -> float:
    """Return the tokens that a run trains, and those of its evaluations at a third: a forward pass alone."""
    evaluations = arm.batches.evals * len(evaluated_in(arm.config))
    return arm.batches.tokens + evaluations * arm.config.training.eval_tokens / 3


def _modelled_seconds(arm: PlannedArm) -> float:
    """Model a run's time; that of a model of unknown size up to a factor."""
    flops = _work(arm) * (1 if arm.size is None else arm.size.flops_per_token)
    resources = arm.resources
    rate = resources.num_gpus * FLOPS_PER_GPU or resources.cpus * FLOPS_PER_CPU_CORE
    return flops / (rate * resources.devices_per_run)


def _scaled(
    plan: Plan, modelled: dict[str, float], measured: dict[str, float]
) -> dict[str, float]:
    """Scale modelled times by the model's error on measured arms; without times that nothing tells."""
    scaled: dict[str, float] = {}
    for has_size in (True, False):
        names = [arm.name for arm in plan.arms if (arm.size is not None) == has_size]
        ratios = [measured[name] / modelled[name] for name in names if name in measured]
        if ratios or has_size:
            scale = median_high(ratios) if ratios else 1.0
            scaled |= {name: modelled[name] * scale for name in names}
    return {arm.name: scaled[arm.name] for arm in plan.arms if arm.name in scaled}


def _storage_bytes(arm: PlannedArm, *, keep_weights: bool) -> int:
    run_bytes = _BYTES_PER_RUN + arm.batches.metric_rows * _BYTES_PER_ROW
    if keep_weights and arm.size is not None:
        bytes_per_weight = 2 if arm.config.training.master_weights == "bf16" else 4
        run_bytes += bytes_per_weight * arm.size.parameters
    return len(arm.runs) * run_bytes


def shared_tokens(
    plan: Plan, is_asked_for: Callable[[str], bool] = lambda _: True
) -> dict[str, int]:
    """Count, by run id, the first tokens that another run trains for it, among the runs asked for."""
    runs = [run for run in configured_runs(plan) if is_asked_for(run[0])]
    return {run_id: prefix.tokens for run_id, prefix in shared_prefixes(runs).items()}


def duration_text(seconds: float) -> str:
    """Return a duration as text, in a suitable unit: ``24 min``."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    if seconds < 90 * 60:
        return f"{round(seconds / 60)} min"
    if seconds < 48 * 3600:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 86400:,.1f} days"


def moderating_degrees(arms: int, others: float) -> float:
    """Return how many degrees of freedom the other arms lend to a paired comparison's variance.

    ``others``: the degrees of freedom of all other arms. Differences to one baseline are correlated: m of
    them tell less than m times as much.
    """
    return min(_MOST_D0, 3 * others / (arms + 3))


def cost_found(
    seeds: int, arms: int, *, moderated: bool, spread: float
) -> float | None:
    """Return the token cost that paired seeds find in four of five comparisons; None for too few seeds.

    ``arms``: compared with the baseline. ``spread``: of the pairs' log ratios. The sum of two quantiles is
    here within a tenth of what the noncentral t distribution gives.
    """
    degrees = float(seeds - 1)
    if moderated:
        degrees += moderating_degrees(arms, degrees * (arms - 1))
    if seeds < 2 or degrees < 2:
        return None
    reach = approximate_quantile(degrees, 0.05) + approximate_quantile(degrees, 0.4)
    return math.expm1(reach * spread / math.sqrt(seeds))


def pair_spread(plan: Plan) -> float:
    """Return the spread of pairs in docs/findings, by the estimator of crossings that the report will use."""
    base = plan.arm(plan.baseline).config
    is_steady = not base.recipe.later and steady_spans(asdict(base.training))
    if is_steady and (plan.target is None or plan.target.crossing == "confirmed"):
        return SPREAD
    return INTERPOLATED * SPREAD


def seeds_for(cost: float, arms: int, *, moderated: bool, spread: float) -> int | None:
    """Return the fewest paired seeds that find a token cost, see ``cost_found``; None for over ``MOST_SEEDS``."""
    for seeds in range(2, MOST_SEEDS + 1):
        least = cost_found(seeds, arms, moderated=moderated, spread=spread)
        if least is not None and least <= cost:
            return seeds
    return None


def approximate_quantile(degrees: float, alpha: float) -> float:
    """Return, to 1 %, the value that |t| exceeds with probability ``alpha``, from 2 degrees of freedom up.

    The series of Fisher and Cornish (1960): scipy's exact value would take as long to load as a plan takes.
    """
    z = NormalDist().inv_cdf(1 - alpha / 2)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / degrees**power for power, term in enumerate(terms, 1))
