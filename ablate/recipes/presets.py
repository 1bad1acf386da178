"""Published recipes by name, each with its source, what that source states, and what we had to assume.

``ablate recipes`` lists them, ``ablate recipes show NAME`` prints all six operands; docs/recipes.md is
written from here. Where published code departs from its paper, the preset follows the paper and a variant
whose name ends in ``-code`` the code. AdaHOP (2604.02525) is left out: it chooses a rotation for each pair of
operands from a calibration run, which no fixed policy can say.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ablate.recipes import sources
from ablate.recipes.build import gemm_policy
from ablate.recipes.policy import (
    GEMMS,
    Gemm,
    GemmPolicy,
    Hadamard,
    LayerRecipe,
    LayerRule,
    OperandPolicy,
    Phase,
    Recipe,
    Rounding,
)


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A named recipe. ``published`` is what the source states, ``assumed`` what we had to choose."""

    name: str
    summary: str
    source: sources.Source
    recipe: Recipe
    published: tuple[str, ...]
    assumed: tuple[str, ...] = ()


ALL = ("fprop", "dgrad", "wgrad")
_BF16 = GemmPolicy()
_HIGH = LayerRecipe()


def _all_gemms(fmt: Any, **fields: Any) -> dict[Gemm, GemmPolicy]:
    return {gemm: gemm_policy(gemm, fmt, **fields) for gemm in GEMMS}


def _of(gemms: dict[Gemm, GemmPolicy]) -> Recipe:
    return Recipe(fprop=gemms["fprop"], dgrad=gemms["dgrad"], wgrad=gemms["wgrad"])


def _both(**fields: Any) -> GemmPolicy:
    return GemmPolicy(left=OperandPolicy(**fields), right=OperandPolicy(**fields))


def _amd(
    gemms: tuple[str, ...], *, rounding: Rounding = "nearest", signs: Any = "none", hadamard: Hadamard = 0
) -> Recipe:
    four = _both(format="mxfp4", scale="even", rounding=rounding, hadamard=hadamard, signs=signs)
    return _of({gemm: four if gemm in gemms else gemm_policy(gemm, "fp8") for gemm in GEMMS})


def _amd_presets() -> list[Preset]:
    ladder = {"amd-f": ALL[:1], "amd-fd": ALL[:2], "amd-fdw": ALL}
    shown = {"amd-f": "Fprop", "amd-fd": "Fprop and Dgrad", "amd-fdw": "all three GEMMs"}
    base = (
        "block 32, E8M0 scale, nearest rounding, every linear layer of the blocks, the other GEMMs in FP8",
        "no seeds and no repeats are given",
    )
    assumed = (
        "scale rule even: that of AMD's public kernels; the paper names none",
        "weights in 1×32 blocks; FP8 with one scale a tensor, E4M3, gradients E5M2",
    )
    presets = []
    for name, gemms in ladder.items():
        variants: list[tuple[str, str, dict[str, Any], tuple[str, ...], tuple[str, ...]]] = [
            ("", "MXFP4", {}, (), ()),
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
                ("random Hadamard of 16 on both operands",),
                ("signs are drawn anew each step for each layer and GEMM",),
            ),
        ]
        if gemms == ALL:
            variants += [
                (
                    f"-dht{size}",
                    f"MXFP4, deterministic Hadamard {size}",
                    {"hadamard": size},
                    (f"Hadamard of {size} without signs, on both operands of each GEMM",),
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


def _rocm_te_sr() -> Preset:
    return Preset(
        name="rocm-te-sr",
        summary="for study only: SR as ROCm TE's public kernel reads, all three GEMMs",
        source=sources.ROCM_TE,
        recipe=_amd(ALL, rounding="stochastic_rocm"),
        published=(
            "one random word for four elements; the last two take it shifted right by 16",
            "AMD's host emulation of the conversion uses a word's top 22 bits, so that these two truncate",
        ),
        assumed=("that hardware does as the emulation, and that a published run used it: neither is known",),
    )


def _tseng_presets() -> list[Preset]:
    fields: dict[str, Any] = {
        "format": "mxfp4",
        "rounding": "stochastic",
        "prescale": 0.75,
        "hadamard": 64,
        "signs": "call",
        "rotated_bf16": True,
    }
    backward = _both(**fields)
    nearest = _both(**{**fields, "rounding": "nearest", "prescale": 1.0})
    code = _both(**{**fields, "undo": "operand"})
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


def _nvidia_presets() -> list[Preset]:
    four = OperandPolicy(format="nvfp4")
    tile = OperandPolicy(format="nvfp4", block="16x16")
    gradient = OperandPolicy(format="nvfp4", rounding="stochastic")
    turned: dict[str, Any] = {"format": "nvfp4", "hadamard": 16, "signs": "fixed"}
    recipe = Recipe(
        fprop=GemmPolicy(left=four, right=tile),
        dgrad=GemmPolicy(left=gradient, right=tile),
        wgrad=GemmPolicy(left=OperandPolicy(rounding="stochastic", **turned), right=OperandPolicy(**turned)),
        rules=(LayerRule(first=2, last=8),),
    )
    said = (
        "NVFP4; weights in 16×16 tiles that Fprop and Dgrad share; SR on gradients alone",
        "Hadamard of 16 on Wgrad's operands with one fixed sign vector for all layers and steps",
        "the first 2 and the last 8 blocks (of the 12B model's 62) in BF16; head in high precision",
    )
    backward = LayerRecipe(dgrad=recipe.dgrad, wgrad=recipe.wgrad)
    return [
        Preset(
            name="nvidia-nvfp4",
            summary="NVFP4 pre-training: 2-D weights, SR, RHT 16 on Wgrad",
            source=sources.NVIDIA,
            recipe=recipe,
            published=said,
        ),
        Preset(
            name="nvidia-nvfp4-switch",
            summary="as nvidia-nvfp4, Fprop in BF16 for the last part",
            source=sources.NVIDIA,
            recipe=replace(recipe, phases=(Phase(from_fraction=0.82, recipe=backward),)),
            published=(*said, "the forward pass goes to BF16 for the last part of training"),
            assumed=("the last part is the last 18 % of the tokens; a phase of your own overrides it",),
        ),
    ]


def _amd_code_presets() -> list[Preset]:
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
                wgrad=_both(**even, hadamard=16),
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


def _quartet_presets() -> list[Preset]:
    forward = _both(format="mxfp4", scale="quest", hadamard=32, mask=True)
    fields: dict[str, Any] = {"format": "mxfp4", "rounding": "stochastic", "prescale": 0.75}
    fields |= {"hadamard": 32, "signs": "call"}
    said = (
        "forward: Hadamard of 32, QuEST's scale from the standard deviation, nearest rounding",
        "the gradient is masked where values clip",
        "backward: Hadamard of 32, floor scale with 3/4 range, SR; operands from the quantised forward",
        "head in high precision",
    )

    def recipe(*, signs_after: bool) -> Recipe:
        gradient = OperandPolicy(**fields, signs_after=signs_after)
        doubly = replace(gradient, source="forward")
        backward = GemmPolicy(left=gradient, right=doubly)
        return Recipe(fprop=forward, dgrad=backward, wgrad=backward)

    return [
        Preset(
            name="quartet",
            summary="MXFP4: QuEST forward, SR + RHT 32 backward, masked gradient",
            source=sources.QUARTET,
            recipe=recipe(signs_after=False),
            published=(*said, "the backward Hadamard is randomised"),
            assumed=(
                "signs before the Hadamard, new each call",
                "1e-8 is added to the standard deviation's scale",
            ),
        ),
        Preset(
            name="quartet-code",
            summary="as quartet's published code: signs after the Hadamard",
            source=sources.QUARTET,
            recipe=recipe(signs_after=True),
            published=(
                *said,
                "the code multiplies the signs after the Hadamard, where they change no rounding",
            ),
        ),
    ]


def _quartet2() -> Preset:
    eden = OperandPolicy(format="nvfp4", scale="ms_eden", hadamard=32, signs="step")
    backward = GemmPolicy(left=eden, right=replace(eden, source="forward"))
    return Preset(
        name="quartet2",
        summary="NVFP4: four-or-six forward, MS-EDEN with RHT 32 backward",
        source=sources.QUARTET2,
        recipe=Recipe(fprop=_both(format="nvfp4", scale="four_six"), dgrad=backward, wgrad=backward),
        published=(
            "forward: nearest with the better of the scales to 4 and to 6; head in high precision",
            "backward: MS-EDEN on all four operands, rotation re-signed each layer and step",
        ),
        assumed=(
            "MS-EDEN as in the public training code: its group of 32 (the published kernels use 128), and",
            "weights and activations of the backward pass taken from the quantised forward",
            "nearest rounding inside it sends ties to even; the code sends them away from zero",
        ),
    )


def _all_the_way_presets() -> list[Preset]:
    nearest = OperandPolicy(format="nvfp4")
    sr = OperandPolicy(format="nvfp4", rounding="stochastic")
    recipe = Recipe(
        fprop=GemmPolicy(left=nearest, right=nearest),
        dgrad=GemmPolicy(left=sr, right=nearest),
        wgrad=GemmPolicy(left=sr, right=sr),
    )
    said = (
        "blocks of 16, E4M3 scales; nearest in the forward pass and on Dgrad's w; SR on dy and Wgrad's x",
    )
    assumed = ("NVFP4's second, tensor-wise scale level",)
    return [
        Preset(
            name="fp4-all-the-way",
            summary="NVFP4 with split rounding, no Hadamard",
            source=sources.ALL_THE_WAY,
            recipe=recipe,
            published=said,
            assumed=assumed,
        ),
        Preset(
            name="fp4-all-the-way-qaf",
            summary="as fp4-all-the-way, backward in BF16 for the last part",
            source=sources.ALL_THE_WAY,
            recipe=replace(
                recipe, phases=(Phase(from_fraction=0.95, recipe=LayerRecipe(fprop=recipe.fprop)),)
            ),
            published=(*said, "a last phase with the backward pass in BF16"),
            assumed=(*assumed, "that phase is the last 5 % of the tokens"),
        ),
    ]


def _tetrajet() -> Preset:
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


def _four_over_six() -> Preset:
    plain = OperandPolicy(format="nvfp4", scale="four_six")
    sr = replace(plain, rounding="stochastic")
    turned = replace(plain, hadamard=16, signs="fixed")
    return Preset(
        name="fouroversix",
        summary="NVFP4 with four-or-six scales, SR on dy, RHT 16 on Wgrad",
        source=sources.FOUR_OVER_SIX,
        recipe=Recipe(
            fprop=GemmPolicy(left=plain, right=plain),
            dgrad=GemmPolicy(left=sr, right=plain),
            wgrad=GemmPolicy(left=replace(turned, rounding="stochastic"), right=turned),
        ),
        published=(
            "per block the scale that maps the largest value to 4 or to 6, whichever errs less (squares)",
            "SR on gradients; Hadamard of 16 with fixed signs on Wgrad",
        ),
        assumed=(
            "all three GEMMs, weights in 1×16 blocks; no layer kept in high precision",
            "NVIDIA's sign vector",
        ),
    )


def _llm_fp4_presets() -> list[Preset]:
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
            recipe=Recipe(fprop=_both(format=fmt, scale="searched")),
            published=said,
            assumed=assumed,
        )
        for name, fmt, shown in (("llm-fp4", "fp4_e2m1", "E2M1"), ("llm-fp4-e3m0", "fp4_e3m0", "E3M0"))
    ]


def _eight_bit_presets() -> list[Preset]:
    return [
        Preset(
            name="deepseek-v3-fp8",
            summary="E4M3 everywhere, 1×128 activations, 128×128 weights",
            source=sources.DEEPSEEK,
            recipe=_of(_all_gemms("fp8-blockwise")),
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
            recipe=_of(_all_gemms("fp8")),
            published=("E4M3 for x and w, E5M2 for dy, one scale a tensor from its own largest value",),
        ),
        Preset(
            name="te-hybrid-fp8-delayed",
            summary="as te-hybrid-fp8, delayed scaling",
            source=sources.TE,
            recipe=_of(_all_gemms("fp8-delayed")),
            published=("the scale comes from the largest value of the last 1,024 steps",),
            assumed=("a step without a past uses its own largest value (TransformerEngine: a scale of 1)",),
        ),
        Preset(
            name="mxfp8",
            summary="MXFP8, E4M3 everywhere, scale rounded up",
            source=sources.MXFP8,
            recipe=_of(_all_gemms("mxfp8", scale="rceil")),
            published=(
                "E4M3 for all operands in blocks of 32, scale rounded up; embedding and head as they are",
            ),
        ),
    ]


_LISTED = [
    *_amd_presets(),
    _rocm_te_sr(),
    *_tseng_presets(),
    *_nvidia_presets(),
    *_amd_code_presets(),
    *_quartet_presets(),
    _quartet2(),
    *_all_the_way_presets(),
    _tetrajet(),
    _four_over_six(),
    *_llm_fp4_presets(),
    *_eight_bit_presets(),
]
PRESETS: dict[str, Preset] = {preset.name: preset for preset in _LISTED}
