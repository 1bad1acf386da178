"""The study that confirms a search is the same recipes, model and data, with other seeds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ablate.recipes import PRESETS
from ablate.search.confirm import confirm_study
from ablate.search.plan import plan_search
from ablate.study import load_study

HEAD = """\
name: s
baseline: bf16
target: {perplexity: 12.5, crossing: first_eval}
base:
  model: {width: 128, layers: 4, heads: 2, ffn: 384, rope_base: 5.0e+5}
  data: {source: text, paths: [corpus], tokenizer: bytes}
  training: {learning_rate: 1.0e-5, eval_every_tokens: 20_000, grad_clip: null, warmup_tokens: 1000}
  resources: {cpus: 2, custom: {mi355x: 1}}
  backend: emulated
search: {hardware: B200, shapes: llama-8b, trials: 99, budgets: [40_000, 80_000], seed: 7}
"""
OWN = """\
arms:
  bf16: {recipe: bf16}
  odd:
    recipe:
      gemms: [fprop, wgrad]
      rest: fp8
      stabiliser: sr+dht
      hadamard_size: 32
      wgrad: {stabiliser: dht, dy: {rounding: stochastic}}
      dgrad: {format: mxfp8}
      layers: [{first: 1, recipe: bf16}, {match: '*.down', last: 1, recipe: {gemms: [wgrad], stabiliser: sr}}]
      phases: [{from_fraction: 0.5, recipe: tseng}]
  'a: "name" #1': {recipe: {preset: tseng, layers: []}}
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "a.txt").write_text("text " * 40_000)
    return tmp_path


def confirmed(folder, text):
    (folder / "search.yaml").write_text(text)
    study = load_study(folder / "search.yaml")
    found = plan_search(study)
    names = [arm.name for arm in found.plans[0].arms if arm.name != "bf16"]
    (folder / "out").mkdir()
    (folder / "out" / "confirm.yaml").write_text(confirm_study(found, names, "search.yaml"))
    return study, found, load_study(folder / "out" / "confirm.yaml")


def test_it_is_the_same_but_for_the_seeds(folder):
    study, _, again = confirmed(folder, HEAD + OWN)
    assert again.name == "s-confirm"
    assert again.seeds == (8, 9, 10, 11, 12)
    assert study.seeds == (7,)
    assert again.search is None
    assert again.target == study.target
    assert again.training == replace(study.training, tokens=80_000)
    assert [arm.name for arm in again.arms] == ["bf16", "odd", 'a: "name" #1']
    for arm, other in zip(study.arms, again.arms, strict=True):
        assert (arm.model, arm.data, arm.recipe) == (other.model, other.data, other.recipe)
        assert (arm.backend, arm.resources) == (other.backend, other.resources)


def test_every_published_recipe_comes_back(folder):
    arms = "".join(f"  {name}: {{recipe: {{preset: {name}, layers: []}}}}\n" for name in PRESETS)
    study, found, again = confirmed(folder, f"{HEAD}arms:\n  bf16: {{recipe: bf16}}\n{arms}")
    recipes = {arm.name: arm.recipe for arm in study.arms}
    assert len(again.arms) == len(found.times) > 20
    for arm in again.arms:
        assert arm.recipe == recipes[arm.name]
