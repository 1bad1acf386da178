"""The best trials under two objectives: fronts, and the order in which trials are promoted.

All objectives are minimised. A trial with a violation is never on a front: its values stand for a miss.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ablate.search.ledger import Trial


def dominates(one: Sequence[float], other: Sequence[float]) -> bool:
    """Whether ``one`` is worse in no objective, and better in at least one."""
    return all(a <= b for a, b in zip(one, other, strict=True)) and tuple(one) != tuple(other)


def is_feasible(trial: Trial) -> bool:
    """Whether a trial is complete, with values that do not stand for a miss."""
    return trial.state == "complete" and not (trial.violation or 0.0) > 0


def layers(trials: Sequence[Trial]) -> list[list[Trial]]:
    """Return the feasible trials in layers: those that none dominates, then those that only these do, etc."""
    left = [trial for trial in trials if is_feasible(trial)]
    found = []
    while left:
        best = {
            trial.number
            for trial in left
            if not any(dominates(other.values or (), trial.values or ()) for other in left)
        }
        found.append([trial for trial in left if trial.number in best])
        left = [trial for trial in left if trial.number not in best]
    return found


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
    best = next(iter(layers(trials)), [])
    return sorted(best, key=lambda trial: (*reversed(trial.values or ()), trial.number))


def promoted(trials: Sequence[Trial], keep: float, diverged: float) -> list[Trial]:
    """Return the trials that go on to a larger budget: a share of them, but always the whole first front.

    By layer, within a layer by crowding distance, ties by number; then those that missed, the nearest first.
    A violation from ``diverged`` up is never promoted.
    """
    order: list[Trial] = []
    found = layers(trials)
    for layer in found:
        distance = crowding({trial.number: trial.values or () for trial in layer})
        order += sorted(layer, key=lambda trial: (-distance[trial.number], trial.number))
    missed = [trial for trial in trials if trial.state == "complete" and not is_feasible(trial)]
    nearest = sorted(missed, key=lambda trial: (trial.violation or 0.0, trial.number))
    order += [trial for trial in nearest if (trial.violation or 0.0) < diverged]
    return order[: max(math.ceil(keep * len(trials)), len(found[0]) if found else 0)]
