"""Validation losses compared at equal tokens: the curves of an arm on a common grid, and differences.

A mean over seeds ends where the first run of the arm ends. Without a run that diverged it would jump down,
and the arm would look better for having lost its worst run.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from ablate.results.intervals import (
    ALPHA,
    Compared,
    Interval,
    contrasts,
    mean_interval,
    t_interval,
)
from ablate.run.outcome import Outcome

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ablate.results.intervals import Method, Values
    from ablate.run.outcome import LocalFit

    Sides = tuple[Sequence["Curve"], Sequence["Curve"]]
    """Curves of an arm, and of the baseline that it is compared with."""

Run = TypeVar("Run", bound=Outcome)


@dataclass(frozen=True, kw_only=True)
class Curve(Outcome):
    """How one run ended, and its validation loss over tokens, tokens rising.

    ``origin``: the token count from which tokens to target are counted; the curve begins there.
    """

    run_id: str
    arm: str
    tokens: np.ndarray
    loss: np.ndarray
    fit: LocalFit | None = None
    origin: int = 0


@dataclass(frozen=True, kw_only=True)
class CurveGrid:
    """Several runs at the tokens where all have an evaluation: ``loss`` has a row for each of ``seeds``."""

    tokens: np.ndarray
    loss: np.ndarray
    seeds: tuple[int, ...]

    @property
    def mean(self) -> np.ndarray:
        """The mean over runs at each token count."""
        return np.asarray(self.loss.mean(axis=0))

    def losses_at(self, place: int) -> Values:
        """Return seed and loss of each run at this place of ``tokens``."""
        return list(zip(self.seeds, self.loss[:, place].tolist(), strict=True))


@dataclass(frozen=True, kw_only=True)
class Band:
    """Difference arm − baseline over tokens; ``low`` and ``high`` are NaN where n is too small."""

    tokens: np.ndarray
    difference: np.ndarray
    low: np.ndarray
    high: np.ndarray
    n: int
    n_baseline: int


@dataclass(frozen=True, kw_only=True)
class LossDifference(Compared):
    """The difference to the baseline at the last evaluation common to all runs of both, after ``tokens``.

    ``moderated``: whether other arms' spread is in the figure's variance.
    """

    tokens: int | None = None
    moderated: bool = False


def with_result(runs: Sequence[Run]) -> list[Run]:
    """Return the runs that have a result, whatever it is."""
    return [run for run in runs if run.end != "missing"]


def with_partners(
    arm: Sequence[Run], baseline: Sequence[Run], method: Method
) -> tuple[list[Run], list[Run]]:
    """Return the results on both sides; of the baseline only those of the arm's seeds, where these are pairs.

    A run of the arm without a partner stays: the others alone might look better.
    """
    runs = with_result(arm)
    base_runs = with_result(baseline)
    seeds = {run.seed for run in runs}
    if method.paired and seeds and seeds <= {run.seed for run in base_runs}:
        base_runs = [run for run in base_runs if run.seed in seeds]
    return runs, base_runs


def sample_sizes(
    sides: Iterable[Sequence[Run]], compared: Iterable[Sequence[Run]], pairs: int
) -> dict[str, Any]:
    """Count the results of either side that are compared, as pairs if there are any, and those that are not."""
    n, n_baseline = (pairs or len(side) for side in compared)
    num_results = sum(len(with_result(side)) for side in sides)
    left_out = num_results - n - n_baseline
    return {"n": n, "n_baseline": n_baseline, "left_out": left_out}


def common_grids(*sides: Sequence[Curve]) -> list[CurveGrid]:
    """Restrict runs with a result to the tokens at which all of them were evaluated: a grid for each side.

    If a side has no result all grids are empty.
    """
    results = [with_result(side) for side in sides]
    tokens = np.empty(0, dtype=np.int64)
    if all(results):
        tokens = reduce(
            np.intersect1d, (curve.tokens for side in results for curve in side)
        )
    grids = []
    for side in results:
        losses = [curve.loss[np.searchsorted(curve.tokens, tokens)] for curve in side]
        seeds = tuple(curve.seed for curve in side)
        grids.append(CurveGrid(tokens=tokens, loss=np.array(losses), seeds=seeds))
    return grids


def _why_no_final_loss(curves: Sequence[Curve], side: str) -> str | None:
    diverged = sum(curve.end == "diverged" for curve in curves)
    if diverged:
        num_runs = len(with_result(curves))
        return f"{diverged} of {num_runs} runs of {side} diverged: no final loss"
    return None if with_result(curves) else f"no results of {side}"


def final_loss(curves: Sequence[Curve], alpha: float = ALPHA) -> Interval:
    """Return the mean loss at the end of the budget; no estimate if a run diverged or none has a result."""
    note = _why_no_final_loss(curves, "this arm")
    if note is not None:
        return Interval(note=note)
    return mean_interval([curve.loss[-1] for curve in with_result(curves)], alpha)


def final_differences(
    sides: Mapping[str, Sides], method: Method
) -> dict[str, LossDifference]:
    """Compute each arm's mean difference to the baseline at the last evaluation common to all their runs."""
    differences: dict[str, LossDifference] = {}
    compared = {}
    tokens = {}
    last_losses = {}
    for arm, curves in sides.items():
        runs, base_runs = with_partners(*curves, method)
        compared[arm] = (runs, base_runs)
        note = _why_no_final_loss(runs, "this arm") or _why_no_final_loss(
            base_runs, "the baseline"
        )
        grid, base_grid = common_grids(runs, base_runs)
        if note is not None or not len(grid.tokens):
            differences[arm] = LossDifference(
                note=note or "no evaluation at equal tokens"
            )
        else:
            tokens[arm] = int(grid.tokens[-1])
            last_losses[arm] = (grid.losses_at(-1), base_grid.losses_at(-1))
    for arm, contrast in contrasts(last_losses, method).items():
        pairs = len(contrast.pairs)
        differences[arm] = LossDifference(
            **vars(contrast.interval(method)),
            **sample_sizes(sides[arm], compared[arm], pairs),
            tokens=tokens[arm],
            figure=contrast.estimate,
            moderated=contrast.estimate != contrast.own,
        )
    return differences


def difference_bands(sides: Mapping[str, Sides], method: Method) -> dict[str, Band]:
    """Compute each arm's difference to the baseline at every common evaluation, with pointwise intervals.

    Arms moderate each other at each token count separately.
    """
    grids = {}
    rows: dict[str, list[tuple[float | None, ...]]] = {}
    evaluated: set[int] = set()
    for arm, curves in sides.items():
        grids[arm] = common_grids(*with_partners(*curves, method))
        evaluated.update(grids[arm][0].tokens.tolist())
        rows[arm] = []
    for tokens in sorted(evaluated):
        losses = {}
        for arm, (grid, base_grid) in grids.items():
            place = int(np.searchsorted(grid.tokens, tokens))
            if tokens in grid.tokens:
                losses[arm] = (grid.losses_at(place), base_grid.losses_at(place))
        for arm, contrast in contrasts(losses, method).items():
            interval = t_interval(contrast.estimate, method.alpha)
            rows[arm].append((interval.estimate, interval.low, interval.high))
    bands = {}
    for arm, (grid, base_grid) in grids.items():
        difference, low, high = np.array(rows[arm], dtype=float).reshape(-1, 3).T
        bands[arm] = Band(
            tokens=grid.tokens,
            difference=difference,
            low=low,
            high=high,
            n=len(grid.loss),
            n_baseline=len(base_grid.loss),
        )
    return bands
