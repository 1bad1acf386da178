"""How many runs have reached the target by so many tokens, where some have not by the end of their budget.

Kaplan and Meier's estimate of the share that has *not* reached it, with Greenwood's variance on the log-log
scale (Kalbfleisch and Prentice) for its band, which stays between 0 and 1. A censored run leaves at its
last evaluation. A diverged run never reaches the target: it stays among those that have not, to the end.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from scipy.special import ndtri

from ablate.results.intervals import ALPHA, Interval, quantile

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ablate.run.outcome import Outcome


@dataclass(frozen=True, kw_only=True)
class Reached:
    """Steps of the share that has reached the target: from ``tokens[i]`` on it is ``share[i]``.

    ``low`` and ``high`` bound it, None where there is no variance. ``end`` is where the last run was
    still looked at.
    """

    tokens: tuple[float, ...]
    share: tuple[float, ...]
    low: tuple[float | None, ...]
    high: tuple[float | None, ...]
    end: float
    n: int


def reached(outcomes: Sequence[Outcome], alpha: float = ALPHA) -> Reached | None:
    """Return the Kaplan–Meier curve of an arm's results; None without any."""
    runs = [run for run in outcomes if run.end != "missing"]
    if not runs:
        return None
    end = max([_last_look(run) for run in runs if run.end != "diverged"] or [run.low for run in runs])
    survival, variance = 1.0, 0.0
    steps: list[tuple[float, float, float | None, float | None]] = [(0.0, 0.0, None, None)]
    for time, at_risk, events in _events(runs):
        survival *= 1 - events / at_risk
        variance += events / (at_risk * (at_risk - events)) if at_risk > events else math.inf
        steps.append((time, 1 - survival, *_band(survival, variance, alpha)))
    tokens, share, low, high = zip(*steps, strict=True)
    return Reached(tokens=tokens, share=share, low=low, high=high, end=end, n=len(runs))


def _last_look(run: Outcome) -> float:
    """Return the tokens at which a run reached the target, or was last looked at."""
    return run.high if run.end == "hit" else run.low


def _events(runs: Sequence[Outcome]) -> list[tuple[float, int, int]]:
    """Return each time at which runs reached the target, how many had not by then, and how many did so."""
    return [
        (
            time,
            sum(run.end == "diverged" or _last_look(run) >= time for run in runs),
            sum(run.end == "hit" and run.high == time for run in runs),
        )
        for time in sorted({run.high for run in runs if run.end == "hit"})
    ]


def common_horizon(arms: Iterable[Sequence[Outcome]]) -> float | None:
    """Return the tokens up to which every arm's share is known; None without results.

    Without any censored run: the latest time at which a run reached the target, or a diverged run's budget.
    """
    followed = [_followed(runs) for runs in arms if any(run.end != "missing" for run in runs)]
    if not followed:
        return None
    known, latest = min(known for known, _ in followed), max(latest for _, latest in followed)
    return known if math.isfinite(known) else latest


def _followed(outcomes: Sequence[Outcome]) -> tuple[float, float]:
    """Return the tokens up to which an arm's share is known, and the latest time of any of its runs."""
    runs = [run for run in outcomes if run.end != "missing"]
    latest = max(map(_last_look, runs))
    if all(run.end != "censored" for run in runs):
        return math.inf, latest
    return max(_last_look(run) for run in runs if run.end != "diverged"), latest


def restricted_mean(outcomes: Sequence[Outcome], horizon: float, alpha: float = ALPHA) -> Interval:
    """Return the mean of tokens to target cut at ``horizon`` tokens, with its interval.

    The area over the curve of the share that has reached, with Greenwood's variance times n / (n − 1), as
    that of a sample, and Student's t: without both the interval of three runs holds the truth three times in
    four. No estimate where the last run was looked at for less than the horizon.
    """
    curve = reached(outcomes)
    if curve is None:
        return Interval(note="no results")
    if _followed(outcomes)[0] < horizon:
        return Interval(note="not looked at for so long")
    runs = [run for run in outcomes if run.end != "missing"]
    times = [time for time in curve.tokens if time < horizon] + [horizon]
    widths = [after - before for before, after in itertools.pairwise(times)]
    areas = [(1 - share) * width for share, width in zip(curve.share, widths, strict=False)]
    variance = sum(
        sum(areas[i:]) ** 2 * events / (at_risk * (at_risk - events))
        for i, (time, at_risk, events) in enumerate(_events(runs), 1)
        if time < horizon and at_risk > events
    )
    mean = sum(areas)
    if variance == 0:
        return Interval(estimate=mean, note="no spread: no interval")
    n = len(runs)
    half = quantile(n - 1, alpha) * math.sqrt(variance * n / (n - 1))
    return Interval(estimate=mean, low=mean - half, high=min(mean + half, horizon))


def _band(survival: float, variance: float, alpha: float) -> tuple[float | None, float | None]:
    """Return the band of the share that has reached, 1 − S."""
    if not 0 < survival < 1 or not math.isfinite(variance):
        return None, None
    width = -float(ndtri(alpha / 2)) * math.sqrt(variance) / abs(math.log(survival))
    return 1 - survival ** math.exp(-width), 1 - survival ** math.exp(width)
