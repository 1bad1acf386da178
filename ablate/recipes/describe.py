"""A recipe in one short line, for tables and tags."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ablate.recipes.policy import GEMMS, LayerRecipe
from ablate.recipes.scale_rules import SCALES

if TYPE_CHECKING:
    from ablate.recipes.policy import (
        Deoscillate,
        GemmPolicy,
        Later,
        LayerRule,
        OperandPolicy,
        Recipe,
    )

_HADAMARD = {"none": "DHT", "step": "RHT"}
_ROUNDING = {
    "nearest": "",
    "nearest_away": " ties away",
    "nearest_toward_zero": " ties to 0",
    "stochastic": " SR",
    "stochastic_8bit": " SR8",
    "stochastic_rocm": " SR(rocm)",
}
_SOURCE = {
    "high_precision": "",
    "forward": " from Fprop",
    "forward_bf16": " from Fprop in bf16",
}


def _operand(policy: OperandPolicy) -> str:
    label: str = "fp8" if policy.format.startswith("fp8") else policy.format
    if policy.scale != SCALES[policy.format][0]:
        label += f"({policy.scale})"
    if policy.block in ("16x16", "32x32"):
        label += f"[{policy.block}]"
    label += _ROUNDING[policy.rounding]
    # A bare SR means Tseng's prescale of 3/4 under that paper's scale rule, and no prescale under others.
    bare_prescale = 1.0
    if policy.format == "mxfp4" and policy.scale == "floor":
        bare_prescale = 0.75
    if policy.rounding == "stochastic_rocm":
        bare_prescale = 1.0
    if policy.is_stochastic and policy.prescale != bare_prescale:
        label += f"×{policy.prescale:.3g}"
    if policy.undo == "operand":
        label += " undone on operand"
    if policy.hadamard:
        rotation = _HADAMARD.get(policy.signs, f"RHT({policy.signs})")
        label += f" {rotation}{policy.hadamard}"
    if policy.permute:
        label += "+perm"
    if policy.rotated_bf16:
        label += "+bf16"
    label += _SOURCE[policy.source]
    if policy.mask:
        label += " masked"
    return label


def describe_gemm(policy: GemmPolicy) -> str:
    """Describe both operands of a GEMM in a few words, e.g. ``mxfp4 SR RHT16``."""
    left = _operand(policy.left)
    right = _operand(policy.right)
    both = left if left == right else f"{left} × {right}"
    if policy.accumulate == "fp32":
        return both
    return f"{both}, summed as {policy.accumulate.capitalize()}"


def describe_layer(recipe: LayerRecipe, before: LayerRecipe | None = None) -> str:
    """Describe the GEMMs that differ from ``before``, e.g. ``Fprop+Dgrad fp8; Wgrad mxfp4 DHT16``."""
    groups: dict[str, list[str]] = {}
    for gemm in GEMMS:
        if before is None or recipe.gemm(gemm) != before.gemm(gemm):
            groups.setdefault(describe_gemm(recipe.gemm(gemm)), []).append(
                gemm.capitalize()
            )
    if len(groups) == 1 and len(next(iter(groups.values()))) == len(GEMMS):
        return next(iter(groups))
    return "; ".join(f"{'+'.join(names)} {label}" for label, names in groups.items())


def describe_place(rule: LayerRule) -> str:
    """Say which layers a rule names, e.g. ``the first 2 and the last 8 blocks``."""
    ends = []
    for end, count in (("first", rule.first), ("last", rule.last)):
        if count == 1:
            ends.append(f"the {end}")
        elif count >= 1:
            ends.append(f"the {end} {count}")
        elif count:
            ends.append(f"the {end} {count:.0%} of the")
    parts = []
    if ends:
        blocks = "block" if rule.first + rule.last == 1 else "blocks"
        parts.append(f"{' and '.join(ends)} {blocks}")
    if rule.head:
        parts.append("the head")
    if rule.role:
        parts.append(" and ".join(rule.role))
    if rule.match:
        parts.append(f"layers named {rule.match}")
    return ", ".join(parts)


def describe(recipe: Recipe) -> str:
    """Describe a whole recipe in one line: two rules or a phase in words, more by number."""
    parts = [describe_layer(recipe)]
    rules = recipe.rules
    phases = recipe.phases
    if len(rules) > 2:
        parts.append(f"{len(rules)} rules")
    else:
        parts += [
            f"{describe_place(rule)} {describe_layer(rule.recipe)}" for rule in rules
        ]
    if len(phases) == 1:
        parts.append(
            f"{describe_start(phases[0])} {describe_layer(phases[0].recipe, recipe) or 'the same'}"
        )
    elif phases:
        parts.append(f"{len(phases)} phases")
    if recipe.deoscillate is not None:
        parts.append(f"de-oscillated {describe_deoscillate(recipe.deoscillate)}")
    return "; ".join(parts)


def describe_deoscillate(resets: Deoscillate) -> str:
    """Describe how weights are reset, e.g. ``every 200 steps at 4× from 10% of the budget on``."""
    text = f"every {resets.window} steps at {resets.threshold:g}×"
    if resets.snapshots == "bf16":
        text += " with bf16 snapshots"
    if resets.from_tokens is not None or resets.from_fraction is not None:
        text += f" {describe_start(resets)}"
    return text


def describe_start(part: Later) -> str:
    """Describe a start, e.g. ``from 10% of the budget on``."""
    if part.from_fraction is not None:
        return f"from {part.from_fraction:.0%} of the budget on"
    return f"from {part.from_tokens:,} tokens on"
