"""Published recipes in NVFP4."""

from __future__ import annotations

from dataclasses import replace

from ablate.recipes.policy import GemmPolicy, LayerRecipe, LayerRule, OperandPolicy, Phase, Recipe
from ablate.recipes.presets.preset import Preset, arxiv, both

_PLAIN = OperandPolicy(format="nvfp4")
_SR = replace(_PLAIN, rounding="stochastic")


def _sr_and_hadamard(plain: OperandPolicy, weight: OperandPolicy) -> Recipe:
    """Build a recipe with SR on gradients, and with a Hadamard of fixed signs on Wgrad alone."""
    sr = replace(plain, rounding="stochastic")
    turned = replace(plain, hadamard=16, signs="fixed")
    return Recipe(
        fprop=GemmPolicy(left=plain, right=weight),
        dgrad=GemmPolicy(left=sr, right=weight),
        wgrad=GemmPolicy(left=replace(turned, rounding="stochastic"), right=turned),
    )


def nvidia() -> list[Preset]:
    """Return NVIDIA's recipe, for the whole run and with its last phase."""
    source = arxiv("2509.25149", "NVIDIA", "Pretraining Large Language Models with NVFP4")
    recipe = _sr_and_hadamard(_PLAIN, replace(_PLAIN, block="16x16"))
    recipe = replace(recipe, rules=(LayerRule(first=2, last=8),))
    said = (
        "NVFP4; weights in 16×16 tiles that Fprop and Dgrad share; SR on gradients alone",
        "Hadamard of 16 on Wgrad's operands with one fixed sign vector for all layers and steps",
        "the first 2 and the last 8 blocks (of the 12B model's 62) in BF16; head in high precision",
    )
    backward = LayerRecipe(dgrad=recipe.dgrad, wgrad=recipe.wgrad)
    return [
        Preset("nvidia-nvfp4", "NVFP4 pre-training: 2-D weights, SR, RHT 16 on Wgrad", source, recipe, said),
        Preset(
            "nvidia-nvfp4-switch",
            "as nvidia-nvfp4, Fprop in BF16 for the last part",
            source,
            replace(recipe, phases=(Phase(from_fraction=0.82, recipe=backward),)),
            published=(*said, "the forward pass goes to BF16 for the last part of training"),
            assumed=("the last part is the last 18 % of the tokens; a phase of your own overrides it",),
        ),
    ]


def quartet2() -> Preset:
    """Return Quartet II's recipe, from its public training code."""
    title = "Quartet II: Accurate LLM Pre-Training in NVFP4 by Improved Unbiased Gradient Estimation"
    eden = OperandPolicy(format="nvfp4", scale="ms_eden", hadamard=32, signs="step")
    backward = GemmPolicy(left=eden, right=replace(eden, source="forward"))
    return Preset(
        "quartet2",
        "NVFP4: four-or-six forward, MS-EDEN with RHT 32 backward",
        arxiv("2601.22813", "Panferov, Schultheis et al. (IST Austria)", title),
        Recipe(fprop=both(format="nvfp4", scale="four_six"), dgrad=backward, wgrad=backward),
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


def four_over_six() -> Preset:
    """Return Four Over Six's recipe."""
    title = "Four Over Six: More Accurate NVFP4 Quantization with Adaptive Block Scaling"
    plain = OperandPolicy(format="nvfp4", scale="four_six")
    return Preset(
        "fouroversix",
        "NVFP4 with four-or-six scales, SR on dy, RHT 16 on Wgrad",
        arxiv("2512.02010", "Cook et al.", title),
        _sr_and_hadamard(plain, plain),
        published=(
            "per block the scale that maps the largest value to 4 or to 6, whichever errs less (squares)",
            "SR on gradients; Hadamard of 16 with fixed signs on Wgrad",
        ),
        assumed=(
            "all three GEMMs, weights in 1×16 blocks; no layer kept in high precision",
            "NVIDIA's sign vector",
        ),
    )
