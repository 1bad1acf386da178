"""The place of a linear layer in its model, the recipes that it follows there, and the sizes that these need.

A layer's block is the first whole number in its dotted name: ``blocks.3.ffn.down`` and
``model.layers.3.mlp.down_proj`` belong to block 3. The first rule that matches a layer decides for the whole
run; phases apply to layers that no rule matches. The head keeps high precision unless a rule matches it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from ablate.recipes.policy import (
    CONTRACTED,
    STORED,
    LayerRecipe,
    LayerRule,
    Phase,
    Recipe,
)
from ablate.recipes.roles import role_of, words_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from ablate.recipes.policy import OperandPolicy


@dataclass(frozen=True, kw_only=True)
class LayerPlace:
    """Where a linear layer is in its model, and what it is for.

    ``block``: None outside the blocks. ``role``: None if its name says nothing (``ablate.recipes.roles``).
    """

    name: str
    block: int | None
    num_blocks: int
    is_head: bool
    role: str | None = None


def block_of(name: str) -> int | None:
    """Read the block number from a layer's dotted name; None if there is none."""
    return next((int(part) for part in name.split(".") if part.isdecimal()), None)


def places(names: Iterable[str], heads: Collection[str] = ()) -> dict[str, LayerPlace]:
    """Map each layer of a model to its place, in the given order; ``heads``: which of them are heads."""
    blocks = {name: block_of(name) for name in names}
    num_blocks = max(
        (block + 1 for block in blocks.values() if block is not None), default=0
    )
    layers = {}
    for name, block in blocks.items():
        is_head = name in heads
        role = "head" if is_head else role_of(name, blocks.keys())
        layers[name] = LayerPlace(
            name=name,
            block=block,
            num_blocks=num_blocks,
            is_head=is_head,
            role=role,
        )
    return layers


def names_layer(rule: LayerRule, place: LayerPlace) -> bool:
    """Whether a rule matches this layer."""
    if (rule.head and place.is_head) or not words_of(place.role).isdisjoint(rule.role):
        return True
    if rule.match is not None and fnmatchcase(place.name, rule.match):
        return True
    if place.block is None:
        return False
    # Rounded first: 0.15 · 20 is a little over 3 in binary, and is meant to be 3.
    if rule.last >= 1:
        last = rule.last
    else:
        last = math.ceil(round(rule.last * place.num_blocks, 6))
    return place.block < rule.first or place.block >= place.num_blocks - last


def phases_of(recipe: Recipe, place: LayerPlace) -> tuple[Phase, ...]:
    """Return the phases of this layer in order of their starts; the first phase starts at token 0."""
    for rule in recipe.rules:
        if names_layer(rule, place):
            return (Phase(from_tokens=0, recipe=rule.recipe),)
    if place.is_head:
        return (Phase(from_tokens=0, recipe=LayerRecipe()),)
    default = LayerRecipe(fprop=recipe.fprop, dgrad=recipe.dgrad, wgrad=recipe.wgrad)
    return (Phase(from_tokens=0, recipe=default), *recipe.phases)


def rule_faults(
    recipe: Recipe, places: Mapping[str, LayerPlace]
) -> Iterator[tuple[int | None, str, str]]:
    """Yield (index, what is wrong, hint) for each rule that decides nothing in a model.

    Index None: all rules together leave no layer for the recipe itself, or in low precision. A role that no
    layer has is no fault by itself: ``idle_roles`` names it.
    """
    names = list(places)
    named: set[int] = set()
    deciding: set[int] = set()
    is_left = False  # whether a layer in the blocks follows the recipe itself
    for place in places.values():
        matching = [
            index for index, rule in enumerate(recipe.rules) if names_layer(rule, place)
        ]
        named.update(matching)
        deciding.update(matching[:1])
        if not matching and not place.is_head:
            is_left = True
    for index, rule in enumerate(recipe.rules):
        layers = f"its layers are {names[0]} … {names[-1]}"
        if rule.match is not None and not any(
            fnmatchcase(name, rule.match) for name in names
        ):
            yield index, f"no layer of this model is called '{rule.match}'", layers
        elif (rule.first or rule.last) and not places[names[0]].num_blocks:
            yield index, "the model has no blocks of layers", layers
        elif index not in named and not rule.role:
            yield index, "the model has no head", layers
        elif index in named and index not in deciding:
            message = "an entry that decides nothing: an earlier one names every layer that it names"
            yield index, message, "put it first"
    if recipe.rules and not (is_left or recipe.is_high_precision):
        blocks = places[names[0]].num_blocks
        message = f"rules name all {blocks} blocks of this model, so that the recipe's own GEMMs never run"
        hint = "set recipe.layers for a model of this depth, e.g. layers: [{last: 1, recipe: bf16}]"
        yield None, message, hint
    if recipe.is_high_precision and recipe.is_ever_low:
        followed: list[LayerRecipe] = []
        for place in places.values():
            followed += [phase.recipe for phase in phases_of(recipe, place)]
        if all(part.is_high_precision for part in followed):
            message = "no layer of this model has a role that the recipe sets in low precision"
            hint = f"no layer is {', '.join(idle_roles(recipe, places))}; bf16 says it"
            yield None, message, hint


def idle_roles(recipe: Recipe, places: Mapping[str, LayerPlace]) -> list[str]:
    """Return the roles that rules of a recipe name and no layer of the model has."""
    known = {word for place in places.values() for word in words_of(place.role)}
    return list(
        dict.fromkeys(
            role for rule in recipe.rules for role in rule.role if role not in known
        )
    )


def block_shape(policy: OperandPolicy) -> tuple[int, int]:
    """Return the (rows, columns) that share a scale, columns along the contraction axis; (1, 1) if none."""
    shape: str = policy.block
    if shape == "none":
        shape = policy.scale_rule.outer
    if not shape[0].isdigit():
        return 1, 1
    rows, columns = shape.split("x")
    return int(rows), int(columns)


def group_size(policy: OperandPolicy) -> int:
    """Return the size that must divide the contraction dimension under this policy."""
    columns = 128 if policy.scale_rule.outer == "1x128" else block_shape(policy)[1]
    return max(columns, policy.hadamard)  # both are powers of two


def token_group(recipe: LayerRecipe) -> int:
    """Return the number that must divide a layer's tokens, which are filled up with zeros.

    The zeros change no scale of a block, tile or Hadamard group, except with ``quest``, whose standard
    deviation counts them. They add nothing to a product.
    """
    groups = [1]
    for gemm, operand, policy in recipe.operands():
        if operand != "w":
            groups.append(
                group_size(policy)
                if CONTRACTED[gemm] == "M"
                else block_shape(policy)[0]
            )
    return max(groups)


def features_fault(
    recipe: LayerRecipe,
    name: str,
    *,
    inputs: int,
    outputs: int,
) -> tuple[str, int, int] | None:
    """Return (what is wrong, size, needed divisor) for the first side that does not fit; None if both fit.

    A block, tile or Hadamard group must divide the number of features.
    """
    sizes = {"K": (inputs, "in-features"), "N": (outputs, "out-features")}
    for gemm, operand, policy in recipe.operands():
        other = STORED[operand].replace(CONTRACTED[gemm], "")
        needs = {CONTRACTED[gemm]: group_size(policy), other: block_shape(policy)[0]}
        for letter, (size, side) in sizes.items():
            if size % (divisor := needs.get(letter, 1)):
                message = (
                    f"{side} {size} of layer {name} is not a multiple of {divisor}"
                )
                return f"{message}, as {gemm.capitalize()} needs it", size, divisor
    return None


def row_group(recipe: LayerRecipe) -> int:
    """Return the number that must divide a layer's rows: the largest block or group of its operands."""
    return max(
        max(block_shape(policy)[0], group_size(policy)) for policy in recipe.policies
    )
