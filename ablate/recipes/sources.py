"""The publications of the recipes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Source:
    """One publication."""

    authors: str
    title: str
    url: str
    year: int


AMD = Source(
    authors="Kandemir et al. (AMD)",
    title="Pretraining Large Language Models with MXFP4 on Native FP4 Hardware",
    url="https://arxiv.org/abs/2605.09825",
    year=2026,
)
ROCM_TE = Source(
    authors="AMD",
    title="TransformerEngine for ROCm, MXFP4 cast kernel; composable_kernel, convert_to_type_sr",
    url="https://github.com/ROCm/TransformerEngine",
    year=2026,
)
TSENG = Source(
    authors="Tseng, Yu, Park",
    title="Training LLMs with MXFP4",
    url="https://arxiv.org/abs/2502.20586",
    year=2025,
)
NVIDIA = Source(
    authors="NVIDIA",
    title="Pretraining Large Language Models with NVFP4",
    url="https://arxiv.org/abs/2509.25149",
    year=2025,
)
PRIMUS_TURBO = Source(
    authors="AMD",
    title="Primus-Turbo, MXFP4 linear layer",
    url="https://github.com/AMD-AGI/Primus-Turbo",
    year=2026,
)
ALTO = Source(
    authors="AMD",
    title="ALTO: Advanced Low-precision Training and Optimization",
    url="https://github.com/AMD-AGI/ALTO",
    year=2026,
)
QUARTET = Source(
    authors="Castro et al.",
    title="Quartet: Native FP4 Training Can Be Optimal for Large Language Models",
    url="https://arxiv.org/abs/2505.14669",
    year=2025,
)
QUARTET2 = Source(
    authors="Panferov, Schultheis et al. (IST Austria)",
    title="Quartet II: Accurate LLM Pre-Training in NVFP4 by Improved Unbiased Gradient Estimation",
    url="https://arxiv.org/abs/2601.22813",
    year=2026,
)
ALL_THE_WAY = Source(
    authors="Chmiel et al.",
    title="FP4 All the Way: Fully Quantized Training of LLMs",
    url="https://arxiv.org/abs/2505.19115",
    year=2025,
)
TETRAJET = Source(
    authors="Chen et al.",
    title="Oscillation-Reduced MXFP4 Training for Vision Transformers (TetraJet)",
    url="https://arxiv.org/abs/2502.20853",
    year=2025,
)
FOUR_OVER_SIX = Source(
    authors="Cook et al.",
    title="Four Over Six: More Accurate NVFP4 Quantization with Adaptive Block Scaling",
    url="https://arxiv.org/abs/2512.02010",
    year=2025,
)
LLM_FP4 = Source(
    authors="Liu et al.",
    title="LLM-FP4: 4-Bit Floating-Point Quantized Transformers",
    url="https://arxiv.org/abs/2310.16836",
    year=2023,
)
DEEPSEEK = Source(
    authors="DeepSeek-AI",
    title="DeepSeek-V3 Technical Report",
    url="https://arxiv.org/abs/2412.19437",
    year=2024,
)
TE = Source(
    authors="NVIDIA",
    title="TransformerEngine, FP8 recipes (hybrid format)",
    url="https://github.com/NVIDIA/TransformerEngine",
    year=2022,
)
MXFP8 = Source(
    authors="Mishra et al. (NVIDIA)",
    title="Recipes for Pre-training LLMs with MXFP8",
    url="https://arxiv.org/abs/2506.08027",
    year=2025,
)
