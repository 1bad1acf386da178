"""Published recipes in NVFP4."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ablate.recipes import sources
from ablate.recipes.policy import GemmPolicy, LayerRecipe, LayerRule, OperandPolicy, Phase, Recipe
from ablate.recipes.presets.preset import Preset, both


def nvidia() -> list[Preset]:
    """Return NVIDIA's recipe (2509.25149), for the whole run and with its last phase."""
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


def quartet2() -> Preset:
    """Return Quartet II's recipe (2601.22813), from its public training code."""
    eden = OperandPolicy(format="nvfp4", scale="ms_eden", hadamard=32, signs="step")
    backward = GemmPolicy(left=eden, right=replace(eden, source="forward"))
    return Preset(
        name="quartet2",
        summary="NVFP4: four-or-six forward, MS-EDEN with RHT 32 backward",
        source=sources.QUARTET2,
        recipe=Recipe(fprop=both(format="nvfp4", scale="four_six"), dgrad=backward, wgrad=backward),
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
    """Return the recipe of 2505.19115, for the whole run and with its last phase."""
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


def four_over_six() -> Preset:
    """Return the recipe of 2512.02010."""
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
