"""How often the intervals of the scaling law hold a known truth, in simulated studies.

python tests/reports/scaling_coverage.py [REPEATS]        prints a line a design, as Markdown

Losses follow the law of Hoffmann et al. (arXiv 2203.15556; γ = 1) or Quartet (arXiv 2505.14669; γ = 0.28),
with an arm of eff_N 0.7 and eff_D 0.95 and one of 1 and 0.85. A run spreads by 0.004 nats; 70 % of the
variance is its seed's, the same for all arms. ``miss``: what each arm's cells lie off the law besides (nats).
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ablate.reports.read.losses import LossPoint
from ablate.reports.statistics import law_fit
from ablate.reports.statistics.scaling import fit_scaling

if TYPE_CHECKING:
    from collections.abc import Iterator

LAWS = {
    "1": (406.4, 0.34, 410.7, 0.28, 1.0, 1.69),
    "0.28": (127_444.0, 0.5785, 465_834.0, 0.5389, 0.2764, 1.3408),
}
ARMS = {"bf16": (1.0, 1.0), "smaller": (0.7, 0.95), "less": (1.0, 0.85)}
SIZES = (30_000_000, 60_000_000, 120_000_000, 240_000_000)
BUDGETS = (600_000_000, 1_200_000_000, 2_400_000_000, 4_800_000_000)
WIDE = ((30_000_000, 100_000_000, 300_000_000), (600_000_000, 2_400_000_000, 9_600_000_000))
BEYOND = (1_000_000_000, 20_000_000_000)
SPREAD, OF_SEED = 0.004, 0.7


@dataclass(frozen=True, kw_only=True)
class Design:
    """One kind of study. ``read``: a run gives the losses of all budgets, as at a constant learning rate."""

    seeds: int
    law: str = "1"
    sizes: tuple[int, ...] = SIZES
    budgets: tuple[int, ...] = BUDGETS
    paired: bool = True
    miss: float = 0.0
    read: bool = False

    def __str__(self) -> str:
        runs = "one run" if self.seeds == 1 else f"{self.seeds} {'pairs' if self.paired else 'runs'}"
        more = (
            ", read at all budgets" if self.read else f", {self.miss} nats off the law" if self.miss else ""
        )
        return f"{len(self.sizes)} × {len(self.budgets)}, {runs}, γ = {self.law}{more}"


DESIGNS = (
    Design(seeds=2),
    Design(seeds=3),
    Design(seeds=5),
    Design(seeds=3, sizes=WIDE[0], budgets=WIDE[1]),
    Design(seeds=3, paired=False),
    Design(seeds=3, law="0.28"),
    Design(seeds=3, law="0.28", miss=0.004),
    Design(seeds=1, law="0.28"),
    Design(seeds=3, sizes=WIDE[0], read=True),
    Design(seeds=5, sizes=WIDE[0], read=True),
)


def loss_of(law: str, size: float, budget: float, eff_n: float, eff_d: float) -> float:
    a, alpha, b, beta, gamma, e = LAWS[law]
    return (a / (size * eff_n) ** alpha + b / (budget * eff_d) ** beta) ** gamma + e


def simulated(design: Design, rng: np.random.Generator) -> Iterator[LossPoint]:
    """Yield the losses of one study."""
    shape = (len(design.budgets), design.seeds)
    for size in design.sizes:
        of_seed = _noise(design, rng, shape)
        for arm, factors in ARMS.items():
            noise = math.sqrt(OF_SEED) * (of_seed if design.paired else _noise(design, rng, shape))
            noise = noise + math.sqrt(1 - OF_SEED) * _noise(design, rng, shape)
            for row, budget in zip(noise, design.budgets, strict=True):
                law = loss_of(design.law, size, budget, *factors) + rng.normal(0, design.miss)
                for seed, off in enumerate(row):
                    run = f"{arm} {size} {seed}" if design.read else f"{arm} {size} {budget} {seed}"
                    yield LossPoint(
                        arm=arm, parameters=size, tokens=budget, seed=seed, loss=law + SPREAD * off, run=run
                    )


def _noise(design: Design, rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """Return standard normal numbers; budgets of one run have half of their variance in common."""
    own = rng.normal(size=shape)
    return (own + rng.normal(size=(1, shape[1]))) / math.sqrt(2) if design.read else own


def coverage(design: Design, repeats: int) -> dict[str, tuple[float, float]]:
    """Return of eff_N, eff_D and the gap beyond how often it is held, and the intervals' median width."""
    rng = np.random.default_rng(7)
    held: dict[str, list[tuple[bool, float]]] = {"eff_N": [], "eff_D": [], "gap": []}
    for _ in range(repeats):
        found = fit_scaling(list(simulated(design, rng)), "bf16", paired=design.paired, at=[BEYOND])
        assert not isinstance(found, str), found
        base = loss_of(design.law, *BEYOND, 1.0, 1.0)
        for arm, place in zip(found.arms, found.predictions[0].places[1:], strict=True):
            eff_n, eff_d = ARMS[arm.name]
            gap = loss_of(design.law, *BEYOND, eff_n, eff_d) - base
            for name, interval, truth in (
                ("eff_N", arm.eff_n, eff_n), ("eff_D", arm.eff_d, eff_d), ("gap", place.gap, gap),
            ):  # fmt: skip
                low = -math.inf if interval.low is None else interval.low
                high = math.inf if interval.high is None else interval.high
                held[name].append((low <= truth <= high, high - low))
    return {
        name: (float(np.mean([one for one, _ in own])), float(np.median([width for _, width in own])))
        for name, own in held.items()
    }


def main() -> None:
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 300
    law_fit.REPLICATES = 400
    print("| sizes × budgets | eff_N held | width | eff_D held | width | gap 4 times beyond held |")
    print("|---|---|---|---|---|---|")
    for design in DESIGNS:
        found = coverage(design, repeats)
        cells = (
            f"{100 * share:.1f} %" + (f" | {width:.3f}" if name != "gap" else "")
            for name, (share, width) in found.items()
        )
        print(f"| {design} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
