"""When a run reached the target, and how it ended.

The crossing is interpolated by default. Read at evaluations alone, a cost is a multiple of the evaluation
interval, which in MLPerf's Llama 3.1 8B is as wide as the published effects. The next evaluation has to
confirm a crossing, so that one lucky evaluation does not count. Where training is known to be steady around
it, a local fit of the curve says where it lies (``local_fit``): two evaluations alone carry all their noise.

A run that never crosses has no crossing; a run whose first evaluation is already at or under the target
crossed at an unknown earlier point (``left_bound``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike

    from ablate.run.local_fit import LocalFit

Rule = Literal["confirmed", "first_eval"]
End = Literal["hit", "censored", "ended", "diverged", "missing", "unused"]


@dataclass(frozen=True, kw_only=True)
class Crossing:
    """Tokens to target. ``left_bound``: the run reached the target at or before these tokens."""

    tokens: float
    left_bound: bool = False


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How one run ended, and the range of its tokens to target.

    ``low == high`` means a known value. A censored or diverged run never reached the target: ``low`` is its
    budget and ``high`` is infinity. ``ended``: a finished run where there is no target. ``missing`` means no
    result. ``unused`` describes a run of an arm that was stopped earlier, whatever the run's result; compared
    outcomes never have it. ``lost``: of a missing one, that no result is to come unless somebody asks for it
    again. ``interpolated`` and ``fitted``: of a hit, the crossing by either way, in tokens; the fit's is the
    value where there is one.
    """

    seed: int
    end: End
    low: float = 0.0
    high: float = math.inf
    lost: bool = False
    interpolated: float | None = None
    fitted: float | None = None

    @property
    def exact(self) -> bool:
        """Whether the tokens to target are known exactly."""
        return self.end == "hit" and 0 < self.low == self.high

    def after(self, tokens: float) -> Outcome:
        """Return the same with its tokens counted from there on; a crossing before is at or before 0."""
        interpolated, fitted = (
            None if value is None else value - tokens for value in (self.interpolated, self.fitted)
        )
        low, high = (max(0.0, value - tokens) for value in (self.low, self.high))
        return replace(self, low=low, high=high, interpolated=interpolated, fitted=fitted)


def find_crossing(
    tokens: ArrayLike, loss: ArrayLike, target: float, rule: Rule = "confirmed"
) -> Crossing | None:
    """Return the point where a validation curve crosses the target, or None.

    ``confirmed``: the first evaluation at or under the target that the next evaluation confirms, or that is
    the last one; linear in ln tokens between it and the one before, as loss curves are nearly straight in
    ln tokens. ``first_eval``: the tokens of the first evaluation at or under the target, as MLPerf scores.
    Rows may come in any order. Among evaluations at the same tokens the last one counts. Evaluations without
    a finite loss are ignored.
    """
    at, value = _clean(tokens, loss)
    under = value <= target
    if rule == "first_eval":
        first = np.flatnonzero(under)
        return Crossing(tokens=float(at[first[0]])) if len(first) else None
    # The last evaluation has no successor and confirms itself.
    confirmed = np.flatnonzero(under & np.append(under[1:], True)[: len(under)])
    if not len(confirmed):
        return None
    i = int(confirmed[0])
    if i == 0:
        return Crossing(tokens=float(at[0]), left_bound=True)
    # value[i - 1] > target: otherwise evaluation i would have confirmed evaluation i - 1.
    share = (value[i - 1] - target) / (value[i - 1] - value[i])
    if at[i - 1] <= 0:  # a logarithm has no 0
        return Crossing(tokens=float(share * at[i]))
    return Crossing(tokens=float(at[i - 1] * (at[i] / at[i - 1]) ** share))


def _clean(tokens: ArrayLike, loss: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    at = np.asarray(tokens, dtype=float)
    value = np.asarray(loss, dtype=float)
    if not (known := np.isfinite(value)).all():
        at, value = at[known], value[known]
    if len(at) > 1 and np.all(np.diff(at) > 0):
        return at, value
    # np.unique takes the first of the reversed rows, which is the last row.
    unique, index = np.unique(at[::-1], return_index=True)
    return unique, value[::-1][index]


def outcome(
    *,
    seed: int,
    state: str,
    tokens: ArrayLike,
    loss: ArrayLike,
    target: float | None,
    rule: Rule,
    budget_tokens: float,
    fit: LocalFit | None = None,
) -> Outcome:
    """Return how a run ended. Only finished and diverged runs are results; all others are missing.

    A running run that has crossed is missing too: counting it would favour fast runs. ``target``: nats per
    token, None without one. ``fit``: of the same evaluations; ``first_eval`` does not ask it.
    """
    if state == "diverged":
        return Outcome(seed=seed, end="diverged", low=budget_tokens)
    if state != "finished" or not np.size(np.asarray(tokens)):
        return Outcome(seed=seed, end="missing", lost=state in ("failed", "set apart"))
    if target is None:
        return Outcome(seed=seed, end="ended", low=budget_tokens)
    return outcomes(seed=seed, tokens=tokens, loss=loss, targets=(target,), rule=rule, fit=fit)[0]


def outcomes(
    *,
    seed: int,
    tokens: ArrayLike,
    loss: ArrayLike,
    targets: Sequence[float],
    rule: Rule,
    fit: LocalFit | None = None,
) -> list[Outcome]:
    """Return how a finished run stands to each of several targets (nats per token)."""
    found = [find_crossing(tokens, loss, target, rule) for target in targets]
    inner = [i for i, one in enumerate(found) if one is not None and not one.left_bound and one.tokens > 0]
    fitted: dict[int, float] = {}
    if fit is not None and rule == "confirmed" and inner:
        near = [one.tokens for i in inner if (one := found[i]) is not None]
        values = fit.crossings(near, [targets[i] for i in inner])
        fitted = {i: float(value) for i, value in zip(inner, values, strict=True) if math.isfinite(value)}
    # Censored at the last evaluation: the rest was not observed.
    last = float(np.max(np.asarray(tokens, dtype=float)))
    return [
        Outcome(seed=seed, end="censored", low=last)
        if one is None
        else Outcome(seed=seed, end="hit", low=0.0, high=one.tokens)
        if one.left_bound
        else Outcome(
            seed=seed, end="hit", low=fitted.get(i, one.tokens), high=fitted.get(i, one.tokens),
            interpolated=one.tokens, fitted=fitted.get(i),
        )
        for i, one in enumerate(found)
    ]  # fmt: skip
