"""Where a smoothed loss curve crosses the target: less noise in tokens to target than two evaluations have.

Locally weighted regression (LOWESS; Cleveland 1979, JASA 74) of the loss on x = ln tokens: at each place a
straight line with the weights (1 − |Δx / h|³)³, h = 0.3 or wide enough for four evaluations, and two passes
with bisquare weights at 6 times the median residual, so that an evaluation that went wrong hardly counts.

A line bends at no kink. So a fit takes evaluations of one span alone, in which nothing of the training
changes (``schedule.steady_spans``), and only where the span reaches by h to both sides of the crossing.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import ArrayLike

WIDTH = 0.3
"""In ln tokens: evaluations of 26 % fewer to 35 % more tokens count."""
_NEIGHBOURS = 4
_PASSES = 2
_CUT = 6.0
_PLACES = 250
_BLOCK = 1 << 20
_STEPS = 50


class LocalFit:
    """The loss curve (nats per token) of one run over the spans of tokens in which training is steady."""

    def __init__(self, tokens: ArrayLike, loss: ArrayLike, spans: Iterable[tuple[float, float]]) -> None:
        tokens, loss = np.asarray(tokens, dtype=float), np.asarray(loss, dtype=float)
        self._spans = [_Span(tokens, loss, *span) for span in spans]

    def crossings(self, near: ArrayLike, targets: ArrayLike) -> np.ndarray:
        """Return the tokens at which the fit crosses each target next to the crossing ``near``, else NaN."""
        near, targets = np.asarray(near, dtype=float), np.asarray(targets, dtype=float)
        found = np.full(len(near), np.nan)
        wide = math.exp(WIDTH)
        for span in self._spans:
            within = (span.start <= near / wide) & (near * wide <= span.end)
            if within.any():
                found[within] = span.crossings(near[within], targets[within])
        return found


class _Span:
    def __init__(self, tokens: np.ndarray, loss: np.ndarray, start: float, end: float) -> None:
        inside = (tokens >= max(start, 1.0)) & (tokens <= end) & np.isfinite(loss)
        self.start, self.end = start, end
        self._x, self._y = np.log(tokens[inside]), loss[inside]

    def crossings(self, near: np.ndarray, targets: np.ndarray) -> np.ndarray:
        found = np.full(len(near), np.nan)
        if len(self._x) <= _NEIGHBOURS:
            return found
        first = np.log(near)
        at, left = first.copy(), np.arange(len(near))
        for _ in range(_STEPS):
            value, slope = _lines(self._x, self._y, self._weights, at[left])
            step = (targets[left] - value) / np.where(slope < 0, slope, np.nan)
            at[left] += np.clip(step, -WIDTH / 3, WIDTH / 3)
            # Beyond the last evaluation nothing was seen.
            inside = (np.abs(at[left] - first[left]) <= WIDTH) & (at[left] <= self._x[-1])
            done = inside & (np.abs(step) < 1e-9)
            found[left[done]] = np.exp(at[left[done]])
            left = left[inside & ~done]
            if not len(left):
                break
        return found

    @cached_property
    def _weights(self) -> np.ndarray:
        """How much each evaluation counts: bisquare weights by its own distance from the fit."""
        weights = np.ones(len(self._x))
        # The fit is smooth: of very many evaluations at a few places, and straight between them.
        count = len(self._x)
        places = self._x[np.linspace(0, count - 1, min(count, _PLACES)).round().astype(int)]
        for _ in range(_PASSES):
            blocks = np.array_split(places, 1 + len(places) * count // _BLOCK)
            fitted = np.concatenate([_lines(self._x, self._y, weights, block)[0] for block in blocks])
            residual = np.abs(self._y - np.interp(self._x, places, fitted))
            scale = _CUT * float(np.median(residual))
            if not scale > 1e-12 * float(np.abs(self._y).max()):  # the curve is its own fit
                break
            weights = np.clip(1 - (residual / scale) ** 2, 0, None) ** 2
        return weights


def _lines(
    x: np.ndarray, y: np.ndarray, weights: np.ndarray, at: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the value and the slope of the local line at each of ``at``; ``x`` rises."""
    # Sums of products lose no digits that count where the values lie around zero.
    middle, level = x.mean(), y.mean()
    near, own_y = x - middle, y - level
    share = np.abs(near - (at - middle)[:, None])
    share /= _widths(x, at)[:, None]
    # Products, because a power takes ten times as long.
    own = np.maximum(1 - share * share * share, 0)
    own = own * own * own * weights
    total, sum_x, sum_y, sum_xx, sum_xy = (
        own @ np.stack([np.ones_like(near), near, own_y, near * near, near * own_y], axis=1)
    ).T
    total = np.maximum(total, np.finfo(float).tiny)
    mean_x, mean_y = sum_x / total, sum_y / total
    spread, together = sum_xx / total - mean_x**2, sum_xy / total - mean_x * mean_y
    slope = np.divide(together, spread, out=np.zeros_like(together), where=spread > 1e-12)
    return level + mean_y + slope * (at - middle - mean_x), slope


def _widths(x: np.ndarray, at: np.ndarray) -> np.ndarray:
    """Return how far evaluations count at each of ``at``."""
    widths = np.full(len(at), WIDTH)
    inside = np.searchsorted(x, at + WIDTH) - np.searchsorted(x, at - WIDTH, side="right")
    if (few := inside <= _NEIGHBOURS).any():
        # The fifth neighbour stands at the edge, where the weight is zero: four lie inside.
        distance = np.partition(np.abs(x - at[few][:, None]), _NEIGHBOURS, axis=1)[:, _NEIGHBOURS]
        widths[few] = np.maximum(WIDTH, distance)
    return widths
