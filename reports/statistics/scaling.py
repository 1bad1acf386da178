"""Losses over sizes and budgets: what each arm makes of a model's parameters and of its tokens.

The law is L = (A / (N · eff_N)^α + B / (D · eff_D)^β)^γ + E, N parameters and D training tokens, the
baseline's eff_N and eff_D 1, as Quartet fits it (arXiv 2505.14669; Kumar et al., arXiv 2411.04330, without γ;
with γ = 1 the baseline's is Hoffmann et al.'s, arXiv 2203.15556). ``law_fit`` says how it is fitted.

How it fails: it does not raise. Losses that cannot carry the law give a sentence that says what is missing.
An end of an interval that the losses do not bound is None, with a note.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from scipy.special import ndtr

from ablate.reports.statistics.intervals import (
    Estimate,
    Interval,
    combination,
    difference,
    mean_estimate,
    mean_interval,
    t_interval,
)
from ablate.reports.statistics.law import ALPHA, BETA, FACTORS, GAMMA, NO_END, A, B, E
from ablate.reports.statistics.law_fit import (
    Key,
    arms_of,
    axes_of,
    bootstrap,
    choose,
    one_slice,
    run_variance,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ablate.reports.read.losses import LossPoint
    from ablate.reports.statistics.law_fit import Cells, Fitted

SEEN = 1.005
"""Times the largest size or budget: what is further is extrapolated."""
NO_LOW, NO_HIGH, NO_BOUND = "no lower bound", "no upper bound", "not bounded by these losses"
NEVER = "never reached, by the law"


@dataclass(frozen=True, kw_only=True)
class ArmScaling:
    """An arm's factors, None where that axis is not fitted, and its mean loss gap to the baseline in nats.

    ``gap`` is over ``gap_cells`` sizes × budgets of the same weight. ``gap_size``: root mean square of the
    gaps; ``gap_miss``: that of what the law misses them by.
    """

    name: str
    eff_n: Interval | None
    eff_d: Interval | None
    gap: Interval
    gap_cells: int
    gap_size: float = 0.0
    gap_miss: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Place:
    """What the law says of an arm at a size and budget: loss and gap in nats per token, and token cost.

    ``cost``: tokens to the loss that the baseline has there, over the baseline's, minus one.
    """

    arm: str
    loss: Interval
    gap: Interval
    cost: Interval


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A named size and budget. ``beyond``: parameters and tokens over the largest seen."""

    parameters: int
    tokens: int
    beyond: tuple[float, float]
    places: tuple[Place, ...]


@dataclass(frozen=True, kw_only=True)
class Goodness:
    """How well the law holds. Standard deviations in nats, None where there is nothing to take them from.

    ``residual_sd``: of the cells' means about the law; ``mean_sd``: what the seeds alone make of it;
    ``seed_sd``: of one run in its cell. ``largest``: the cell that is furthest off, and by how much.
    ``explained``: share of the variance of ln L. ``spare``: sizes × budgets beyond the law's parameters, by
    which alone it is tested.
    """

    cells: int
    free: int
    residual_sd: float | None
    mean_sd: float | None
    seed_sd: float | None
    largest: tuple[Key, float]
    explained: float
    spare: int


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """One law over all arms. ``axes``: what it is over, "parameters", "tokens" or both; else ``why_not``.

    ``of``: what losses. ``law``: A, alpha, B, beta, gamma, E; None for what is not in it. ``left_out``: the
    other arms, and why. ``cells``: the loss of each, the geometric mean over its runs.
    """

    of: str
    baseline: str
    axes: tuple[str, ...]
    why_not: str | None
    law: Mapping[str, float | None]
    runs: int
    paired: bool
    goodness: Goodness
    arms: tuple[ArmScaling, ...]
    predictions: tuple[Prediction, ...]
    left_out: Mapping[str, str]
    cells: Mapping[Key, float]

    def by_law(self, cell: Key) -> float:
        """Return the law's loss of an arm at any size and budget, in nats per token."""
        arm = next((one for one in self.arms if one.name == cell.arm), None)
        factors = (None, None) if arm is None else (arm.eff_n, arm.eff_d)
        terms = [
            constant / (count * ((factor and factor.estimate) or 1.0)) ** power
            for constant, power, count, factor in (
                (self.law["A"], self.law["alpha"], cell.parameters, factors[0]),
                (self.law["B"], self.law["beta"], cell.tokens, factors[1]),
            )
            if constant is not None and power is not None
        ]
        assert self.law["gamma"] is not None
        assert self.law["E"] is not None
        return float(sum(terms) ** self.law["gamma"] + self.law["E"])


def fit_scaling(
    points: Sequence[LossPoint], baseline: str, *, paired: bool, at: Sequence[tuple[int, int]] = ()
) -> Scaling | str:
    """Fit one law to all arms, or say what is missing for one.

    ``paired``: a seed of a size is one data order and one start for all arms. ``at``: sizes and budgets
    (parameters, tokens) to say the law's losses of, where it is over both.
    """
    # In an order of its own, for the bootstrap's numbers go by it: a table's rows may stand in any.
    arms_seen = list(dict.fromkeys(point.arm for point in points))
    by_cell: dict[Key, list[LossPoint]] = defaultdict(list)
    for point in sorted(
        points, key=lambda one: (arms_seen.index(one.arm), one.parameters, one.tokens, one.seed, one.run)
    ):
        by_cell[Key(point.arm, point.parameters, point.tokens)].append(point)
    cells: Cells = by_cell
    axes, why_not = axes_of(cells, baseline)
    if not axes:
        return why_not
    if len(axes) == 1:
        cells, kept = one_slice(cells, baseline, axes[0])
        why_not += kept
    names, left_out = arms_of(cells, baseline, axes)
    cells = {key: own for key, own in cells.items() if key[0] in names}
    fitted = choose(cells, names, axes)
    if isinstance(fitted, str):
        return fitted
    replicates, t = bootstrap(fitted, cells, paired=paired)
    count = len(names)

    def factor(place: int) -> Interval | None:
        if place not in fitted.law.free:
            return None
        return _factor(fitted.theta[place], replicates[:, place], t)

    gaps = {name: _gap(cells, name, baseline, paired=paired) for name in names}
    arms = tuple(
        ArmScaling(
            name=name,
            eff_n=factor(FACTORS + i),
            eff_d=factor(FACTORS + count + i),
            gap=gaps[name][0],
            gap_cells=gaps[name][1],
        )
        for i, name in enumerate(names)
        if i
    )
    predictions = tuple(_predict(fitted, replicates, t, place) for place in (at if len(axes) == 2 else ()))
    found = Scaling(
        of="losses",
        baseline=baseline,
        axes=axes,
        why_not=why_not or None,
        law=_constants(fitted),
        runs=len({(point.arm, point.parameters, point.run) for own in cells.values() for point in own}),
        paired=paired,
        goodness=_goodness(fitted, cells),
        arms=arms,
        predictions=predictions,
        left_out=left_out,
        cells=dict(zip(fitted.cells, np.exp(fitted.y).tolist(), strict=True)),
    )
    return replace(found, arms=tuple(_with_miss(found, arm) for arm in arms))


def _with_miss(law: Scaling, arm: ArmScaling) -> ArmScaling:
    """Add how large the arm's loss gaps are, and by how much the law misses them."""
    seen, fitted = [], []
    for key, loss in law.cells.items():
        base = Key(law.baseline, key.parameters, key.tokens)
        if key.arm == arm.name and base in law.cells:
            seen.append(loss - law.cells[base])
            fitted.append(law.by_law(key) - law.by_law(base))
    if not seen:
        return arm
    gaps = np.array(seen)
    size, miss = (float(np.sqrt(np.mean(part**2))) for part in (gaps, gaps - fitted))
    return replace(arm, gap_size=size, gap_miss=miss)


def _percentiles(estimate: float, values: np.ndarray, t: float) -> Interval:
    """Return the percentile interval at the levels of ±t; what is infinite stays so."""
    level = float(ndtr(-t))
    low, high = np.quantile(values, [level, 1 - level], method="nearest")
    return Interval(estimate=float(estimate), low=float(low), high=float(high))


def _factor(log_estimate: float, logs: np.ndarray, t: float) -> Interval:
    """Return a factor with its interval, from logs; an end that the losses do not bound is None."""
    found = _percentiles(log_estimate, logs, t)
    assert found.low is not None
    assert found.high is not None
    ends = (found.low > -0.99 * NO_END, found.high < 0.99 * NO_END)
    notes = {(True, True): None, (False, True): NO_LOW, (True, False): NO_HIGH, (False, False): NO_BOUND}
    return Interval(
        estimate=math.exp(log_estimate),
        low=math.exp(found.low) if ends[0] else None,
        high=math.exp(found.high) if ends[1] else None,
        note=notes[ends],
    )


def _gap(cells: Cells, arm: str, baseline: str, *, paired: bool) -> tuple[Interval, int]:
    """Return the mean over sizes × budgets of an arm's loss less the baseline's, and of how many of them.

    Where a size has two seeds (runs) at least with all its budgets, each of them counts as its mean over
    them; else each cell has its own interval. With one run a cell the interval is over the cells.
    """
    budgets: dict[int, list[int]] = defaultdict(list)
    for name, size, budget in cells:
        if name == arm and Key(baseline, size, budget) in cells:
            budgets[size].append(budget)
    count = sum(map(len, budgets.values()))
    if not count:
        return Interval(note="no size and budget in common with the baseline"), 0
    parts: list[tuple[float, Estimate]] = []
    for size, own in budgets.items():
        groups = [own]
        if min(len(_units(cells, name, size, own, paired=paired)) for name in (arm, baseline)) < 2:
            groups = [[budget] for budget in own]
        for group in groups:
            own_losses, base = (
                dict(_units(cells, name, size, group, paired=paired)) for name in (arm, baseline)
            )
            pairs = own_losses.keys() & base.keys() if paired else set()
            estimate = (
                mean_estimate([own_losses[unit] - base[unit] for unit in sorted(pairs)])
                if len(pairs) > 1
                else difference(*(mean_estimate(list(side.values())) for side in (own_losses, base)))
            )
            parts.append((len(group) / count, estimate))
    if all(not part.degrees for _, part in parts):
        return mean_interval([part.value for _, part in parts]), count
    return t_interval(combination(parts)), count


def _units(
    cells: Cells, arm: str, size: int, budgets: Sequence[int], *, paired: bool
) -> list[tuple[int, float]]:
    """Return the seeds (runs) of an arm and size that have all these budgets, with their mean loss."""
    losses: dict[object, list[float]] = defaultdict(list)
    for budget in budgets:
        for point in cells[Key(arm, size, budget)]:
            losses[point.seed if paired else point.run].append(point.loss)
    whole = [(unit, own) for unit, own in losses.items() if len(own) == len(budgets)]
    numbers = ((unit if isinstance(unit, int) else i, own) for i, (unit, own) in enumerate(whole))
    return [(number, math.fsum(own) / len(own)) for number, own in numbers]


def _predict(fitted: Fitted, replicates: np.ndarray, t: float, at: tuple[int, int]) -> Prediction:
    """Return what the law says of all arms at a size and budget."""
    n, d = (math.log(value) - middle for value, middle in zip(at, fitted.middle, strict=True))
    rows = np.vstack([fitted.theta[None], replicates])
    arms = np.arange(len(fitted.names))
    where = np.full(len(arms), n), np.full(len(arms), d), arms
    with np.errstate(all="ignore"):
        parts = fitted.law.terms(rows, *where)
        loss = parts.above + parts.e
        # What is left for the data's term once the arm's size has taken its part of the baseline's loss.
        left = parts.of_n[:, :1] + parts.of_d[:, :1] - parts.of_n
        factor = rows[:, FACTORS + fitted.law.arms + arms]
        log_cost = np.log(parts.of_d[:, :1] / np.maximum(left, 0.0)) / np.exp(rows[:, [BETA]]) - factor
        cost = np.where(left > 0, np.expm1(log_cost), np.inf)
    return Prediction(
        parameters=at[0],
        tokens=at[1],
        beyond=(
            at[0] / max(key.parameters for key in fitted.cells),
            at[1] / max(key.tokens for key in fitted.cells),
        ),
        places=tuple(
            Place(
                arm=name,
                loss=_percentiles(loss[0, i], loss[1:, i], t),
                gap=_percentiles(loss[0, i] - loss[0, 0], loss[1:, i] - loss[1:, 0], t),
                cost=_finite(_percentiles(cost[0, i], cost[1:, i], t)),
            )
            for i, name in enumerate(fitted.names)
        ),
    )


def _finite(found: Interval) -> Interval:
    """Return an interval in which infinity is None: the arm might never get there."""
    whole = found.each(lambda value: value if math.isfinite(value) else None)
    if whole.estimate is None:
        return replace(whole, high=None, note=NEVER)
    return replace(whole, note=None if whole.high is not None else NO_HIGH)


def _constants(fitted: Fitted) -> dict[str, float | None]:
    """Return A, α, B, β, γ and E in units of nats, parameters and tokens."""
    found: dict[str, float | None] = {}
    pairs = zip(("A", "B"), ("alpha", "beta"), (A, B), (ALPHA, BETA), fitted.middle, strict=True)
    for name, power, constant, exponent, middle in pairs:
        known = constant in fitted.law.free
        value = math.exp(fitted.theta[exponent])
        found[name] = math.exp(fitted.theta[constant] + value * middle) if known else None
        found[power] = value if known else None
    return found | {"gamma": math.exp(fitted.theta[GAMMA]), "E": math.exp(fitted.theta[E])}


def _goodness(fitted: Fitted, cells: Cells) -> Goodness:
    off = np.exp(fitted.y) - np.exp(fitted.y - fitted.residual)
    worst = int(np.argmax(np.abs(off)))
    variance = run_variance(cells, of_logs=False)
    per_mean = float(np.mean([1 / len(own) for own in cells.values()]))
    about = fitted.y - fitted.y.mean()
    return Goodness(
        cells=len(fitted.y),
        free=len(fitted.law.free),
        residual_sd=math.sqrt(float(off @ off) / fitted.degrees),
        mean_sd=math.sqrt(variance * per_mean) or None,
        seed_sd=math.sqrt(variance) or None,
        largest=(fitted.cells[worst], float(off[worst])),
        spare=len({key[1:] for key in fitted.cells}) - sum(i < FACTORS for i in fitted.law.free),
        explained=1 - float(fitted.residual @ fitted.residual) / float(about @ about),
    )
