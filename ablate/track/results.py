"""What the report found, as MLflow's metrics, so that its tables sort by them.

Read from ``report.json``. A run that hit the target has its tokens to target, and its token cost against the
baseline's run of the same seed. The run that holds the report has the estimates of every arm. What has no
honest number is left out: a bound, a hit at the first evaluation, a single run's cost from a fork on.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from ablate.base.files import read_json
from ablate.track.describe import RESULTS, Point, metric_name

if TYPE_CHECKING:
    from pathlib import Path

TOKENS, COST = RESULTS
SUMMARY = "summary"
"""Stands for the run that holds the report, beside the ids of the others."""

Results = dict[str, dict[str, float]]
"""Metric → value, by run id and for the summary."""


def read_results(report: Path) -> Results:
    """Return the figures of a ``report.json``."""
    try:
        return _results(read_json(report))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _results(report: dict[str, Any]) -> Results:
    tokens = {
        (arm["name"], run["seed"]): run[TOKENS]
        for arm in report["arms"]
        for run in arm["runs"]
        if run[TOKENS] and not run["at_or_before_first_evaluation"]
    }
    found: Results = {SUMMARY: {}}
    for arm in report["arms"]:
        for name in (TOKENS, COST):
            _add(found[SUMMARY], metric_name(f"{name}/{arm['name']}"), arm[name]["estimate"])
        for run in arm["runs"]:
            own, base = (tokens.get((name, run["seed"])) for name in (arm["name"], report["baseline"]))
            figures = found[run["id"]] = {}
            _add(figures, TOKENS, own)
            if own and base and not arm["counted_from_tokens"] and arm["name"] != report["baseline"]:
                _add(figures, COST, own / base - 1)
    return found


def _add(figures: dict[str, float], name: str, value: Any) -> None:
    if isinstance(value, int | float) and math.isfinite(value):
        figures[name] = float(value)


def result_points(figures: dict[str, float], unix: float) -> list[Point]:
    """Return figures as points without an axis; of two with the same name MLflow shows the later."""
    return [Point(name, value, round(unix * 1000), 0) for name, value in figures.items()]
