"""Final loss over the learning rate, of arms that differ in it alone: what a comparison owes to one rate.

Arms that are compared at one learning rate are compared by how well that rate suits each of them as well.
Found by comparing resolved configurations, not names.

How it fails: an arm whose configuration is not there (no run of it has started) is in no curve.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ablate.reports.findings.analyse import ArmResult
    from ablate.reports.statistics.intervals import Interval
    from ablate.store.records import RecordedConfig


@dataclass(frozen=True, kw_only=True)
class Rate:
    """One arm as a point: its peak rate, final loss (nats per token), results, and how many diverged."""

    learning_rate: float
    arm: str
    loss: Interval
    n: int
    diverged: int


@dataclass(frozen=True, kw_only=True)
class RateCurve:
    """Arms alike but for the learning rate, by rising rate. Named after the one at the baseline's rate."""

    name: str
    rates: tuple[Rate, ...]

    @property
    def best(self) -> Rate | None:
        """The rate with the lowest mean loss; None without a loss."""
        known = [(rate.loss.estimate, rate) for rate in self.rates if rate.loss.estimate is not None]
        return min(known, key=lambda pair: pair[0])[1] if known else None

    @property
    def best_is_outermost(self) -> bool:
        """Whether a rate beyond those tried may be better still; one that diverged closes its side."""
        return self.best is not None and self.best in (self.rates[0], self.rates[-1])


def rate_curves(
    arms: Sequence[ArmResult], configs: Mapping[str, RecordedConfig], baseline: str
) -> tuple[RateCurve, ...]:
    """Return the curves of all arms that were run at two rates or more."""
    groups: dict[str, list[Rate]] = {}
    for arm in arms:
        config = configs.get(arm.name)
        rate = _rate_of(config)
        if arm.again or config is None or rate is None:
            continue
        rest = {**config.with_training(learning_rate=None).whole, "seed": None}
        point = Rate(learning_rate=rate, arm=arm.name, loss=arm.final_loss, n=arm.n, diverged=arm.diverged)
        groups.setdefault(json.dumps(rest, sort_keys=True), []).append(point)
    usual = _rate_of(configs.get(baseline))
    return tuple(
        _curve(points, usual)
        for points in groups.values()
        if len({point.learning_rate for point in points}) > 1
    )


def _curve(points: list[Rate], usual: float | None) -> RateCurve:
    rates = tuple(sorted(points, key=lambda point: point.learning_rate))
    at_usual = next((rate for rate in rates if rate.learning_rate == usual), rates[0])
    return RateCurve(name=at_usual.arm, rates=rates)


def _rate_of(config: RecordedConfig | None) -> float | None:
    rate = None if config is None else (config.training or {}).get("learning_rate")
    return rate if isinstance(rate, int | float) else None
