"""Final loss over the learning rate, of arms that differ in it alone: what a comparison owes to one rate.

Arms that are compared at one learning rate are compared by how well that rate suits each of them as well.
Found by comparing resolved configurations, not names.

How it fails: an arm whose configuration is not there (no run of it has started) is in no curve.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from ablate.reports.findings.results import Rate, RateCurve

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ablate.reports.findings.results import ArmResult
    from ablate.store.records import RecordedConfig


def rate_curves(
    arms: Sequence[ArmResult], configs: Mapping[str, RecordedConfig], baseline: str
) -> tuple[RateCurve, ...]:
    """Return the curves of all arms that were run at two rates or more."""
    groups: dict[str, list[Rate]] = {}
    for arm in arms:
        config = configs.get(arm.name)
        rate = _rate_of(config)
        if arm.planned.again or config is None or rate is None:
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
