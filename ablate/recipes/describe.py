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
    "nearest": "", "nearest_away": " ties away", "nearest_toward_zero": " ties to 0",
    "stochastic": " SR", "stochastic_8bit": " SR8", "stochastic_rocm": " SR(rocm)",
}  # fmt: skip
_SOURCE = {"high_precision": "", "forward": " from Fprop", "forward_bf16": " from Fprop in bf16"}


def _operand(policy: OperandPolicy) -> str:
    label: str = "fp8" if policy.format.startswith("fp8") else policy.format
    if policy.scale != SCALES[policy.format][0]:
        label += f"({policy.scale})"
    if policy.block in ("16x16", "32x32"):
        label += f"[{policy.block}]"
    label += _ROUNDING[policy.rounding]
    # A bare SR means Tseng's prescale of 3/4 under that paper's scale rule, and no prescale under others.
    is_tseng = (policy.format, policy.scale) == ("mxfp4", "floor") and policy.rounding != "stochastic_rocm"
    if policy.is_stochastic and policy.prescale != (0.75 if is_tseng else 1.0):
        label += f"×{policy.prescale:.3g}"
    if policy.undo == "operand":
        label += " undone on operand"
    if policy.hadamard:
        rotation = _HADAMARD.get(policy.signs, f"RHT({policy.signs})")
        label += f" {rotation}{policy.hadamard}"
    parts = {"+perm": policy.permute, "+bf16": policy.rotated_bf16}
    parts |= {_SOURCE[policy.source]: True, " masked": policy.mask}
    return label + "".join(word for word, holds in parts.items() if holds)


def describe_gemm(policy: GemmPolicy) -> str:
    """Describe both operands of a GEMM in a few words, e.g. ``mxfp4 SR RHT16``."""
    left, right = _operand(policy.left), _operand(policy.right)
    both = left if left == right else f"{left} × {right}"
    return both if policy.accumulate == "fp32" else f"{both}, summed as Blackwell"


def describe_layer(recipe: LayerRecipe, before: LayerRecipe | None = None) -> str:
    """Describe the GEMMs that differ from ``before``, e.g. ``Fprop+Dgrad fp8; Wgrad mxfp4 DHT16``."""
    groups: dict[str, list[str]] = {}
    for gemm in GEMMS:
        if before is None or recipe.gemm(gemm) != before.gemm(gemm):
            groups.setdefault(describe_gemm(recipe.gemm(gemm)), []).append(gemm.capitalize())
    whole = len(GEMMS) in map(len, groups.values())
    return "; ".join(groups if whole else (f"{'+'.join(names)} {label}" for label, names in groups.items()))


def describe_place(rule: LayerRule) -> str:
    """Say which layers a rule names, e.g. ``the first 2 and the last 8 blocks``."""
    last = f"{rule.last:.0%} of the" if 0 < rule.last < 1 else rule.last
    counts = {"first": rule.first, "last": last}
    parts = [f"the {side}" if n == 1 else f"the {side} {n}" for side, n in counts.items() if n]
    blocks = "block" if rule.first + rule.last == 1 else "blocks"
    named = [f"{' and '.join(parts)} {blocks}"] if parts else []
    named += ["the head"] if rule.head else []
    named += [" and ".join(rule.role)] if rule.role else []
    named += [f"layers named {rule.match}"] if rule.match else []
    return ", ".join(named)


def describe(recipe: Recipe) -> str:
    """Describe a whole recipe in one line: a single rule or phase in words, several by number."""
    parts, rules, phases = [describe_layer(recipe)], recipe.rules, recipe.phases
    if len(rules) == 1:
        parts.append(f"{describe_place(rules[0])} {describe_layer(rules[0].recipe)}")
    elif rules:
        parts.append(f"{len(rules)} rules")
    if len(phases) == 1:
        parts.append(f"{describe_start(phases[0])} {describe_layer(phases[0].recipe, recipe) or 'the same'}")
    elif phases:
        parts.append(f"{len(phases)} phases")
    if recipe.deoscillate is not None:
        parts.append(f"de-oscillated {describe_deoscillate(recipe.deoscillate)}")
    return "; ".join(parts)


def describe_deoscillate(found: Deoscillate) -> str:
    """Describe how weights are reset, e.g. ``every 200 steps at 4× from 10% of the budget on``."""
    begins = found.from_tokens is not None or found.from_fraction is not None
    start = f" {describe_start(found)}" if begins else ""
    kept = " with bf16 snapshots" if found.snapshots == "bf16" else ""
    return f"every {found.window} steps at {found.threshold:g}×{kept}{start}"


def describe_start(found: Later) -> str:
    """Describe a start, e.g. ``from 10% of the budget on``."""
    if found.from_fraction is not None:
        return f"from {found.from_fraction:.0%} of the budget on"
    return f"from {found.from_tokens:,} tokens on"
