"""Fit the token costs of many arms by the errors of their GEMMs: of which GEMM, and the fixed or drawn part.

    python benchmarks/explain.py --storage DIRECTORY STUDY [STUDY …]

Every arm of the studies (of one model, data and budget, with diagnostics) is one point. With E_g the energy
of GEMM g's error over that of its exact output, and b_g the share of it that every draw of the recipe's
randomness has in common (``bias_share``; 1 where nothing is drawn), fitted is

    log(1 + token cost) = Σ_g k_g E_g (b_g + r (1 − b_g)),    k_g ≥ 0

k_g says what GEMM g's error costs, and r what drawn error costs over as much fixed error: at r = 0 only what
is fixed costs, at r = 1 it does not matter which it is. Non-negative least squares at each r of a grid; 95 %
intervals by bootstrap over arms (Efron's percentiles), which takes the arms for a sample of recipes.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.optimize import nnls

from ablate.recipes import GEMMS
from ablate.reports import analyse, load_frames
from ablate.reports.diagnoses import diagnose_study
from ablate.store import StudyStore

RATIOS = np.linspace(0.0, 4.0, 81)
DRAWS = 1000


@dataclass(frozen=True)
class Point:
    """An arm: log (1 + token cost), and of each GEMM the energy of its error that is fixed, and drawn."""

    name: str
    cost: float
    fixed: tuple[float, ...]
    drawn: tuple[float, ...]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("studies", nargs="+")
    parser.add_argument("--storage", type=Path, required=True)
    options = parser.parse_args()
    points: dict[str, Point] = {}
    for study in options.studies:
        points |= read(StudyStore(options.storage / study))
    names = [point.name for point in points.values()]
    cost = np.array([point.cost for point in points.values()])
    fixed = np.array([point.fixed for point in points.values()])
    drawn = np.array([point.drawn for point in points.values()])
    ratio, costs = fit(fixed, drawn, cost)
    predicted = (fixed + ratio * drawn) @ costs
    rng = np.random.default_rng(0)
    samples = [fit(fixed[at], drawn[at], cost[at]) for at in rng.integers(0, len(cost), (DRAWS, len(cost)))]
    print(
        f"{len(cost)} arms; share of the variance of log(1 + cost) explained: "
        f"{explained(cost, predicted):.0%}"
    )
    print(f"r, drawn over fixed error: {ratio:.2f} {ends([one for one, _ in samples])}")
    for place, gemm in enumerate(GEMMS):
        # Of an error of 10 %, whose energy is 0.01.
        ten = [math.expm1(0.01 * each[place]) for _, each in samples]
        print(f"{gemm}: a fixed error of 10 % costs {math.expm1(0.01 * costs[place]):.1%} {ends(ten, '.1%')}")
    print(f"\n{'arm':32} {'token cost':>10} {'predicted':>10}")
    for at in np.argsort(cost):
        print(f"{names[at]:32} {math.expm1(cost[at]):>10.1%} {math.expm1(predicted[at]):>10.1%}")


def read(store: StudyStore) -> dict[str, Point]:
    """Return the arms of a study by the id of their first run: a run that studies share counts once."""
    analysis = analyse(load_frames(store))
    diagnosed = {arm.arm: arm for arm in diagnose_study(store, analysis)[0]}
    found = {}
    for arm in analysis.others:
        if arm.name not in diagnosed or arm.token_cost.log_ratio is None:
            continue
        fixed, drawn = dict.fromkeys(GEMMS, 0.0), dict.fromkeys(GEMMS, 0.0)
        for one in diagnosed[arm.name].gemms:
            energy = (one.relative_error.estimate or 0.0) ** 2
            share = 1.0 if one.draws == 1 else min(max(one.bias_share.estimate or 0.0, 0.0), 1.0)
            fixed[one.gemm], drawn[one.gemm] = energy * share, energy * (1 - share)  # type: ignore[index]
        found[arm.runs[0].run_id] = Point(
            arm.name, arm.token_cost.log_ratio.value, tuple(fixed.values()), tuple(drawn.values())
        )
    return found


def fit(fixed: np.ndarray, drawn: np.ndarray, cost: np.ndarray) -> tuple[float, np.ndarray]:
    """Return r and the three k, at which the sum of squared residuals is least."""
    fits = [nnls(fixed + ratio * drawn, cost) for ratio in RATIOS]
    best = int(np.argmin([residual for _, residual in fits]))
    return float(RATIOS[best]), fits[best][0]


def explained(cost: np.ndarray, predicted: np.ndarray) -> float:
    return 1 - float(np.sum((cost - predicted) ** 2) / np.sum((cost - cost.mean()) ** 2))


def ends(values: list[float], form: str = ".2f") -> str:
    low, high = np.percentile(values, [2.5, 97.5])
    return f"[{low:{form}}, {high:{form}}]"


if __name__ == "__main__":
    main()
