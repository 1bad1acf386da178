"""The scaling law and its fit: many fits at once, for grids of starts and for bootstraps.

L = (A / (N · eff_N)^α + B / (D · eff_D)^β)^γ + E, fitted on ln L under Huber's loss (Levenberg–Marquardt).
All rows of ``theta`` go down side by side in numpy: a thousand replicates take seconds.

How it fails: it does not raise. A parameter that the data do not hold ends at its bound.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

A, ALPHA, B, BETA, E, GAMMA = range(6)
"""Places in ``theta``: ln A, ln α, ln B, ln β (A, B at the mean ln N, ln D), ln E, ln γ; then ln eff_N of
each arm, the baseline first, then ln eff_D of each."""
FACTORS = 6
NO_END = math.log(1000)
"""|ln eff| stops here: a factor beyond 1/1000 … 1000 is as good as any other."""
_LOW = (-15.0, math.log(0.01), -15.0, math.log(0.01), -10.0, math.log(0.1))
_HIGH = (9.0, math.log(5), 9.0, math.log(5), 5.0, math.log(10))
_STEPS, _SMALL = 200, 1e-6
_LEAST, _STUCK = 1e-10, 1e9
"""Of the damping: above rounding, so that no matrix is singular; and where nothing more is gained."""
_AT_ONCE = 4_000_000
"""Numbers that a Jacobian of one batch may have."""


class Terms(NamedTuple):
    """Parts of the law, rows of ``theta`` × places: both terms, L − E, E; ln N, ln D with their factors."""

    of_n: np.ndarray
    of_d: np.ndarray
    above: np.ndarray
    e: np.ndarray
    n: np.ndarray
    d: np.ndarray


@dataclass(frozen=True, kw_only=True)
class Law:
    """Where losses are: ``n``, ``d`` = ln N, ln D less their means; ``arm`` of ``arms``, 0 the baseline.

    ``free``: places of ``theta`` that are fitted.
    """

    n: np.ndarray
    d: np.ndarray
    arm: np.ndarray
    arms: int
    free: tuple[int, ...]

    def terms(self, theta: np.ndarray, n: np.ndarray, d: np.ndarray, arm: np.ndarray) -> Terms:
        """Return the parts of the law at any places, for each row of ``theta``."""
        n = n + theta[:, FACTORS + arm]
        d = d + theta[:, FACTORS + self.arms + arm]
        alpha, beta, gamma = np.exp(theta[:, [ALPHA, BETA, GAMMA]]).T[:, :, None]
        of_n = np.exp(theta[:, [A]] - alpha * n)
        of_d = np.exp(theta[:, [B]] - beta * d)
        return Terms(of_n, of_d, (of_n + of_d) ** gamma, np.exp(theta[:, [E]]), n, d)

    def model(self, theta: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return ln L (rows × losses) and its derivatives by the free parameters (rows × losses × free)."""
        parts = self.terms(theta, self.n, self.d, self.arm)
        alpha, beta, gamma = np.exp(theta[:, [ALPHA, BETA, GAMMA]]).T[:, :, None]
        total, loss = parts.of_n + parts.of_d, parts.above + parts.e
        slope = gamma * parts.above / total / loss
        by_n, by_d = slope * parts.of_n, slope * parts.of_d
        columns = {
            A: by_n,
            ALPHA: -alpha * parts.n * by_n,
            B: by_d,
            BETA: -beta * parts.d * by_d,
            E: parts.e / loss,
            GAMMA: gamma * parts.above * np.log(total) / loss,
        }
        jacobian = np.empty((*loss.shape, len(self.free)))
        for i, place in enumerate(self.free):
            if place < FACTORS:
                jacobian[:, :, i] = columns[place]
            else:
                side = -alpha * by_n if place < FACTORS + self.arms else -beta * by_d
                jacobian[:, :, i] = np.where(self.arm == (place - FACTORS) % self.arms, side, 0.0)
        return np.log(loss), jacobian

    def fit(self, start: np.ndarray, y: np.ndarray, delta: float) -> tuple[np.ndarray, np.ndarray]:
        """Return ``theta`` and the cost of fits to ``y`` (ln L, a row each or one for all) from ``start``.

        ``delta``: from where on Huber's loss counts a residual linearly.
        """
        rows = max(1, _AT_ONCE // (len(self.n) * max(1, len(self.free))))
        y = np.broadcast_to(y, (len(start), len(self.n)))
        parts = [self._fit(start[i : i + rows], y[i : i + rows], delta) for i in range(0, len(start), rows)]
        return np.concatenate([theta for theta, _ in parts]), np.concatenate([cost for _, cost in parts])

    def _fit(self, start: np.ndarray, y: np.ndarray, delta: float) -> tuple[np.ndarray, np.ndarray]:
        free, diagonal = list(self.free), range(len(self.free))
        low, high = (
            np.array((*ends, *(end,) * 2 * self.arms))[free]
            for ends, end in ((_LOW, -NO_END), (_HIGH, NO_END))
        )
        found, costs = start.copy(), np.empty(len(start))
        # What still goes down: rows that have arrived are taken out, for a few go ten times as far as most.
        live, theta, damping = np.arange(len(start)), start.copy(), np.full(len(start), 1e-2)
        with np.errstate(all="ignore"):
            value, jacobian = self.model(theta)
            residual = y - value
            cost = huber(residual, delta)
            for _ in range(_STEPS):
                weight = np.minimum(1.0, delta / np.maximum(np.abs(residual), 1e-300))
                turned = np.swapaxes(jacobian * weight[:, :, None], 1, 2)
                normal, gradient = turned @ jacobian, turned @ residual[:, :, None]
                scale = np.einsum("bii->bi", normal)
                scale = np.maximum(scale, 1e-9 * scale.max(axis=1, keepdims=True) + 1e-15)
                normal[:, diagonal, diagonal] += damping[:, None] * scale
                step = np.clip(np.linalg.solve(normal, gradient)[:, :, 0], -2, 2)
                tried = theta.copy()
                tried[:, free] = np.clip(theta[:, free] + step, low, high)
                value, slopes = self.model(tried)
                new = huber(y - value, delta)
                better = np.isfinite(new) & (new < cost)
                arrived = (better & (cost - new <= _SMALL * cost)) | (damping >= _STUCK)
                theta[better], jacobian[better] = tried[better], slopes[better]
                residual[better], cost[better] = (y - value)[better], new[better]
                damping = np.where(better, np.maximum(damping / 5, _LEAST), damping * 4)
                found[live], costs[live] = theta, cost
                on = ~arrived
                if not on.any():
                    break
                live, theta, damping, cost = live[on], theta[on], damping[on], cost[on]
                y, residual, jacobian = y[on], residual[on], jacobian[on]
        return found, costs


def huber(residual: np.ndarray, delta: float) -> np.ndarray:
    """Return Huber's loss of each row of residuals, doubled: their square where they are small."""
    size = np.abs(residual)
    costs: np.ndarray = np.where(size <= delta, size**2, delta * (2 * size - delta)).sum(axis=1)
    return costs


def starts(loss: np.ndarray, arms: int, axes: Sequence[int], *, gamma: bool) -> np.ndarray:
    """Return starts of a fit in ``theta``: exponents, E and shares of the two terms on a grid.

    ``axes``: of ``ALPHA`` and ``BETA`` those that are in the law.
    """
    grid = (0.1, 0.3, 0.7, 1.5)
    exponents = [grid if axis in axes else (1.0,) for axis in (ALPHA, BETA)]
    shares = (0.3, 0.7) if len(axes) == 2 else (1.0,) if ALPHA in axes else (0.0,)
    found = []
    for alpha, beta, floor, share in itertools.product(*exponents, (0.3, 0.6, 0.9), shares):
        e, power = floor * float(loss.min()), 0.5 if gamma else 1.0
        above = (float(loss.mean()) - e) ** (1 / power)
        terms = [math.log(part * above) if part else -math.inf for part in (share, 1 - share)]
        head = [terms[0], math.log(alpha), terms[1], math.log(beta), math.log(e), math.log(power)]
        found.append([*head, *(0.0,) * 2 * arms])
    return np.array(found)
