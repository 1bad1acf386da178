"""Published recipes in MXFP4."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ablate.recipes import sources
from ablate.recipes.build import gemm_policy
from ablate.recipes.policy import GemmPolicy, OperandPolicy, Recipe
from ablate.recipes.presets.preset import Preset, both

if TYPE_CHECKING:
    from ablate.recipes.policy import Signs


def tseng() -> list[Preset]:
    """Return the recipes of the paper (2502.20586, algorithm 2) and of its code."""
    fields: dict[str, Any] = {
        "format": "mxfp4",
        "rounding": "stochastic",
        "prescale": 0.75,
        "hadamard": 64,
        "signs": "call",
        "rotated_bf16": True,
    }
    backward = both(**fields)
    nearest = both(**{**fields, "rounding": "nearest", "prescale": 1.0})
    code = both(**{**fields, "undo": "operand"})
    said = (
        "Dgrad and Wgrad in MXFP4 (floor), stochastic rounding; 3/4 prescale after the block's exponent",
        "random Hadamard of 64 with new signs each call, in bf16; the product times 16/9",
    )
    return [
        Preset(
            name="tseng",
            summary="MXFP4 backward with RHT 64 and SR, forward in BF16",
            source=sources.TSENG,
            recipe=Recipe(dgrad=backward, wgrad=backward),
            published=said,
        ),
        Preset(
            name="tseng-fp8",
            summary="as tseng, forward in FP8",
            source=sources.TSENG,
            recipe=Recipe(fprop=gemm_policy("fprop", "fp8"), dgrad=backward, wgrad=backward),
            published=said,
            assumed=("the forward's FP8 is E4M3 with one scale a tensor",),
        ),
        Preset(
            name="tseng-rht",
            summary="as tseng, nearest rounding instead of SR",
            source=sources.TSENG,
            recipe=Recipe(dgrad=nearest, wgrad=nearest),
            published=("the ablation with the random Hadamard alone",),
            assumed=("no prescale with nearest rounding",),
        ),
        Preset(
            name="tseng-code",
            summary="as tseng's published code: 4/3 on each operand, in bf16",
            source=sources.TSENG,
            recipe=Recipe(dgrad=code, wgrad=code),
            published=(
                "the code multiplies 4/3 back on each operand in its dtype, which leaves the MXFP4 grid",
            ),
        ),
    ]


def quartet() -> list[Preset]:
    """Return the recipes of the paper (2505.14669) and of its code."""
    forward = both(format="mxfp4", scale="quest", hadamard=32, mask=True)
    fields: dict[str, Any] = {"format": "mxfp4", "rounding": "stochastic", "prescale": 0.75}
    fields |= {"hadamard": 32}
    said = (
        "forward: Hadamard of 32, QuEST's scale from the standard deviation, nearest rounding",
        "the gradient is masked where values clip",
        "backward: Hadamard of 32, floor scale with 3/4 range, SR; operands from the quantised forward",
        "head in high precision",
    )

    def recipe(signs: Signs) -> Recipe:
        gradient = OperandPolicy(**fields, signs=signs)
        doubly = replace(gradient, source="forward")
        backward = GemmPolicy(left=gradient, right=doubly)
        return Recipe(fprop=forward, dgrad=backward, wgrad=backward)

    return [
        Preset(
            name="quartet",
            summary="MXFP4: QuEST forward, SR + RHT 32 backward, masked gradient",
            source=sources.QUARTET,
            recipe=recipe("call"),
            published=(*said, "the backward Hadamard is randomised"),
            assumed=(
                "signs before the Hadamard, new each call",
                "1e-8 is added to the standard deviation's scale",
            ),
        ),
        Preset(
            name="quartet-code",
            summary="as quartet's published code, whose signs change nothing: no signs",
            source=sources.QUARTET,
            recipe=recipe("none"),
            published=(*said, "the code multiplies the signs after the Hadamard"),
            assumed=("no signs: after the Hadamard they change no rounding and cancel in the product",),
        ),
    ]


def tetrajet() -> Preset:
    """Return TetraJet's recipe (2502.20853)."""
    nearest = OperandPolicy(format="mxfp4", scale="rceil")
    sr = replace(nearest, rounding="stochastic")
    backward = GemmPolicy(left=sr, right=replace(sr, source="forward"))
    return Preset(
        name="tetrajet",
        summary="MXFP4 (rceil): nearest forward, SR backward, double quantisation",
        source=sources.TETRAJET,
        recipe=Recipe(fprop=GemmPolicy(left=nearest, right=nearest), dgrad=backward, wgrad=backward),
        published=(
            "truncation-free scale (rounded up), nearest forward, SR backward without a prescale",
            "weights and activations of the backward pass are quantised from the quantised forward",
        ),
        assumed=(
            "the oscillation remedies (EMA quantiser, Q-Ramping) are left out: they are optimizers' business",
        ),
    )
