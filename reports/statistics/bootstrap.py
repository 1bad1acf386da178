"""A token cost's interval once more, without the normal distribution: the percentile bootstrap on log T.

A check beside Student's interval and no replacement for it: with few runs the bootstrap's interval is too
narrow (it only knows the figures that were seen), so that it is not given below 5 runs a side. Each side is
drawn from on its own; pairs are drawn as pairs. The draws are fixed, so that a report gives the same bytes.

How it fails: it does not raise; None where there is nothing to draw from.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ablate.reports.statistics.intervals import ALPHA, Interval, exponential

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ablate.run.outcome import Outcome

FEWEST_RUNS = 5
DRAWS = 10_000


def bootstrap_cost(
    arm: Sequence[Outcome], baseline: Sequence[Outcome], *, paired: bool = False, alpha: float = ALPHA
) -> Interval | None:
    """Return the token cost with its percentile interval over 10,000 draws; None below 5 runs a side."""
    left = {run.seed: np.log(run.high) for run in arm if run.exact}
    right = {run.seed: np.log(run.high) for run in baseline if run.exact}
    if any(run.end != "missing" and not run.exact for run in (*arm, *baseline)):
        return None
    rng = np.random.default_rng(0)
    pairs = sorted(left.keys() & right.keys()) if paired else []
    if len(pairs) >= FEWEST_RUNS:
        differences = np.array([left[seed] - right[seed] for seed in pairs])
        means = _means(differences, rng)
        center = differences.mean()
    elif min(len(left), len(right)) >= FEWEST_RUNS and not len(pairs) >= 2:
        x, y = np.array(list(left.values())), np.array(list(right.values()))
        means = _means(x, rng) - _means(y, rng)
        center = x.mean() - y.mean()
    else:
        return None
    low, high = np.quantile(means, [alpha / 2, 1 - alpha / 2])
    return exponential(Interval(estimate=float(center), low=float(low), high=float(high)), minus=1.0)


def _means(values: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return np.asarray(values[rng.integers(len(values), size=(DRAWS, len(values)))].mean(axis=1))
