"""How often a search finds a front that is known, by TPE and at random: 20 repeats, some seconds each.

The recipes are those of stabiliser × GEMMs × scale rule × where high precision is kept; a made-up trainer
gives each a loss of additive effects, two interactions and noise, and a step time. Nothing is trained: this
measures the search, not FP4.

    python benchmarks/search.py
"""

from __future__ import annotations

import argparse
import itertools
import random
from types import SimpleNamespace
from typing import Any

import optuna

from ablate.search.engine import Asked, TrialResult, seed_of
from ablate.search.halving import SearchPlan, candidate_of, search_grid
from ablate.study.search_space import Search

GEMMS = ("none", "F", "D", "W", "F+D", "F+W", "D+W", "F+D+W")
FACTORS = {
    "GEMMs": GEMMS,
    "stabiliser": ("none", "sr", "rht", "dht"),
    "scale rule": ("floor", "even"),
    "kept high": ("no layer", "last block"),
}
HARM = {"F": 0.012, "D": 0.02, "W": 0.05}
EASE = {"none": 1.0, "sr": 0.75, "rht": 0.5, "dht": 0.45}
OF_RULE = {"floor": 1.15, "even": 1.0}
OF_LAYERS = {"no layer": 1.0, "last block": 0.6}
GAIN = 0.14
OVERHEAD = {"none": 0.0, "sr": 0.004, "rht": 0.016, "dht": 0.013}
SLOWER = {"no layer": 1.0, "last block": 0.94}
"""Shares of the gain in time that are left."""


def recipes() -> dict[str, list[dict[str, str]]]:
    """Return the cells of each recipe: without a GEMM in FP4 all else means nothing."""
    found: dict[str, list[dict[str, str]]] = {"bf16": []}
    for labels in itertools.product(*FACTORS.values()):
        name = "bf16" if "none" in labels[:1] else " ".join(labels)
        found.setdefault(name, []).append(dict(zip(FACTORS, labels, strict=True)))
    return found


def truth(cell: dict[str, str]) -> tuple[float, float]:
    """Return loss without noise, and step time over BF16's."""
    if cell["GEMMs"] == "none":
        return 2.0, 1.0
    gemms = cell["GEMMs"].split("+")
    harm = sum(HARM[gemm] for gemm in gemms) + 0.015 * ("D" in gemms and "W" in gemms)
    ease = EASE[cell["stabiliser"]]
    if gemms == ["F"] and cell["stabiliser"] == "sr":
        ease *= 1.6  # stochastic rounding does not help the forward pass
    loss = (
        2.0 + harm * ease * OF_RULE[cell["scale rule"]] * OF_LAYERS[cell["kept high"]]
    )
    gained = (
        len(gemms) * (GAIN - OVERHEAD[cell["stabiliser"]]) * SLOWER[cell["kept high"]]
    )
    return loss, 1.0 - gained


def hypervolume(
    points: list[tuple[float, float]], reference: tuple[float, float]
) -> float:
    """Return the area that points dominate, up to a reference that they all dominate."""
    area, ceiling = 0.0, reference[1]
    for x, y in sorted(points):
        if y < ceiling:
            area += (reference[0] - x) * (ceiling - y)
            ceiling = y
    return area


def repeat(sampler: str, trials: int, noise: float, number: int) -> tuple[int, float]:
    """Return how many of the true front one search tried, and its share of the true front's hypervolume."""
    values = {name: truth(cells[0]) for name, cells in recipes().items()}

    def run(asked: list[Asked]) -> list[TrialResult]:
        found = []
        for name in (candidate_of(one.trial) for one in asked):
            loss, seconds = values[name]
            deviation = random.Random(seed_of("noise", number, name)).gauss(0.0, noise)
            found.append(TrialResult(values=(loss + deviation, seconds)))
        return found

    search = Search(
        hardware="B200", budgets=(1,), trials=trials, keep=1.0, sampler=sampler, seed=number, factors=FACTORS,
        cells=(),
    )  # fmt: skip
    plan: Any = SimpleNamespace(arm=lambda name: SimpleNamespace(runs=[], recipe=name))
    study: Any = None
    grid = SearchPlan(
        name="benchmark",
        search=search,
        cells=recipes(),
        first=("bf16",),
        study=study,
        plans=(plan,),
        times={},
    )
    storage = optuna.storages.InMemoryStorage()
    search_grid(grid, storage, run)
    names = {candidate_of(trial) for trial in grid.read(storage)[0]}
    front = true_front(values)
    reference = (max(loss for loss, _ in values.values()) + 0.01, 1.01)
    ratio = hypervolume([values[name] for name in names], reference) / hypervolume(
        [values[name] for name in front], reference
    )
    return len(front & names), ratio


def true_front(values: dict[str, tuple[float, float]]) -> set[str]:
    """Return the names that nothing dominates."""
    return {
        name
        for name, (loss, seconds) in values.items()
        if not any(
            other != (loss, seconds) and other[0] <= loss and other[1] <= seconds
            for other in values.values()
        )
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--trials", type=int, nargs="+", default=[20, 40, 60, 80])
    parser.add_argument(
        "--noise",
        type=float,
        default=0.002,
        help="standard deviation in nats per token",
    )
    options = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    values = {name: truth(cells[0]) for name, cells in recipes().items()}
    size = len(true_front(values))
    print(
        f"{len(values)} recipes, {size} on the true front, noise {options.noise:g} nats/token"
    )
    print("| trials | sampler | whole front found | share of the front | hypervolume |")
    print("|---:|---|---:|---:|---:|")
    for trials in options.trials:
        for sampler in ("tpe", "random"):
            found = [
                repeat(sampler, trials, options.noise, number)
                for number in range(options.repeats)
            ]
            whole = sum(count == size for count, _ in found)
            part = sum(count for count, _ in found) / len(found) / size
            area = sum(ratio for _, ratio in found) / len(found)
            times = f"{whole} of {options.repeats}"
            print(f"| {trials} | {sampler} | {times} | {part:.0%} | {area:.3f} |")


if __name__ == "__main__":
    main()
