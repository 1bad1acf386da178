"""Validation losses compared at equal tokens: the curves of an arm on a common grid, and differences.

A mean over seeds goes only as far as every run of the arm does: without the runs that diverge it would jump
down, and make the arm look better for having lost its worst run.

How it fails: it does not raise. Runs without a common evaluation give an empty grid, and no figure.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import reduce
from typing import TYPE_CHECKING

import numpy as np

from ablate.reports.statistics.intervals import ALPHA, Interval, contrast, mean_interval, t_interval

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One run's validation loss (nats per token) over tokens, tokens rising.

    ``origin``: the tokens from which those to target are counted; the curve begins there.
    """

    run_id: str
    arm: str
    seed: int
    end: str
    tokens: np.ndarray
    loss: np.ndarray
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
class LossDifference(Interval):
    """The difference to the baseline at the last evaluation that all runs of both have."""

    tokens: int | None = None
    n: int = 0
    n_baseline: int = 0


def common_grid(curves: Sequence[Curve]) -> CurveGrid:
    """Return the curves of runs with a result at the tokens that all of them evaluated."""
    results = [curve for curve in curves if curve.end != "missing"]
    if not results:
        return CurveGrid(tokens=np.empty(0, dtype=np.int64), loss=np.empty((0, 0)), seeds=())
    tokens = reduce(np.intersect1d, [curve.tokens for curve in results])
    rows = [curve.loss[np.searchsorted(curve.tokens, tokens)] for curve in results]
    return CurveGrid(tokens=tokens, loss=np.array(rows), seeds=tuple(curve.seed for curve in results))


def final_loss(curves: Sequence[Curve], alpha: float = ALPHA) -> Interval:
    """Return the mean loss at the end of the budget; none where a run diverged or nothing finished."""
    results = [curve for curve in curves if curve.end != "missing"]
    diverged = sum(curve.end == "diverged" for curve in results)
    if diverged:
        return Interval(note=f"{diverged} of {len(results)} runs diverged: no final loss")
    if not results:
        return Interval(note="no results")
    return mean_interval([curve.loss[-1] for curve in results], alpha)


def final_difference(
    arm: Sequence[Curve], baseline: Sequence[Curve], alpha: float = ALPHA, *, paired: bool = False
) -> LossDifference:
    """Return the mean difference at the last evaluation common to all runs of both.

    ``paired``: of seeds in common, where there are two; else by Welch's way.
    """
    for mean in map(final_loss, (arm, baseline)):
        if mean.estimate is None:
            return LossDifference(note=mean.note)
    left, right = _align(common_grid(arm), common_grid(baseline))
    if not len(left.tokens):
        return LossDifference(note="no evaluation at equal tokens")
    return LossDifference(
        **vars(_differences(left, right, alpha, paired=paired)[-1]),
        tokens=int(left.tokens[-1]),
        n=len(left.loss),
        n_baseline=len(right.loss),
    )


def difference_band(
    arm: Sequence[Curve], baseline: Sequence[Curve], alpha: float = ALPHA, *, paired: bool = False
) -> Band:
    """Return the difference to the baseline at every common evaluation, with pointwise intervals.

    ``paired``: as in ``final_difference``.
    """
    left, right = _align(common_grid(arm), common_grid(baseline))
    intervals = _differences(left, right, alpha, paired=paired)
    rows = np.array([(one.estimate, one.low, one.high) for one in intervals], dtype=float)
    middle, low, high = rows.reshape(-1, 3).T
    return Band(
        tokens=left.tokens,
        difference=middle,
        low=low,
        high=high,
        n=len(left.loss),
        n_baseline=len(right.loss),
    )


def _differences(left: CurveGrid, right: CurveGrid, alpha: float, *, paired: bool) -> list[Interval]:
    """Return left − right at each token count of two aligned grids."""
    sides = ([list(zip(grid.seeds, at, strict=True)) for at in grid.loss.T] for grid in (left, right))
    return [t_interval(contrast(*each, paired=paired)[0], alpha) for each in zip(*sides, strict=True)]


def _align(left: CurveGrid, right: CurveGrid) -> tuple[CurveGrid, CurveGrid]:
    tokens, in_left, in_right = np.intersect1d(left.tokens, right.tokens, return_indices=True)
    return (
        replace(left, tokens=tokens, loss=left.loss[:, in_left]),
        replace(right, tokens=tokens, loss=right.loss[:, in_right]),
    )
