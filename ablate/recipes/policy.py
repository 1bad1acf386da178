"""Operand policies: how each of the six operands of a linear layer's three GEMMs is rounded.

Plain frozen data without torch, so that planning stays fast. docs/numerics.md has the table of operands,
shapes and axes, which ``STORED`` and ``CONTRACTED`` hold.

Block axis = Hadamard axis = contraction axis, so each tensor is quantised twice, from high precision unless
the policy says otherwise. A contradictory policy raises ``ValueError``, which names both sides.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, StrictBool, StringConstraints
from pydantic.dataclasses import dataclass
from pydantic_core import PydanticCustomError

from ablate.base.config_base import Section, key, said
from ablate.recipes.scale_rules import SCALE_RULES, SCALES, ScaleRule

if TYPE_CHECKING:
    from collections.abc import Iterator

Gemm = Literal["fprop", "dgrad", "wgrad"]
GEMMS: tuple[Gemm, ...] = ("fprop", "dgrad", "wgrad")
OPERANDS: dict[Gemm, tuple[str, str]] = {
    "fprop": ("x", "w"),
    "dgrad": ("dy", "w"),
    "wgrad": ("dy", "x"),
}
"""The left and right operands of each GEMM."""
STORED: dict[str, str] = {"x": "MK", "w": "NK", "dy": "MN"}
"""The stored shape of each tensor: tokens M, out-features N, in-features K."""
CONTRACTED: dict[Gemm, str] = {"fprop": "K", "dgrad": "N", "wgrad": "M"}
"""The dimension that each GEMM sums over."""


def contracted_axis(gemm: Gemm, operand: str) -> int:
    """Return the axis (0 or 1) of a stored operand that its GEMM sums over."""
    return STORED[operand].index(CONTRACTED[gemm])


Format = Literal[
    "bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "mxfp8", "mxfp4", "nvfp4", "nvint4", "if4", "fp4_e2m1", "fp4_e3m0"
]  # fmt: skip
HIGH_FORMATS = ("bf16", "fp16")
"""The high-precision formats."""
if TYPE_CHECKING:
    Scale = str
else:  # from the table itself, so that a rule is written in one place
    Scale = Literal[tuple(SCALE_RULES)]
Block = Literal["none", "1x16", "16x16", "1x32", "32x32"]
Rounding = Literal[
    "nearest", "nearest_away", "nearest_toward_zero", "stochastic", "stochastic_8bit", "stochastic_rocm"
]  # fmt: skip
Hadamard = Literal[0, 16, 32, 64, 128, 256]
HadamardSize = Literal[16, 32, 64, 128, 256]
Signs = Literal["none", "fixed", "layer", "step", "call", "backward"]
Source = Literal["high_precision", "forward", "forward_bf16"]
Undo = Literal["accumulator", "operand"]
Accumulate = Literal["fp32", "blackwell", "hopper"]

ADDED_BY: dict[str, tuple[str, ...]] = {
    "fp32": (),
    "blackwell": ("nvfp4",),
    "hopper": ("fp8_e4m3", "fp8_e5m2"),
}
"""The formats of which both operands must be, for each model of a device's sums."""

BLOCKS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("mxfp8", "mxfp4"), ("1x32", "32x32")),
    **dict.fromkeys(("nvfp4", "nvint4", "if4"), ("1x16", "16x16")),
}
"""The block layouts of each format with block scales; the first is the default."""

NO_ROTATION: dict[str, Any] = {
    "hadamard": 0,
    "signs": "none",
    "permute": False,
    "rotated_bf16": False,
}
"""All keys of a rotation, as they are without one."""
_CLOSED = ConfigDict(extra="forbid")


@dataclass(frozen=True, kw_only=True, config=_CLOSED)
class OperandPolicy:
    """One operand of one GEMM. ``scale`` and ``block`` default to those of the format.

    ``format``: the elements. ``mxfp8`` has E4M3 elements; ``fp4_*`` have one fp32 scale per tensor or row
    instead of block scales. ``nvint4`` has whole numbers up to 7 under NVFP4's scales; ``if4`` takes, for
    each block, those or E2M1, whichever errs less.
    ``scale``: the scale rule (``ablate.recipes.scale_rules``; docs/numerics.md says what each computes).
    ``block``: the elements that share an MX or NVFP4 scale, along the contraction axis or in a square tile.
    ``rounding``: nearest (ties to even code); nearest_away and nearest_toward_zero (ties away from zero,
    toward it); stochastic (up when p > u); stochastic_8bit (8 random bits, as NVIDIA's instruction; up when
    p + u ≥ 1); stochastic_rocm, *for study only*: ROCm TransformerEngine's public
    kernel, which uses one random word for four elements.
    ``prescale`` multiplies the values after the block's exponent was computed, so that stochastic rounding
    does not clip (3/4: Tseng et al. 2502.20586, algorithm 2; 16/17 for NVFP4). ``undo``: divide it out on the
    fp32 accumulator, or on each operand, rounded to bf16, as that paper's published code does.
    ``hadamard``: group of the Walsh–Hadamard rotation along the contraction axis; 0 means no rotation.
    ``signs``: random ±1 before it: none (deterministic), fixed (one vector for all), or drawn per layer,
    step or call (forward pass), or per call for Dgrad and Wgrad together (backward). ``permute`` draws a
    permutation within the group with the signs; without signs each call.
    ``rotated_bf16`` rounds the rotated values to bf16 before they are quantised.
    ``source``: ``forward`` takes the forward GEMM's dequantised operand ("double quantisation"; in bf16
    it is not quantised again), ``forward_bf16`` this operand rounded to bf16.
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

    def __post_init__(self) -> None:
        if self.scale == "none":
            object.__setattr__(self, "scale", SCALES[self.format][0])
        if self.block == "none":
            object.__setattr__(self, "block", BLOCKS.get(self.format, ("none",))[0])
        if fault := self._fault():
            raise ValueError(fault)

    def _fault(self) -> str | None:
        scales = SCALES[self.format]
        if self.scale not in scales:
            return (
                f"scale '{self.scale}' on {self.format} (it takes {', '.join(scales)})"
            )
        blocks = BLOCKS.get(self.format, ("none",))
        if self.block not in blocks:
            return (
                f"block '{self.block}' on {self.format} (it takes {', '.join(blocks)})"
            )
        has_prescale = self.prescale != 1.0
        if self.is_high_precision:
            if self.rounding != "nearest" or has_prescale or self.mask:
                return f"rounding, prescale or mask on {self.format}, which is high precision"
            if self.source == "forward_bf16":
                return f"source 'forward_bf16' on {self.format}: 'forward' says it"
        if has_prescale:
            prescale = f"prescale {self.prescale}"
            if not 0 < self.prescale <= 1:
                return f"{prescale} (above 0, at most 1)"
            if not self.is_stochastic:
                return f"{prescale} with nearest rounding (it keeps stochastic rounding from clipping)"
            if self.block == "none":
                return f"{prescale} with scale '{self.scale}' (it is of blocks of 16 or 32)"
        elif self.undo == "operand":
            return "undo 'operand' without a prescale to undo"
        if self.rounding == "stochastic_rocm" and self.format != "mxfp4":
            return f"rounding 'stochastic_rocm' on {self.format} (it is that of a kernel for mxfp4)"
        rule = self.scale_rule
        if rule.is_stochastic and (
            self.is_stochastic or self.block != "1x16" or not self.hadamard
        ):
            needs = "a Hadamard, nearest elements (its scales are stochastic) and block 1x16"
            return f"scale '{self.scale}' needs {needs}"
        if rule.is_delayed and self.hadamard:
            return "scale 'delayed' under a Hadamard (its history is of values that are not rotated)"
        if rule.family == "quest" and self.block == "32x32":
            return "scale 'quest' on block 32x32 (it is of one row)"
        if rule.outer in ("row", "1x128") and self.block == "16x16":
            return f"scale '{self.scale}' on block {self.block} (it is of one row)"
        for name, without in NO_ROTATION.items():
            if not self.hadamard and getattr(self, name) != without:
                return f"{name} without a Hadamard"
        if self.mask and self.format != "mxfp4":
            return (
                f"mask on {self.format} (it is that of a clipped mxfp4 forward operand)"
            )
        return None

    @property
    def scale_rule(self) -> ScaleRule:
        """The row of its scale rule."""
        return SCALE_RULES[self.scale]

    @property
    def is_high_precision(self) -> bool:
        """Whether the elements stay in bf16 or fp16."""
        return self.format in HIGH_FORMATS

    @property
    def is_untouched(self) -> bool:
        """Whether the operand enters its GEMM in bf16, neither rounded nor rotated."""
        return (
            self.format == "bf16"
            and not self.hadamard
            and self.source == "high_precision"
        )

    @property
    def is_stochastic(self) -> bool:
        """Whether its elements are rounded stochastically."""
        return self.rounding.startswith("stochastic")

    @property
    def draws_anew(self) -> bool:
        """Whether it draws random numbers anew for each step or forward pass."""
        rotates_anew = self.signs in ("step", "call", "backward") or (
            self.permute and self.signs == "none"
        )
        return self.is_stochastic or rotates_anew or self.scale_rule.is_stochastic

    @property
    def has_tensor_scale(self) -> bool:
        """Whether the whole tensor has one fp32 scale, which is applied to the accumulator."""
        return self.scale_rule.outer == "tensor"

    @property
    def is_fp32(self) -> bool:
        """Whether bf16 cannot hold its dequantised values exactly, because parts of it have fp32 scales."""
        rule = self.scale_rule
        has_parts = rule.outer not in ("none", "tensor") and not rule.is_power_of_two
        return has_parts or self.format == "if4"

    @property
    def has_fixed_grid(self) -> bool:
        """Whether it is in low precision and its values follow from the tensor alone, element by element.

        No random numbers, no history of scales and no rotation.
        """
        rule = self.scale_rule
        is_drawn = self.is_stochastic or rule.is_stochastic
        return not (
            self.is_high_precision or is_drawn or rule.is_delayed or self.hadamard
        )


HIGH_PRECISION = OperandPolicy()


@dataclass(frozen=True, kw_only=True, config=_CLOSED)
class GemmPolicy:
    """The two operands of one GEMM, in the order of the module's table, and how their products are added.

    ``accumulate``: fp32 in any order; or, in emulation, as a published model of a device does
    (``ablate.backends.modelled_sums``).
    """

    left: OperandPolicy = HIGH_PRECISION
    right: OperandPolicy = HIGH_PRECISION
    accumulate: Accumulate = "fp32"

    def __post_init__(self) -> None:
        for name in ("hadamard", "signs", "permute"):
            left = getattr(self.left, name)
            right = getattr(self.right, name)
            if left != right:
                message = f"{name} {left} on one operand and {right} on the other: the rotation would not cancel"
                raise ValueError(message)
        if self.accumulate != "fp32" and not self.can_add_as(self.accumulate):
            formats = " or ".join(ADDED_BY[self.accumulate])
            raise ValueError(
                f"accumulate '{self.accumulate}' needs {formats} on both sides, not {self.left.format} and "
                f"{self.right.format}, and neither undo 'operand' nor fp32 scales of rows or groups"
            )

    @property
    def sides(self) -> tuple[OperandPolicy, OperandPolicy]:
        """The left and the right operand."""
        return self.left, self.right

    def can_add_as(self, accumulate: Accumulate) -> bool:
        """Whether a model of a device's sums is one of these operands' products."""
        formats = ADDED_BY[accumulate]
        for operand in self.sides:
            if operand.format not in formats or operand.undo != "accumulator":
                return False
            if operand.scale_rule.family == "groups":
                return False
        return True

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
            message, part = fault
            raise said(message, None, part)

    def _fault(self) -> tuple[str, str] | None:
        """Return what is wrong, and the GEMM or the recipe's key at fault."""
        weight = self.fprop.right
        is_square = weight.block in ("32x32", "16x16")
        if is_square or weight.scale_rule.outer == "128x128":
            backward = self.dgrad.right
            is_shared = (backward.block, backward.scale) == (
                weight.block,
                weight.scale,
            )
            if is_shared and (weight.hadamard or backward.hadamard):
                message = (
                    "a square weight tile under a Hadamard: Fprop rotates it along in-features and Dgrad along "
                    "out-features, so one tile cannot serve both"
                )
                return message, "weight_block"
        for gemm, operand, policy in self.operands():
            name = f"{gemm}.{operand}"
            if policy.mask and gemm != "fprop":
                return f"mask on {name} (it is of forward operands)", gemm
            if policy.signs == "backward" and gemm == "fprop":
                return f"signs 'backward' on {name} (Dgrad and Wgrad share them)", gemm
            if policy.source == "high_precision":
                continue
            fault = f"source '{policy.source}' on {name}"
            if name not in ("dgrad.w", "wgrad.x"):
                return f"{fault}, which the forward GEMM does not use", gemm
            source = self.fprop.right if operand == "w" else self.fprop.left
            if source.is_high_precision:
                return f"{fault}, but Fprop's {operand} is in {source.format}", gemm
        for operand, forward, backward in (
            ("x", self.fprop.left, self.wgrad.right),
            ("w", self.fprop.right, self.dgrad.right),
        ):
            is_masked = forward.mask and forward.hadamard
            if is_masked and backward.source == "high_precision":
                message = f"mask on fprop.{operand} under a Hadamard needs source 'forward' on its backward operand"
                return message, "fprop"
        return None

    def gemm(self, name: Gemm) -> GemmPolicy:
        """Return the policy of one GEMM, by its name."""
        policy: GemmPolicy = getattr(self, name)
        return policy

    @property
    def is_high_precision(self) -> bool:
        """Whether all six operands stay in bf16 or fp16."""
        return all(policy.is_high_precision for policy in self.policies)

    def operands(self) -> Iterator[tuple[Gemm, str, OperandPolicy]]:
        """Yield (GEMM, operand name, policy) for all six operands."""
        for gemm, names in OPERANDS.items():
            for name, policy in zip(names, self.gemm(gemm).sides, strict=True):
                yield gemm, name, policy

    @property
    def policies(self) -> list[OperandPolicy]:
        """The policies of all six operands."""
        return [policy for _, _, policy in self.operands()]


Role = Literal[
    "attention", "attention.qkv", "attention.out", "ffn", "ffn.up", "ffn.gate", "ffn.down",
    "experts", "experts.up", "experts.gate", "experts.down", "router", "latent",
    "mamba", "mamba.in", "mamba.out", "mtp", "embedding", "head",
]  # fmt: skip
"""What a layer is for in its model; ``ablate.recipes.roles`` says which layers have which role."""
Roles = Annotated[
    tuple[Role, ...],
    BeforeValidator(
        lambda value: (value,) if isinstance(value, str) else value,
        json_schema_input_type=Role | list[Role],
    ),
]


def _count_or_share(value: Any) -> Any:
    if isinstance(value, str) and re.fullmatch(r"\d+%", value):
        value = int(value[:-1]) / 100
    if (type(value) is int and value >= 0) or (type(value) is float and 0 < value < 1):
        return value
    raise PydanticCustomError("count_or_share", "neither")


CountOrShare = Annotated[
    int | float,
    BeforeValidator(
        _count_or_share,
        json_schema_input_type=int
        | float
        | Annotated[str, StringConstraints(pattern="^[0-9]+%$")],
    ),
]


@dataclass(frozen=True, kw_only=True, config=_CLOSED)
class SomeLayers:
    """Layers chosen by name, by role, by position, or as the head. A share of the blocks is rounded up."""

    match: str | None = key(
        None, "shell pattern on the layer's name, e.g. '*.ffn.down'"
    )
    role: Roles = key(
        (), "one role or several, in any model, e.g. [attention, ffn.down]"
    )
    first: int = key(0, "the first n blocks", ge=0, strict=True)
    last: CountOrShare = key(
        0, "the last n blocks, or a share of them such as 15% or 0.15, rounded up"
    )
    head: StrictBool = key(False, "the output head")

    def __post_init__(self) -> None:
        if not (self.match or self.role or self.first or self.last or self.head):
            raise said(
                "an entry of layers names none: give match, role, first, last or head",
                None,
                "match",
            )
        # one id however it is written
        object.__setattr__(self, "role", tuple(sorted(set(self.role))))


@dataclass(frozen=True, kw_only=True, config=_CLOSED)
class LayerRule(SomeLayers):
    """Layers with their own recipe."""

    recipe: LayerRecipe = LayerRecipe()


@dataclass(frozen=True, kw_only=True, config=_CLOSED)
class Later:
    """What begins later in the run; with neither key, at the start of the run."""

    from_tokens: int | None = key(None, "training tokens seen", ge=0, strict=True)
    from_fraction: float | None = key(
        None, "share of the token budget", gt=0, lt=1, strict=True
    )

    def start(self, total_tokens: int | None) -> int:
        """Return the start in training tokens; ``total_tokens``: the budget, None if unknown.

        Raises:
            ValueError: the start is a fraction of the budget and the budget is unknown.
        """
        if self.from_fraction is None:
            return self.from_tokens or 0
        if total_tokens is None:
            raise ValueError(
                "what starts at a fraction of the budget (from_fraction) needs total_tokens"
            )
        return round(self.from_fraction * total_tokens)


@dataclass(frozen=True, kw_only=True, config=_CLOSED)
class Phase(Later):
    """The recipe of layers without a rule, from a token count or a fraction of the budget on."""

    recipe: LayerRecipe

    def __post_init__(self) -> None:
        if (self.from_tokens is None) == (self.from_fraction is None):
            raise ValueError(
                "a phase starts at from_tokens or at from_fraction: give one of them"
            )


@dataclass(frozen=True, kw_only=True, config=_CLOSED)
class Deoscillate(Later):
    """Set oscillating weights to their quantised value (OsciReset), once in a window of optimizer steps.

    A weight oscillates if its quantised value has moved at least ``threshold`` times as far as the weight.
    What the layers do with it is in ``ablate.layers.deoscillation``.
    """

    window: int = key(200, "optimizer steps between two resets", gt=0, strict=True)
    threshold: float = key(
        4.0,
        "resets weights whose quantised value moved this many times as far as they did",
        gt=0,
        strict=True,
        allow_inf_nan=False,
    )
    snapshots: Literal["fp32", "bf16"] = key(
        "fp32", "what the weights and their values are compared in"
    )

    def __post_init__(self) -> None:
        if self.from_tokens is not None and self.from_fraction is not None:
            message = "deoscillate starts at from_tokens or at from_fraction: give one of them"
            raise said(message, None, "from_tokens")


_LATER: dict[str, Any] = {"role": (), "snapshots": "fp32"}
"""Keys that recipes did not have at first, and their defaults."""


@dataclass(frozen=True, kw_only=True, eq=False, config=_CLOSED)
class Recipe(Section, LayerRecipe):
    """The recipe of every linear layer: six policies for layers in the blocks, rules and phases.

    The first rule that matches a layer decides; the head keeps high precision unless a rule matches it.
    Phases are in order of their starts.
    """

    rules: tuple[LayerRule, ...] = ()
    phases: tuple[Phase, ...] = ()
    deoscillate: Deoscillate | None = None

    def _fault(self) -> tuple[str, str] | None:
        if fault := super()._fault():
            return fault
        for part in self.parts if self.deoscillate else ():
            w = part.fprop.right
            if not w.is_high_precision and not w.has_fixed_grid:
                message = (
                    "deoscillate needs a grid that weights can be set to, but Fprop's w has "
                    f"{w.rounding} rounding, scale '{w.scale}' and "
                )
                message += (
                    f"a Hadamard of {w.hadamard}" if w.hadamard else "no Hadamard"
                )
                return message, "deoscillate"
        return None

    @cached_property
    def text(self) -> str:
        """The content as JSON; what recipes got later is left out at its default, so that ids stay."""

        def known(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
            return {
                name: value for name, value in pairs if _LATER.get(name, ...) != value
            }

        return json.dumps(
            asdict(self, dict_factory=known), sort_keys=True, separators=(",", ":")
        )

    @property
    def later(self) -> tuple[Later, ...]:
        """All that begins later in the run: phases, then resets."""
        if self.deoscillate is None:
            return self.phases
        return (*self.phases, self.deoscillate)

    @property
    def parts(self) -> tuple[LayerRecipe, ...]:
        """The recipes that some layer may follow at some time: this one, those of its rules and phases."""
        return (
            self,
            *(rule.recipe for rule in self.rules),
            *(phase.recipe for phase in self.phases),
        )

    @property
    def is_ever_low(self) -> bool:
        """Whether any layer may be in low precision at any time."""
        return not all(part.is_high_precision for part in self.parts)
