"""What a study file means: inheritance, recipes, grids, folding, paths."""

from __future__ import annotations

import itertools

import pytest

from ablate.recipes import RecipeSpec, describe, resolve
from ablate.store.plan_file import ForkPoint, Settled, StopRule

HEAD = "name: s\nbaseline: a\ntarget: {val_loss: 3.3}\n"


def arms_of(study, text):
    return {arm.name: arm for arm in study(text).arms}


def test_defaults(study):
    loaded = study(HEAD + "arms: {a: }\n")
    assert loaded.seeds == (0, 1)
    assert loaded.paired_seeds is True
    assert loaded.intervals == "moderated"
    assert (loaded.target.kind, loaded.target.value, loaded.target.crossing) == ("val_loss", 3.3, "confirmed")
    assert loaded.description is None
    (arm,) = loaded.arms
    assert describe(arm.recipe) == "bf16"
    assert arm.backend == "auto"
    assert arm.factors == {}
    assert arm.training == loaded.training


def test_seeds_are_a_count_or_a_list(study):
    assert study(HEAD + "seeds: 3\narms: {a: }\n").seeds == (0, 1, 2)
    assert study(HEAD + "seeds: [7, 3]\narms: {a: }\n").seeds == (7, 3)


def test_an_arm_inherits_from_its_parent_and_then_from_base(study):
    arms = arms_of(
        study,
        HEAD
        + """\
base:
  model: {width: 64, heads: 2, ffn: 96}
  training: {tokens: 200_000}
arms:
  c: {from: b, model: {ffn: 160}, description: third}
  a:
  b:
    model: {layers: 2}
    resources: {cpus: 2}
    description: second
""",
    )
    assert list(arms) == ["c", "a", "b"]
    c = arms["c"]
    assert (c.model.width, c.model.layers, c.model.ffn) == (64, 2, 160)
    assert c.training.tokens == 200_000
    assert c.resources.cpus == 2
    assert c.description == "third"
    assert c.factors == {"model.layers": 2, "resources.cpus": 2, "model.ffn": 160}
    assert arms["a"].resources.cpus == 1


def test_a_recipe_word_replaces_and_a_mapping_is_laid_over(study):
    arms = arms_of(
        study,
        HEAD
        + """\
base:
  recipe: {rest: fp8, hadamard_size: 32}
arms:
  a:
  word: {recipe: mxfp4}
  word then mapping: {from: word, recipe: {stabiliser: dht}}
  mapping: {recipe: {gemms: [fprop], stabiliser: dht}}
  mapping then word: {from: mapping, recipe: bf16}
  one gemm: {recipe: {gemms: [fprop, wgrad], wgrad: {stabiliser: sr}}}
  gemm word: {from: one gemm, recipe: {dgrad: bf16}}
  gemm word then mapping: {from: gemm word, recipe: {dgrad: {format: fp8}, wgrad: null}}
""",
    )
    specs = {name: arm.recipe_spec for name, arm in arms.items()}
    every = ["fprop", "dgrad", "wgrad"]
    assert specs["word"] == RecipeSpec(gemms=every)
    assert specs["word then mapping"] == RecipeSpec(gemms=every, stabiliser="dht")
    assert specs["mapping"] == RecipeSpec(rest="fp8", hadamard_size=32, gemms=["fprop"], stabiliser="dht")
    assert specs["mapping then word"] == RecipeSpec()
    expected = "Fprop mxfp4; Dgrad fp8; Wgrad mxfp4 SR"
    assert describe(arms["one gemm"].recipe) == expected
    assert describe(arms["gemm word"].recipe) == "Fprop mxfp4; Dgrad bf16; Wgrad mxfp4 SR"
    assert describe(arms["gemm word then mapping"].recipe) == "Fprop+Wgrad mxfp4; Dgrad fp8"
    assert arms["word then mapping"].factors == {"recipe": "mxfp4", "recipe.stabiliser": "dht"}
    assert arms["mapping then word"].factors == {"recipe": "bf16"}
    for arm in arms.values():
        assert arm.recipe == resolve(arm.recipe_spec)


def test_the_grid_is_the_product_of_its_factors_in_order(study):
    loaded = study(
        """\
name: s
baseline: fprop none 16
target: {val_loss: 3}
grid:
  factors:
    recipe.gemms: [[fprop], [fprop, dgrad]]
    recipe.stabiliser: [none, dht]
    recipe.hadamard_size: [16, 32]
    model.layers: [2]
"""
    )
    names = ["fprop none 16", "fprop dht 16", "fprop dht 32"]
    assert [arm.name for arm in loaded.arms] == names + [
        name.replace("fprop", "fprop+dgrad") for name in names
    ]
    assert [(cell.name, cell.into) for cell in loaded.folded] == [
        ("fprop none 32", "fprop none 16"),
        ("fprop+dgrad none 32", "fprop+dgrad none 16"),
    ]
    assert loaded.folded[0].reason == "the same configuration as 'fprop none 16'"
    assert loaded.arms[1].factors == {
        "recipe.gemms": ["fprop"],
        "recipe.stabiliser": "dht",
        "recipe.hadamard_size": 16,
        "model.layers": 2,
    }
    assert all(arm.model.layers == 2 for arm in loaded.arms)


def test_names_come_from_labels_and_values(study):
    loaded = study(
        HEAD
        + """\
arms: {a: {model: {layers: 1}}}
grid:
  factors:
    recipe: {BF16: bf16, "F+D": {gemms: [fprop, dgrad]}}
    training.learning_rate: [1e-3, 0.002]
    training.schedule: [constant, cosine]
    model.tied_head: [true, false]
    training.grad_clip: [1.0, null]
"""
    )
    names = {arm.name for arm in loaded.arms}
    assert len(names) == 33
    assert "BF16 learning_rate=1e-3 constant tied_head=true grad_clip=1.0" in names
    assert "F+D learning_rate=0.002 cosine tied_head=false grad_clip=null" in names


def test_sections_can_be_factors_and_inner_factors_win(study):
    arms = arms_of(
        study,
        HEAD
        + """\
arms: {a: }
grid:
  factors:
    model.layers: [2, 3]
    model:
      small: {width: 64, heads: 2, layers: 9}
      large: {width: 256}
""",
    )
    assert (arms["layers=2 small"].model.width, arms["layers=2 small"].model.layers) == (64, 2)
    assert (arms["layers=3 large"].model.width, arms["layers=3 large"].model.layers) == (256, 3)


def test_a_grid_can_start_from_an_arm_and_folds_into_it(study):
    loaded = study(
        HEAD
        + """\
arms:
  a: {recipe: mxfp4, resources: {cpus: 2}}
grid:
  from: a
  factors:
    recipe.stabiliser: [none, sr]
"""
    )
    assert [arm.name for arm in loaded.arms] == ["a", "sr"]
    assert loaded.arms[1].resources.cpus == 2
    assert loaded.arms[1].factors == {"recipe": "mxfp4", "resources.cpus": 2, "recipe.stabiliser": "sr"}
    assert [(cell.name, cell.into) for cell in loaded.folded] == [("none", "a")]


def test_cells_that_differ_in_de_oscillation_alone_are_not_folded(study):
    loaded = study(
        HEAD
        + """arms:
  a: {recipe: {gemms: [fprop], phases: [{from_fraction: 0.9, recipe: bf16}]}}
grid:
  from: a
  factors:
    recipe.deoscillate: {none: null, reset: {window: 10}}
"""
    )
    assert [arm.name for arm in loaded.arms] == ["a", "reset"]


def test_the_baseline_may_be_named_as_a_folded_cell(study):
    loaded = study(
        HEAD.replace("baseline: a", "baseline: none")
        + "arms: {a: {recipe: mxfp4}}\ngrid: {from: a, factors: {recipe.stabiliser: [none, sr]}}\n"
    )
    assert loaded.baseline == "a"


def test_zipped_factors_step_together(study):
    loaded = study(
        HEAD
        + """\
arms: {a: {model: {layers: 7}}}
grid:
  factors:
    model.width: [64, 128, 256]
    training.learning_rate: [0.1, 0.2]
    model.ffn: [160, 320, 640]
  zip: [[model.width, model.ffn]]
"""
    )
    shapes = [(arm.model.width, arm.training.learning_rate, arm.model.ffn) for arm in loaded.arms[1:]]
    assert shapes == [
        (w, lr, f) for (w, f), lr in itertools.product([(64, 160), (128, 320), (256, 640)], [0.1, 0.2])
    ]
    assert loaded.arms[1].name == "width=64 learning_rate=0.1 ffn=160"


def test_excluded_and_senseless_cells_are_dropped_and_listed(study):
    loaded = study(
        HEAD
        + """\
arms: {a: {recipe: fp8}}
grid:
  factors:
    recipe.gemms: {no FP4: [], F: [fprop], F+D: [fprop, dgrad]}
    recipe.stabiliser: {plain: none, SR: sr}
    training.beta1: [0.9, 0.8]
  exclude:
    - {recipe.gemms: F+D, recipe.stabiliser: sr}
    - {recipe.gemms: [fprop], training.beta1: 0.8}
  senseless: drop
"""
    )
    assert [arm.name for arm in loaded.arms] == [
        "a",
        "no FP4 plain beta1=0.9",
        "no FP4 plain beta1=0.8",
        "F plain beta1=0.9",
        "F SR beta1=0.9",
        "F+D plain beta1=0.9",
        "F+D plain beta1=0.8",
    ]
    senseless = "stabiliser 'sr' with no FP4 GEMM to act on"
    assert [(cell.name, cell.reason) for cell in loaded.dropped] == [
        ("no FP4 SR beta1=0.9", senseless),
        ("no FP4 SR beta1=0.8", senseless),
        ("F plain beta1=0.8", "excluded by grid.exclude[1]"),
        ("F SR beta1=0.8", "excluded by grid.exclude[1]"),
        ("F+D SR beta1=0.9", "excluded by grid.exclude[0]"),
        ("F+D SR beta1=0.8", "excluded by grid.exclude[0]"),
    ]


def test_an_excluded_cell_is_not_checked(study):
    text = HEAD + "arms: {a: }\ngrid:\n  factors:\n    model.heads: [2, 3]\n  exclude: [{model.heads: 3}]\n"
    assert [arm.name for arm in study(text).arms] == ["a", "heads=2"]


def test_paths_are_relative_to_the_study(study, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/of")
    (tmp_path / "tok").mkdir()
    arms = arms_of(
        study,
        HEAD
        + """\
arms:
  a:
    data: {source: text, paths: [corpus, ../up/*.txt, /abs, ~/mine, ~nobody-at-all/x], validation_paths: [v]}
  hub: {data: {source: hub, paths: [allenai/c4, en], tokenizer: hf, tokenizer_path: gpt2}}
  local: {data: {source: hub, paths: [tok], tokenizer: hf, tokenizer_path: tok}}
  dot: {data: {source: text, paths: [c], tokenizer: hf, tokenizer_path: ./missing}}
""",
    )
    data = arms["a"].data
    assert data.paths[:4] == [f"{tmp_path}/corpus", f"{tmp_path}/../up/*.txt", "/abs", "/home/of/mine"]
    assert data.validation_paths == [f"{tmp_path}/v"]
    assert (arms["hub"].data.paths, arms["hub"].data.tokenizer_path) == (["allenai/c4", "en"], "gpt2")
    assert arms["local"].data.paths == [f"{tmp_path}/tok"]
    assert arms["local"].data.tokenizer_path == f"{tmp_path}/tok"
    assert arms["dot"].data.tokenizer_path == f"{tmp_path}/missing"


def test_blocks_need_not_divide_the_tokens(study):
    text = HEAD + "arms: {a: {training: {seq_len: 100, batch_size: 6, micro_batch_size: 3}, recipe: mxfp4}}\n"
    assert study(text).arms[0].training.seq_len == 100  # the layers fill the last block with zeros


def test_a_fork_of_base_is_every_arms_but_of_the_one_that_it_names(study):
    text = """\
name: s
baseline: a
target: {val_loss: 3.3}
base:
  training: {tokens: 400_000}
  fork: {from: a, at: 102_400}
arms:
  a:
  b: {recipe: fp8}
  later: {from: b, fork: {at: 204_900}}
  whole: {from: b, fork: null}
grid:
  from: later
  factors: {recipe: [bf16, mxfp4]}
"""
    forks = {name: arm.fork for name, arm in arms_of(study, text).items()}
    assert forks == {
        "a": None,
        "b": ForkPoint(arm="a", tokens=102_400),
        "later": ForkPoint(arm="a", tokens=204_800),  # a step has 4,096 tokens
        "whole": None,
        "mxfp4": ForkPoint(arm="a", tokens=204_800),
    }
    # A cell with the recipe of its fork's parent is that parent.
    assert [(cell.name, cell.into) for cell in study(text).folded] == [("bf16", "a")]


def test_the_place_of_a_fork_is_a_factor_and_the_baseline_may_leave_another_arm(study):
    text = HEAD + "base: {training: {tokens: 400_000}}\n"
    text += "arms:\n  a:\n  b: {recipe: fp8, fork: {from: a, at: 1}}\n"
    text += "grid: {from: b, factors: {fork.at: [81_920, 163_840]}}\n"
    forks = {name: arm.fork and arm.fork.tokens for name, arm in arms_of(study, text).items()}
    assert forks == {"a": None, "b": 4096, "at=81_920": 81_920, "at=163_840": 163_840}
    text = HEAD + "arms:\n  trunk: {recipe: fp8}\n  a: {fork: {from: trunk, at: 90_000}}\n"
    arms = arms_of(study, text + "  b: {from: a, recipe: mxfp4}\n")
    assert arms["a"].fork == arms["b"].fork == ForkPoint(arm="trunk", tokens=90_112)


@pytest.mark.parametrize(
    ("model", "recipe"),
    [
        (
            "width: 72",
            "{gemms: [wgrad]}",
        ),  # Wgrad contracts over tokens alone: no model dimension matters to it
        ("ffn: 100", "{gemms: [wgrad]}"),
        ("layers: 4, ffn: 256", "{preset: nvidia-nvfp4, layers: [{last: 1, recipe: bf16}]}"),
        ("layers: 4", "{layers: [{match: '*.ffn.*', recipe: mxfp4}, {match: '*.attention.*', recipe: fp8}]}"),
        (
            "width: 256, ffn: 384",
            "{layers: [{match: '*.qkv', recipe: {gemms: [fprop], stabiliser: dht, hadamard_size: 256}}]}",
        ),
        ("width: 128, ffn: 352", "{gemms: [fprop], weight_block: 32x32}"),
        ("width: 128, ffn: 336", "{fprop: {w: {format: nvfp4, block: 16x16}}}"),
    ],
)
def test_recipes_that_fit_their_models(study, model, recipe):
    assert study(f"{HEAD}arms: {{a: , b: {{model: {{{model}}}, recipe: {recipe}}}}}\n").arms[1].model


def test_the_rules_that_end_arms_early(study):
    text = HEAD + "seeds: %s\nstop: %s\narms: {a: , b: {recipe: fp8}}\n"
    settled = "{until: settled, at_least: 3, at_most: 5, narrower_than: 10%}"
    looked = Settled(looks=(3, 4, 5), narrower_than=0.1)
    assert study(text % (settled, "{diverged: 2}")).stop == StopRule(diverged=2, settled=looked)
    shortest = study(text % ("{until: settled, at_most: 3}", "null"))
    assert shortest.stop == StopRule(settled=Settled(looks=(2, 3)))
    assert study(text % (3, "{diverged: 1}")).stop == StopRule(diverged=1)
    assert study(text % (3, "null")).stop is None
