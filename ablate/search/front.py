"""Which trials are best where there are two objectives: fronts, and the order in which trials are promoted.

All objectives are minimised. A trial with a violation is never on a front: its values stand for a miss.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ablate.search.ledger import Trial


def dominates(one: Sequence[float], other: Sequence[float]) -> bool:
    """Tell whether ``one`` is nowhere worse, and somewhere better."""
    return all(a <= b for a, b in zip(one, other, strict=True)) and tuple(one) != tuple(other)


def is_feasible(trial: Trial) -> bool:
    """Tell whether a trial has values of its own."""
    return trial.state == "complete" and not (trial.violation or 0.0) > 0


def fronts(points: Mapping[int, Sequence[float]]) -> list[list[int]]:
    """Return the keys in layers: those that nothing dominates, then those that only these do, and on."""
    left = dict(points)
    layers = []
    while left:
        layer = [
            key for key, point in left.items() if not any(dominates(other, point) for other in left.values())
        ]
        layers.append(layer)
        for key in layer:
            del left[key]
    return layers


def crowding(points: Mapping[int, Sequence[float]]) -> dict[int, float]:
    """Return each point's distance to its neighbours, each objective over its range; infinite at the ends."""
    distance = dict.fromkeys(points, 0.0)
    for axis in range(len(next(iter(points.values()), ()))):
        order = sorted(points, key=lambda key, axis=axis: (points[key][axis], key))  # type: ignore[misc]
        low, high = points[order[0]][axis], points[order[-1]][axis]
        distance[order[0]] = distance[order[-1]] = math.inf
        for before, key, after in zip(order, order[1:], order[2:], strict=False):
            distance[key] += (points[after][axis] - points[before][axis]) / (high - low or 1.0)
    return distance


def front(trials: Sequence[Trial]) -> list[Trial]:
    """Return the trials that none dominates, in the order of their last objective."""
    feasible = {trial.number: trial for trial in trials if is_feasible(trial)}
    layers = fronts({number: trial.values or () for number, trial in feasible.items()})
    first = [feasible[number] for number in layers[0]] if layers else []
    return sorted(first, key=lambda trial: (*reversed(trial.values or ()), trial.number))


def promoted(trials: Sequence[Trial], keep: float, diverged: float) -> list[Trial]:
    """Return the trials that go on to a larger budget: a share of them, but always the whole first front.

    By layer, within a layer by crowding distance, ties by number; then those that missed, the nearest first.
    A violation from ``diverged`` up is never promoted.
    """
    feasible = {trial.number: trial for trial in trials if is_feasible(trial)}
    layers = fronts({number: trial.values or () for number, trial in feasible.items()})
    order: list[Trial] = []
    for layer in layers:
        distance = crowding({number: feasible[number].values or () for number in layer})
        order += [feasible[number] for number in sorted(layer, key=lambda n: (-distance[n], n))]
    missed = [trial for trial in trials if trial.state == "complete" and not is_feasible(trial)]
    nearest = sorted(missed, key=lambda trial: (trial.violation or 0.0, trial.number))
    order += [trial for trial in nearest if (trial.violation or 0.0) < diverged]
    count = max(math.ceil(keep * len(trials)), len(layers[0]) if layers else 0)
    return order[:count]
