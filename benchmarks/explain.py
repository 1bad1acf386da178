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
    points: dict[str, Point] = {}
    for study in options.studies:
        points |= read(StudyStore(options.storage / study))
    names = [point.name for point in points.values()]
    cost = np.array([point.cost for point in points.values()])
    fixed = np.array([point.fixed for point in points.values()])
    drawn = np.array([point.drawn for point in points.values()])
    energies = np.hstack([fixed, drawn])
    costs, _ = nnls(energies, cost)
    predicted = energies @ costs
    rng = np.random.default_rng(0)
    samples = [
        nnls(energies[index], cost[index])[0]
        for index in rng.integers(0, len(cost), (DRAWS, len(cost)))
    ]
    share = 1 - float(
        np.sum((cost - predicted) ** 2) / np.sum((cost - cost.mean()) ** 2)
    )
    print(
        f"{len(cost)} arms; share of the variance of log(1 + token cost) explained: {share:.0%}"
    )
    print("\ntoken cost of an error of 10 % of the output's norm\n")
    for place, (part, gemm) in enumerate(
        (part, gemm) for part in ("fixed", "drawn") for gemm in GEMMS
    ):
        # Its energy is 0.01.
        each = [math.expm1(0.01 * sample[place]) for sample in samples]
        low, high = np.percentile(each, [2.5, 97.5])
        print(
            f"{part} in {gemm}: {math.expm1(0.01 * costs[place]):6.1%} [{low:.1%}, {high:.1%}]"
        )
    print(f"\n{'arm':32} {'token cost':>10} {'predicted':>10}")
    for index in np.argsort(cost):
        print(
            f"{names[index]:32} {math.expm1(cost[index]):>10.1%} {math.expm1(predicted[index]):>10.1%}"
        )


def read(store: StudyStore) -> dict[str, Point]:
    """Return the arms of a study by the id of their first run: a run that studies share counts once."""
    analysis = analyse(load_frames(store))
    diagnosed = {arm.arm: arm for arm in diagnose_study(store, analysis)[0]}
    products = {}
    for arm in analysis.others:
        if arm.name not in diagnosed or arm.token_cost.figure is None:
            continue
        fixed, drawn = dict.fromkeys(GEMMS, 0.0), dict.fromkeys(GEMMS, 0.0)
        for gemm in diagnosed[arm.name].gemms:
            energy = (gemm.relative_error.estimate or 0.0) ** 2
            share = (
                1.0
                if gemm.draws == 1
                else min(max(gemm.bias_share.estimate or 0.0, 0.0), 1.0)
            )
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
