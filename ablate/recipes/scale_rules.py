"""The table of scale rules: how the scales of an operand follow from its values.

To add a rule, write its row in ``SCALE_RULES`` and its test. A rule of a new family also needs its formula: a
function in ``FAMILIES`` of ``ablate.numerics.quantiser``, or a line of ``SCALE_ADD`` in
``ablate.numerics.formats`` for an E8M0 rule. Without a compiled kernel plain torch does it, more slowly.
Plain data without torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

Family = Literal[
    "none", "tensor", "groups", "searched", "e8m0", "quest", "two_level", "four_six", "ue5m3", "ms_eden"
]  # fmt: skip
"""Rules that share a formula. ``groups`` have fp32 scales beside their elements."""
Outer = Literal["none", "tensor", "row", "1x128", "128x128"]
Kernel = Literal["cpp", "triton"]

_FP8 = ("fp8_e4m3", "fp8_e5m2")
_FP4 = ("fp4_e2m1", "fp4_e3m0")
_BOTH: tuple[Kernel, ...] = ("cpp", "triton")


@dataclass(frozen=True, kw_only=True)
class ScaleRule:
    """One scale rule.

    ``formats``: those that take it. ``element``: the format of block scales. ``outer``: the values that share
    an fp32 scale. ``largest_scale``: the block scale to which the outer scale maps the largest magnitude.
    ``measure``: by what four-or-six compares errors (``mse``, ``mae``), or whether MS-EDEN measures its
    stretch in units of the block scales (``scaled``) or of the tensor (``unscaled``). ``can_clip``: a block's
    largest value may exceed the largest element. ``is_delayed``: scales are of past values.
    ``kernels``: the compiled quantisers that take it, C++ on CPUs and Triton on GPUs.
    """

    family: Family
    formats: tuple[str, ...]
    element: Literal["none", "e8m0", "e4m3", "ue5m3"] = "none"
    outer: Outer = "none"
    largest_scale: float = 1.0
    measure: Literal["mse", "mae", "scaled", "unscaled"] | None = None
    is_power_of_two: bool = False
    is_delayed: bool = False
    can_clip: bool = False
    kernels: tuple[Kernel, ...] = ()

    @property
    def is_stochastic(self) -> bool:
        """Whether the scales are rounded stochastically."""
        return self.family == "ms_eden"


_TENSOR = ScaleRule(
    family="tensor", formats=(*_FP8, *_FP4), outer="tensor", kernels=_BOTH
)
_GROUPS = ScaleRule(family="groups", formats=_FP8, outer="1x128", kernels=("cpp",))
_POWERS = replace(_GROUPS, is_power_of_two=True, kernels=())
_E8M0 = ScaleRule(
    family="e8m0", formats=("mxfp8", "mxfp4"), element="e8m0", kernels=_BOTH
)
_TWO_LEVEL = ScaleRule(
    family="two_level",
    formats=("nvfp4",),
    element="e4m3",
    outer="tensor",
    largest_scale=448.0,
)
_UE5M3 = ScaleRule(
    family="ue5m3", formats=("nvfp4",), element="ue5m3", kernels=("cpp",)
)
# 1.5 × 256 fits E4M3 (2512.02010).
_FOUR_SIX = replace(
    _TWO_LEVEL, family="four_six", largest_scale=256.0, measure="mae", kernels=_BOTH
)
# The correction may raise a block scale (2601.22813).
_MS_EDEN = replace(_FOUR_SIX, family="ms_eden", largest_scale=255.99, measure="scaled")

SCALE_RULES: dict[str, ScaleRule] = {
    "none": ScaleRule(family="none", formats=("bf16", "fp16")),
    "tensor": _TENSOR,
    "delayed": replace(_TENSOR, formats=_FP8, is_delayed=True),
    "row": replace(_GROUPS, formats=(*_FP8, *_FP4), outer="row"),
    "1x128": _GROUPS,
    "128x128": replace(_GROUPS, outer="128x128"),
    "1x128_pow2": _POWERS,
    "128x128_pow2": replace(_POWERS, outer="128x128"),
    "searched": ScaleRule(family="searched", formats=_FP4, outer="row", kernels=("cpp",)),
    "floor": replace(_E8M0, can_clip=True),
    "even": replace(_E8M0, can_clip=True),
    "rceil": _E8M0,
    "quest": replace(_E8M0, family="quest", formats=("mxfp4",)),
    "two_level": replace(_TWO_LEVEL, formats=("nvfp4", "nvint4", "if4"), kernels=_BOTH),
    "two_level_row": replace(_TWO_LEVEL, outer="row"),
    "two_level_1x128": replace(_TWO_LEVEL, outer="1x128"),
    "two_level_ue5m3": replace(_UE5M3, outer="tensor", largest_scale=114688.0),
    "ue5m3": _UE5M3,
    "four_six": replace(_FOUR_SIX, measure="mse"),
    "four_six_mae": _FOUR_SIX,
    "four_six_mae_row": replace(_FOUR_SIX, outer="row", kernels=()),
    "ms_eden": _MS_EDEN,
    "ms_eden_unscaled": replace(_MS_EDEN, measure="unscaled"),
}  # fmt: skip
"""The rules by name; the first that has a format is the format's default."""
SCALES: dict[str, tuple[str, ...]] = {}
"""The rules of each format."""
for _name, _rule in SCALE_RULES.items():
    for _format in _rule.formats:
        SCALES[_format] = (*SCALES.get(_format, ()), _name)
