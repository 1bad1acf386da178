"""The recipe of each linear layer, for display: it shows which layers a rule really matches."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from ablate.recipes import describe_layer
from ablate.recipes.place import LayerPlace, phases_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ablate.recipes import Recipe


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerGroup:
    """Layers with the same recipe: their names, as ``blocks.0-3.ffn.down``, their number, and the recipe."""

    names: tuple[str, ...]
    count: int
    recipe: str


def layer_groups(recipe: Recipe, where: Iterable[LayerPlace], total_tokens: int) -> list[LayerGroup]:
    """Group a model's layers by their recipes over the whole budget, in the order of the model."""
    by_text: dict[str, list[LayerPlace]] = {}
    for place in where:
        phases = phases_of(recipe, place)
        texts = [(phase.start(total_tokens), describe_layer(phase.recipe)) for phase in phases]
        text = ", ".join(f"from token {start:,}: {what}" if start else what for start, what in texts)
        by_text.setdefault(text, []).append(place)
    return [
        LayerGroup(names=_shortened(members), count=len(members), recipe=text)
        for text, members in by_text.items()
    ]


def _shortened(members: list[LayerPlace]) -> tuple[str, ...]:
    """Write the blocks of layers of one kind as ranges."""
    kinds: dict[str, list[int]] = {}
    for place in members:
        parts = place.name.split(".")
        if place.block is None:
            kinds.setdefault(place.name, [])
            continue
        at = parts.index(str(place.block))
        kinds.setdefault(".".join([*parts[:at], "{}", *parts[at + 1 :]]), []).append(place.block)
    return tuple(kind.format(_ranges(blocks)) for kind, blocks in kinds.items())


def _ranges(blocks: list[int]) -> str:
    runs = groupby(enumerate(sorted(blocks)), key=lambda pair: pair[1] - pair[0])
    spans = [[block for _, block in run] for _, run in runs]
    return ",".join(f"{span[0]}-{span[-1]}" if len(span) > 1 else str(span[0]) for span in spans)
