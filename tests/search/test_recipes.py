"""What a run's end means to a search, and which searches may be gone on with."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from optuna.trial import TrialState, create_trial

from ablate.base.errors import UserError
from ablate.base.files import append_line
from ablate.recipes import PRESETS
from ablate.search.halving import DIVERGED
from ablate.search.plan import plan_search
from ablate.search.recipes import arm_name, check_same, confirm_study, result_of, tried_plan
from ablate.store import Status, StudyStore
from ablate.study import load_study

SEARCH = """\
name: s
baseline: bf16
target: {{val_loss: 2.0}}
base: {{model: {{ffn: 384}}}}
arms: {{bf16: {{recipe: bf16}}, tseng: {{recipe: tseng}}}}
grid:
  factors: {{recipe.gemms: {{F: [fprop], D: [dgrad]}}, recipe.stabiliser: [none, sr]}}
search: {{hardware: B200, trials: {trials}, budgets: {budgets}, objective: {objective}, seed: {seed}}}
"""

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
def planned(tmp_path):
    def make(objective="loss", *, trials=4, budgets="[100_000, 200_000]", seed=3):
        path = tmp_path / "s.yaml"
        path.write_text(SEARCH.format(objective=objective, trials=trials, budgets=budgets, seed=seed))
        return plan_search(load_study(path))

    return make


@pytest.fixture
def store(tmp_path):
    return StudyStore(tmp_path / "runs" / "s")


def end(store, planned, name, curve, state="finished", budget=100_000):
    run = store.run(planned.arm(budget, name).runs[0].id)
    run.create({})
    for step, (tokens, loss) in enumerate(curve):
        append_line(run.metrics_path, {"kind": "eval", "tokens": tokens, "step": step, "val_loss": loss})
    run.write_status(Status(state=state, message="why"))


def test_the_loss_at_the_end_of_the_budget(planned, store):
    found = planned()
    end(store, found, "bf16", [(50_000, 2.5), (100_000, 2.25)])
    assert result_of(found, store, 100_000, "bf16").values == (2.25, 1.0)
    end(store, found, "tseng", [], state="failed")
    assert result_of(found, store, 100_000, "tseng").failed == "why"


def test_a_diverged_run_is_told_as_its_bound(planned, store):
    found = planned()
    end(store, found, "F sr", [(50_000, 9.9)], state="diverged")
    result = result_of(found, store, 100_000, "F sr")
    assert result.values == (1.5 * math.log(256), found.times["F sr"])
    assert result.violation == DIVERGED
    end(store, found, "bf16", [(50_000, 9.9)], state="diverged")
    with pytest.raises(UserError, match="the baseline 'bf16' diverged"):
        result_of(found, store, 100_000, "bf16")


def test_the_token_cost_is_against_the_baselines_run_or_a_bound_with_a_violation(planned, store):
    found = planned("token_cost")
    end(store, found, "bf16", [(40_000, 3.0), (60_000, 1.0), (100_000, 0.9)])
    end(store, found, "tseng", [(40_000, 3.0), (80_000, 1.0), (100_000, 0.9)])
    end(store, found, "F sr", [(50_000, 3.0), (100_000, 2.3)])
    end(store, found, "D none", [(50_000, 9.0)], state="diverged")
    half_way = (40_000 * 60_000) ** 0.5  # in ln tokens
    for name, cost, violation in (
        ("bf16", 0.0, None),
        ("tseng", (80_000 / 60_000) ** 0.5 - 1, None),
        ("F sr", 100_000 / half_way - 1, pytest.approx(0.3)),
        ("D none", 100_000 / half_way - 1, DIVERGED),
    ):
        result = result_of(found, store, 100_000, name)
        assert (result.values[0], result.violation) == (pytest.approx(cost), violation)
    end(store, found, "bf16", [(50_000, 3.0), (100_000, 2.3)], budget=200_000)
    with pytest.raises(UserError, match="does not reach the target within 200,000 tokens"):
        result_of(found, store, 200_000, "bf16")


def test_the_lock_file_holds_what_was_tried_alone(planned):
    found = planned()
    first, second = (
        [create_trial(state=TrialState.RUNNING, user_attrs={"candidate": name}) for name in names]
        for names in (("bf16", "F sr"), ("bf16",))
    )
    lock = tried_plan(found, [first, second])
    assert [arm.name for arm in lock.arms] == ["bf16 @ 100k", "F sr @ 100k", "bf16 @ 200k"]
    assert lock.baseline == "bf16 @ 100k"
    assert [arm.name for arm in tried_plan(found, [(), ()]).arms] == ["bf16 @ 100k"]
    assert arm_name(planned(budgets="[100_000]"), 100_000, "bf16") == "bf16"


def test_candidates_are_arms_and_cells(planned):
    grid = planned().halving.grid
    assert grid.by_name["F sr"].levels == {"recipe.gemms": "F", "recipe.stabiliser": "sr"}
    assert grid.by_name["tseng"].levels == {}
    assert grid.first == ("bf16", "tseng")


def test_another_search_of_the_name_is_refused(planned, store):
    (store.path / "runs").mkdir(parents=True)
    with pytest.raises(UserError, match="holds a study of this name"):
        check_same(planned(), store)
    (store.path / "runs").rmdir()
    check_same(planned(), store)
    check_same(planned(trials=6), store)
    with pytest.raises(UserError, match="with other seed, recipes"):
        check_same(planned(seed=4), store)
    with pytest.raises(UserError, match="with other budgets, recipes"):
        check_same(planned(budgets="[100_000]"), store)
    with pytest.raises(UserError, match="with other objective "):
        check_same(planned("token_cost"), store)


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
    # Without their layers some are the same recipe.
    apart = {replace(preset.recipe, rules=()).text: name for name, preset in reversed(PRESETS.items())}
    arms = "".join(f"  {name}: {{recipe: {{preset: {name}, layers: []}}}}\n" for name in apart.values())
    head = HEAD.replace("[40_000, 80_000]", "[2_000_000, 4_000_000]")  # de-oscillation has time
    study, found, again = confirmed(folder, f"{head}arms:\n  bf16: {{recipe: bf16}}\n{arms}")
    recipes = {arm.name: arm.recipe for arm in study.arms}
    assert len(again.arms) == len(found.times) > 20
    for arm in again.arms:
        assert arm.recipe == recipes[arm.name]
