"""When a run reached the target, and how it ended.

The crossing is interpolated by default. Read at evaluations alone, a cost is a multiple of the evaluation
interval, which in MLPerf's Llama 3.1 8B is as wide as the published effects. The next evaluation has to
confirm a crossing, so that one lucky evaluation does not count. Where training is known to be steady around
it, a local fit of the curve gives the crossing, because two evaluations alone carry all their noise.

A run that never crosses has no crossing; a run whose first evaluation is already at or under the target
crossed at an unknown earlier point.

``LocalFit`` is locally weighted regression (LOWESS; Cleveland 1979, JASA 74) of the loss on x = ln tokens: at
each place a straight line with the weights (1 − |Δx / h|³)³, h = 0.3 or wide enough for four evaluations, and
two passes with bisquare weights at 6 times the median residual, so that an evaluation that went wrong hardly
counts. A line cannot follow a kink. So a fit uses the evaluations of one span, in which nothing of the
training changes (``schedule.steady_spans``), and only if the span extends by h on both sides of the crossing.

Where the rate begins to fall, or the recipe changes, between the two evaluations around a crossing, no straight
line leads from one to the other: the crossing is then known to lie between them, and no better.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import ArrayLike

Rule = Literal["confirmed", "first_eval"]
End = Literal["hit", "censored", "ended", "diverged", "missing", "unused"]


WIDTH = 0.3
"""In ln tokens: evaluations of 26 % fewer to 35 % more tokens count."""
_NEIGHBOURS = 4
_PASSES = 2
_CUT = 6.0
_PLACES = 250
_BLOCK = 1 << 20
_STEPS = 50


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How one run ended, and the range of its tokens to target.

    ``low == high`` means a known value. Of a hit ``low`` is 0 if it came by the first evaluation, and the
    evaluation before if training changed between the two around it. A censored or diverged run never reached
    the target: ``high`` is infinity, ``low`` its last evaluation if censored, its budget if diverged.
    ``ended``: a finished run where there is no target. ``missing`` means no result. ``unused`` describes a run
    of an arm that was stopped earlier, whatever the run's result; compared outcomes never have it.
    ``lost``: a missing run that gets no result unless somebody asks for it again.
    ``interpolated`` and ``fitted``: the crossing of a hit, in tokens, by either way; the fit's is the value
    if there is one.
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

    @property
    def at_change(self) -> bool:
        """Whether the schedule or the recipe changed between the evaluations around the crossing."""
        return self.end == "hit" and 0 < self.low < self.high

    def after(self, tokens: float) -> Outcome:
        """Count the tokens from ``tokens`` on; ``low`` and ``high`` of an earlier crossing become 0."""
        return replace(
            self,
            low=max(0.0, self.low - tokens),
            high=max(0.0, self.high - tokens),
            interpolated=None
            if self.interpolated is None
            else self.interpolated - tokens,
            fitted=None if self.fitted is None else self.fitted - tokens,
        )


def find_crossing(
    tokens: ArrayLike, loss: ArrayLike, target: float, rule: Rule = "confirmed"
) -> tuple[float, float] | None:
    """Return the range in which a validation curve crosses the target, in tokens; None if it does not.

    Both ends are equal if the place is known; the first one is 0 if the curve was never above the target.

    ``confirmed``: the first evaluation at or under the target that the next evaluation confirms, or that is
    the last one; interpolated in ln tokens between it and the one before, because loss curves are nearly
    straight there. ``first_eval``: the tokens of the first evaluation at or under the target, as MLPerf
    scores.
    Rows may come in any order. Among evaluations at the same tokens the last one counts. Evaluations without
    a finite loss are ignored.
    """
    places = np.asarray(tokens, dtype=float)
    losses = np.asarray(loss, dtype=float)
    is_finite = np.isfinite(losses)
    places = places[is_finite]
    losses = losses[is_finite]
    if len(places) > 1 and not np.all(np.diff(places) > 0):
        # np.unique takes the first of the reversed rows, which is the last row.
        places, indices = np.unique(places[::-1], return_index=True)
        losses = losses[::-1][indices]
    is_hit = losses <= target
    if rule == "confirmed":
        # The last evaluation has no successor and confirms itself.
        is_hit = is_hit & np.append(is_hit[1:], True)[: len(is_hit)]
    if not is_hit.any():
        return None
    index = int(is_hit.argmax())
    place = places[index]
    if rule == "confirmed":
        if index == 0:
            return 0.0, float(place)
        before = places[index - 1]
        # This loss is above the target: otherwise the evaluation would have confirmed this one.
        loss_before = losses[index - 1]
        share = (loss_before - target) / (loss_before - losses[index])
        # 0 has no logarithm.
        place = before * (place / before) ** share if before > 0 else share * place
    return float(place), float(place)


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
    token, None without one. ``fit``: of the same evaluations; ``first_eval`` does not use it.
    """
    if state == "diverged":
        return Outcome(seed=seed, end="diverged", low=budget_tokens)
    if state != "finished" or not np.size(tokens):
        return Outcome(seed=seed, end="missing", lost=state in ("failed", "set apart"))
    if target is None:
        return Outcome(seed=seed, end="ended", low=budget_tokens)
    return outcomes(
        seed=seed, tokens=tokens, loss=loss, targets=(target,), rule=rule, fit=fit
    )[0]


def outcomes(
    *,
    seed: int,
    tokens: ArrayLike,
    loss: ArrayLike,
    targets: Sequence[float],
    rule: Rule,
    fit: LocalFit | None = None,
) -> list[Outcome]:
    """Return a finished run's outcome for each target, a loss."""
    crossings = [find_crossing(tokens, loss, target, rule) for target in targets]
    fitted = np.full(len(targets), np.nan)
    if fit is not None and rule == "confirmed":
        near = [
            crossing[1] if crossing and crossing[0] > 0 else np.nan
            for crossing in crossings
        ]
        fitted = fit.crossings(near, targets)
    last = float(np.max(tokens))
    ends = []
    for crossing, value in zip(crossings, map(float, fitted), strict=True):
        # censored at the last evaluation: the rest was not observed
        if crossing is None:
            ends.append(Outcome(seed=seed, end="censored", low=last))
            continue
        low, high = crossing
        hit = Outcome(seed=seed, end="hit", low=low, high=high)
        if 0 < low == high:
            hit = replace(hit, interpolated=high)
            if math.isfinite(value):
                hit = replace(hit, low=value, high=value, fitted=value)
            elif rule == "confirmed" and fit is not None:
                low, high = fit.around_a_change(high)
                hit = replace(hit, low=low, high=high)
        ends.append(hit)
    return ends


class LocalFit:
    """The loss curve of one run over the spans of tokens in which training is steady."""

    def __init__(
        self, tokens: ArrayLike, loss: ArrayLike, spans: Iterable[tuple[float, float]]
    ) -> None:
        self._tokens = np.asarray(tokens, dtype=float)
        self._loss = np.asarray(loss, dtype=float)
        self._spans = list(spans)
        self._curves: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}

    def around_a_change(self, place: float) -> tuple[float, float]:
        """Return the evaluations around a crossing if a span ends between them, else the place twice."""
        before = float(np.max(self._tokens[self._tokens < place], initial=0.0))
        after = float(np.min(self._tokens[self._tokens >= place], initial=math.inf))
        if any(before < end < after for _, end in self._spans):
            return before, after
        return place, place

    def crossings(self, near: ArrayLike, targets: ArrayLike) -> np.ndarray:
        """Return the tokens at which the fit crosses each target close to ``near``; NaN where it does not."""
        near = np.asarray(near, dtype=float)
        targets = np.asarray(targets, dtype=float)
        start = np.log(near)
        place = start.copy()
        crossings = np.full(len(near), np.nan)
        margin = math.exp(WIDTH)
        for span, (span_start, span_end) in enumerate(self._spans):
            pending = np.flatnonzero(
                (span_start <= near / margin) & (near * margin <= span_end)
            )
            if not len(pending):
                continue
            x, y, weights = self._curve(span)
            for _ in range(_STEPS if len(x) > _NEIGHBOURS else 0):
                value, slope = _lines(x, y, weights, place[pending])
                step = (targets[pending] - value) / np.where(slope < 0, slope, np.nan)
                place[pending] += np.clip(step, -WIDTH / 3, WIDTH / 3)
                # Beyond the last evaluation nothing was seen.
                is_inside = (np.abs(place[pending] - start[pending]) <= WIDTH) & (
                    place[pending] <= x[-1]
                )
                is_found = is_inside & (np.abs(step) < 1e-9)
                crossings[pending[is_found]] = np.exp(place[pending[is_found]])
                pending = pending[is_inside & ~is_found]
                if not len(pending):
                    break
        return crossings

    def _curve(self, span: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return ln tokens and loss of a span's evaluations, and how much each of them counts.

        The weights are bisquare weights by an evaluation's own distance from the fit.
        """
        if span in self._curves:
            return self._curves[span]
        start, end = self._spans[span]
        is_inside = (
            (self._tokens >= max(start, 1.0))
            & (self._tokens <= end)
            & np.isfinite(self._loss)
        )
        x = np.log(self._tokens[is_inside])
        y = self._loss[is_inside]
        count = len(x)
        weights = np.ones(count)
        if count > _NEIGHBOURS:
            # The fit is smooth: even for very many evaluations, a few places with lines between will do.
            places = x[
                np.linspace(0, count - 1, min(count, _PLACES)).round().astype(int)
            ]
            for _ in range(_PASSES):
                blocks = np.array_split(places, 1 + len(places) * count // _BLOCK)
                fitted = np.concatenate(
                    [_lines(x, y, weights, block)[0] for block in blocks]
                )
                residual = np.abs(y - np.interp(x, places, fitted))
                scale = _CUT * float(np.median(residual))
                if not scale > 1e-12 * float(np.abs(y).max()):  # the fit is exact
                    break
                weights = np.clip(1 - (residual / scale) ** 2, 0, None) ** 2
        self._curves[span] = x, y, weights
        return self._curves[span]


def _lines(
    x: np.ndarray, y: np.ndarray, weights: np.ndarray, places: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the value and the slope of the local line at each of ``places``; ``x`` must rise."""
    # Around zero, sums of products lose no digits that count.
    x_middle = x.mean()
    y_middle = y.mean()
    centred_x = x - x_middle
    centred_y = y - y_middle
    widths = np.full(len(places), WIDTH)
    num_inside = np.searchsorted(x, places + WIDTH) - np.searchsorted(
        x, places - WIDTH, side="right"
    )
    is_sparse = num_inside <= _NEIGHBOURS
    if is_sparse.any():
        # The fifth neighbour is at the edge, where the weight is zero, so four count.
        distances = np.abs(x - places[is_sparse][:, None])
        widths[is_sparse] = np.maximum(
            WIDTH, np.partition(distances, _NEIGHBOURS, axis=1)[:, _NEIGHBOURS]
        )
    share = np.abs(centred_x - (places - x_middle)[:, None])
    share /= widths[:, None]
    # Not a power, which takes ten times as long.
    closeness = np.maximum(1 - share * share * share, 0)
    closeness = closeness * closeness * closeness * weights
    terms = [
        np.ones_like(x),
        centred_x,
        centred_y,
        centred_x * centred_x,
        centred_x * centred_y,
    ]
    total, sum_x, sum_y, sum_xx, sum_xy = (closeness @ np.stack(terms, axis=1)).T
    total = np.maximum(total, np.finfo(float).tiny)
    mean_x = sum_x / total
    mean_y = sum_y / total
    variance = sum_xx / total - mean_x**2
    covariance = sum_xy / total - mean_x * mean_y
    slope = np.divide(
        covariance, variance, out=np.zeros_like(covariance), where=variance > 1e-12
    )
    return y_middle + mean_y + slope * (places - x_middle - mean_x), slope
