"""Published recipes in MXFP4."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ablate.recipes.build import gemm_policy
from ablate.recipes.policy import GemmPolicy, OperandPolicy, Recipe
from ablate.recipes.presets.preset import Preset, arxiv, both

if TYPE_CHECKING:
    from ablate.recipes.policy import Signs


def tseng() -> list[Preset]:
    """Return the recipes of the paper (algorithm 2) and of its code."""
    source = arxiv("2502.20586", "Tseng, Yu, Park", "Training LLMs with MXFP4")
    fields: dict[str, Any] = {"format": "mxfp4", "hadamard": 64, "signs": "call", "rotated_bf16": True}
    stochastic = {**fields, "rounding": "stochastic", "prescale": 0.75}
    nearest, backward, code = both(**fields), both(**stochastic), both(**stochastic, undo="operand")
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
        ),
        Preset(
            "tseng-fp8",
            "as tseng, forward in FP8",
            source,
            Recipe(fprop=gemm_policy("fprop", "fp8"), dgrad=backward, wgrad=backward),
            published=said,
            assumed=("the forward's FP8 is E4M3 with one scale a tensor",),
        ),
        Preset(
            "tseng-rht",
            "as tseng, nearest rounding instead of SR",
            source,
            Recipe(dgrad=nearest, wgrad=nearest),
            published=("the ablation with the random Hadamard alone",),
            assumed=("no prescale with nearest rounding",),
        ),
        Preset(
            "tseng-code",
            "as tseng's published code: 4/3 on each operand, in bf16",
            source,
            Recipe(dgrad=code, wgrad=code),
            published=(
                "the code multiplies 4/3 back on each operand in its dtype, which leaves the MXFP4 grid",
            ),
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

    def recipe(signs: Signs) -> Recipe:
        gradient = OperandPolicy(
            format="mxfp4", rounding="stochastic", prescale=0.75, hadamard=32, signs=signs
        )
        backward = GemmPolicy(left=gradient, right=replace(gradient, source="forward"))
        forward = both(format="mxfp4", scale="quest", hadamard=32, mask=True)
        return Recipe(fprop=forward, dgrad=backward, wgrad=backward)

    return [
        Preset(
            "quartet",
            "MXFP4: QuEST forward, SR + RHT 32 backward, masked gradient",
            source,
            recipe("call"),
            published=(*said, "the backward Hadamard is randomised"),
            assumed=(
                "signs before the Hadamard, new each call",
                "1e-8 is added to the standard deviation's scale",
            ),
        ),
        Preset(
            "quartet-code",
            "as quartet's published code, whose signs change nothing: no signs",
            source,
            recipe("none"),
            published=(*said, "the code multiplies the signs after the Hadamard"),
            assumed=("no signs: after the Hadamard they change no rounding and cancel in the product",),
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
