"""Main effects and two-way interactions of a grid's factors, on log tokens to target or on the final loss.

Least squares over runs with sum-to-zero coding, so that a main effect is the mean over the other factors'
levels. F tests of type II; the p-values of all terms are adjusted together after Holm. With missing cells
only the estimable part of a term is tested; a term without such a part is not tested. If seeds are pairs,
each seed is a block: what all arms share of a seed is not error.

If a value is unknown, fewer than two factors vary or no degree of freedom is left for the error, there are no
effects and ``reason`` says why.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.special import fdtrc

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    Row = tuple[Mapping[str, Any], int, float | None]

_TINY = 1e-9


@dataclass(frozen=True, kw_only=True)
class Effect:
    """One term: a factor, or a pair of them. ``levels``: for a main effect, each level's mean deviation.

    On log T a deviation d means exp(d) − 1 more tokens than the mean over the levels. ``degrees``: 0 if the
    design cannot separate the term from those before it.
    """

    term: str
    degrees: int
    f: float | None = None
    p: float | None = None
    p_holm: float | None = None
    levels: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Effects:
    """All terms, with the residual's standard deviation and degrees of freedom."""

    reason: str | None = None
    runs: int = 0
    residual: float | None = None
    residual_degrees: int = 0
    terms: tuple[Effect, ...] = ()


def factor_effects(rows: Sequence[Row], *, paired: bool = False) -> Effects:
    """Estimate and test the effects of factors on a value.

    Args:
        rows: one for each run: its factors' levels, its seed, and the value (None if unknown). Only runs
            with the most frequent set of factors are used.
        paired: equal seeds are pairs.
    """
    if rows:
        grid = Counter(frozenset(factors) for factors, _, _ in rows).most_common(1)[0][0]
        rows = [row for row in rows if row[0].keys() == grid]

    def none(reason: str) -> Effects:
        return Effects(reason=reason, runs=len(rows))

    if unknown := sum(value is None for _, _, value in rows):
        return none(f"{unknown} of {len(rows)} runs have no known value: no effects")
    values = {name: [str(factors[name]) for factors, _, _ in rows] for name in (rows[0][0] if rows else ())}
    levels = {name: each for name in values if len(each := list(dict.fromkeys(values[name]))) > 1}
    if len(levels) < 2:
        return none("fewer than two factors that vary")
    y = np.array([value for _, _, value in rows], dtype=float)
    terms: dict[tuple[str, ...], np.ndarray] = {(name,): _coded(values[name]) for name in levels}
    for a, b in itertools.combinations(levels, 2):
        terms[a, b] = np.stack([u * v for u in terms[a,].T for v in terms[b,].T], axis=1)
    common = np.ones((len(y), 1))
    if paired:
        common = np.hstack([common, _coded([str(seed) for _, seed, _ in rows])])
    kept: dict[tuple[str, ...], np.ndarray] = {}
    for term, columns in terms.items():  # main effects first, so that interactions lose columns
        told: list[int] = []
        for i in range(columns.shape[1]):
            design = np.hstack([common, *kept.values(), columns[:, [*told, i]]])
            if np.linalg.matrix_rank(design) == design.shape[1]:
                told.append(i)
        kept[term] = columns[:, told]
    degrees = len(y) - sum(columns.shape[1] for columns in (common, *kept.values()))
    if degrees < 1:
        return none("no run to spare for the error: add seeds")
    coefficients, rss = _least_squares([common, *kept.values()], y)
    noise = rss / degrees
    # With equal values the residual is only rounding, which allows no test.
    if noise <= (_TINY * max(1.0, float(np.abs(y).max()))) ** 2:
        return none("runs of equal factors gave equal values: no error to test against")
    found = []
    at = common.shape[1]
    for term, columns in kept.items():
        number = columns.shape[1]
        own, at = coefficients[at : at + number], at + number
        f = p = None
        if number:
            # Type II: against the model of all terms that do not contain this one.
            others = [kept[other] for other in kept if other != term and not set(term) < set(other)]
            _, without = _least_squares([common, *others], y)
            _, complete = _least_squares([common, *others, columns], y)
            f = max(0.0, (without - complete) / number) / noise
            p = float(fdtrc(number, degrees, f))
        deviations = {}
        if len(term) == 1 and number == terms[term].shape[1]:
            deviations = dict(zip(levels[term[0]], [*map(float, own), -float(own.sum())], strict=True))
        found.append(Effect(term=" × ".join(term), degrees=number, f=f, p=p, levels=deviations))
    adjusted = iter(holm([effect.p for effect in found if effect.p is not None]))
    tested = tuple(one if one.p is None else replace(one, p_holm=next(adjusted)) for one in found)
    return Effects(terms=tested, residual=float(np.sqrt(noise)), residual_degrees=degrees, runs=len(y))


def _coded(values: Sequence[str]) -> np.ndarray:
    """Code a factor as sum-to-zero columns, one fewer than it has levels."""
    levels = list(dict.fromkeys(values))
    rows = np.vstack([np.eye(len(levels) - 1), -np.ones(len(levels) - 1)])
    return rows[[levels.index(value) for value in values]]


def _least_squares(parts: Sequence[np.ndarray], y: np.ndarray) -> tuple[np.ndarray, float]:
    x = np.hstack(parts)
    coefficients, *_ = np.linalg.lstsq(x, y, rcond=None)
    return coefficients, float(np.sum((y - x @ coefficients) ** 2))


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjust p-values after Holm (1979); the order is kept."""
    order = np.argsort(p_values, kind="stable")
    raised = np.asarray(p_values)[order] * np.arange(len(p_values), 0, -1)
    adjusted = np.empty(len(p_values))
    adjusted[order] = np.maximum.accumulate(np.minimum(1.0, raised))
    return [float(one) for one in adjusted]
