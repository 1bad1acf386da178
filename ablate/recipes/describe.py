"""A recipe in one short line, for tables and tags."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ablate.recipes.policy import GEMMS, LayerRecipe

if TYPE_CHECKING:
    from ablate.recipes.policy import Gemm, GemmPolicy, OperandPolicy, Recipe

_LETTERS: dict[Gemm, str] = {"fprop": "Fprop", "dgrad": "Dgrad", "wgrad": "Wgrad"}
_HADAMARD = {"none": "DHT", "fixed": "RHT(fixed)", "layer": "RHT(layer)", "step": "RHT", "call": "RHT(call)"}
_ROUNDING = {"nearest": "", "stochastic": " SR", "stochastic_rocm": " SR(rocm)"}
_TSENG_PRESCALE = 0.75
_USUAL = ("none", "floor", "tensor", "two_level")


def _operand(policy: OperandPolicy) -> str:
    label: str = "fp8" if policy.format.startswith("fp8") else policy.format
    if policy.scale not in _USUAL:
        label += f"({policy.scale})"
    if policy.block in ("16x16", "32x32"):
        label += f"[{policy.block}]"
    label += _ROUNDING[policy.rounding]
    if policy.rounding != "nearest" and policy.prescale != _usual_prescale(policy):
        label += f"×{policy.prescale:g}"
    if policy.undo == "operand":
        label += " undone on operand"
    if policy.hadamard:
        label += f" {_HADAMARD[policy.signs]}{policy.hadamard}"
    parts = {"+perm": policy.permute, "+bf16": policy.rotated_bf16}
    parts |= {" from Fprop": policy.source == "forward", " masked": policy.mask}
    return label + "".join(word for word, holds in parts.items() if holds)


def _usual_prescale(policy: OperandPolicy) -> float:
    """Return the prescale that SR implies: Tseng's 3/4 under his paper's scale rule, else 1."""
    tseng = (policy.format, policy.scale, policy.rounding) == ("mxfp4", "floor", "stochastic")
    return _TSENG_PRESCALE if tseng else 1.0


def describe_gemm(policy: GemmPolicy) -> str:
    """Describe both operands of a GEMM in a few words, e.g. ``mxfp4 SR RHT16``."""
    left, right = _operand(policy.left), _operand(policy.right)
    return left if left == right else f"{left} × {right}"


def describe_layer(recipe: LayerRecipe) -> str:
    """Describe the three GEMMs in one line, e.g. ``Fprop+Dgrad fp8; Wgrad mxfp4 DHT16``."""
    groups: dict[str, list[str]] = {}
    for gemm in GEMMS:
        groups.setdefault(describe_gemm(recipe.gemm(gemm)), []).append(_LETTERS[gemm])
    if len(groups) == 1:
        return next(iter(groups))
    return "; ".join(f"{'+'.join(names)} {label}" for label, names in groups.items())


def describe(recipe: Recipe) -> str:
    """Describe a whole recipe in one line, with the number of its rules and phases."""
    line = describe_layer(recipe)
    for count, what in ((len(recipe.rules), "rule"), (len(recipe.phases), "phase")):
        if count:
            line += f"; {count} {what}{'s' if count > 1 else ''}"
    return line
