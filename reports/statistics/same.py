"""A/A: the baseline compared with itself, to see how often the test cries wolf on these very runs.

The baseline's runs are split in two in every way (or 1,000 ways by a fixed draw, if there are more), and each
split is tested as two arms would be. About 5 % should come out as a difference; many more would say that the
runs are not what the test takes them for. The splits share runs, so that this is a check and no estimate with
an error of its own.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ablate.reports.statistics.intervals import welch_interval

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ablate.run.outcome import Outcome

FEWEST_RUNS = 6
MOST_SPLITS = 1000


@dataclass(frozen=True, kw_only=True)
class SameArm:
    """Splits of one arm's runs, how many came out as a difference, and the largest cost that was seen."""

    splits: int
    positives: int
    largest_cost: float

    @property
    def rate(self) -> float:
        """The share of splits that came out as a difference."""
        return self.positives / self.splits


def compare_with_itself(outcomes: Sequence[Outcome]) -> SameArm | None:
    """Split an arm's runs in two in every way; None with fewer than 6 runs of known T, or without spread."""
    logs = np.log([run.high for run in outcomes if run.exact])
    n = len(logs)
    if n < FEWEST_RUNS or np.ptp(logs) == 0:
        return None
    positives, largest, splits = 0, 0.0, 0
    for chosen in _halves(n):
        found = welch_interval(logs[chosen], logs[~chosen])
        if found.estimate is None or found.low is None or found.high is None:
            continue
        splits += 1
        positives += not found.low <= 0 <= found.high
        largest = max(largest, abs(found.estimate))
    return SameArm(splits=splits, positives=positives, largest_cost=math.expm1(largest)) if splits else None


def _halves(n: int) -> list[np.ndarray]:
    """Return masks of half of the runs; for an even number each pair of halves once."""
    half = n // 2
    number = math.comb(n, half) // (2 if n % 2 == 0 else 1)
    masks = []
    if number <= MOST_SPLITS:
        for chosen in itertools.combinations(range(n), half):
            if n % 2 == 0 and 0 not in chosen:
                continue  # its other half has been
            mask = np.zeros(n, dtype=bool)
            mask[list(chosen)] = True
            masks.append(mask)
        return masks
    rng = np.random.default_rng(0)
    for _ in range(MOST_SPLITS):
        mask = np.zeros(n, dtype=bool)
        mask[rng.permutation(n)[:half]] = True
        masks.append(mask)
    return masks
