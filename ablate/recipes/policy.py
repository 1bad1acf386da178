"""Operand policies: how each of the six operands of a linear layer's three GEMMs is rounded.

Plain frozen data without torch, so that planning stays fast. docs/numerics.md has the table of operands,
shapes and axes, which ``STORED`` and ``CONTRACTED`` hold.

Block axis = Hadamard axis = contraction axis, so each tensor is quantised twice, from high precision unless
the policy says otherwise. A contradictory policy raises ``ValueError``, which names both sides.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from pydantic import ConfigDict, model_validator
from pydantic.dataclasses import dataclass

from ablate.base.section import Section

if TYPE_CHECKING:
    from collections.abc import Iterator

Gemm = Literal["fprop", "dgrad", "wgrad"]
GEMMS: tuple[Gemm, ...] = ("fprop", "dgrad", "wgrad")
OPERANDS: dict[Gemm, tuple[str, str]] = {"fprop": ("x", "w"), "dgrad": ("dy", "w"), "wgrad": ("dy", "x")}
"""The left and right operands of each GEMM."""
STORED: dict[str, str] = {"x": "MK", "w": "NK", "dy": "MN"}
"""The stored shape of each tensor: tokens M, out-features N, in-features K."""
CONTRACTED: dict[Gemm, str] = {"fprop": "K", "dgrad": "N", "wgrad": "M"}
"""The dimension that each GEMM sums over."""


def contracted_axis(gemm: Gemm, operand: str) -> int:
    """Return the axis (0 or 1) of a stored operand that its GEMM sums over."""
    return STORED[operand].index(CONTRACTED[gemm])


def other_dimension(gemm: Gemm, operand: str) -> str:
    """Return the dimension (M, N or K) of a stored operand that its GEMM keeps."""
    return STORED[operand][1 - contracted_axis(gemm, operand)]


Format = Literal[
    "bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "mxfp8", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp4", "mxfp4_e3m0",
    "nvfp4", "fp4_e2m1", "fp4_e3m0",
]  # fmt: skip
HIGH_FORMATS: tuple[Literal["bf16"], Literal["fp16"]] = ("bf16", "fp16")
"""The high-precision formats."""
Scale = Literal[
    "none", "tensor", "delayed", "row", "1x128", "128x128", "searched",
    "floor", "even", "rceil", "ceil", "uos", "quest", "two_level", "four_six", "ms_eden",
]  # fmt: skip
Block = Literal["none", "1x16", "16x16", "1x32", "32x32"]
Rounding = Literal["nearest", "stochastic", "stochastic_rocm"]
Hadamard = Literal[0, 16, 32, 64, 128, 256]
HadamardSize = Literal[16, 32, 64, 128, 256]
Signs = Literal["none", "fixed", "layer", "step", "call"]
Source = Literal["high_precision", "forward"]
Undo = Literal["accumulator", "operand"]

_E8M0 = ("floor", "even", "rceil", "ceil", "quest")
_FP32 = ("tensor", "delayed", "row", "1x128", "128x128")
SCALES: dict[str, tuple[str, ...]] = {
    "bf16": ("none",),
    "fp16": ("none",),
    "fp8_e4m3": _FP32,
    "fp8_e5m2": _FP32,
    "mxfp8": _E8M0[:4],
    "mxfp6_e3m2": _E8M0[:4],
    "mxfp6_e2m3": _E8M0[:4],
    "mxfp4": (*_E8M0, "uos"),
    "mxfp4_e3m0": _E8M0[:4],
    "nvfp4": ("two_level", "four_six", "ms_eden"),
    "fp4_e2m1": ("tensor", "row", "searched"),
    "fp4_e3m0": ("tensor", "row", "searched"),
}
"""The scale rules of each format; the first is the default."""

DEFAULT_SCALE = {name: scales[0] for name, scales in SCALES.items()}
BLOCKS: dict[str, tuple[str, ...]] = {
    **{name: ("1x32", "32x32") for name in SCALES if name.startswith("mx")},
    "nvfp4": ("1x16", "16x16"),
}
"""The block layouts of each format with block scales; the first is the default."""
DEFAULT_BLOCK = {name: blocks[0] for name, blocks in BLOCKS.items()}

_CLOSED = ConfigDict(extra="forbid")


@dataclass(frozen=True, kw_only=True, config=_CLOSED)
class OperandPolicy:
    """One operand of one GEMM. ``scale`` and ``block`` default to those of the format.

    ``format``: the elements. ``mxfp8`` has E4M3 elements; ``mxfp4_e3m0`` and ``fp4_e3m0`` have E3M0 elements;
    ``fp4_*`` have one fp32 scale per tensor or row instead of block scales.
    ``scale``: the scale rule. E8M0 for 32 elements: floor, even, rceil, ceil, uos, quest.
    NVFP4: two_level (E4M3 for 16 and fp32 for the tensor), four_six, ms_eden. FP8 and fp4: tensor (current),
    delayed, row, 1x128, 128x128, searched.
    ``block``: the elements that share an MX or NVFP4 scale, along the contraction axis or in a square tile.
    ``rounding``: nearest (ties to even code); stochastic (up when p > u); stochastic_rocm, *for study only*:
    ROCm TransformerEngine's public kernel, which uses one random word for four elements.
    ``prescale`` multiplies the values after the block's exponent was computed (3/4: Tseng et al. 2502.20586,
    algorithm 2). ``undo``: divide it out once on the fp32 accumulator, or on each operand, rounded to bf16,
    as that paper's published code does.
    ``hadamard``: group of the Walsh–Hadamard rotation along the contraction axis; 0 means no rotation.
    ``signs``: random ±1 before it: none (deterministic), fixed (one vector for all), or drawn per layer,
    step or call (forward pass). ``permute`` draws a permutation within the group with the signs.
    ``rotated_bf16`` rounds the rotated values to bf16 before they are quantised.
    ``source``: ``forward`` quantises the forward GEMM's dequantised operand ("double quantisation").
    ``mask``: the gradient of a forward operand is zero where its scaled value is 6 or more (Quartet).
    """

    format: Format = "bf16"
    scale: Scale = "none"
    block: Block = "none"
    rounding: Rounding = "nearest"
    prescale: float = 1.0
    undo: Undo = "accumulator"
    hadamard: Hadamard = 0
    signs: Signs = "none"
    permute: bool = False
    rotated_bf16: bool = False
    source: Source = "high_precision"
    mask: bool = False

    @model_validator(mode="before")
    @classmethod
    def _of_older_versions(cls, given: Any) -> Any:
        """Read ``signs_after`` of older versions: signs after the Hadamard change no product."""
        if isinstance(given, dict) and "signs_after" in given:
            given = dict(given)
            if given.pop("signs_after"):
                given["signs"] = "none"
        return given

    def __post_init__(self) -> None:
        if self.scale == "none":
            object.__setattr__(self, "scale", DEFAULT_SCALE.get(self.format, "none"))
        if self.block == "none":
            object.__setattr__(self, "block", DEFAULT_BLOCK.get(self.format, "none"))
        if fault := self._fault():
            raise ValueError(fault)

    def _fault(self) -> str | None:
        """Return the contradiction in one operand's policy, or None."""
        if self.scale not in SCALES[self.format]:
            return f"scale '{self.scale}' on {self.format} (it takes {', '.join(SCALES[self.format])})"
        blocks = BLOCKS.get(self.format, ("none",))
        if self.block not in blocks:
            return f"block '{self.block}' on {self.format} (it takes {', '.join(blocks)})"
        rounded = (
            self.rounding != "nearest" or self.prescale != 1.0 or self.mask or self.source != "high_precision"
        )
        if self.is_high_precision and rounded:
            return f"rounding, prescale, mask or source on {self.format}, which is high precision"
        if not 0 < self.prescale <= 1:
            return f"prescale {self.prescale} (above 0, at most 1)"
        if self.prescale != 1.0 and self.rounding == "nearest":
            what = "with nearest rounding (it keeps stochastic rounding from clipping)"
            return f"prescale {self.prescale} {what}"
        if self.prescale != 1.0 and self.block == "none":
            return f"prescale {self.prescale} with scale '{self.scale}' (it is of blocks of 16 or 32)"
        if self.undo == "operand" and self.prescale == 1.0:
            return "undo 'operand' without a prescale to undo"
        if self.rounding == "stochastic_rocm" and self.format != "mxfp4":
            return f"rounding 'stochastic_rocm' on {self.format} (it is that of a kernel for mxfp4)"
        plain = self.rounding == "nearest" and self.block == "1x16"
        if self.scale == "ms_eden" and not (plain and self.hadamard):
            needs = "a Hadamard, nearest elements (its scales are stochastic) and block 1x16"
            return f"scale 'ms_eden' needs {needs}"
        if self.scale == "delayed" and self.hadamard:
            return "scale 'delayed' under a Hadamard (its history is of values that are not rotated)"
        if self.scale == "quest" and self.block == "32x32":
            return "scale 'quest' on block 32x32 (it is of one row)"
        for name, without in (("signs", "none"), ("permute", False), ("rotated_bf16", False)):
            if not self.hadamard and getattr(self, name) != without:
                return f"{name} without a Hadamard"
        if self.permute and self.signs == "none":
            return "permute without signs (a permutation is drawn with them)"
        if self.mask and self.format != "mxfp4":
            return f"mask on {self.format} (it is that of a clipped mxfp4 forward operand)"
        return None

    @property
    def is_high_precision(self) -> bool:
        """Whether the elements stay in bf16 or fp16."""
        return self.format in HIGH_FORMATS

    @property
    def is_untouched(self) -> bool:
        """Whether the operand enters its GEMM in bf16, neither rounded nor rotated."""
        return self.format == "bf16" and not self.hadamard


HIGH_PRECISION = OperandPolicy()


@dataclass(frozen=True, kw_only=True, config=_CLOSED)
class GemmPolicy:
    """The two operands of one GEMM, in the order of the module's table."""

    left: OperandPolicy = HIGH_PRECISION
    right: OperandPolicy = HIGH_PRECISION

    def __post_init__(self) -> None:
        for name in ("hadamard", "signs", "permute"):
            a, b = getattr(self.left, name), getattr(self.right, name)
            if a != b:
                what = f"{name} {a} on one operand and {b} on the other: the rotation would not cancel"
                raise ValueError(what)

    @property
    def is_untouched(self) -> bool:
        """Whether both operands enter the GEMM in bf16, neither rounded nor rotated."""
        return self.left.is_untouched and self.right.is_untouched


@dataclass(frozen=True, kw_only=True, config=_CLOSED)
class LayerRecipe:
    """The policies of all six operands of one linear layer."""

    fprop: GemmPolicy = GemmPolicy()
    dgrad: GemmPolicy = GemmPolicy()
    wgrad: GemmPolicy = GemmPolicy()

    def __post_init__(self) -> None:
        if fault := self._fault():
            raise ValueError(fault)

    def _fault(self) -> str | None:
        """Return the contradiction between the GEMMs, or None."""
        forward, backward = self.fprop.right, self.dgrad.right
        square = ("32x32", "16x16", "128x128")
        shared = forward.block in square or forward.scale in square
        same_tile = shared and (backward.block, backward.scale) == (forward.block, forward.scale)
        if same_tile and (forward.hadamard or backward.hadamard):
            return (
                "a square weight tile under a Hadamard: Fprop rotates it along in-features and Dgrad along "
                "out-features, so one tile cannot serve both"
            )
        for gemm, operand, policy in self.operands():
            where = f"{gemm}.{operand}"
            if policy.mask and gemm != "fprop":
                return f"mask on {where} (it is of forward operands)"
            if policy.source != "forward":
                continue
            if where not in ("dgrad.w", "wgrad.x"):
                return f"source 'forward' on {where}, which the forward GEMM does not use"
            source = self.fprop.right if operand == "w" else self.fprop.left
            if source.is_high_precision:
                return f"source 'forward' on {where}, but Fprop's {operand} is in {source.format}"
        for forward, backward, name in (
            (self.fprop.left, self.wgrad.right, "x"),
            (self.fprop.right, self.dgrad.right, "w"),
        ):
            if forward.mask and forward.hadamard and backward.source != "forward":
                return f"mask on fprop.{name} under a Hadamard needs source 'forward' on its backward operand"
        return None

    def gemm(self, name: Gemm) -> GemmPolicy:
        """Return the policy of one GEMM."""
        policy: GemmPolicy = getattr(self, name)
        return policy

    @property
    def is_high_precision(self) -> bool:
        """Whether all six operands stay in bf16 or fp16."""
        return all(policy.is_high_precision for _, _, policy in self.operands())

    def operands(self) -> Iterator[tuple[Gemm, str, OperandPolicy]]:
        """Yield (GEMM, operand name, policy) for all six operands."""
        for gemm, (left, right) in OPERANDS.items():
            yield gemm, left, self.gemm(gemm).left
            yield gemm, right, self.gemm(gemm).right


@dataclass(frozen=True, kw_only=True, config=_CLOSED)
class LayerRule:
    """Layers with their own recipe, chosen by name, by position (first or last blocks), or as the head.

    ``match`` is a shell pattern on the layer's whole name (``*.ffn.down``).
    """

    match: str | None = None
    first: int = 0
    last: int = 0
    head: bool = False
    recipe: LayerRecipe = LayerRecipe()


@dataclass(frozen=True, kw_only=True, config=_CLOSED)
class Phase:
    """The recipe of layers without a rule, from a token count or a fraction of the budget on."""

    from_tokens: int | None = None
    from_fraction: float | None = None
    recipe: LayerRecipe

    def __post_init__(self) -> None:
        if (self.from_tokens is None) == (self.from_fraction is None):
            raise ValueError("a phase starts at from_tokens or at from_fraction: give one of them")

    def start(self, total_tokens: int | None) -> int:
        """Return the first token of this phase.

        Raises:
            ValueError: the start is a fraction of the budget and the budget is unknown.
        """
        if self.from_fraction is None:
            return self.from_tokens or 0
        if total_tokens is None:
            raise ValueError("a phase that starts at a fraction of the budget needs total_tokens")
        return round(self.from_fraction * total_tokens)


@dataclass(frozen=True, kw_only=True, eq=False, config=_CLOSED)
class Recipe(Section, LayerRecipe):
    """The recipe of every linear layer: six policies for layers in the blocks, rules and phases.

    The first rule that matches a layer decides; the head keeps high precision unless a rule matches it.
    Phases are in order of their starts.
    """

    rules: tuple[LayerRule, ...] = ()
    phases: tuple[Phase, ...] = ()

    @cached_property
    def text(self) -> str:
        """The content as JSON, with the former field ``signs_after``, so that run ids stay the same."""

        def with_older_fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
            found = dict(pairs)
            return found | {"signs_after": False} if "rotated_bf16" in found else found

        content = asdict(self, dict_factory=with_older_fields)
        return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)


def block_shape(policy: OperandPolicy) -> tuple[int, int]:
    """Return the (rows, columns) that share a scale, columns along the contraction axis; else (1, 1)."""
    shape = policy.block if policy.block != "none" else policy.scale
    if shape[0].isdigit():
        rows, columns = shape.split("x")
        return int(rows), int(columns)
    return 1, 1


def group_size(policy: OperandPolicy) -> int:
    """Return the size that must divide the contraction dimension under this policy."""
    return max(block_shape(policy)[1], policy.hadamard)  # both are powers of two


def row_group(recipe: LayerRecipe) -> int:
    """Return the number that must divide a layer's rows: the largest block or group of its operands."""
    return max(max(*block_shape(policy), policy.hadamard) for _, _, policy in recipe.operands())
