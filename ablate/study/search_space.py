"""The values that a search may try: ranges and lists as plain data, without Optuna.

The first points of a search are spread evenly over the space (Halton's sequence). All groups get the same
points, so that their results can be compared. Grids are expanded here, exactly and in order: Optuna's
``GridSampler`` draws cells at random and may draw one twice.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic.dataclasses import dataclass as pydantic_dataclass

from ablate.store.plan_file import LockedTuning
from ablate.study.sections import RangeSection, SearchSection

if TYPE_CHECKING:
    from collections.abc import Mapping

    from optuna.distributions import BaseDistribution


_DIGITS = 3


@pydantic_dataclass(frozen=True, kw_only=True)
class Range(RangeSection):
    """Numbers from ``low`` to ``high``, spread evenly in the logarithm if ``log``; ``whole``: integers."""

    whole: bool = False

    @property
    def count(self) -> float:
        """The number of different values; infinite unless ``whole``."""
        return self.high - self.low + 1 if self.whole else math.inf

    def __contains__(self, value: float | None) -> bool:
        return value is not None and self.low <= value <= self.high

    def at(self, place: float) -> float:
        """Return the value at a place from 0 (``low``) to 1 (``high``)."""
        if self.log:
            return self.tidy(
                math.exp(math.log(self.low) + place * math.log(self.high / self.low))
            )
        return self.tidy(self.low + place * (self.high - self.low))

    def tidy(self, value: float) -> float:
        """Round to three significant digits, or to an integer, within the range."""
        if self.whole:
            return min(max(round(value), int(self.low)), int(self.high))
        return min(max(float(f"{value:.{_DIGITS}g}"), self.low), self.high)

    def distribution(self) -> BaseDistribution:
        """Convert to Optuna's distribution."""
        from optuna.distributions import FloatDistribution, IntDistribution

        if self.whole:
            return IntDistribution(int(self.low), int(self.high), log=self.log)
        return FloatDistribution(self.low, self.high, log=self.log)


@dataclass(frozen=True, kw_only=True, slots=True)
class Choices:
    """A list of values."""

    values: tuple[Any, ...]

    @property
    def count(self) -> float:
        """The number of different values."""
        return len(self.values)

    def __contains__(self, value: Any) -> bool:
        return value in self.values

    def at(self, place: float) -> Any:
        """Return the value at a place from 0 (the first) to 1 (the last)."""
        return self.values[min(int(place * len(self.values)), len(self.values) - 1)]

    def tidy(self, value: Any) -> Any:
        """Return the value unchanged."""
        return value

    def distribution(self) -> BaseDistribution:
        """Convert to Optuna's distribution."""
        from optuna.distributions import CategoricalDistribution

        return CategoricalDistribution(self.values)


@pydantic_dataclass(frozen=True, kw_only=True)
class Search(SearchSection):
    """A search with the labels of its factors; ``cells``: the labels by factor of each cell, and its arm."""

    factors: dict[str, tuple[str, ...]]
    cells: tuple[tuple[dict[str, str], str], ...]


Space = dict[str, Range | Choices]
"""The values to try, by the name of a field."""


@dataclass(frozen=True, kw_only=True)
class Tune(LockedTuning):
    """The search for values before the seeds run. ``budget``: ``tokens`` of a trial's run, as written."""

    fields: Space
    budget: int


def combinations(space: Mapping[str, Range | Choices]) -> list[dict[str, Any]]:
    """List every combination of a space of lists, the last field varying fastest; none if it has a range."""
    lists = [
        field.values if isinstance(field, Choices) else () for field in space.values()
    ]
    return [
        dict(zip(space, values, strict=True)) for values in itertools.product(*lists)
    ]


def spread_point(space: Mapping[str, Range | Choices], index: int) -> dict[str, Any]:
    """Return the ``index``-th point, from 1, of Halton's sequence, which fills the space evenly."""
    from scipy.stats.qmc import Halton

    (point,) = Halton(len(space), scramble=False).fast_forward(index).random(1)
    return {
        name: field.at(place)
        for (name, field), place in zip(space.items(), point, strict=True)
    }


def tuned_name(arm: str) -> str:
    """Return the name of the arm that runs at this arm's best values."""
    return f"{arm} tuned"
