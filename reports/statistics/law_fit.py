"""Losses of runs → the scaling law's fit and its bootstrap.

- **Fit.** Of the means of cells (arm × size × budget), all arms together, on ln L, under Huber's loss: δ is
  1e-3 as in Hoffmann et al. (arXiv 2203.15556), then twice the residuals' robust spread if that is more, so
  that a stray cell counts little and the others fully. γ is 1 unless an F test at 1 % asks for another.
- **Bootstrap.** Normal multipliers stand in for resampled runs, of which two or three are too few. A seed of
  a size moves all its runs (of all arms, where seeds are pairs) by their deviations from the means of their
  cells, scaled to the variance s² / n. What the means miss the law by beyond that is a second source: cells
  of one size and budget (of one size, where runs have several budgets) move together, by what they lie off a
  law fitted without them (CR3). What all arms share of it and what is an arm's own are weighed apart.
- **Levels.** Percentiles at the levels of Student's t in place of the normal's (Hesterberg,
  doi:10.1080/00031305.2015.1089789), with the degrees of freedom that the two sources have.

How it fails: it does not raise; losses that cannot carry the law give a sentence that says what is missing.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np
from scipy.special import fdtri

from ablate.reports.statistics.intervals import quantile
from ablate.reports.statistics.law import ALPHA, BETA, FACTORS, GAMMA, A, B, E, Law, starts

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ablate.reports.read.losses import LossPoint

HUBER = 1e-3
"""Hoffmann et al.'s δ, in ln L."""
REPLICATES = 1000
DISTINCT = 3
"""Sizes, and budgets, that a power law with an offset needs at least."""
CROSSED = 6
"""Sizes × budgets that a law over both needs at least: one budget a size does not tell them apart."""


class Key(NamedTuple):
    """A cell: all runs of an arm at one size and budget."""

    arm: str
    parameters: int
    tokens: int


Cells: TypeAlias = "Mapping[Key, Sequence[LossPoint]]"


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """A fit: ``cells`` in the order of ``law``, their ln L, and what came out."""

    cells: tuple[Key, ...]
    names: tuple[str, ...]
    law: Law
    middle: tuple[float, float]
    y: np.ndarray
    theta: np.ndarray
    cost: float
    delta: float

    @property
    def residual(self) -> np.ndarray:
        """What the cells lie above the law, in ln L."""
        left: np.ndarray = self.y - self.law.model(self.theta[None])[0][0]
        return left

    def jackknifed(self, groups: Sequence[object]) -> np.ndarray:
        """Return what cells lie above a law fitted without their group, to first order (CR3)."""
        _, jacobian = self.law.model(self.theta[None])
        basis, sizes, _ = np.linalg.svd(jacobian[0], full_matrices=False)
        basis = basis[:, sizes > 1e-9 * sizes[0]]
        residual, found = self.residual, np.empty(len(self.y))
        for group in set(groups):
            own = [i for i, other in enumerate(groups) if other == group]
            left = np.eye(len(own)) - basis[own] @ basis[own].T
            # A direction that the group alone decides has no residual, and nothing to tell its error by.
            found[own] = np.linalg.pinv(left, rcond=1e-2, hermitian=True) @ residual[own]
        return found

    @property
    def degrees(self) -> int:
        """How many cells there are beyond the parameters."""
        return len(self.y) - len(self.law.free)


def axes_of(cells: Iterable[Key], baseline: str) -> tuple[tuple[str, ...], str]:
    """Return what the baseline's cells vary in enough for a law over it, and what is missing."""
    own = [key for key in cells if key[0] == baseline]
    if not own:
        return (), f"no loss of the baseline '{baseline}'"
    sizes, budgets = ({key[place] for key in own} for place in (1, 2))
    axes, missing = [], []
    for axis, values, noun, letter in (
        ("parameters", sizes, "size", "N"),
        ("tokens", budgets, "budget", "D"),
    ):
        if len(values) >= DISTINCT:
            axes.append(axis)
        else:
            more = DISTINCT - len(values)
            count = f"{len(values)} {noun}" + ("" if len(values) == 1 else "s")
            missing.append(
                f"eff_{letter} needs losses at {DISTINCT} {noun}s at least, and the baseline has {count}: "
                f"add a study of another {noun}" + ("" if more == 1 else f", and {more - 1} more")
            )
    if len(axes) == 2 and len(own) < CROSSED:
        return (), (
            f"the baseline has losses at {len(own)} sizes × budgets, and a law over both needs {CROSSED}: "
            "add "
            "studies of several budgets at one size"
        )
    return tuple(axes), "; ".join(missing)


def one_slice(cells: Cells, baseline: str, axis: str) -> tuple[Cells, str]:
    """Keep the value of the other axis that the baseline has most cells at; return it, and a word on that."""

    def other(key: Key) -> int:
        return key.tokens if axis == "parameters" else key.parameters

    counts: dict[int, int] = defaultdict(int)
    for key in cells:
        counts[other(key)] += key.arm == baseline
    best = max(counts, key=lambda value: (counts[value], value))
    unit = "tokens" if axis == "parameters" else "parameters"
    text = f"; fitted at {best:,} {unit} alone" if sum(map(bool, counts.values())) > 1 else ""
    return {key: own for key, own in cells.items() if other(key) == best}, text


def arms_of(cells: Cells, baseline: str, axes: tuple[str, ...]) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the arms that have cells enough, the baseline first, and why others have not."""
    own: dict[str, list[Key]] = defaultdict(list)
    for key in cells:
        own[key.arm].append(key)
    few = {}
    for name, keys in own.items():
        sizes, budgets = {key.parameters for key in keys}, {key.tokens for key in keys}
        if name == baseline:
            continue
        if len(keys) < 2 * len(axes):
            few[name] = f"losses at {len(keys)} of the sizes and budgets, needed are {2 * len(axes)}"
        elif len(axes) == 2 and 1 in (len(sizes), len(budgets)):
            # Its two factors would be told apart by the law's form alone.
            few[name] = f"losses at one {'size' if len(sizes) == 1 else 'budget'} alone"
    return (baseline, *(name for name in own if name != baseline and name not in few)), few


def choose(cells: Cells, names: tuple[str, ...], axes: tuple[str, ...]) -> Fitted | str:
    """Return the fit with γ = 1, or with γ free where that is far better."""
    if len({point.loss for own in cells.values() for point in own}) == 1:
        return "all losses are the same"
    first = _fit(cells, names, axes, HUBER, gamma=False)
    if first.degrees < 1:
        return (
            f"{len(first.y)} cells (arms × sizes × budgets) cannot carry the law's {len(first.law.free)} "
            "parameters: add sizes, budgets or arms"
        )
    best = first
    # Arms miss the law together: what tests it is the sizes and budgets, not how many arms they have.
    degrees = len({key[1:] for key in cells}) - FACTORS
    if len(axes) == 2 and min(degrees, first.degrees) > 1:
        other = _fit(cells, names, axes, HUBER, gamma=True)
        if first.cost - other.cost > fdtri(1, degrees, 0.99) * other.cost / degrees:
            best = other
    spread = 1.4826 * float(np.median(np.abs(best.residual))) * math.sqrt(len(best.y) / best.degrees)
    delta = max(HUBER, 2 * spread)
    return _fit(cells, names, axes, delta, gamma=GAMMA in best.law.free)


def _fit(
    cells: Cells,
    names: tuple[str, ...],
    axes: tuple[str, ...],
    delta: float,
    *,
    gamma: bool,
) -> Fitted:
    keys = tuple(cells)
    count = len(names)
    n, d = (np.log([float(key[place]) for key in keys]) for place in (1, 2))
    y = np.array([_mean(own) for own in cells.values()])
    free = [E]
    over = []
    for axis, constants, exponent, base in (
        ("parameters", (A, ALPHA), ALPHA, FACTORS),
        ("tokens", (B, BETA), BETA, FACTORS + count),
    ):
        if axis in axes:
            over.append(exponent)
            free += [*constants, *range(base + 1, base + count)]
    law = Law(
        n=n - n.mean(),
        d=d - d.mean(),
        arm=np.array([names.index(key[0]) for key in keys]),
        arms=count,
        free=tuple(sorted([*free, GAMMA] if gamma else free)),
    )
    theta, cost = law.fit(starts(np.exp(y), count, over, gamma=gamma), y, delta)
    best = int(np.argmin(cost))
    return Fitted(
        cells=keys,
        names=names,
        law=law,
        middle=(float(n.mean()), float(d.mean())),
        y=y,
        theta=theta[best],
        cost=float(cost[best]),
        delta=delta,
    )


def _mean(own: Sequence[LossPoint]) -> float:
    return math.fsum(math.log(point.loss) for point in own) / len(own)


def bootstrap(fitted: Fitted, cells: Cells, *, paired: bool) -> tuple[np.ndarray, float]:
    """Return refits to moved cells, and the quantile of Student's t that stands for the normal's 1.96."""
    draws = _Draws()
    pooled = run_variance(cells)
    several = _several(cells)
    moved = np.zeros((REPLICATES, len(cells)))
    units: dict[tuple[object, ...], set[object]] = defaultdict(set)
    for i, ((arm, size, budget), own) in enumerate(cells.items()):
        logs, n = np.log([point.loss for point in own]), len(own)
        variance = float(logs.var(ddof=1)) if n > 1 else pooled
        if n == 1:
            moved[:, i] += math.sqrt(variance) * draws.of((arm, size, budget))
        group = (size,) if paired else (size, arm) if several else (size, arm, budget)
        for point, off in zip(own, logs - logs.mean(), strict=True) if n > 1 else ():
            unit = point.seed if paired else point.run
            units[group].add(unit)
            moved[:, i] += draws.of((*group, unit)) * off / math.sqrt(n * (n - 1))
    places = [key[1:] for key in cells]
    together = np.array([[one == other for other in places] for one in places], dtype=float)
    together /= together.sum(axis=0)
    of_arms = sum(place >= FACTORS for place in fitted.law.free)
    shared = len(set(places))
    parts = ((shared, len(fitted.law.free) - of_arms), (len(cells) - shared, of_arms))
    seeds = sum(map(len, units.values())) - len(units)
    levels: list[float] = []
    added = np.zeros_like(moved)
    # In turn what all arms of a size and budget share, and what is an arm's own.
    for is_own, (count, free) in enumerate(parts):
        if count <= free:
            continue  # as many parameters as places: nothing tells what misses the law
        residual, jack, by_seeds = (
            part - part @ together if is_own else part @ together
            for part in (fitted.residual, fitted.jackknifed(places), moved)
        )
        degrees = count - free
        variance = float(np.mean(residual**2)) * count / degrees
        share = max(0.0, 1 - float(np.mean(by_seeds.var(axis=0))) / variance) if variance else 0.0
        for i, (size, budget) in enumerate(places):
            block = ("law", is_own, size, None if several else budget)
            added[:, i] += math.sqrt(share) * jack[i] * draws.of(block)
        sources = [(part, most) for part, most in ((1 - share, seeds), (share, degrees)) if part]
        levels.append(quantile(1 / sum(part**2 / max(1, most) for part, most in sources)))
    start = np.repeat(fitted.theta[None], REPLICATES, axis=0)
    return fitted.law.fit(start, fitted.y + moved + added, fitted.delta)[0], max(
        levels, default=quantile(max(1, seeds))
    )


class _Draws:
    """Normal numbers by name, the same whenever a report is made."""

    def __init__(self) -> None:
        self._rng = np.random.default_rng(0)
        self._known: dict[object, np.ndarray] = {}

    def of(self, name: object) -> np.ndarray:
        """Return the numbers of that name, one a replicate."""
        if name not in self._known:
            self._known[name] = self._rng.standard_normal(REPLICATES)
        return self._known[name]


def _several(cells: Cells) -> bool:
    """Tell whether a run stands for more than one budget."""
    runs = [(key[:2], point.run) for key, own in cells.items() for point in own]
    return len(set(runs)) < len(runs)


def run_variance(cells: Cells, *, of_logs: bool = True) -> float:
    """Return the variance of ln L, or of L, of a run in its cell, pooled; 0 with one run a cell."""
    values = [np.array([point.loss for point in own]) for own in cells.values()]
    values = [np.log(one) if of_logs else one for one in values]
    degrees = sum(len(one) - 1 for one in values)
    return float(sum(((one - one.mean()) ** 2).sum() for one in values)) / degrees if degrees else 0.0
