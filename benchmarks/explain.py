"""Fit the token costs of many arms by the errors of their GEMMs: of which GEMM, and the fixed or drawn part.

    python benchmarks/explain.py --storage DIRECTORY STUDY [STUDY …]

Every arm of the studies (of one model, data and budget, with diagnostics) is one point. With E_g the energy
of GEMM g's error over that of its exact output, and b_g the share of it that every draw of the recipe's
randomness has in common (``bias_share``; 1 where nothing is drawn), fitted is what follows. Of the fixed
part, what shrinks the whole output by a common factor, (1 − gain)², is left out: norms and Adam undo it.

    log(1 + token cost) = Σ_g (f_g E_g b_g + d_g E_g (1 − b_g)),    f_g, d_g ≥ 0

f_g says what error of GEMM g costs that is fixed on a step, d_g what error costs that is drawn. Non-negative
least squares; 95 % intervals by bootstrap over arms (Efron's percentiles), which takes the arms for a sample
of recipes. It is a description of these arms, with their errors measured along their own runs.
"""

from __future__ import annotations

import argparse
import itertools
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.optimize import nnls

from ablate.recipes import GEMMS
from ablate.reports import analyse, load_frames
from ablate.reports.findings.diagnoses import diagnose_study
from ablate.store import StudyStore

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
    points_by_run: dict[str, Point] = {}
    for study in options.studies:
        points_by_run |= read(StudyStore(options.storage / study))
    points = sorted(points_by_run.values(), key=lambda point: point.cost)
    cost = np.array([point.cost for point in points])
    energies = np.array([(*point.fixed, *point.drawn) for point in points])
    costs, _ = nnls(energies, cost)
    predicted = energies @ costs
    unexplained = np.sum((cost - predicted) ** 2) / np.sum((cost - cost.mean()) ** 2)
    print(
        f"{len(points)} arms; share of the variance of log(1 + token cost) explained: {1 - unexplained:.0%}"
    )
    print("\ntoken cost of an error of 10 % of the output's norm\n")
    lows, highs = bootstrap(energies, cost)
    kinds = itertools.product(("fixed", "drawn"), GEMMS)
    for (part, gemm), middle, low, high in zip(kinds, costs, lows, highs, strict=True):
        # The energy of such an error is 0.01.
        shown, low_shown, high_shown = np.expm1(
            [0.01 * middle, 0.01 * low, 0.01 * high]
        )
        print(f"{part} in {gemm}: {shown:6.1%} [{low_shown:.1%}, {high_shown:.1%}]")
    print(f"\n{'arm':32} {'token cost':>10} {'predicted':>10}")
    for point, guess in zip(points, predicted, strict=True):
        print(
            f"{point.name:32} {math.expm1(point.cost):>10.1%} {math.expm1(guess):>10.1%}"
        )


def bootstrap(energies: np.ndarray, cost: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the 2.5 % and 97.5 % quantiles of each coefficient over arms that are drawn anew."""
    rng = np.random.default_rng(0)
    samples = []
    for arms in rng.integers(0, len(cost), (DRAWS, len(cost))):
        coefficients, _ = nnls(energies[arms], cost[arms])
        samples.append(coefficients)
    low, high = np.percentile(samples, [2.5, 97.5], axis=0)
    return low, high


def read(store: StudyStore) -> dict[str, Point]:
    """Return the arms of a study by the id of their first run: a run that studies share counts once."""
    analysis = analyse(load_frames(store))
    diagnosed = {arm.arm: arm for arm in diagnose_study(store, analysis)[0]}
    products = {}
    for arm in analysis.others:
        if arm.name not in diagnosed or arm.token_cost.figure is None:
            continue
        fixed = dict.fromkeys(GEMMS, 0.0)
        drawn = dict.fromkeys(GEMMS, 0.0)
        for gemm in diagnosed[arm.name].gemms:
            energy = (gemm.relative_error.estimate or 0.0) ** 2
            share = 1.0
            if gemm.draws > 1:
                share = min(max(gemm.bias_share.estimate or 0.0, 0.0), 1.0)
            shrunk = (1 - (gemm.gain.estimate or 1.0)) ** 2
            fixed[gemm.gemm] = max(energy * share - shrunk, 0.0)  # type: ignore[index]
            drawn[gemm.gemm] = energy * (1 - share)  # type: ignore[index]
        products[arm.runs[0].run_id] = Point(
            arm.name,
            arm.token_cost.figure.value,
            tuple(fixed.values()),
            tuple(drawn.values()),
        )
    return products


if __name__ == "__main__":
    main()
