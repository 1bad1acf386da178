"""Published recipes in MXFP4."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ablate.recipes.build import gemm_policy
from ablate.recipes.policy import GemmPolicy, OperandPolicy, Recipe
from ablate.recipes.presets.preset import Preset, arxiv, both, compared, read_in

if TYPE_CHECKING:
    from ablate.recipes.policy import Rounding, Undo

_PATCHES = "patch_override_scripts"


def tseng() -> list[Preset]:
    """Return the recipes of the paper (algorithm 2) and of its code."""
    source = arxiv("2502.20586", "Tseng, Yu, Park", "Training LLMs with MXFP4")
    fields: dict[str, Any] = {"format": "mxfp4", "hadamard": 64, "signs": "call", "rotated_bf16": True}
    stochastic = {**fields, "rounding": "stochastic", "prescale": 0.75}
    nearest = both(**fields, rounding="nearest_away")
    backward, code = both(**stochastic), both(**stochastic, undo="operand")
    doubly = replace(backward, right=replace(backward.right, source="forward_bf16"))
    megatron = read_in("amazon-science/mxfp4-llm", f"{_PATCHES}/Megatron-LM.patch")
    said = (
        "Dgrad and Wgrad in MXFP4 (floor), stochastic rounding; 3/4 prescale after the block's exponent",
        "random Hadamard of 64 with new signs each call, in bf16; the product times 16/9",
    )
    return [
        Preset(
            "tseng",
            "MXFP4 backward with RHT 64 and SR, forward in BF16",
            source,
            Recipe(dgrad=backward, wgrad=backward),
            published=said,
            checked=megatron,
        ),
        Preset(
            "tseng-fp8",
            "as tseng, forward in FP8",
            source,
            Recipe(fprop=gemm_policy("fprop", "fp8"), dgrad=backward, wgrad=doubly),
            published=(*said, "Wgrad's x comes from the FP8 forward, in bf16; Dgrad's w from high precision"),
            assumed=(
                "E4M3 with one current scale a tensor; the code leaves it to Megatron's delayed scaling",
            ),
            checked=read_in("amazon-science/mxfp4-llm", f"{_PATCHES}/te1.5/linear.py"),
        ),
        Preset(
            "tseng-rht",
            "as tseng, nearest rounding instead of SR",
            source,
            Recipe(dgrad=nearest, wgrad=nearest),
            published=(
                "the ablation with the random Hadamard alone, without a prescale",
                "microxcaling's nearest sends ties away from zero",
            ),
            checked=compared("microsoft/microxcaling", "mx/mx_ops.py"),
        ),
        Preset(
            "tseng-code",
            "as tseng's published code: 4/3 on each operand, in bf16",
            source,
            Recipe(dgrad=code, wgrad=code),
            published=(
                "the code multiplies 4/3 back on each operand in its dtype, which leaves the MXFP4 grid",
            ),
            checked=read_in("amazon-science/mxfp4-llm", f"{_PATCHES}/microxcaling.patch"),
        ),
    ]


def quartet() -> list[Preset]:
    """Return the recipes of the paper and of its code."""
    title = "Quartet: Native FP4 Training Can Be Optimal for Large Language Models"
    source = arxiv("2505.14669", "Castro et al.", title)
    said = (
        "forward: Hadamard of 32, QuEST's scale from the standard deviation, nearest rounding",
        "the gradient is masked where values clip",
        "backward: Hadamard of 32, floor scale with 3/4 range, SR; operands from the quantised forward",
        "head in high precision",
    )

    def recipe(*, signs: bool, ties: Rounding, undo: Undo) -> Recipe:
        gradient = OperandPolicy(
            format="mxfp4", rounding="stochastic", prescale=0.75, undo=undo,
            hadamard=32, signs="call" if signs else "none",
        )  # fmt: skip
        backward = GemmPolicy(left=gradient, right=replace(gradient, source="forward"))
        forward = both(format="mxfp4", scale="quest", rounding=ties, hadamard=32, mask=True)
        return Recipe(fprop=forward, dgrad=backward, wgrad=backward)

    code = "src/models/quantization/quantizers/mxfp4_triton.py"

    return [
        Preset(
            "quartet",
            "MXFP4: QuEST forward, SR + RHT 32 backward, masked gradient",
            source,
            recipe(signs=True, ties="nearest", undo="accumulator"),
            published=(*said, "the backward Hadamard is randomised"),
            assumed=(
                "signs before the Hadamard, new each call",
                "1e-8 is added to the standard deviation's scale",
            ),
            checked=read_in("IST-DASLab/Quartet", code),
        ),
        Preset(
            "quartet-code",
            "as quartet's published code: no signs, ties toward zero, 4/3 on each operand",
            source,
            recipe(signs=False, ties="nearest_toward_zero", undo="operand"),
            published=(
                *said,
                "the code multiplies the signs after the Hadamard; its nearest sends ties toward zero",
                "it multiplies 4/3 back on each operand, in the operand's dtype",
            ),
            assumed=(
                "no signs: after the Hadamard they change no rounding and cancel in the product",
                "an exact Hadamard: the code holds 1/√32 in bf16, 0.01 % less",
            ),
            checked=compared("IST-DASLab/Quartet", f"{code} (forward)"),
        ),
    ]


def tetrajet() -> Preset:
    """Return TetraJet's recipe."""
    title = "Oscillation-Reduced MXFP4 Training for Vision Transformers (TetraJet)"
    nearest = OperandPolicy(format="mxfp4", scale="rceil")
    sr = replace(nearest, rounding="stochastic")
    backward = GemmPolicy(left=sr, right=replace(sr, source="forward"))
    return Preset(
        "tetrajet",
        "MXFP4 (rceil): nearest forward, SR backward, double quantisation",
        arxiv("2502.20853", "Chen et al.", title),
        Recipe(fprop=GemmPolicy(left=nearest, right=nearest), dgrad=backward, wgrad=backward),
        published=(
            "truncation-free scale (rounded up), nearest forward, SR backward without a prescale",
            "weights and activations of the backward pass are quantised from the quantised forward",
        ),
        assumed=(
            "the oscillation remedies (EMA quantiser, Q-Ramping) are left out: they are optimizers' business",
        ),
    )
