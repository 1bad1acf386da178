"""The short form of a recipe, as a study file writes it, and its expansion to six operand policies.

``recipe: fp8`` or ``recipe: {gemms: [fprop, wgrad], stabiliser: dht, hadamard_size: 16, rest: fp8}``. One
GEMM can differ: ``wgrad: {stabiliser: dht}``. A combination that means nothing (a stabiliser where no GEMM
is in FP4) raises ``SenselessRecipe``, because silence would let an arm be another one under a false name.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass

from ablate.recipes.policy import GEMMS, Gemm, GemmPolicy, OperandPolicy, Recipe

Stabiliser = Literal["none", "sr", "rht", "dht", "sr+rht", "sr+dht"]
GemmFormat = Literal["bf16", "fp8", "mxfp4"]
HadamardSize = Literal[16, 32]

_CLOSED = ConfigDict(extra="forbid")

SHORT_RECIPES: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp8": {"rest": "fp8"},
    "mxfp4": {"gemms": ["fprop", "dgrad", "wgrad"]},
}
"""Recipes that a study may call by one word."""


class SenselessRecipe(ValueError):  # noqa: N818  it reads as what it is
    """A recipe whose parts contradict each other. ``key`` is the part to look at."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(message)
        self.key = key


@dataclass(frozen=True, kw_only=True, config=_CLOSED)
class GemmSpec:
    """What differs for one GEMM; a key left out is taken from the recipe."""

    format: GemmFormat | None = None
    stabiliser: Stabiliser | None = None
    hadamard_size: HadamardSize | None = None


def _gemm_short_form(value: Any) -> Any:
    return {"format": value} if isinstance(value, str) else value


GemmEntry = Annotated[
    GemmSpec, BeforeValidator(_gemm_short_form, json_schema_input_type=GemmFormat | GemmSpec)
]


@dataclass(frozen=True, kw_only=True, config=_CLOSED)
class RecipeSpec:
    """Which GEMMs run in FP4, how they are stabilised, and what the rest runs in."""

    gemms: Annotated[list[Gemm], Field(description="GEMMs whose two operands are in FP4")] = Field(
        default_factory=list
    )
    format: Annotated[Literal["mxfp4"], Field(description="the FP4 format")] = "mxfp4"
    rest: Annotated[Literal["bf16", "fp8"], Field(description="format of the GEMMs not in FP4")] = "bf16"
    stabiliser: Annotated[
        Stabiliser,
        Field(
            description="of the FP4 GEMMs: sr = stochastic rounding (both operands, 3/4 prescale); rht = "
            "random Hadamard, new signs each step; dht = deterministic Hadamard; sr+rht, sr+dht = both"
        ),
    ] = "none"
    hadamard_size: Annotated[HadamardSize, Field(description="group of the Hadamard rotation")] = 16
    fprop: GemmEntry | None = None
    dgrad: GemmEntry | None = None
    wgrad: GemmEntry | None = None


def _fp8(gemm: Gemm) -> GemmPolicy:
    """E4M3 for activations and weights, E5M2 for gradients, one scale a tensor (the hybrid of TE)."""
    e4m3 = OperandPolicy(format="fp8_e4m3", scale="tensor")
    e5m2 = OperandPolicy(format="fp8_e5m2", scale="tensor")
    return GemmPolicy(left=e4m3 if gemm == "fprop" else e5m2, right=e4m3)


def _mxfp4(stabiliser: Stabiliser, hadamard_size: HadamardSize) -> GemmPolicy:
    parts = set(stabiliser.split("+"))
    hadamard = bool(parts & {"rht", "dht"})
    operand = OperandPolicy(
        format="mxfp4",
        scale="floor",
        rounding="stochastic" if "sr" in parts else "nearest",
        prescale=0.75 if "sr" in parts else 1.0,
        hadamard=hadamard_size if hadamard else 0,
        signs="step" if "rht" in parts else "none",
    )
    return GemmPolicy(left=operand, right=operand)


def resolve(spec: RecipeSpec) -> Recipe:
    """Expand the short form to six operand policies.

    Raises:
        SenselessRecipe: a stabiliser without an FP4 GEMM to act on, or a GEMM named twice.
    """
    if len(set(spec.gemms)) != len(spec.gemms):
        raise SenselessRecipe("gemms", f"a GEMM is named twice in {spec.gemms}")
    resolved: dict[str, GemmPolicy] = {}
    uses_stabiliser = False
    for gemm in GEMMS:
        own: GemmSpec = getattr(spec, gemm) or GemmSpec()
        chosen = own.format or (spec.format if gemm in spec.gemms else spec.rest)
        if chosen == "mxfp4":
            uses_stabiliser |= own.stabiliser is None
            resolved[gemm] = _mxfp4(
                own.stabiliser or spec.stabiliser, own.hadamard_size or spec.hadamard_size
            )
            continue
        if own.stabiliser not in (None, "none"):
            raise SenselessRecipe(gemm, f"stabiliser '{own.stabiliser}' on {gemm}, which is not in FP4")
        resolved[gemm] = _fp8(gemm) if chosen == "fp8" else GemmPolicy()
    if spec.stabiliser != "none" and not uses_stabiliser:
        raise SenselessRecipe("stabiliser", f"stabiliser '{spec.stabiliser}' with no FP4 GEMM to act on")
    return Recipe(**resolved)


def describe(recipe: Recipe) -> str:
    """Return one short line for a recipe, e.g. ``mxfp4[F D W+dht16] fp8[]`` written as people say it."""
    letters = {"fprop": "Fprop", "dgrad": "Dgrad", "wgrad": "Wgrad"}
    groups: dict[str, list[str]] = {}
    for gemm in GEMMS:
        policy = recipe.gemm(gemm).left
        label: str = "fp8" if policy.format.startswith("fp8") else policy.format
        if policy.rounding == "stochastic":
            label += " SR"
        if policy.hadamard:
            label += f" {'RHT' if policy.signs == 'step' else 'DHT'}{policy.hadamard}"
        groups.setdefault(label, []).append(letters[gemm])
    if len(groups) == 1:
        return next(iter(groups))
    return "; ".join(f"{'+'.join(names)} {label}" for label, names in groups.items())
