"""The ``diagnostics:`` section of a study, and the layers that it selects. Without torch, for planning.

Diagnostics change no result and are no part of a run's identity: switching them on repeats no finished run.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BeforeValidator, ConfigDict
from pydantic.dataclasses import dataclass
from pydantic_core import PydanticCustomError

from ablate.base.config_base import key
from ablate.run.config import PositiveInt  # noqa: TC001  pydantic reads the annotation at run time

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

    from ablate.recipes import Recipe
    from ablate.recipes.place import LayerPlace

DEFAULT_STEPS = 250
"""Default number of optimizer steps between two diagnoses."""
ENDS_AND_MIDDLE = "ends and middle"


def _layers(value: Any) -> Any:
    if value == ENDS_AND_MIDDLE:
        return value
    if (
        isinstance(value, list)
        and value
        and all(isinstance(pattern, str) and pattern for pattern in value)
    ):
        return value
    raise PydanticCustomError("diagnosed_layers", "not layers")


Layers = Annotated[
    Literal["ends and middle"] | list[str],
    BeforeValidator(
        _layers, json_schema_input_type=Literal["ends and middle"] | list[str]
    ),
]


@dataclass(
    frozen=True, kw_only=True, config=ConfigDict(extra="forbid", defer_build=True)
)
class Diagnostics:
    """How often, where and how thoroughly the error of quantised GEMMs is measured along a run."""

    every_tokens: PositiveInt | None = key(
        None,
        f"training tokens between two diagnoses; default: {DEFAULT_STEPS} optimizer steps",
    )
    layers: Layers = key(
        "ends and middle",
        "patterns of layer names, or: the first, middle and last quantised block",
    )
    draws: int = key(
        4,
        "draws of a recipe's randomness, to tell bias from variance",
        ge=2,
        le=64,
        strict=True,
    )

    def interval(self, tokens_per_step: int) -> int:
        """Return the training tokens between two diagnoses."""
        return self.every_tokens or DEFAULT_STEPS * tokens_per_step


def chosen_layers(
    layers: Literal["ends and middle"] | list[str],
    recipe: Recipe,
    places: Iterable[LayerPlace],
) -> list[str]:
    """Return the names of those chosen layers that quantise an operand, in the order of ``places``."""
    from ablate.recipes.place import phases_of

    quantised = [
        place
        for place in places
        if any(
            not policy.is_untouched
            for phase in phases_of(recipe, place)
            for policy in phase.recipe.policies
        )
    ]
    if layers == ENDS_AND_MIDDLE:
        blocks = sorted({place.block for place in quantised if place.block is not None})
        wanted = {blocks[0], blocks[len(blocks) // 2], blocks[-1]} if blocks else set()
        return [
            place.name
            for place in quantised
            if place.block is None or place.block in wanted
        ]
    return [
        place.name
        for place in quantised
        if any(fnmatchcase(place.name, pattern) for pattern in layers)
    ]
