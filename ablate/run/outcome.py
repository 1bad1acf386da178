"""When a run reached the target, and how a run ended.

The rule decides the answer: read at evaluations alone, a cost can only be a multiple of the evaluation
interval, which in MLPerf's Llama 3.1 8B is as wide as the published effects. So by default the crossing is
interpolated, and one lucky evaluation is no crossing: the next one has to confirm it.

How it fails: it does not raise. A run that never crosses has no crossing; a run whose first evaluation is
already at or under the target crossed somewhere before it (``left_bound``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

Rule = Literal["confirmed", "first_eval"]
End = Literal["hit", "censored", "diverged", "missing", "unused"]


@dataclass(frozen=True, kw_only=True)
class Crossing:
    """Tokens to target. ``left_bound``: reached at or before these tokens, it is not known when."""

    tokens: float
    left_bound: bool = False


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How one run ended, and the range that its tokens to target lie in.

    ``low == high`` is a known figure. A censored or diverged run has its budget as ``low`` and infinity as
    ``high``: it never reached the target, however near it came. ``missing`` is no result. ``unused`` is said
    of a run, never of an outcome that is compared: its arm was stopped before, whatever came of the run.
    """

    seed: int
    end: End
    low: float = 0.0
    high: float = math.inf

    @property
    def exact(self) -> bool:
        """Whether the tokens to target are known, not just bounded."""
        return self.end == "hit" and self.low == self.high


def target_loss(kind: str, value: float) -> float:
    """Return the target as a validation loss in nats per token: a perplexity p means ln p."""
    return math.log(value) if kind == "perplexity" else value


def find_crossing(
    tokens: ArrayLike, loss: ArrayLike, target: float, rule: Rule = "confirmed"
) -> Crossing | None:
    """Return where a validation curve crosses the target, or None.

    ``confirmed``: the first evaluation at or under the target that the next evaluation confirms, or that is
    the last one; linear in tokens between it and the one before. ``first_eval``: the tokens of the first
    evaluation at or under the target, as MLPerf scores. Rows may come in any order; of several evaluations
    at the same tokens the last counts; one without a finite loss is none.
    """
    at, value = _clean(tokens, loss)
    under = value <= target
    if rule == "first_eval":
        first = np.flatnonzero(under)
        return Crossing(tokens=float(at[first[0]])) if len(first) else None
    # The last evaluation has none after it, and confirms itself.
    confirmed = np.flatnonzero(under & np.append(under[1:], True)[: len(under)])
    if not len(confirmed):
        return None
    i = int(confirmed[0])
    if i == 0:
        return Crossing(tokens=float(at[0]), left_bound=True)
    # value[i - 1] > target: had it been at or under the target, evaluation i would have confirmed it.
    share = (value[i - 1] - target) / (value[i - 1] - value[i])
    return Crossing(tokens=float(at[i - 1] + share * (at[i] - at[i - 1])))


def _clean(tokens: ArrayLike, loss: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    at = np.asarray(tokens, dtype=float)
    value = np.asarray(loss, dtype=float)
    if not (known := np.isfinite(value)).all():
        at, value = at[known], value[known]
    if len(at) > 1 and np.all(np.diff(at) > 0):
        return at, value
    # The first of the reversed rows is the last of the rows.
    unique, index = np.unique(at[::-1], return_index=True)
    return unique, value[::-1][index]


def outcome(
    *,
    seed: int,
    state: str,
    tokens: ArrayLike,
    loss: ArrayLike,
    target: float,
    rule: Rule,
    budget_tokens: float,
) -> Outcome:
    """Return how a run ended. Only finished and diverged runs are results; the rest is missing.

    A run still going that has crossed is missing all the same: to count it would favour the fast ones.
    """
    if state == "diverged":
        return Outcome(seed=seed, end="diverged", low=budget_tokens)
    if state != "finished" or not np.size(np.asarray(tokens)):
        return Outcome(seed=seed, end="missing")
    crossing = find_crossing(tokens, loss, target, rule)
    if crossing is None:
        # Censored at the last look: what came after it was not seen.
        return Outcome(seed=seed, end="censored", low=float(np.max(np.asarray(tokens, dtype=float))))
    low = 0.0 if crossing.left_bound else crossing.tokens
    return Outcome(seed=seed, end="hit", low=low, high=crossing.tokens)
