"""TransformerEngine's examples of recipes with one format forward and another backward."""

from __future__ import annotations

from dataclasses import replace

from ablate.recipes.policy import GemmPolicy, OperandPolicy, Recipe
from ablate.recipes.presets.preset import Preset, github, read_in

_MXFP8 = OperandPolicy(format="mxfp8", scale="rceil")
_NVFP4 = OperandPolicy(format="nvfp4")
_SR = replace(_NVFP4, rounding="stochastic")
_HIGH = OperandPolicy()
_TURNED = replace(_NVFP4, hadamard=16, signs="fixed", rotated_bf16=True)
_ZOO = "transformer_engine/pytorch/custom_recipes/quantizer_factory_zoo.py"


def _again(policy: OperandPolicy) -> OperandPolicy:
    """Take the forward's dequantised operand, in bf16."""
    return replace(policy, source="forward" if policy.is_high_precision else "forward_bf16")


def _gemm(left: OperandPolicy, right: OperandPolicy) -> GemmPolicy:
    return GemmPolicy(left=left, right=right)


def transformer_engine() -> list[Preset]:
    """Return the zoo's recipes: examples that it calls neither official nor validated."""
    source = github("NVIDIA/TransformerEngine", "NVIDIA", "TransformerEngine, quantizer factory zoo")
    mxfp8, wgrad = _gemm(_MXFP8, _MXFP8), _gemm(replace(_TURNED, rounding="stochastic"), _TURNED)
    rows = [
        (
            "te-mxfp8-nvfp4",
            "MXFP8 forward, NVFP4 backward",
            Recipe(fprop=mxfp8, dgrad=_gemm(_SR, _again(_NVFP4)), wgrad=wgrad),
            (
                "mxfp8_fwd_nvfp4_bwd: Dgrad's w in NVFP4 1×16 from the dequantised MXFP8 forward",
                "Wgrad's operands from high precision, Hadamard of 16 with fixed signs, in bf16; SR on dy",
            ),
            (),
        ),
        (
            "te-nvfp4-1d",
            "as nvidia-nvfp4, weights in 1×16 blocks, quantised doubly for Dgrad",
            Recipe(fprop=_gemm(_NVFP4, _NVFP4), dgrad=_gemm(_SR, _again(_NVFP4)), wgrad=wgrad),
            ("nvfp4_1d_weight: Dgrad's w in NVFP4 1×16 from the dequantised forward; the rest as NVIDIA's",),
            (),
        ),
        (
            "te-bf16-mxfp8",
            "BF16 forward, MXFP8 backward",
            Recipe(dgrad=mxfp8, wgrad=mxfp8),
            ("high_precision_fwd_mxfp8_bwd: all four backward operands in MXFP8 from high precision",),
            (),
        ),
        (
            "te-mxfp8-bf16",
            "MXFP8 forward, BF16 backward of the dequantised operands",
            Recipe(fprop=mxfp8, dgrad=_gemm(_HIGH, _again(_HIGH)), wgrad=_gemm(_HIGH, _again(_HIGH))),
            ("mxfp8_fwd_high_precision_bwd, as backward_override=dequantized; dy in high precision",),
            (),
        ),
        (
            "te-nvfp4-row-mxfp8",
            "NVFP4 forward with a scale for each row of x, MXFP8 backward of the dequantised",
            Recipe(
                fprop=_gemm(replace(_NVFP4, scale="two_level_row"), _NVFP4),
                dgrad=_gemm(_MXFP8, _again(_MXFP8)),
                wgrad=_gemm(_MXFP8, _again(_MXFP8)),
            ),
            (
                "nvfp4_row_scaled_fwd_mxfp8_bwd, after Composer 2 (2603.24477): one fp32 scale a row of x",
                "backward: MXFP8, w and x from the dequantised forward",
            ),
            ("on every linear layer: the factory has it on experts alone, the rest in MXFP8",),
        ),
    ]
    checked = read_in("NVIDIA/TransformerEngine", _ZOO)
    return [
        Preset(name, summary, source, recipe, published, assumed, checked)
        for name, summary, recipe, published, assumed in rows
    ]
