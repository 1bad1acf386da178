"""Main effects and two-way interactions of a grid's factors, on log tokens to target or on the final loss.

Least squares over runs with sum-to-zero coding, so that a main effect is the mean over the other factors'
levels. F tests of type II; the p-values of all terms are adjusted together after Holm. A term that the design
cannot tell from others (a fraction, missing cells) names these, and is not tested; where only a part of it
can be told, that part is tested, with fewer degrees of freedom. Where seeds are pairs, each seed is a block:
what all arms share of a seed is no error.

Where a value is not known, fewer than two factors vary or no degree of freedom is left for the error, there
are no effects and ``reason`` says why.
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
    """One term: a factor, or a pair of them. ``levels``: each level's mean deviation, of a main effect.

    On log T a deviation d means exp(d) − 1 more tokens than the mean over the levels. ``degrees`` that can be
    told, of ``full_degrees`` that the design would have with every cell.
    """

    term: str
    degrees: int
    full_degrees: int
    f: float | None = None
    p: float | None = None
    p_holm: float | None = None
    aliased_with: tuple[str, ...] = ()
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
    """Return the effects of factors on a value.

    Args:
        rows: one for each run: its factors' levels, its seed, and the value (None where it is not known).
            Runs of arms that stand beside the grid, such as a baseline by name, are left out.
        paired: equal seeds are pairs.
    """
    rows = _cells(rows)
    if unknown := sum(value is None for _, _, value in rows):
        return Effects(
            reason=f"{unknown} of {len(rows)} runs have no known value: no effects", runs=len(rows)
        )
    levels: dict[str, dict[str, None]] = {}
    for factors, _, _ in rows:
        for name, level in factors.items():
            levels.setdefault(name, {})[str(level)] = None
    complete = all(name in factors for factors, _, _ in rows for name in levels)
    varying = {name: list(own) for name, own in levels.items() if len(own) > 1}
    if len(varying) < 2 or not complete:
        return Effects(reason="fewer than two factors that vary", runs=len(rows))
    y = np.array([value for _, _, value in rows], dtype=float)
    coded = {name: _coded([str(f[name]) for f, _, _ in rows], own) for name, own in varying.items()}
    terms: dict[tuple[str, ...], np.ndarray] = {(name,): columns for name, columns in coded.items()}
    for a, b in itertools.combinations(varying, 2):
        terms[a, b] = np.stack([u * v for u in coded[a].T for v in coded[b].T], axis=1)
    common = np.ones((len(y), 1))
    seeds = list(dict.fromkeys(str(seed) for _, seed, _ in rows))
    if paired and len(seeds) > 1:
        common = np.hstack([common, _coded([str(seed) for _, seed, _ in rows], seeds)])
    return _fit(y, common, terms, varying)


def _cells(rows: Sequence[Row]) -> Sequence[Row]:
    """Return the runs of the grid: of the arms that set the same factors, and are more than any others."""
    arms: dict[frozenset[str], set[str]] = {}
    for factors, _, _ in rows:
        arms.setdefault(frozenset(factors), set()).add(repr(sorted(factors.items(), key=str)))
    sizes = Counter({names: len(own) for names, own in arms.items()}).most_common(2)
    if len(sizes) < 2 or sizes[0][1] == sizes[1][1]:
        return rows
    return [row for row in rows if frozenset(row[0]) == sizes[0][0]]


def _coded(values: list[str], levels: list[str]) -> np.ndarray:
    """Return sum-to-zero columns, one fewer than there are levels."""
    rows = np.vstack([np.eye(len(levels) - 1), -np.ones(len(levels) - 1)])
    return rows[[levels.index(value) for value in values]]


def _fit(
    y: np.ndarray,
    common: np.ndarray,
    terms: dict[tuple[str, ...], np.ndarray],
    levels: dict[str, list[str]],
) -> Effects:
    """Fit the terms beside ``common``: the mean, and the blocks."""
    kept: dict[tuple[str, ...], np.ndarray] = {}
    aliased: dict[tuple[str, ...], tuple[str, ...]] = {}
    for term, columns in terms.items():  # main effects first: an interaction is what gives way
        own = _told_apart(np.hstack([common, *kept.values()]), columns)
        if own.shape[1]:
            kept[term] = own
        else:
            shared = (_name(other) for other in kept if _share_space(columns, kept[other]))
            aliased[term] = tuple(shared) or ("the mean",)
    full = np.hstack([common, *kept.values()])
    degrees = len(y) - full.shape[1]
    if degrees < 1:
        return Effects(reason="no run to spare for the error: add seeds", runs=len(y))
    coefficients, rss = _least_squares(full, y)
    # Of equal runs nothing is left but rounding: no test is to be had from that.
    noise = rss / degrees
    if noise <= (_TINY * max(1.0, float(np.abs(y).max()))) ** 2:
        return Effects(
            reason="runs of equal factors gave equal values: no error to test against", runs=len(y)
        )
    found = []
    at = common.shape[1]
    for term, columns in terms.items():
        whole = columns.shape[1]
        if term in aliased:
            found.append(Effect(term=_name(term), degrees=0, full_degrees=whole, aliased_with=aliased[term]))
            continue
        # Type II: against the model of all terms that do not contain this one.
        others = [kept[other] for other in kept if other != term and not set(term) < set(other)]
        _, rss_without = _least_squares(np.hstack([common, *others]), y)
        _, rss_with = _least_squares(np.hstack([common, *others, kept[term]]), y)
        number = kept[term].shape[1]
        f = max(0.0, (rss_without - rss_with) / number) / noise
        own = coefficients[at : at + number]
        deviations = [*map(float, own), -float(own.sum())]
        found.append(
            Effect(
                term=_name(term), degrees=number, full_degrees=whole, f=f,
                p=float(fdtrc(number, degrees, f)),
                levels=dict(zip(levels[term[0]], deviations, strict=True))
                if len(term) == 1 and number == whole
                else {},
            )
        )  # fmt: skip
        at += number
    adjusted = iter(holm([effect.p for effect in found if effect.p is not None]))
    tested = tuple(one if one.p is None else replace(one, p_holm=next(adjusted)) for one in found)
    return Effects(terms=tested, residual=float(np.sqrt(noise)), residual_degrees=degrees, runs=len(y))


def _told_apart(before: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Return those of a term's columns that the terms before leave anything to."""
    kept: list[np.ndarray] = []
    for column in columns.T[:, :, None]:
        design = np.hstack([before, *kept, column])
        if np.linalg.matrix_rank(design) == design.shape[1]:
            kept.append(column)
    return np.hstack(kept) if kept else columns[:, :0]


def _least_squares(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, float]:
    coefficients, *_ = np.linalg.lstsq(x, y, rcond=None)
    return coefficients, float(np.sum((y - x @ coefficients) ** 2))


def _share_space(a: np.ndarray, b: np.ndarray) -> bool:
    """Tell whether two terms' columns are not orthogonal after their means are taken off."""
    a, b = a - a.mean(axis=0), b - b.mean(axis=0)
    return bool(np.abs(a.T @ b).max() > _TINY * len(a))


def _name(term: tuple[str, ...]) -> str:
    return " × ".join(term)


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values adjusted after Holm (1979), in the order given."""
    order = np.argsort(p_values, kind="stable")
    raised = np.asarray(p_values)[order] * np.arange(len(p_values), 0, -1)
    adjusted = np.empty(len(p_values))
    adjusted[order] = np.maximum.accumulate(np.minimum(1.0, raised))
    return [float(one) for one in adjusted]
