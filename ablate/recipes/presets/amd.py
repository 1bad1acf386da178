"""AMD's recipes: the ladder of its paper (2605.09825) and the defaults of its public code."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ablate.recipes import sources
from ablate.recipes.build import gemm_policy
from ablate.recipes.policy import GEMMS, GemmPolicy, OperandPolicy, Recipe
from ablate.recipes.presets.preset import Preset, both

if TYPE_CHECKING:
    from ablate.recipes.policy import Hadamard, Rounding


def _amd(
    gemms: tuple[str, ...], *, rounding: Rounding = "nearest", signs: Any = "none", hadamard: Hadamard = 0
) -> Recipe:
    four = both(format="mxfp4", scale="even", rounding=rounding, hadamard=hadamard, signs=signs)
    policies: dict[str, Any] = {gemm: four if gemm in gemms else gemm_policy(gemm, "fp8") for gemm in GEMMS}
    return Recipe(**policies)


def ladder() -> list[Preset]:
    """Return the rows of the paper's table of stabilisers; the other GEMMs are in FP8."""
    rows = {"amd-f": GEMMS[:1], "amd-fd": GEMMS[:2], "amd-fdw": GEMMS}
    shown = {"amd-f": "Fprop", "amd-fd": "Fprop and Dgrad", "amd-fdw": "all three GEMMs"}
    base = (
        "block 32, E8M0 scale, every linear layer of the blocks, the other GEMMs in FP8",
        "no seeds and no repeats are given",
    )
    assumed = (
        "scale rule even: that of AMD's public kernels; the paper names none",
        "weights in 1×32 blocks; FP8 with one scale a tensor, E4M3, gradients E5M2",
    )
    presets = []
    for name, gemms in rows.items():
        variants: list[tuple[str, str, dict[str, Any], tuple[str, ...], tuple[str, ...]]] = [
            ("", "MXFP4", {}, ("nearest rounding",), ()),
            (
                "-sr",
                "MXFP4, stochastic rounding",
                {"rounding": "stochastic"},
                ("stochastic rounding",),
                ("on both operands, without a prescale: the paper does not say (rocm-te-sr: the kernel)",),
            ),
            (
                "-rht16",
                "MXFP4, random Hadamard 16",
                {"hadamard": 16, "signs": "step"},
                ("nearest rounding; random Hadamard of 16 on both operands",),
                ("signs are drawn anew each step for each layer and GEMM",),
            ),
        ]
        if gemms == GEMMS:
            variants += [
                (
                    f"-dht{size}",
                    f"MXFP4, deterministic Hadamard {size}",
                    {"hadamard": size},
                    (f"nearest rounding; Hadamard of {size} without signs, on both operands of each GEMM",),
                    (),
                )
                for size in (16, 32)
            ]
        presets += [
            Preset(
                name=name + suffix,
                summary=f"{what} in {shown[name]}",
                source=sources.AMD,
                recipe=_amd(gemms, **fields),
                published=base + said,
                assumed=assumed + chosen,
            )
            for suffix, what, fields, said, chosen in variants
        ]
    return presets


def rocm_te_sr() -> Preset:
    """Return the stochastic rounding of the public kernel, for study only."""
    return Preset(
        name="rocm-te-sr",
        summary="for study only: SR as ROCm TE's public kernel reads, all three GEMMs",
        source=sources.ROCM_TE,
        recipe=_amd(GEMMS, rounding="stochastic_rocm"),
        published=(
            "one random word for four elements; the last two take it shifted right by 16",
            "AMD's host emulation of the conversion uses a word's top 22 bits, so that these two truncate",
        ),
        assumed=("that hardware does as the emulation, and that a published run used it: neither is known",),
    )


def code_bases() -> list[Preset]:
    """Return the defaults of Primus-Turbo and ALTO."""
    even: dict[str, Any] = {"format": "mxfp4", "scale": "even"}
    plain, tile = OperandPolicy(**even), OperandPolicy(**even, block="32x32")
    sr = OperandPolicy(**even, rounding="stochastic")
    turned = {**even, "hadamard": 32, "signs": "call", "permute": True}
    return [
        Preset(
            name="primus-turbo",
            summary="MXFP4 (even), 32×32 weights, H16 on Wgrad",
            source=sources.PRIMUS_TURBO,
            recipe=Recipe(
                fprop=GemmPolicy(left=plain, right=tile),
                dgrad=GemmPolicy(left=plain, right=tile),
                wgrad=both(**even, hadamard=16),
            ),
            published=(
                "scale rule even, nearest rounding, one 32×32 weight tile for Fprop and Dgrad",
                "Hadamard of 16 without signs on Wgrad alone; SR is an option that is off by default",
            ),
        ),
        Preset(
            name="alto",
            summary="MXFP4 (even), signs and permutation with H32 and SR on Wgrad",
            source=sources.ALTO,
            recipe=Recipe(
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
