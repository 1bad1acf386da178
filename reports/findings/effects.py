"""Average effects of a study's factors: what a GEMM, a stabiliser or a setting does over all else that varies.

A *pair* is two arms that differ in one factor alone. An effect is the mean over all pairs of the same two
levels of log T, second arm minus first. Each seed that all of its arms have in common gives one value of that
contrast, and its interval is the t interval of these values, moderated by the other effects over the same
level (``intervals``). The residual of a table of arms by seeds would be too small: it leaves out how the
contrast itself varies from seed to seed.

Whether an effect is the same in every pair is an F test of pairs by seeds (repeated measures). Pairs that
share an arm are correlated, so both degrees of freedom are multiplied by Box's epsilon (1954, Ann. Math.
Stat. 25: 484), here of arms that all spread alike. A large p does not show that the pairs are equal.

How it fails: a pair is left out, and named, if not every run of both arms has reached the target: the effect
is then that of the other pairs. Studies without paired seeds have no effects.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

import numpy as np
from scipy.special import fdtrc

from ablate.reports.findings.results import Effect, Pair
from ablate.results.intervals import Interval, change_interval, combination, contrasts
from ablate.results.losses import with_result

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ablate.reports.findings.gemms import Cell, Step
    from ablate.reports.findings.results import ArmResult
    from ablate.results.intervals import Method, Values

    Logs = Mapping[str, Mapping[int, float]]
    """Log tokens to target of each arm and seed; empty for an arm with a run that has none."""
    Names = tuple[str, str]
    """The two arms of a pair."""
    Change = tuple[str, str, str, Names]
    """Factor, the level that the first arm has, that of the second, and the two arms."""


def find_effects(
    arms: Sequence[ArmResult],
    cells: Mapping[str, Cell],
    steps: Sequence[Step],
    method: Method,
) -> tuple[Effect, ...]:
    """Compute the effect of each change that at least two pairs of arms make.

    ``cells``: of the arms whose recipe has one. ``steps``: pairs that differ in one GEMM.
    """
    if not method.paired:
        return ()
    logs = {}
    counted_from = {}
    for arm in arms:
        logs[arm.name] = log_tokens_by_seed(arm)
        counted_from[arm.name] = arm.counted_from
    pools: dict[tuple[str, str], dict[str, list[Names]]] = {}
    for factor, over, level, names in itertools.chain(
        _changes_of_gemms(steps, cells),
        _changes_of_stabilisers(cells),
        _changes_of_settings(arms),
    ):
        if counted_from[names[0]] == counted_from[names[1]]:
            pool = pools.setdefault((factor, over), {})
            pool.setdefault(level, []).append(names)
    effects = []
    for (factor, over), pool in pools.items():
        designs = {}
        for level, pairs in pool.items():
            known = [pair for pair in pairs if logs[pair[0]] and logs[pair[1]]]
            if known and len(pairs) > 1:
                designs[level] = Design(known, logs)
        for level, interval in averages(designs, method).items():
            effects.append(
                Effect(
                    **vars(interval),
                    factor=factor,
                    over=over,
                    level=level,
                    n=len(designs[level].seeds),
                    p_same=designs[level].p_same(),
                    pairs=tuple(_pair(names, logs) for names in pool[level]),
                )
            )
    return tuple(effects)


def averages(designs: Mapping[str, Design], method: Method) -> dict[str, Interval]:
    """Return the average change of each level that has seeds in common; the levels moderate each other."""
    sides = {level: design.sides for level, design in designs.items() if design.seeds}
    intervals = {}
    for level, compared in contrasts(sides, method).items():
        figure = combination([(designs[level].size, compared.estimate)])
        intervals[level] = change_interval(figure, method.alpha)
    return intervals


def log_tokens_by_seed(arm: ArmResult) -> dict[int, float]:
    """Return log T of each seed; empty unless every run with a result has one."""
    runs = with_result(arm.used)
    if not all(run.exact for run in runs):
        return {}
    return {run.seed: math.log(run.high) for run in runs}


def _pair(names: Names, logs: Logs) -> Pair:
    first, second = (list(logs[arm].values()) for arm in names)
    change = None
    if first and second:
        change = math.expm1(float(np.mean(second) - np.mean(first)))
    return Pair(from_arm=names[0], to_arm=names[1], change=change)


def _changes_of_gemms(
    steps: Sequence[Step], cells: Mapping[str, Cell]
) -> Iterator[Change]:
    """Yield the steps in which the added GEMM has the stabiliser of those that were in FP4 before."""
    for step in steps:
        before = cells.get(step.from_arm)
        if before is None or before.stabiliser == cells[step.to_arm].stabiliser:
            yield "gemm", "not in FP4", step.gemm, (step.from_arm, step.to_arm)


def _changes_of_stabilisers(cells: Mapping[str, Cell]) -> Iterator[Change]:
    """Yield pairs of which the second arm has one more stabiliser, or random signs in its Hadamard."""
    stabilisers = {arm: _stabilisers(cell) for arm, cell in cells.items()}
    for first, second in itertools.permutations(cells.values(), 2):
        if not first.is_alike(second):
            continue
        names = (first.arm, second.arm)
        rounding, rotation, size = stabilisers[first.arm]
        next_rounding, next_rotation, next_size = stabilisers[second.arm]
        if (rotation, size) == (next_rotation, next_size):
            if next_rounding and not rounding:
                yield "stabiliser", "none", next_rounding, names
        elif rounding != next_rounding:
            continue
        elif not rotation:
            yield "stabiliser", "none", next_rotation, names
        elif size == next_size and rotation.replace("DHT", "RHT") == next_rotation:
            yield "stabiliser", rotation, next_rotation, names


def _stabilisers(cell: Cell) -> tuple[str, str, int]:
    """Return the rounding and the rotation, each with its operands unless all have it, and its size."""
    size = 0
    num_operands = 0
    stochastic = []
    rotated: dict[str, list[str]] = {}
    for gemm, name, operand in cell.recipe.operands():
        if gemm in cell.gemms:
            num_operands += 1
            if operand.is_stochastic:
                stochastic.append(f"{gemm} {name}")
            if operand.hadamard:
                rotated.setdefault(operand.signs, []).append(f"{gemm} {name}")
                size = max(size, operand.hadamard)

    def level(word: str, names: list[str]) -> str:
        if len(names) in (0, num_operands):
            return word if names else ""
        return f"{word} on {', '.join(names)}"

    rotations = []
    for signs, names in sorted(rotated.items()):
        word = {"none": "DHT", "step": "RHT"}.get(signs, f"RHT {signs}")
        rotations.append(level(word, names))
    rounding = level(cell.stabiliser.partition("+")[0].rstrip("*"), stochastic)
    return rounding, " and ".join(rotations), size


def _changes_of_settings(arms: Sequence[ArmResult]) -> Iterator[Change]:
    """Yield pairs, in the study's order, that differ in the scale rule or in one key outside of the recipe."""
    planned = [arm.planned for arm in arms if arm.config and not arm.planned.again]
    for first, second in itertools.combinations(planned, 2):
        differs = {**second.differs, **first.differs}
        changed = [
            key for key in differs if first.differs.get(key) != second.differs.get(key)
        ]
        key = changed[0] if len(changed) == 1 else "recipe"
        if key == "recipe.scale" or not key.startswith("recipe"):
            unchanged = (None, differs[key][0])
            _, over = first.differs.get(key, unchanged)
            _, level = second.differs.get(key, unchanged)
            yield key, str(over), str(level), (first.name, second.name)


class Design:
    """The pairs of one change that are averaged.

    ``incidence``: a row for each pair, a column for each arm: 1 for its second arm, −1 for its first one.
    ``gaps``: log T, second arm minus first: a row for each pair, a column for each of ``seeds``, which all
    arms have. ``size``: by how much more the mean gap spreads than log T of one arm, if all spread alike.
    """

    def __init__(self, pairs: Sequence[Names], logs: Logs) -> None:
        arms = list(dict.fromkeys(itertools.chain(*pairs)))
        self.seeds = sorted(set.intersection(*(set(logs[arm]) for arm in arms)))
        values = np.array([[logs[arm][seed] for seed in self.seeds] for arm in arms])
        self.incidence = np.zeros((len(pairs), len(arms)))
        for row, (first, second) in zip(self.incidence, pairs, strict=True):
            row[arms.index(first)] = -1
            row[arms.index(second)] = 1
        self.gaps = self.incidence @ values
        self.size = float(np.linalg.norm(self.incidence.mean(axis=0)))

    @property
    def sides(self) -> tuple[Values, Values]:
        """Each seed's mean gap, so scaled that all effects spread alike, to be compared with zero."""
        means = self.gaps.mean(axis=0) / self.size
        zeros = dict.fromkeys(self.seeds, 0.0)
        return list(zip(self.seeds, means.tolist(), strict=True)), list(zeros.items())

    def p_same(self) -> float | None:
        """Test that the effect is the same in every pair."""
        freedom = len(self.seeds) - 1
        gaps = self.gaps - self.gaps.mean(axis=0)
        means = gaps.mean(axis=1, keepdims=True)
        within = float(((gaps - means) ** 2).sum())
        if len(gaps) < 2 or not within:
            return None
        ratio = freedom * len(self.seeds) * float((means**2).sum()) / within
        centred = self.incidence - self.incidence.mean(axis=0)
        spread = centred @ centred.T
        degrees = float(np.trace(spread) ** 2 / (spread**2).sum())
        return float(fdtrc(degrees, degrees * freedom, ratio))
