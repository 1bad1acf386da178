"""Published recipes in NVFP4."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ablate.recipes.policy import GemmPolicy, LayerRecipe, LayerRule, OperandPolicy, Phase, Recipe
from ablate.recipes.presets.preset import Preset, arxiv, both, compared, github, read_in

if TYPE_CHECKING:
    from ablate.recipes.policy import Hadamard, Rounding, Scale

_PLAIN = OperandPolicy(format="nvfp4")
_SR = replace(_PLAIN, rounding="stochastic")
_TILE = replace(_PLAIN, block="16x16")
_REFERENCE = compared(
    "NVIDIA/TransformerEngine", "transformer_engine/pytorch/custom_recipes/reference_nvfp4.py"
)
_UNCLIPPED = 16 / 17
"""The prescale with which SR never clips: an E4M3 scale may be 1/17 below its block's."""


def _sr_and_hadamard(plain: OperandPolicy, weight: OperandPolicy, prescale: float = 1.0) -> Recipe:
    """Build a recipe with SR on gradients, and with a Hadamard of fixed signs on Wgrad alone."""
    turned = replace(plain, hadamard=16, signs="fixed", rotated_bf16=True)
    sr, turned_sr = (replace(one, rounding="stochastic", prescale=prescale) for one in (plain, turned))
    return Recipe(
        fprop=GemmPolicy(left=plain, right=weight),
        dgrad=GemmPolicy(left=sr, right=weight),
        wgrad=GemmPolicy(left=turned_sr, right=turned),
    )


def nvidia() -> list[Preset]:
    """Return NVIDIA's recipe, for the whole run, with its last phase, and with unbiased gradients."""
    source = arxiv("2509.25149", "NVIDIA", "Pretraining Large Language Models with NVFP4")
    everywhere = _sr_and_hadamard(_PLAIN, _TILE)
    recipe, unbiased = (
        replace(found, rules=(LayerRule(first=2, last=8),))
        for found in (everywhere, _sr_and_hadamard(_PLAIN, _TILE, _UNCLIPPED))
    )
    said = (
        "NVFP4; weights in 16×16 tiles that Fprop and Dgrad share; SR on gradients alone",
        "Hadamard of 16 on Wgrad's operands with one fixed sign vector, rounded to bf16",
        "the first 2 and the last 8 blocks (of the 12B model's 62) in BF16; head in high precision",
    )
    backward = LayerRecipe(dgrad=recipe.dgrad, wgrad=recipe.wgrad)
    return [
        Preset(
            "nvidia-nvfp4",
            "NVFP4 pre-training: 2-D weights, SR, RHT 16 on Wgrad",
            source,
            recipe,
            published=said,
            checked=_REFERENCE,
        ),
        Preset(
            "nvidia-nvfp4-switch",
            "as nvidia-nvfp4, Fprop in BF16 for the last part",
            source,
            replace(recipe, phases=(Phase(from_fraction=0.82, recipe=backward),)),
            published=(*said, "the forward pass goes to BF16 for the last part of training"),
            assumed=("the last part is the last 18 % of the tokens; a phase of your own overrides it",),
            checked=_REFERENCE,
        ),
        Preset(
            "torchtitan-nvfp4-85",
            "as nvidia-nvfp4, the last 15 % of the blocks in BF16",
            github("pytorch/torchtitan", "Meta", "torchtitan, llama3_8b_first_85_pct_layers_nvfp4 (#3914)"),
            replace(everywhere, rules=(LayerRule(last=0.15),)),
            published=(*said[:2], "the last 15 % of the blocks in BF16; head in high precision"),
            assumed=("15 % rounded up to whole blocks",),
            checked=compared("pytorch/ao", "test/prototype/moe_training/nvfp4_training/nvfp4_reference.py"),
        ),
        Preset(
            "nvidia-nvfp4-unbiased",
            "as nvidia-nvfp4, SR scaled by 16/17 so that nothing clips",
            source,
            unbiased,
            published=said,
            assumed=(
                "not NVIDIA's: an E4M3 scale may lie 1/17 too low for the largest value, which SR then clips",
                "the factor is that of fouroversix' unbiased rounding (github.com/mit-han-lab/fouroversix)",
            ),
            checked=_REFERENCE,
        ),
    ]


def quartet2() -> list[Preset]:
    """Return Quartet II's recipe, that of its published sweep, of the model trained with it, and unbiased."""
    title = "Quartet II: Accurate LLM Pre-Training in NVFP4 by Improved Unbiased Gradient Estimation"
    source = arxiv("2601.22813", "Panferov, Schultheis et al. (IST Austria)", title)
    checked = compared(
        "IST-DASLab/Quartet-II",
        "src/models/quantization/quantizers/nvfp4_triton.py (forward); backward read in schemes/quartet_2.py",
    )
    said = "backward: MS-EDEN on all four operands, w and x from the quantised forward, in bf16"
    signs = "signs anew for each backward pass of a layer, shared by Dgrad and Wgrad; head in high precision"
    away = "nearest sends ties away from zero"
    exact = "an exact Hadamard: the code holds 1/√32 and 1/√128 in bf16, 0.01 % less"

    def recipe(scale: Scale, group: Hadamard, ties: Rounding, eden: Scale = "ms_eden") -> Recipe:
        policy = OperandPolicy(format="nvfp4", scale=eden, hadamard=group, signs="backward", rounding=ties)
        backward = GemmPolicy(left=policy, right=replace(policy, source="forward_bf16"))
        forward = both(format="nvfp4", scale=scale, rounding=ties)
        return Recipe(fprop=forward, dgrad=backward, wgrad=backward)

    return [
        Preset(
            "quartet2",
            "NVFP4: four-or-six forward, MS-EDEN with RHT 32 backward",
            source,
            recipe("four_six", 32, "nearest_away"),
            published=("forward: nearest with the better of the scales to 4 and to 6", said, signs, away),
            assumed=("the group of 32 that the training code has by default", exact),
            checked=checked,
        ),
        Preset(
            "quartet2-unscaled",
            "as quartet2, MS-EDEN's stretch taken before the block scales",
            source,
            recipe("four_six", 32, "nearest_away", "ms_eden_unscaled"),
            published=("forward: nearest with the better of the scales to 4 and to 6", said, signs, away),
            assumed=("not the authors': energy and product of a group in the tensor's units, gain 1", exact),
            checked=checked,
        ),
        Preset(
            "quartet2-code",
            "as quartet2's published sweep: plain scales forward, RHT 128 backward",
            source,
            recipe("two_level", 128, "nearest_away"),
            published=("scripts/quartetv2_sweep.sh: groups of 128, four-or-six off", said, signs, away),
            assumed=(exact,),
            checked=checked,
        ),
        Preset(
            "quartet2-128",
            "as quartet2, RHT 128 and ties to even (CloverLM, 310B tokens)",
            github("IST-DASLab/CloverLM", "IST Austria", "CloverLM, training in NVFP4 by Quartet II"),
            recipe("four_six", 128, "nearest"),
            published=("forward: four-or-six; groups of 128; nearest by the hardware", said, signs),
            assumed=("scales in fp32 before MS-EDEN's correction: the kernels hold them in bf16", exact),
            checked=read_in("IST-DASLab/CloverLM", "quartet2/python/quartet2/linear.py"),
        ),
    ]


def all_the_way() -> list[Preset]:
    """Return FP4 All the Way's recipe, for the whole run and with its last phase."""
    source = arxiv("2505.19115", "Chmiel et al.", "FP4 All the Way: Fully Quantized Training of LLMs")
    recipe = Recipe(
        fprop=GemmPolicy(left=_PLAIN, right=_PLAIN),
        dgrad=GemmPolicy(left=_SR, right=_PLAIN),
        wgrad=GemmPolicy(left=_SR, right=_SR),
    )
    last = Phase(from_fraction=0.95, recipe=LayerRecipe(fprop=recipe.fprop))
    said = (
        "blocks of 16, E4M3 scales; nearest in the forward pass and on Dgrad's w; SR on dy and Wgrad's x",
    )
    assumed = ("NVFP4's second, tensor-wise scale level",)
    return [
        Preset("fp4-all-the-way", "NVFP4 with split rounding, no Hadamard", source, recipe, said, assumed),
        Preset(
            "fp4-all-the-way-qaf",
            "as fp4-all-the-way, backward in BF16 for the last part",
            source,
            replace(recipe, phases=(last,)),
            published=(*said, "a last phase with the backward pass in BF16"),
            assumed=(*assumed, "that phase is the last 5 % of the tokens"),
        ),
    ]


def four_over_six() -> list[Preset]:
    """Return the training configurations of the fouroversix repository."""
    title = "Four Over Six: More Accurate NVFP4 Quantization with Adaptive Block Scaling"
    source = arxiv("2512.02010", "Cook et al.", title)
    said = (
        "SR on gradients, scaled by 16/17 so that it never clips",
        "Hadamard of 16 with NVIDIA's signs on Wgrad, in bf16; the last 4 of 24 blocks in BF16",
    )
    assumed = (
        "weights in 16×16 tiles, as its documentation advises for training",
        "a choice by the error of its own draw, as in its code, which biases SR upwards (docs/numerics.md)",
    )
    reference = compared("mit-han-lab/fouroversix", "src/fouroversix/quantize/pytorch/reference.py")

    def recipe(plain: OperandPolicy, wgrad: OperandPolicy) -> Recipe:
        found = _sr_and_hadamard(plain, replace(plain, block="16x16"), _UNCLIPPED)
        on_wgrad = _sr_and_hadamard(wgrad, wgrad, _UNCLIPPED).wgrad
        return replace(found, wgrad=on_wgrad, rules=(LayerRule(last=4),))

    four_six, if4 = replace(_PLAIN, scale="four_six"), OperandPolicy(format="if4")
    return [
        Preset(
            "fouroversix",
            "NVFP4 with four-or-six scales, SR on dy, RHT 16 on Wgrad",
            source,
            recipe(four_six, four_six),
            published=(
                "per block the scale that maps the largest value to 4 or to 6, whichever errs less (squares)",
                "TransformerEngine has its own, which compares mean errors: four_six_mae",
                *said,
            ),
            assumed=assumed,
            checked=reference,
        ),
        Preset(
            "fouroversix-if4",
            "IF4: E2M1 or whole numbers per block, SR on dy, RHT 16 on Wgrad",
            source,
            recipe(if4, if4),
            published=("per block E2M1 or whole numbers to 7, whichever errs less (squares)", *said),
            assumed=assumed,
            checked=reference,
        ),
        Preset(
            "fouroversix-wgrad-nvint4",
            "NVFP4, whole numbers to 7 on Wgrad, SR on dy, RHT 16 on Wgrad",
            source,
            recipe(_PLAIN, OperandPolicy(format="nvint4")),
            published=("NVFP4; Wgrad in NVINT4, whole numbers to 7 under NVFP4's scales", *said),
            assumed=assumed,
            checked=reference,
        ),
    ]


def tetrajet2() -> Preset:
    """Return TetraJet-v2's recipe, without its outlier channels and its optimizer."""
    title = "TetraJet-v2: Accurate NVFP4 Training for Large Language Models with Oscillation Suppression"
    nearest = replace(_PLAIN, scale="two_level_1x128")
    sr = replace(nearest, rounding="stochastic", hadamard=16, signs="call")
    backward = GemmPolicy(left=sr, right=replace(sr, source="forward"))
    return Preset(
        "tetrajet2",
        "NVFP4 with an fp32 scale for 128, SR + RHT 16 backward, double quantisation",
        arxiv("2510.27527", "Chen et al.", title),
        Recipe(fprop=GemmPolicy(left=nearest, right=nearest), dgrad=backward, wgrad=backward),
        published=(
            "an fp32 scale for 128 neighbours, amax / 448 / 6; a zero block scale becomes 2^-9",
            "nearest forward; SR on all four backward operands, w and x from the quantised forward, in fp32",
            "Hadamard of 16 on Dgrad and on Wgrad, signs of each drawn anew each call",
        ),
        assumed=(
            "bf16 inputs: the code quantises fp32 ones",
            "left out: channels in MXFP8 by their norm, and OsciReset, which belongs to the optimizer's step",
        ),
        checked=read_in("thu-ml/TetraJet-v2-NVFP4Training", "kernels/csrc/quant_fp4.cu"),
    )
