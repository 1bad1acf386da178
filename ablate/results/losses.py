"""Validation losses compared at equal tokens: the curves of an arm on a common grid, and differences.

A mean over seeds ends where the first run of the arm ends. Without a run that diverged it would jump down,
and the arm would look better for having lost its worst run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import reduce
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from ablate.results.intervals import (
    ALPHA,
    NO_PAIRS,
    Compared,
    Interval,
    contrasts,
    mean_interval,
    t_interval,
)
from ablate.run.outcome import Outcome

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ablate.results.intervals import Method, Values
    from ablate.run.outcome import LocalFit

    Sides = tuple[Sequence["Curve"], Sequence["Curve"]]
    """Curves of an arm, and of the baseline that it is compared with."""

Arm = TypeVar("Arm")


@dataclass(frozen=True, kw_only=True)
class Curve(Outcome):
    """How one run ended, and its validation loss over tokens, tokens rising.

    ``origin``: the token count from which tokens to target are counted; the curve begins there.
    """

    run_id: str
    arm: str
    tokens: np.ndarray
    loss: np.ndarray
    fit: LocalFit | None = None
    origin: int = 0


@dataclass(frozen=True, kw_only=True)
class CurveGrid:
    """Several runs at the tokens where all have an evaluation: ``loss`` has a row for each of ``seeds``."""

    tokens: np.ndarray
    loss: np.ndarray
    seeds: tuple[int, ...]

    @property
    def mean(self) -> np.ndarray:
        """The mean over runs at each token count."""
        return np.asarray(self.loss.mean(axis=0))


@dataclass(frozen=True, kw_only=True)
class Band:
    """Difference arm − baseline over tokens; ``low`` and ``high`` are NaN where n is too small."""

    tokens: np.ndarray
    difference: np.ndarray
    low: np.ndarray
    high: np.ndarray
    n: int
    n_baseline: int


@dataclass(frozen=True, kw_only=True)
class LossDifference(Compared):
    """The difference to the baseline at the last evaluation common to all runs of both, after ``tokens``.

    ``moderated``: whether other arms' spread is in the figure's variance.
    """

    tokens: int | None = None
    moderated: bool = False


def common_grids(*sides: Sequence[Curve]) -> list[CurveGrid]:
    """Restrict runs with a result to the tokens at which all of them were evaluated: a grid for each side.

    If a side has no result all grids are empty.
    """
    results = [[curve for curve in side if curve.end != "missing"] for side in sides]
    evaluated = [curve.tokens for side in results for curve in side]
    tokens = reduce(np.intersect1d, evaluated) if all(results) else np.empty(0, dtype=np.int64)
    return [
        CurveGrid(
            tokens=tokens,
            loss=np.array([curve.loss[np.searchsorted(curve.tokens, tokens)] for curve in side]),
            seeds=tuple(curve.seed for curve in side),
        )
        for side in results
    ]


def final_loss(curves: Sequence[Curve], alpha: float = ALPHA) -> Interval:
    """Return the mean loss at the end of the budget; no estimate if a run diverged or none has a result."""
    results = [curve for curve in curves if curve.end != "missing"]
    diverged = sum(curve.end == "diverged" for curve in results)
    if diverged:
        return Interval(note=f"{diverged} of {len(results)} runs diverged: no final loss")
    if not results:
        return Interval(note="no results")
    return mean_interval([curve.loss[-1] for curve in results], alpha)


def final_differences(sides: Mapping[Arm, Sides], how: Method) -> dict[Arm, LossDifference]:
    """Compute each arm's mean difference to the baseline at the last evaluation common to all their runs."""
    found: dict[Arm, LossDifference] = {}
    at: dict[Arm, list[CurveGrid]] = {}
    for arm, both in sides.items():
        note = next((mean.note for mean in map(final_loss, both) if mean.estimate is None), None)
        grids = common_grids(*both)
        if note is not None or not len(grids[0].tokens):
            found[arm] = LossDifference(note=note or "no evaluation at equal tokens")
        else:
            at[arm] = grids
    for arm, one in contrasts({arm: _values(grids, -1) for arm, grids in at.items()}, how).items():
        left, right = at[arm]
        interval = t_interval(one.estimate, how.alpha)
        if how.paired and not one.pairs and interval.note is None:
            interval = replace(interval, note=NO_PAIRS)
        found[arm] = LossDifference(
            **vars(interval),
            tokens=int(left.tokens[-1]),
            n=len(left.loss),
            n_baseline=len(right.loss),
            figure=one.estimate,
            moderated=one.estimate != one.own,
        )
    return found


def difference_bands(sides: Mapping[Arm, Sides], how: Method) -> dict[Arm, Band]:
    """Compute each arm's difference to the baseline at every common evaluation, with pointwise intervals.

    Arms moderate each other at each token count separately.
    """
    grids = {arm: common_grids(*both) for arm, both in sides.items()}
    rows: dict[Arm, list[Interval]] = {arm: [] for arm in sides}
    for tokens in sorted({int(at) for left, _ in grids.values() for at in left.tokens}):
        there = {
            arm: _values(both, int(np.searchsorted(both[0].tokens, tokens)))
            for arm, both in grids.items()
            if tokens in both[0].tokens
        }
        for arm, one in contrasts(there, how).items():
            rows[arm].append(t_interval(one.estimate, how.alpha))
    found = {}
    for arm, (own, base) in grids.items():
        parts = [(one.estimate, one.low, one.high) for one in rows[arm]]
        middle, low, high = np.array(parts, dtype=float).reshape(-1, 3).T
        found[arm] = Band(
            tokens=own.tokens,
            difference=middle,
            low=low,
            high=high,
            n=len(own.loss),
            n_baseline=len(base.loss),
        )
    return found


def _values(grids: Sequence[CurveGrid], place: int) -> tuple[Values, Values]:
    """Return seed and loss of each run on either side at the grids' ``place``."""
    left, right = (
        [(seed, float(loss)) for seed, loss in zip(grid.seeds, grid.loss[:, place], strict=True)]
        for grid in grids
    )
    return left, right
