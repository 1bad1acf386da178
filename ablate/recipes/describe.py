"""A recipe in one short line, for tables and tags."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ablate.recipes.policy import GEMMS, LayerRecipe

if TYPE_CHECKING:
    from ablate.recipes.policy import (
        Deoscillate,
        Gemm,
        GemmPolicy,
        Later,
        LayerRule,
        OperandPolicy,
        Recipe,
    )

_LETTERS: dict[Gemm, str] = {"fprop": "Fprop", "dgrad": "Dgrad", "wgrad": "Wgrad"}
_HADAMARD = {
    "none": "DHT", "fixed": "RHT(fixed)", "layer": "RHT(layer)", "step": "RHT", "call": "RHT(call)",
    "backward": "RHT(backward)",
}  # fmt: skip
_ROUNDING = {
    "nearest": "", "nearest_away": " ties away", "nearest_toward_zero": " ties to 0",
    "stochastic": " SR", "stochastic_rocm": " SR(rocm)",
}  # fmt: skip
_SOURCE = {"high_precision": "", "forward": " from Fprop", "forward_bf16": " from Fprop in bf16"}
_TSENG_PRESCALE = 0.75
_USUAL = ("none", "floor", "tensor", "two_level")


def _operand(policy: OperandPolicy) -> str:
    label: str = "fp8" if policy.format.startswith("fp8") else policy.format
    if policy.scale not in _USUAL:
        label += f"({policy.scale})"
    if policy.block in ("16x16", "32x32"):
        label += f"[{policy.block}]"
    label += _ROUNDING[policy.rounding]
    if policy.is_stochastic and policy.prescale != _usual_prescale(policy):
        label += f"×{policy.prescale:.3g}"
    if policy.undo == "operand":
        label += " undone on operand"
    if policy.hadamard:
        label += f" {_HADAMARD[policy.signs]}{policy.hadamard}"
    parts = {"+perm": policy.permute, "+bf16": policy.rotated_bf16}
    parts |= {_SOURCE[policy.source]: True, " masked": policy.mask}
    return label + "".join(word for word, holds in parts.items() if holds)


def _usual_prescale(policy: OperandPolicy) -> float:
    """Return the prescale that SR implies: Tseng's 3/4 under his paper's scale rule, else 1."""
    tseng = (policy.format, policy.scale, policy.rounding) == ("mxfp4", "floor", "stochastic")
    return _TSENG_PRESCALE if tseng else 1.0


def describe_gemm(policy: GemmPolicy) -> str:
    """Describe both operands of a GEMM in a few words, e.g. ``mxfp4 SR RHT16``."""
    left, right = _operand(policy.left), _operand(policy.right)
    both = left if left == right else f"{left} × {right}"
    return both if policy.accumulate == "fp32" else f"{both}, summed as Blackwell"


def describe_layer(recipe: LayerRecipe) -> str:
    """Describe the three GEMMs in one line, e.g. ``Fprop+Dgrad fp8; Wgrad mxfp4 DHT16``."""
    groups: dict[str, list[str]] = {}
    for gemm in GEMMS:
        groups.setdefault(describe_gemm(recipe.gemm(gemm)), []).append(_LETTERS[gemm])
    if len(groups) == 1:
        return next(iter(groups))
    return "; ".join(f"{'+'.join(names)} {label}" for label, names in groups.items())


def describe_place(rule: LayerRule) -> str:
    """Say which layers a rule names, e.g. ``the first 2 and the last 8 blocks``."""
    last = f"{rule.last:.0%} of the" if 0 < rule.last < 1 else rule.last
    counts = {"first": rule.first, "last": last}
    parts = [f"the {side}" if n == 1 else f"the {side} {n}" for side, n in counts.items() if n]
    blocks = "block" if rule.first + rule.last == 1 else "blocks"
    named = [f"{' and '.join(parts)} {blocks}"] if parts else []
    named += ["the head"] if rule.head else []
    named += [f"layers named {rule.match}"] if rule.match else []
    return ", ".join(named)


def describe(recipe: Recipe) -> str:
    """Describe a whole recipe in one line: its only rule or the number of rules, and that of phases."""
    line = describe_layer(recipe)
    if len(recipe.rules) == 1:
        (rule,) = recipe.rules
        line += f"; {describe_place(rule)} {describe_layer(rule.recipe)}"
    for count, what in ((len(recipe.rules), "rule"), (len(recipe.phases), "phase")):
        if count > (what == "rule"):
            line += f"; {count} {what}{'s' if count > 1 else ''}"
    if recipe.deoscillate is not None:
        line += f"; de-oscillated {describe_deoscillate(recipe.deoscillate)}"
    return line


def describe_deoscillate(found: Deoscillate) -> str:
    """Describe how weights are reset, e.g. ``every 200 steps at 4× from 10% of the budget on``."""
    text = f"every {found.window} steps at {found.threshold:g}×"
    return (
        text
        if found.from_tokens is None and found.from_fraction is None
        else f"{text} {describe_start(found)}"
    )


def describe_start(found: Later) -> str:
    """Describe from which point of the run on."""
    if found.from_fraction is not None:
        return f"from {found.from_fraction:.0%} of the budget on"
    return f"from {found.from_tokens:,} tokens on"
