"""Recipes that only choose a format: FP4 after training, and FP8."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ablate.recipes.build import gemm_policy
from ablate.recipes.policy import GEMMS, GemmPolicy, OperandPolicy, Recipe
from ablate.recipes.presets.preset import Preset, arxiv, both, compared, github, read_in

if TYPE_CHECKING:
    from ablate.recipes.build import GemmFormat
    from ablate.recipes.policy import Scale


_BLOCKWISE = "tests/pytorch/references/blockwise_quantizer_reference.py"
_CURRENT = "transformer_engine/common/recipe/__init__.py"


def llm_fp4() -> list[Preset]:
    """Return LLM-FP4's searched formats (section 3), on Fprop."""
    source = arxiv("2310.16836", "Liu et al.", "LLM-FP4: 4-Bit Floating-Point Quantized Transformers")
    said = ("FP4 with a searched largest value, which is a searched, real-valued exponent bias",)
    assumed = (
        "a scale for each row of x and w, the best of 100 shares (up to 1.2) of its largest value",
        "not a training recipe: post-training quantisation, put on Fprop alone",
    )
    rows = (("llm-fp4", "fp4_e2m1", "E2M1"), ("llm-fp4-e3m0", "fp4_e3m0", "E3M0"))
    return [
        Preset(name, f"{shown} elements with a searched scale, on Fprop", source, recipe, said, assumed)
        for name, fmt, shown in rows
        for recipe in [Recipe(fprop=both(format=fmt, scale="searched"))]
    ]


def _everywhere(fmt: GemmFormat, scale: Scale | None = None) -> Recipe:
    policies: dict[str, Any] = {gemm: gemm_policy(gemm, fmt, scale=scale) for gemm in GEMMS}
    return Recipe(**policies)


def eight_bit() -> list[Preset]:
    """Return the usual FP8 and MXFP8 baselines."""
    hybrid = github(
        "NVIDIA/TransformerEngine", "NVIDIA", "TransformerEngine, FP8 recipes (hybrid format)", 2022
    )
    blockwise = github("NVIDIA/TransformerEngine", "NVIDIA", "TransformerEngine, Float8BlockScaling", 2025)
    weighted = GemmPolicy(
        left=OperandPolicy(format="fp8_e4m3", scale="1x128_pow2"),
        right=OperandPolicy(format="fp8_e4m3", scale="128x128_pow2"),
    )
    return [
        Preset(
            "deepseek-v3-fp8",
            "E4M3 everywhere, 1×128 activations, 128×128 weights",
            arxiv("2412.19437", "DeepSeek-AI", "DeepSeek-V3 Technical Report"),
            _everywhere("fp8-blockwise"),
            published=(
                "E4M3 throughout; fp32 scales, 1×128 for x and dy, 128×128 for w; fp32 sums each 128",
                "embedding, head, norms, gates and attention in high precision",
            ),
            assumed=("products are accumulated in fp32 throughout",),
            checked=compared("NVIDIA/TransformerEngine", _BLOCKWISE),
        ),
        Preset(
            "te-blockwise-fp8",
            "as deepseek-v3-fp8, scales rounded down to powers of two",
            blockwise,
            Recipe(fprop=weighted, dgrad=weighted, wgrad=both(format="fp8_e4m3", scale="1x128_pow2")),
            published=(
                "E4M3; 1×128 for x and dy, 128×128 for w",
                "scales in powers of two unless NVTE_FP8_BLOCK_SCALING_FP32_SCALES=1",
            ),
            checked=compared("NVIDIA/TransformerEngine", _BLOCKWISE),
        ),
        Preset(
            "te-hybrid-fp8",
            "E4M3 forward, E5M2 gradients, current scaling",
            hybrid,
            _everywhere("fp8"),
            published=("E4M3 for x and w, E5M2 for dy, one scale a tensor from its own largest value",),
            checked=read_in("NVIDIA/TransformerEngine", _CURRENT),
        ),
        Preset(
            "te-hybrid-fp8-delayed",
            "as te-hybrid-fp8, delayed scaling",
            hybrid,
            _everywhere("fp8-delayed"),
            published=("the scale comes from the largest value of the last 1,024 steps",),
            assumed=("a step without a past uses its own largest value (TransformerEngine: a scale of 1)",),
            checked=read_in("NVIDIA/TransformerEngine", _CURRENT),
        ),
        Preset(
            "mxfp8",
            "MXFP8, E4M3 everywhere, scale rounded up",
            arxiv("2506.08027", "Mishra et al. (NVIDIA)", "Recipes for Pre-training LLMs with MXFP8"),
            _everywhere("mxfp8", scale="rceil"),
            published=(
                "E4M3 for all operands in blocks of 32, scale rounded up; embedding and head as they are",
            ),
        ),
    ]
