"""AMD's recipes: the ladder of its paper and the defaults of its public code."""

from __future__ import annotations

from typing import Any

from ablate.recipes.build import gemm_policy
from ablate.recipes.policy import GEMMS, GemmPolicy, OperandPolicy, Recipe
from ablate.recipes.presets.preset import Preset, arxiv, both, github

_EVEN: dict[str, Any] = {"format": "mxfp4", "scale": "even"}


def _amd(gemms: tuple[str, ...], **fields: Any) -> Recipe:
    four = both(**_EVEN, **fields)
    policies: dict[str, Any] = {gemm: four if gemm in gemms else gemm_policy(gemm, "fp8") for gemm in GEMMS}
    return Recipe(**policies)


def ladder() -> list[Preset]:
    """Return the rows of the paper's table of stabilisers; the other GEMMs are in FP8."""
    title = "Pretraining Large Language Models with MXFP4 on Native FP4 Hardware"
    source = arxiv("2605.09825", "Kandemir et al. (AMD)", title)
    base = (
        "block 32, E8M0 scale, every linear layer of the blocks, the other GEMMs in FP8",
        "no seeds and no repeats are given",
    )
    assumed = (
        "scale rule even: that of AMD's public kernels; the paper names none",
        "weights in 1×32 blocks; FP8 with one scale a tensor, E4M3, gradients E5M2",
    )
    of_sr = "on both operands, without a prescale: the paper does not say (rocm-te-sr: the kernel)"
    of_signs = "signs are drawn anew each step for each layer and GEMM"
    variants: list[tuple[str, str, dict[str, Any], str, tuple[str, ...]]] = [
        ("", "", {}, "nearest rounding", ()),
        ("-sr", ", stochastic rounding", {"rounding": "stochastic"}, "stochastic rounding", (of_sr,)),
        (
            "-rht16",
            ", random Hadamard 16",
            {"hadamard": 16, "signs": "step"},
            "nearest rounding; random Hadamard of 16 on both operands",
            (of_signs,),
        ),
    ]
    deterministic: list[tuple[str, str, dict[str, Any], str, tuple[str, ...]]] = [
        (
            f"-dht{size}",
            f", deterministic Hadamard {size}",
            {"hadamard": size},
            f"nearest rounding; Hadamard of {size} without signs, on both operands of each GEMM",
            (),
        )
        for size in (16, 32)
    ]
    return [
        Preset(
            name + suffix,
            f"MXFP4{what} in {where}",
            source,
            _amd(gemms, **fields),
            published=(*base, said),
            assumed=assumed + chosen,
        )
        for name, gemms, where, rows in (
            ("amd-f", GEMMS[:1], "Fprop", variants),
            ("amd-fd", GEMMS[:2], "Fprop and Dgrad", variants),
            ("amd-fdw", GEMMS, "all three GEMMs", variants + deterministic),
        )
        for suffix, what, fields, said, chosen in rows
    ]


def rocm_te_sr() -> Preset:
    """Return the stochastic rounding of the public kernel, for study only."""
    title = "TransformerEngine for ROCm, MXFP4 cast kernel; composable_kernel, convert_to_type_sr"
    return Preset(
        "rocm-te-sr",
        "for study only: SR as ROCm TE's public kernel reads, all three GEMMs",
        github("ROCm/TransformerEngine", "AMD", title),
        _amd(GEMMS, rounding="stochastic_rocm"),
        published=(
            "one random word for four elements; the last two take it shifted right by 16",
            "AMD's host emulation of the conversion uses a word's top 22 bits, so that these two truncate",
        ),
        assumed=("that hardware does as the emulation, and that a published run used it: neither is known",),
    )


def code_bases() -> list[Preset]:
    """Return the defaults of Primus-Turbo and ALTO."""
    plain, tile = OperandPolicy(**_EVEN), OperandPolicy(**_EVEN, block="32x32")
    sr = OperandPolicy(**_EVEN, rounding="stochastic")
    turned = {**_EVEN, "hadamard": 32, "signs": "call", "permute": True}
    tiled = GemmPolicy(left=plain, right=tile)
    return [
        Preset(
            "primus-turbo",
            "MXFP4 (even), 32×32 weights, H16 on Wgrad",
            github("AMD-AGI/Primus-Turbo", "AMD", "Primus-Turbo, MXFP4 linear layer"),
            Recipe(fprop=tiled, dgrad=tiled, wgrad=both(**_EVEN, hadamard=16)),
            published=(
                "scale rule even, nearest rounding, one 32×32 weight tile for Fprop and Dgrad",
                "Hadamard of 16 without signs on Wgrad alone; SR is an option that is off by default",
            ),
        ),
        Preset(
            "alto",
            "MXFP4 (even), signs and permutation with H32 and SR on Wgrad",
            github("AMD-AGI/ALTO", "AMD", "ALTO: Advanced Low-precision Training and Optimization"),
            Recipe(
                fprop=GemmPolicy(left=plain, right=plain),
                dgrad=GemmPolicy(left=sr, right=plain),
                wgrad=GemmPolicy(
                    left=OperandPolicy(**turned, rounding="stochastic"), right=OperandPolicy(**turned)
                ),
            ),
            published=(
                "Wgrad: signs, permutation and Hadamard of 32, new each forward; SR on dy, nearest on x",
                "head and router in high precision",
            ),
            assumed=(
                "of its options: scale even (not UOS), weights in 1×32 blocks (not 32×32), SR on Dgrad's dy",
                "the permutation moves values within a Hadamard group",
            ),
        ),
    ]
