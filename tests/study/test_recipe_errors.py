"""The exact lines for what can be wrong in a recipe, without ``study.yaml`` and the arm."""

from __future__ import annotations

import pytest

HEAD = """\
name: s
baseline: a
target: {val_loss: 3.3}
base: {model: {width: 256, ffn: 512, layers: 12}}
arms:
  a:
  b:
    recipe:
"""
DEEP = "rules name all 12 blocks of this model, so that the recipe's own GEMMs never run"
DEEPER = "set recipe.layers for a model of this depth, e.g. layers: [{last: 1, recipe: bf16}]"

# what is wrong -> (the recipe from line 9 on, the lines)
CASES: dict[str, tuple[str, list[str]]] = {
    "an unknown preset": (
        "{preset: tsengg}",
        ["9:16: recipe.preset: unknown preset 'tsengg' (did you mean 'tseng'?)"],
    ),
    "an unknown preset that is like none": (
        "{preset: qqq}",
        ["9:16: recipe.preset: unknown preset 'qqq' (`ablate recipes` lists them)"],
    ),
    "a preset and what it says already": (
        "{preset: tseng, gemms: [fprop], format: nvfp4}",
        [
            (
                "9:30: recipe.gemms: gemms beside preset 'tseng', which says it already "
                "(leave it out, or write under fprop, dgrad or wgrad what differs)"
            )
        ],
    ),
    "an unknown word in a layer": (
        "{layers: [{first: 1, recipe: fp9}]}",
        ["9:36: recipe.layers[0].recipe: unknown recipe 'fp9' (did you mean 'fp8'?)"],
    ),
    "an unknown key of a layer": (
        "{layers: [{frst: 1, recipe: fp8}]}",
        ["9:18: recipe.layers[0].frst: unknown key (did you mean 'first'?)"],
    ),
    "layers within layers": (
        "{layers: [{first: 1, recipe: {layers: []}}]}",
        ["9:37: recipe.layers[0].recipe.layers: unknown key (it belongs to the whole recipe)"],
    ),
    "a layer without a recipe": (
        "{layers: [{first: 1}]}",
        ["9:17: recipe.layers[0]: missing key 'recipe'"],
    ),
    "an unknown key of an operand": (
        "{fprop: {x: {hadamrd: 16}}}",
        ["9:20: recipe.fprop.x.hadamrd: unknown key (did you mean 'hadamard'?)"],
    ),
    "a word for a yes or no of an operand": (
        "{fprop: {x: {mask: yes}}}",
        ["9:26: recipe.fprop.x.mask: expected true or false, got 'yes' (write true)"],
    ),
    "a prescale above one": (
        "{gemms: [fprop], stabiliser: sr, prescale: 1.5}",
        ["9:50: recipe.prescale: expected a number up to 1, got 1.5"],
    ),
    "a fraction of a percentage": (
        "{phases: [{from_fraction: 90, recipe: bf16}]}",
        ["9:33: recipe.phases[0].from_fraction: expected a number below 1, got 90"],
    ),
    "a contradiction within a layer, whose key the recipe has too": (
        "{gemms: [fprop], stabiliser: dht, layers: [{first: 1, recipe: {stabiliser: sr}}]}",
        [
            (
                "9:82: recipe.layers[0].recipe.stabiliser: stabiliser 'sr' with no FP4 GEMM to act on "
                "(name the GEMMs in gemms, or leave it out)"
            )
        ],
    ),
    "a contradiction within a phase": (
        "{phases: [{from_tokens: 9, recipe: fp8}, {from_tokens: 99, recipe: {wgrad: {scale: even}}}]}",
        ["9:82: recipe.phases[1].recipe.wgrad: scale 'even' on wgrad, which is not in FP4"],
    ),
    "a layer entry that names none": (
        "{gemms: [fprop], layers: [{first: 1, recipe: bf16}, {recipe: fp8}]}",
        ["9:59: recipe.layers[1]: an entry of layers names none: give match, first, last or head"],
    ),
    "a rule for layers that are not there": (
        "{gemms: [fprop], layers: [{first: 1, recipe: bf16}, {match: '*.dwon', recipe: bf16}]}",
        [
            (
                "9:59: recipe.layers[1]: no layer of this model is called '*.dwon' "
                "(its layers are blocks.0.attention.qkv … blocks.11.ffn.down and head)"
            )
        ],
    ),
    "a rule that an earlier one hides": (
        "{gemms: [fprop], layers: [{last: 3, recipe: bf16}, {match: 'blocks.11.*', recipe: fp8}]}",
        [
            (
                "9:58: recipe.layers[1]: an entry that decides nothing: an earlier one names every layer "
                "that it names (put it first)"
            )
        ],
    ),
    "rules that leave nothing": (
        "{gemms: [fprop], layers: [{first: 4, last: 8, recipe: fp8}]}",
        [f"9:32: recipe.layers: {DEEP} ({DEEPER})"],
    ),
    "a start given twice": (
        "{phases: [{from_tokens: 7, from_fraction: .5, recipe: fp8}]}",
        [
            (
                "9:31: recipe.phases[0].from_tokens: a phase starts at from_tokens or at from_fraction: give "
                "one of them"
            )
        ],
    ),
    "de-oscillation with no weight in low precision": (
        "{gemms: [dgrad, wgrad], deoscillate: {}}",
        [
            (
                "9:44: recipe.deoscillate: deoscillate with no quantised weight to act on (name fprop in "
                "gemms, or leave it out)"
            )
        ],
    ),
    "de-oscillation of weights under a Hadamard": (
        "{gemms: [fprop], stabiliser: dht, deoscillate: {}}",
        [
            (
                "9:54: recipe.deoscillate: deoscillate needs a grid that weights can be set to, but Fprop's "
                "w has nearest rounding, scale 'floor' and a Hadamard of 16"
            )
        ],
    ),
    "de-oscillation of weights that a phase rounds at random": (
        (
            "{gemms: [fprop], phases: [{from_fraction: .5, recipe: {gemms: [fprop], stabiliser: sr}}], "
            "deoscillate: {}}"
        ),
        [
            (
                "9:110: recipe.deoscillate: deoscillate needs a grid that weights can be set to, but Fprop's "
                "w has stochastic rounding, scale 'floor' and no Hadamard"
            )
        ],
    ),
    "de-oscillation that starts twice": (
        "{gemms: [fprop], deoscillate: {from_tokens: 7, from_fraction: .5}}",
        [
            (
                "9:51: recipe.deoscillate.from_tokens: deoscillate starts at from_tokens or at "
                "from_fraction: give one of them"
            )
        ],
    ),
    "de-oscillation whose window never ends": (
        "{gemms: [fprop], deoscillate: {from_fraction: 0.5}}",
        [
            (
                "9:37: recipe.deoscillate: a window of 200 steps from step 123 on, but the run has 245 steps "
                "(no window would ever end)"
            )
        ],
    ),
    "a window of no step": (
        "{gemms: [fprop], deoscillate: {window: 0}}",
        ["9:46: recipe.deoscillate.window: expected a number above 0, got 0"],
    ),
    "a phase without a start": (
        "{phases: [{recipe: fp8}]}",
        ["9:17: recipe.phases[0]: a phase starts at from_tokens or at from_fraction: give one of them"],
    ),
    "phases out of order": (
        "{phases: [{from_fraction: 0.5, recipe: fp8}, {from_tokens: 500_000, recipe: bf16}]}",
        [
            (
                "9:52: recipe.phases[1]: a phase from token 500000 on, not after the one before it (500000) "
                "(phases stand in the order of their starts)"
            )
        ],
    ),
    "a phase after the end": (
        "{phases: [{from_tokens: 1_000_000, recipe: fp8}]}",
        [
            (
                "9:17: recipe.phases[0]: a phase from token 1000000 on, but the budget is 1000000 tokens "
                "(it would never begin)"
            )
        ],
    ),
    "a forward source that there is not": (
        "{gemms: [wgrad], fprop: bf16, wgrad: {x: {source: forward}}}",
        ["9:44: recipe.wgrad: source 'forward' on wgrad.x, but Fprop's x is in bf16"],
    ),
    "one operand rotated": (
        "{gemms: [fprop], fprop: {x: {hadamard: 16}}}",
        ["9:31: recipe.fprop: hadamard 16 on one operand and 0 on the other: the rotation would not cancel"],
    ),
    "a square weight tile under a Hadamard": (
        "{gemms: [fprop, dgrad], stabiliser: dht, weight_block: 32x32}",
        [
            (
                "9:62: recipe.weight_block: a square weight tile under a Hadamard: Fprop rotates it along "
                "in-features and Dgrad along out-features, so one tile cannot serve both"
            )
        ],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_each_fault_of_a_recipe_has_its_line(case, problems):
    text, lines = CASES[case]
    assert [line.replace("arms.b.", "") for line in problems(f"{HEAD}      {text}\n")] == lines


def problems_or_none(problems, text):
    """Return the faults of a file that may have none: one that it always has stands beside them."""
    *found, _ = problems(f"{text}zzz: 1\n")
    return found


def sized(model, recipe, training="{}"):
    return (
        f"name: s\nbaseline: a\ntarget: {{val_loss: 3.3}}\n"
        f"arms:\n  a:\n  b:\n    model: {model}\n    recipe: {recipe}\n    training: {training}\n"
    )


def test_a_preset_for_deep_models_on_a_shallow_one_says_how_to_fix_it(problems):
    deep = DEEP.replace("12", "4")
    assert problems(sized("{layers: 4, ffn: 256}", "nvidia-nvfp4")) == [
        f"8:13: arms.b.recipe: {deep} ({DEEPER})"
    ]
    assert problems(sized("{layers: 4, ffn: 256}", "{preset: nvidia-nvfp4}")) == [
        f"8:22: arms.b.recipe.preset: {deep} ({DEEPER})"
    ]
    fixed = "{preset: nvidia-nvfp4, layers: [{last: 1, recipe: bf16}]}"
    assert problems_or_none(problems, sized("{layers: 4, ffn: 256}", fixed)) == []


def test_rules_may_name_every_block_of_a_recipe_that_is_in_high_precision_itself(problems):
    recipe = "{layers: [{match: '*.ffn.*', recipe: mxfp4}, {match: '*.attention.*', recipe: fp8}]}"
    assert problems_or_none(problems, sized("{layers: 4}", recipe)) == []


@pytest.mark.parametrize(
    ("part", "line"),
    [
        (
            "layers: [{match: '*.ffn.down', recipe: {gemms: [fprop], stabiliser: dht, hadamard_size: 256}}]",
            "ffn 384 is not a multiple of 256, as Fprop of down needs it (its Hadamard group",
        ),
        (
            "phases: [{from_fraction: 0.5, recipe: {gemms: [dgrad], stabiliser: rht, hadamard_size: 256}}]",
            "ffn 384 is not a multiple of 256, as Dgrad of gate and up needs it (its Hadamard group",
        ),
        ("layers: [{match: '*.qkv', recipe: {gemms: [fprop], stabiliser: dht, hadamard_size: 256}}]", None),
    ],
)
def test_layers_and_phases_are_measured_by_their_own_recipe(part, line, problems):
    found = problems_or_none(problems, sized("{width: 256, ffn: 384}", f"{{{part}}}"))
    assert len(found) == (line is not None)
    assert line is None or line in found[0]


def test_the_rows_of_a_square_tile_count_too(problems):
    nvfp4 = "{fprop: {w: {format: nvfp4, block: 16x16}}}"
    for ffn, recipe in ((352, "{gemms: [fprop], weight_block: 32x32}"), (336, nvfp4)):
        assert problems_or_none(problems, sized(f"{{width: 128, ffn: {ffn}}}", recipe)) == []
    recipe = "{layers: [{match: '*.gate_up', recipe: {gemms: [fprop], weight_block: 32x32}}]}"
    (line,) = problems(sized("{width: 128, ffn: 336}", recipe))
    assert line.startswith("7:30: arms.b.model.ffn: ffn 336 is not a multiple of 32, as Fprop of gate and up")
    assert "its square tile of 32" in line
    recipe = "{layers: [{match: '*.gate_up', recipe: {gemms: [dgrad], weight_block: 32x32}}]}"
    (line,) = problems(sized("{width: 144, ffn: 352}", recipe))
    assert "width 144 is not a multiple of 32, as Dgrad of gate and up needs it (its square tile" in line


def test_a_misfit_of_default_sizes_points_to_the_recipe(problems):
    found = problems(
        "name: s\nbaseline: a\ntarget: {val_loss: 3.3}\n"
        "arms:\n  a:\n  b: {recipe: {gemms: [fprop], stabiliser: dht, hadamard_size: 256}}\n"
    )
    assert [line.split(",")[0] for line in found] == [
        "6:15: arms.b.recipe: ffn 352 is not a multiple of 256",
        "6:15: arms.b.recipe: width 128 is not a multiple of 256",
    ]


def test_factors_reach_into_recipes(problems):
    text = (
        "name: s\nbaseline: a\ntarget: {val_loss: 3.3}\narms:\n  a:\n"
        "grid:\n  factors:\n"
        "    recipe.gemms: [[wgrad]]\n    recipe.wgrad.scale: [floor, even, two_level]\n"
    )
    assert problems(text) == [
        (
            "9:39: grid.factors.recipe.wgrad.scale[2]: scale 'two_level' on mxfp4 (it takes floor, even, "
            "rceil, ceil, quest, uos) (exclude the cell, or set grid.senseless: drop; in arm 'two_level')"
        )
    ]
