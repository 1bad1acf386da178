"""AMD's recipes: the ladder of its paper and the defaults of its public code."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ablate.recipes.build import gemm_policy
from ablate.recipes.policy import GEMMS, Deoscillate, GemmPolicy, LayerRule, OperandPolicy, Recipe
from ablate.recipes.presets.preset import Preset, arxiv, both, compared, github, read_in

if TYPE_CHECKING:
    from ablate.recipes.policy import Block

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


def primus() -> list[Preset]:
    """Return Primus-Turbo's default, that with SR, and Primus' configuration of gpt-oss."""
    plain, tile = OperandPolicy(**_EVEN), OperandPolicy(**_EVEN, block="32x32")
    tiled = GemmPolicy(left=plain, right=tile)
    nearest = Recipe(fprop=tiled, dgrad=tiled, wgrad=both(**_EVEN, hadamard=16))
    sr = replace(
        nearest,
        dgrad=replace(tiled, left=_stochastic(plain)),
        wgrad=replace(nearest.wgrad, left=_stochastic(nearest.wgrad.left)),
    )
    turbo = github("AMD-AGI/Primus-Turbo", "AMD", "Primus-Turbo, MXFP4 linear layer")
    said = (
        "scale rule even, one 32×32 weight tile for Fprop and Dgrad",
        "Hadamard of 16 without signs on Wgrad alone",
    )
    checked = read_in("AMD-AGI/Primus-Turbo", "primus_turbo/pytorch/ops/gemm_fp4.py")
    config = "examples/mlperf/gpt_oss_20b/configs/MI355/gpt_oss_20B-MXFP4-deosc-mlperf-pretrain.yaml"
    return [
        Preset(
            "primus-turbo",
            "MXFP4 (even), 32×32 weights, H16 on Wgrad",
            turbo,
            nearest,
            published=(
                *said,
                "nearest rounding; SR on dy (use_gradient_sr) is off by default (#365 says on, its code off)",
            ),
            checked=checked,
        ),
        Preset(
            "primus-turbo-sr",
            "as primus-turbo, with SR on dy",
            turbo,
            sr,
            published=(*said, "use_gradient_sr: SR on dy of Dgrad and of Wgrad, without a prescale"),
            assumed=("a random word for each element: the kernel shares one among four",),
            checked=checked,
        ),
        Preset(
            "primus-gpt-oss",
            "as primus-turbo, first and last 2 blocks in BF16, de-oscillation (MLPerf's gpt-oss)",
            github("AMD-AGI/Primus", "AMD", "Primus, MLPerf gpt-oss-20B in MXFP4"),
            replace(
                nearest,
                rules=(LayerRule(first=2, last=2),),
                deoscillate=Deoscillate(window=200, threshold=3.0),
            ),
            published=(
                *said,
                "nearest rounding; the first 2 and the last 2 of 24 blocks in BF16",
                "weights are de-oscillated every 200 steps at 3×, from step 1,500 on",
            ),
            assumed=("de-oscillation from the beginning: its start depends on the run",),
            checked=read_in("AMD-AGI/Primus", config),
        ),
    ]


def alto() -> list[Preset]:
    """Return ALTO's published recipe in MXFP4, and in AMD-FP4."""
    source = github("AMD-AGI/ALTO", "AMD", "ALTO: Advanced Low-precision Training and Optimization")
    order = (
        "Wgrad: a Hadamard of 32 with a permutation, new each forward, then bf16; SR on dy, not on x",
        "SR on Dgrad's dy; head and router in high precision",
    )
    signs = "no signs: after the Hadamard they change no rounding and cancel in the product"

    def recipe(block: Block, **fields: Any) -> Recipe:
        plain = OperandPolicy(**fields)
        tile = replace(plain, block=block)
        turned = replace(plain, hadamard=32, permute=True, rotated_bf16=True)
        return Recipe(
            fprop=GemmPolicy(left=plain, right=tile),
            dgrad=GemmPolicy(left=_stochastic(plain), right=tile),
            wgrad=GemmPolicy(left=_stochastic(turned), right=turned),
        )

    return [
        Preset(
            "alto",
            "MXFP4 (even), 32×32 weights, permuted H32 and SR on Wgrad",
            source,
            recipe("32x32", **_EVEN),
            published=("scale rule even; weights in 32×32 tiles in all published configurations", *order),
            assumed=(signs, "the second permutation stays within a block and changes no rounding"),
            checked=compared("AMD-AGI/ALTO", "tests/unittest/mxfp4/utils.py"),
        ),
        Preset(
            "alto-amdfp4",
            "AMD-FP4: UE5M3 scales for 16, else as alto",
            source,
            recipe("16x16", format="nvfp4", scale="ue5m3"),
            published=(
                "E2M1 in blocks of 16 with UE5M3 scales, at least 2^-17",
                "no scale of the tensor by default (with one: two_level_ue5m3)",
                *order,
            ),
            assumed=(
                signs,
                "weights in tiles, Hadamard and SR as in the published MXFP4 configurations",
                "the second permutation, which would move values between blocks of 16, is left out",
            ),
            checked=compared("AMD-AGI/ALTO", "tests/unittest/nvfp4/utils.py"),
        ),
    ]


def _stochastic(policy: OperandPolicy) -> OperandPolicy:
    return replace(policy, rounding="stochastic")


def mfu() -> Preset:
    """Return the MXFP4 recipe of a technical report on 160B tokens."""
    plain = OperandPolicy(format="mxfp4")
    tile = replace(plain, block="32x32")
    return Preset(
        "mfu-mxfp4",
        "MXFP4, 32×32 weights, SR on Dgrad's dy alone, RHT 32 on Wgrad",
        github("MrHuff/mfu-fp4-training", "MrHuff", "MFU FP4 training, technical report"),
        Recipe(
            fprop=GemmPolicy(left=plain, right=tile),
            dgrad=GemmPolicy(left=_stochastic(plain), right=tile),
            wgrad=both(format="mxfp4", hadamard=32, signs="fixed"),
        ),
        published=(
            "MXFP4 in all GEMMs, weights in 32×32 tiles; SR on Dgrad's dy, nearest on Wgrad's",
            "a Hadamard of 32 with fixed signs on Wgrad",
        ),
        assumed=("scale rule floor, no prescale, our own sign vector: the report's are not known to us",),
        checked="read in notes on the report, not in its code",
    )
