"""The numbers that must divide the dimensions of the built-in model, layer by layer, under a recipe's rules.

A policy's block and Hadamard group lie along the contraction dimension of its GEMM. The rows of a square tile
lie along the operand's other dimension, over which another GEMM contracts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ablate.recipes import Gemm, OperandPolicy, Recipe, block_shape
from ablate.recipes.place import stages
from ablate.recipes.policy import CONTRACTED, other_dimension
from ablate.run.architecture import HEAD, block_layers, model_places, part_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ablate.run.config import ModelConfig, TrainingConfig

FieldPath = tuple[str, ...]

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
        block_rows, block_columns = block_shape(policy)
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
    """A dimension that does not fit, in words, and the fields that set it."""

    what: str
    hint: str
    paths: tuple[FieldPath, ...]


class Shapes:
    """Finds misfits; a recipe's needs in a model are computed once for all arms that share both."""

    def __init__(self) -> None:
        self._needs: dict[tuple[ModelConfig, Recipe], _Needs] = {}

    def misfits(
        self, model: ModelConfig, training: TrainingConfig | None, recipe: Recipe, devices: int = 1
    ) -> Iterator[Misfit]:
        """Yield every dimension that a block, a tile or a Hadamard group does not divide.

        Without a usable training section the token dimension is skipped. The vocabulary, over which a head's
        Dgrad contracts, is not known here.
        """
        if (model, recipe) not in self._needs:
            self._needs[model, recipe] = _needs(recipe, model)
        needs = self._needs[model, recipe]
        if not needs:
            return
        for shown, size, gemm, parts, paths in _dimensions(model, training, devices):
            here = {part: need for part in parts if (need := needs.get((part, gemm))) and size % need.divisor}
            if not here:
                continue
            need = max(here.values(), key=lambda need: need.divisor)
            is_every = len(here) >= len(block_layers(model))
            layers = "every layer" if is_every else _listed(here, kv="kv_heads" in shown)
            yield Misfit(
                what=f"{shown} is not a multiple of {need.divisor}, as {need.gemm.capitalize()} of {layers} "
                "needs it",
                hint=f"its {need.why} of {need.divisor} lies along this dimension",
                paths=paths,
            )


def _needs(recipe: Recipe, model: ModelConfig) -> _Needs:
    needs: _Needs = {}
    for place in model_places(model).values():
        part = part_of(place.name)
        for stage in stages(recipe, place):
            for gemm, operand, policy in stage.recipe.operands():
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


def _dimensions(
    model: ModelConfig, training: TrainingConfig | None, devices: int
) -> Iterator[tuple[str, int, Gemm, tuple[str, ...], tuple[FieldPath, ...]]]:
    """Yield (dimension in words, size, GEMM that contracts over it, layers, fields)."""
    width, ffn = model.width, model.ffn
    kv_heads, head_dim = model.kv_heads or model.heads, model.width // model.heads
    kv_width = kv_heads * head_dim
    of_width: tuple[FieldPath, ...] = (("model", "width"),)
    of_ffn: tuple[FieldPath, ...] = (("model", "ffn"),)
    parts = [layer.name for layer in block_layers(model)]
    down = tuple(part for part in parts if part.endswith(".down"))
    inner = tuple(part for part in parts if part.startswith("ffn.") and part not in down)
    attention = ("attention.qkv", "attention.out")
    yield f"width {width}", width, "fprop", (*attention, *inner, HEAD), of_width
    yield f"ffn {ffn}", ffn, "fprop", down, of_ffn
    yield f"width {width}", width, "dgrad", (*attention, *down), of_width
    if kv_width != width:
        shown = f"kv_heads {kv_heads} × head dimension {head_dim} = {kv_width}"
        kv_paths: tuple[FieldPath, ...] = (("model", "kv_heads"), ("model", "heads"), ("model", "width"))
        yield shown, kv_width, "dgrad", ("attention.qkv",), kv_paths
    yield f"ffn {ffn}", ffn, "dgrad", inner, of_ffn
    if training is None:
        return
    micro = training.micro_batch_size or training.batch_size // devices
    micro_name = "micro_batch_size" if training.micro_batch_size else "batch_size"
    if devices > 1 and not training.micro_batch_size:
        micro_name = f"batch_size {training.batch_size} / devices_per_run {devices} ="
    tokens = micro * training.seq_len
    # The tokens of an expert are padded to whole blocks.
    yield (
        f"{micro_name} {micro} × seq_len {training.seq_len} = {tokens} tokens",
        tokens,
        "wgrad",
        (*(part for part in parts if ".experts." not in part), HEAD),
        (("training", "seq_len"), ("training", "micro_batch_size"), ("training", "batch_size")),
    )
