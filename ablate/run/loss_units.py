"""The units in which trainers log validation losses.

A study keeps its losses in the unit of its logs. A perplexity is kept as its natural logarithm.
"""

from __future__ import annotations

import math
from typing import Literal

LossUnit = Literal["nats", "bits", "bits-per-byte", "nats-per-byte", "log10"]
"""The unit of a study's validation losses."""
LoggedUnit = Literal[LossUnit, "perplexity"]
"""The unit of those in a log."""
UNIT_NAMES: dict[LossUnit, str] = {
    "nats": "nats per token",
    "bits": "bits per token",
    "bits-per-byte": "bits per byte",
    "nats-per-byte": "nats per byte",
    "log10": "log10 per token",
}
"""Their names in a sentence."""


def stored_unit(unit: LoggedUnit) -> LossUnit:
    """Return the unit in which a study keeps the losses of a log."""
    return "nats" if unit == "perplexity" else unit


def short_name(unit: LossUnit) -> str:
    """Return a unit's name for axes and figures: ``nats/token``."""
    return UNIT_NAMES[unit].replace(" per ", "/")


def to_stored(value: float, unit: LoggedUnit) -> float:
    """Convert a loss of a log to the unit in which a study keeps it.

    Raises:
        ValueError: a perplexity is not above 0.
    """
    return math.log(value) if unit == "perplexity" else value
