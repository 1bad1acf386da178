"""Whether a recipe fits its model and its budget: dimensions, rules by layer, phases, and de-oscillation.

A policy's block and Hadamard group lie along the contraction dimension of its GEMM. The rows of a square tile
lie along the operand's other dimension, over which another GEMM contracts. A rule must match a layer, and a
phase must begin within the budget: otherwise an arm would run under a name that is wrong.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from ablate.recipes import Gemm, OperandPolicy, Recipe, block_shape, scale_columns
from ablate.recipes.place import names_layer, phases_of
from ablate.recipes.policy import CONTRACTED, other_dimension
from ablate.run.architecture import HEAD, block_layers, model_places, part_of
from ablate.run.schedule import plan_steps

if TYPE_CHECKING:
    from collections.abc import Iterator
    from collections.abc import Mapping as AbstractMapping

    from ablate.recipes.place import LayerPlace
    from ablate.run.config import ModelConfig, TrainingConfig

_SUMS_OVER: dict[str, Gemm] = {dimension: gemm for gemm, dimension in CONTRACTED.items()}
_WORDS = {"qkv": ("q", "k", "v"), "out": ("o",), "gate_up": ("gate", "up")}
"""The projections in a linear layer, for layers whose name does not say them."""


@dataclass(frozen=True, kw_only=True)
class Need:
    """A number that must divide a dimension, the reason, and the GEMM of that operand."""

    divisor: int = 1
    why: str = "block"
    gemm: Gemm = "fprop"

    def with_policy(self, policy: OperandPolicy, gemm: Gemm, *, rows: bool) -> Need:
        """Return the larger of this need and a policy's; all divisors are powers of two."""
        block_rows, block_columns = block_shape(policy)[0], scale_columns(policy)
        if rows:
            need = Need(divisor=block_rows, why="square tile", gemm=gemm)
        elif block_columns >= policy.hadamard:
            need = Need(divisor=block_columns, gemm=gemm)
        else:
            need = Need(divisor=policy.hadamard, why="Hadamard group", gemm=gemm)
        return max(self, need, key=lambda one: one.divisor)


_Needs = dict[tuple[str, Gemm], Need]


@dataclass(frozen=True, kw_only=True)
class Misfit:
    """What does not fit, in words, and the fields that set it, as dotted paths."""

    what: str
    hint: str
    paths: tuple[str, ...]


class Fit:
    """Finds misfits; what a recipe asks of a built-in model is computed once for all arms that share both.

    ``rules(model, recipe)`` returns the rules that decide nothing in a built-in model.
    """

    def __init__(self) -> None:
        self._needs = cache(_needs)
        self.rules = cache(_rules)

    def shapes(self, model: ModelConfig, recipe: Recipe) -> Iterator[Misfit]:
        """Yield every dimension of a model that a block, a tile or a Hadamard group does not divide.

        Tokens are filled up with zeros. The vocabulary, over which a head's Dgrad contracts, is not known
        here.
        """
        needs = self._needs(model, recipe)
        if not needs:
            return
        for shown, size, gemm, parts, paths in _dimensions(model):
            here = {part: need for part in parts if (need := needs.get((part, gemm))) and size % need.divisor}
            if not here:
                continue
            need = max(here.values(), key=lambda need: need.divisor)
            is_every = len(here) >= len(block_layers(model))
            layers = "every layer" if is_every else _listed(here, kv="kv_heads" in shown)
            yield Misfit(
                what=f"{shown} is not a multiple of {need.divisor}, as {need.gemm.capitalize()} of {layers} "
                "needs it",
                hint=f"its {need.why} of {need.divisor} lies along this dimension; "
                f"{nearest(size, need.divisor)} would fit",
                paths=paths,
            )


def nearest(size: int, divisor: int) -> str:
    """Name the multiples of a divisor that are nearest to a size."""
    below = size // divisor * divisor
    return f"{below} or {below + divisor}" if below else str(divisor)


def _needs(model: ModelConfig, recipe: Recipe) -> _Needs:
    needs: _Needs = {}
    for place in model_places(model).values():
        part = part_of(place.name)
        for phase in phases_of(recipe, place):
            for gemm, operand, policy in phase.recipe.operands():
                other = _SUMS_OVER[other_dimension(gemm, operand)]
                for which, rows in ((gemm, False), (other, True)):
                    before = needs.get((part, which), Need())
                    needs[part, which] = before.with_policy(policy, gemm, rows=rows)
    return {key: need for key, need in needs.items() if need.divisor > 1}


def _listed(parts: dict[str, Need], *, kv: bool) -> str:
    last = dict.fromkeys(part.rsplit(".", 1)[-1] for part in parts)  # one word for all experts
    words = [word for name in last for word in _WORDS.get(name, (name,))]
    words = ["k", "v"] if kv else words
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def _dimensions(model: ModelConfig) -> Iterator[tuple[str, int, Gemm, tuple[str, ...], tuple[str, ...]]]:
    """Yield (dimension in words, size, GEMM that contracts over it, layers, fields)."""
    width, ffn = model.width, model.ffn
    kv_heads, head_dim = model.kv_heads or model.heads, model.width // model.heads
    kv_width = kv_heads * head_dim
    parts = [layer.name for layer in block_layers(model)]
    down = tuple(part for part in parts if part.endswith(".down"))
    inner = tuple(part for part in parts if part.startswith("ffn.") and part not in down)
    attention = ("attention.qkv", "attention.out")
    yield f"width {width}", width, "fprop", (*attention, *inner, HEAD), ("model.width",)
    yield f"ffn {ffn}", ffn, "fprop", down, ("model.ffn",)
    yield f"width {width}", width, "dgrad", (*attention, *down), ("model.width",)
    if kv_width != width:
        shown = f"kv_heads {kv_heads} × head dimension {head_dim} = {kv_width}"
        fields = ("model.kv_heads", "model.heads", "model.width")
        yield shown, kv_width, "dgrad", ("attention.qkv",), fields
    yield f"ffn {ffn}", ffn, "dgrad", inner, ("model.ffn",)


def _rules(model: ModelConfig, recipe: Recipe) -> list[Misfit]:
    return rule_misfits(model_places(model), recipe) if recipe.rules else []


def rule_misfits(where: AbstractMapping[str, LayerPlace], recipe: Recipe) -> list[Misfit]:
    """Return the rules that decide nothing in a model, and rules that leave the recipe itself no layer."""
    if not recipe.rules:
        return []
    naming = {
        name: [index for index, rule in enumerate(recipe.rules) if names_layer(rule, place)]
        for name, place in where.items()
    }
    names = list(where)
    found = []
    for index, rule in enumerate(recipe.rules):
        if not any(index in rules for rules in naming.values()):
            hint = f"its layers are {names[0]} … {names[-2]} and {names[-1]}"
            by_place = "the model has no head" if rule.head else "the model has no blocks of layers"
            what = by_place if rule.match is None else f"no layer of this model is called '{rule.match}'"
            found.append(_misfit(what, hint, "layers", index))
        elif not any(rules[:1] == [index] for rules in naming.values()):
            what = "an entry that decides nothing: an earlier one names every layer that it names"
            found.append(_misfit(what, "put it first", "layers", index))
    no_layer_left = all(naming[name] for name, place in where.items() if not place.is_head)
    if no_layer_left and not recipe.is_high_precision:
        blocks = next(iter(where.values())).num_blocks
        what = f"rules name all {blocks} blocks of this model, so that the recipe's own GEMMs never run"
        hint = "set recipe.layers for a model of this depth, e.g. layers: [{last: 1, recipe: bf16}]"
        found.append(_misfit(what, hint, "layers"))
    return found


def phase_misfits(recipe: Recipe, tokens: int) -> list[Misfit]:
    """Return the phases that begin after a budget of ``tokens``, or not after the phase before."""
    found = []
    before = 0
    for index, phase in enumerate(recipe.phases):
        start = phase.start(tokens)
        if start >= tokens:
            what = f"a phase from token {start} on, but the budget is {tokens} tokens"
            found.append(_misfit(what, "it would never begin", "phases", index))
        elif start <= before:
            what = f"a phase from token {start} on, not after the one before it ({before})"
            found.append(_misfit(what, "phases stand in the order of their starts", "phases", index))
        before = max(before, start)
    return found


def deoscillation_misfits(recipe: Recipe, training: TrainingConfig) -> list[Misfit]:
    """Return what keeps de-oscillation from ever resetting a weight: no window ends within the budget."""
    if (spec := recipe.deoscillate) is None:
        return []
    plan = plan_steps(training)
    # The first window begins with the weights of the first step at or after its start.
    first = max(1, -(-spec.start(plan.tokens) // plan.tokens_per_step))
    if first + spec.window <= plan.steps:
        return []
    what = f"a window of {spec.window} steps from step {first} on, but the run has {plan.steps} steps"
    return [_misfit(what, "no window would ever end", "deoscillate")]


def _misfit(what: str, hint: str, key: str, index: int | None = None) -> Misfit:
    entry = f"recipe.{key}" if index is None else f"recipe.{key}.{index}"
    return Misfit(what=what, hint=hint, paths=(entry, "recipe.preset", "recipe"))
