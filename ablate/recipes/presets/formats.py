"""Recipes that only choose a format: FP4 after training, and FP8."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ablate.recipes import sources
from ablate.recipes.build import gemm_policy
from ablate.recipes.policy import GEMMS, Recipe
from ablate.recipes.presets.preset import Preset, both

if TYPE_CHECKING:
    from ablate.recipes.build import GemmFormat
    from ablate.recipes.policy import Scale


def llm_fp4() -> list[Preset]:
    """Return LLM-FP4's searched formats (2310.16836, section 3), on Fprop."""
    said = ("FP4 with a searched largest value, which is a searched, real-valued exponent bias",)
    assumed = (
        "a scale for each row of x and w, the best of 100 shares (up to 1.2) of its largest value",
        "not a training recipe: post-training quantisation, put on Fprop alone",
    )
    return [
        Preset(
            name=name,
            summary=f"{shown} elements with a searched scale, on Fprop",
            source=sources.LLM_FP4,
            recipe=Recipe(fprop=both(format=fmt, scale="searched")),
            published=said,
            assumed=assumed,
        )
        for name, fmt, shown in (("llm-fp4", "fp4_e2m1", "E2M1"), ("llm-fp4-e3m0", "fp4_e3m0", "E3M0"))
    ]


def _everywhere(fmt: GemmFormat, scale: Scale | None = None) -> Recipe:
    policies: dict[str, Any] = {gemm: gemm_policy(gemm, fmt, scale=scale) for gemm in GEMMS}
    return Recipe(**policies)


def eight_bit() -> list[Preset]:
    """Return the usual FP8 and MXFP8 baselines."""
    return [
        Preset(
            name="deepseek-v3-fp8",
            summary="E4M3 everywhere, 1×128 activations, 128×128 weights",
            source=sources.DEEPSEEK,
            recipe=_everywhere("fp8-blockwise"),
            published=(
                "E4M3 throughout; fp32 scales, 1×128 for x and dy, 128×128 for w; fp32 sums each 128",
                "embedding, head, norms, gates and attention in high precision",
            ),
            assumed=("products are accumulated in fp32 throughout",),
        ),
        Preset(
            name="te-hybrid-fp8",
            summary="E4M3 forward, E5M2 gradients, current scaling",
            source=sources.TE,
            recipe=_everywhere("fp8"),
            published=("E4M3 for x and w, E5M2 for dy, one scale a tensor from its own largest value",),
        ),
        Preset(
            name="te-hybrid-fp8-delayed",
            summary="as te-hybrid-fp8, delayed scaling",
            source=sources.TE,
            recipe=_everywhere("fp8-delayed"),
            published=("the scale comes from the largest value of the last 1,024 steps",),
            assumed=("a step without a past uses its own largest value (TransformerEngine: a scale of 1)",),
        ),
        Preset(
            name="mxfp8",
            summary="MXFP8, E4M3 everywhere, scale rounded up",
            source=sources.MXFP8,
            recipe=_everywhere("mxfp8", scale="rceil"),
            published=(
                "E4M3 for all operands in blocks of 32, scale rounded up; embedding and head as they are",
            ),
        ),
    ]
