"""Build both operands of a GEMM from a format and a stabiliser, for short forms and presets."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ValidationError

from ablate.recipes.policy import (
    GEMMS,
    HIGH_FORMATS,
    OPERANDS,
    Block,
    Format,
    Gemm,
    GemmPolicy,
    HadamardSize,
    LayerRecipe,
    OperandPolicy,
    Scale,
    Signs,
)

GemmFormat = Literal[
    "bf16", "fp16", "fp8", "fp8-delayed", "fp8-rowwise", "fp8-blockwise", "mxfp8", "mxfp6_e3m2", "mxfp6_e2m3",
    "mxfp4", "mxfp4_e3m0", "nvfp4", "nvint4", "if4", "fp4_e2m1", "fp4_e3m0",
]  # fmt: skip
Stabiliser = Literal["none", "sr", "rht", "dht", "sr+rht", "sr+dht"]

_FP8_SCALES: dict[str, Scale] = {"fp8": "tensor", "fp8-delayed": "delayed", "fp8-rowwise": "row"}
_CLIPPING = ("floor", "even", "uos")
"""Scale rules under which the largest values of MXFP4 clip."""


class SenselessRecipe(ValueError):  # noqa: N818  it reads as what it is
    """A recipe whose parts contradict each other.

    ``path`` leads from the recipe to the faulty part; ``hint`` says how to mend it, where that is known.
    """

    def __init__(
        self, key: str, message: str, *, hint: str | None = None, inside: tuple[str | int, ...] = ()
    ) -> None:
        super().__init__(message)
        self.path = (*inside, key)
        self.hint = hint

    def within(self, *prefix: str | int) -> SenselessRecipe:
        """Return the same fault for a recipe nested at ``prefix`` in another one."""
        inside = (*prefix, *self.path[:-1])
        return SenselessRecipe(str(self.path[-1]), str(self), hint=self.hint, inside=inside)


def build(key: str, of: Any, **fields: Any) -> Any:
    """Build a policy of class ``of``; raise ``SenselessRecipe`` if its fields contradict each other."""
    try:
        return of(**fields)
    except ValidationError as error:
        first = error.errors()[0]
        cause = first.get("ctx", {}).get("error")
        raise SenselessRecipe(key, str(cause) if cause is not None else first["msg"]) from None


def is_low_precision(fmt: GemmFormat | Format) -> bool:
    """Whether a stabiliser can act on this format: FP4 or a format with block scales."""
    return fmt.startswith(("mx", "nv", "if", "fp4"))


def gemm_policy(
    gemm: Gemm,
    fmt: GemmFormat,
    *,
    stabiliser: Stabiliser = "none",
    hadamard_size: HadamardSize = 16,
    scale: Scale | None = None,
    signs: Signs = "step",
    prescale: float | None = None,
    weight_block: Block = "none",
) -> GemmPolicy:
    """Return both operands of a GEMM in one format, with the same stabiliser.

    FP8 with one scale per tensor uses E4M3 for x and w, E5M2 for dy (TransformerEngine's hybrid); with finer
    scales it uses E4M3 for all. ``fp8-blockwise`` scales x and dy by 1×128 and w by 128×128 (DeepSeek-V3).
    Stochastic rounding uses Tseng's 3/4 prescale if values can clip under the MXFP4 scale rule.

    Raises:
        SenselessRecipe: contradictory parts; its path is the GEMM.
    """
    if fmt in HIGH_FORMATS:
        high = OperandPolicy(format=fmt)
        return GemmPolicy(left=high, right=high)
    if fmt.startswith("fp8"):
        return _fp8(gemm, fmt)
    parts = set(stabiliser.split("+"))
    rotated, stochastic = bool(parts & {"rht", "dht"}), "sr" in parts
    clips = fmt == "mxfp4" and (scale or "floor") in _CLIPPING
    fields: dict[str, Any] = {
        "format": fmt,
        "scale": scale or "none",
        "rounding": "stochastic" if stochastic else "nearest",
        "prescale": (prescale if prescale is not None else 0.75 if clips else 1.0) if stochastic else 1.0,
        "hadamard": hadamard_size if rotated else 0,
        "signs": signs if "rht" in parts else "none",
    }
    left, right = (
        build(gemm, OperandPolicy, **fields, block=weight_block if name == "w" else "none")
        for name in OPERANDS[gemm]
    )
    policy: GemmPolicy = build(gemm, GemmPolicy, left=left, right=right)
    return policy


def _fp8(gemm: Gemm, fmt: str) -> GemmPolicy:
    def operand(name: str) -> OperandPolicy:
        if fmt == "fp8-blockwise":
            return OperandPolicy(format="fp8_e4m3", scale="128x128" if name == "w" else "1x128")
        is_wide = name == "dy" and fmt != "fp8-rowwise"
        return OperandPolicy(format="fp8_e5m2" if is_wide else "fp8_e4m3", scale=_FP8_SCALES[fmt])

    left, right = OPERANDS[gemm]
    return GemmPolicy(left=operand(left), right=operand(right))


def layer_recipe(gemms: dict[Gemm, GemmPolicy]) -> LayerRecipe:
    """Combine three GEMMs into one layer's recipe.

    Raises:
        SenselessRecipe: contradictory GEMMs; its path is the faulty GEMM or the tile.
    """
    try:
        recipe: LayerRecipe = build("weight_block", LayerRecipe, **gemms)
    except SenselessRecipe as fault:
        at_fault = next((gemm for gemm in GEMMS if f" on {gemm}." in str(fault)), None)
        raise (SenselessRecipe(at_fault, str(fault)) if at_fault else fault) from None
    return recipe
