"""A search's plans: the same recipes at every budget, with modelled step times, without what cannot run."""

from __future__ import annotations

import pytest

from ablate.base.errors import UserError
from ablate.modelled.speed import LLAMA_8B, token_time
from ablate.plan import build_plan
from ablate.recipes import PRESETS, Recipe
from ablate.search.plan import plan_search
from ablate.study import load_study

SEARCH = """\
name: s
baseline: bf16
target: {{val_loss: 2.0}}
base: {{model: {{ffn: 384}}}}
arms:
  bf16: {{recipe: {baseline}}}
  tseng: {{recipe: tseng}}
  nvfp4: {{recipe: {{gemms: [fprop], format: nvfp4}}}}
grid:
  senseless: drop
  factors:
    recipe.gemms: {{none: [], F: [fprop]}}
    recipe.stabiliser: [none, sr]
search: {{hardware: {hardware}, shapes: {shapes}, trials: {trials}, budgets: [60_000, 90_000]}}
"""


@pytest.fixture
def planned(study, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def make(*, hardware="B200", shapes="llama-8b", trials=4, baseline="bf16", name="bf16"):
        text = SEARCH.format(hardware=hardware, shapes=shapes, trials=trials, baseline=baseline)
        text = text.replace("bf16:", f"{name}:").replace("baseline: bf16", f"baseline: {name}")
        return plan_search(study(text))

    return make


def test_the_budgets_differ_in_tokens_alone(planned):
    found = planned()
    names = [[arm.name for arm in plan.arms] for plan in found.plans]
    assert names[0] == names[1] == ["bf16", "tseng", "nvfp4", "F none", "F sr"]
    tokens = [arm.config.training.tokens for plan in found.plans for arm in plan.arms]
    assert tokens == [60_000] * 5 + [90_000] * 5
    ids = [arm.runs[0].id for plan in found.plans for arm in plan.arms]
    assert len(set(ids)) == 10
    assert {run.seed for plan in found.plans for _, run in plan.runs()} == {1000}
    assert found.first == ("bf16", "tseng", "nvfp4")
    assert found.arm(90_000, "tseng").config.training.tokens == 90_000


def test_the_time_of_a_recipe_with_phases_is_that_of_its_whole_run(study):
    text = SEARCH.format(hardware="B200", shapes="llama-8b", trials=4, baseline="bf16")
    phase = "recipe: {gemms: [fprop], phases: [{from_fraction: 0.8, recipe: bf16}]}"
    times = plan_search(study(text.replace("recipe: tseng", phase))).times
    assert times["tseng"] == pytest.approx(0.8 * times["F none"] + 0.2)
    assert times["F none"] < 1


def test_rules_and_phases_that_change_nothing_make_no_other_recipe(study):
    text = SEARCH.format(hardware="B200", shapes="llama-8b", trials=4, baseline="bf16")
    factors = """\
    recipe.layers: {all: [], last: [{last: 1, recipe: bf16}]}
    recipe.phases: {whole: [], end: [{from_fraction: 0.8, recipe: bf16}]}
"""
    found = plan_search(study(text.replace("search: {", factors + "search: {")))
    assert [arm.name for arm in found.plans[0].arms if arm.name.startswith("none")] == []
    assert len([arm for arm in found.plans[0].arms if arm.name.startswith("F")]) == 8


def test_the_time_is_the_models_over_the_baselines(planned):
    times = planned().times
    expected = [token_time(LLAMA_8B, recipe, "B200").total for recipe in (PRESETS["tseng"].recipe, Recipe())]
    assert times["tseng"] == expected[0] / expected[1]
    assert times["bf16"] == 1.0
    assert planned(shapes="study").times["tseng"] != times["tseng"]


def test_what_the_hardware_has_no_unit_for_is_dropped_and_listed(planned):
    amd = planned(hardware="MI355X")
    assert "nvfp4" not in amd.times
    assert amd.first == ("bf16", "tseng")
    reasons = {cell.name: cell.reason for cell in amd.plans[0].dropped}
    assert reasons["nvfp4"] == "MI355X has no unit for one of its formats"
    assert reasons["none sr"] == "stabiliser 'sr' with no FP4 GEMM to act on"
    assert set(planned(hardware="H100", trials=1).times) == {"bf16"}


def test_a_baseline_without_a_unit_is_one_line(planned):
    with pytest.raises(
        UserError, match=r"study\.yaml:14:20: search\.hardware: H100 has no unit for a format"
    ):
        planned(hardware="H100", baseline="mxfp4", name="start")


def test_fewer_trials_than_arms_is_one_line(planned):
    with pytest.raises(UserError, match=r"14:\d+: search\.trials: 2 are fewer than .* named arms \(3\)"):
        planned(trials=2)


def test_a_search_is_no_study(study):
    with pytest.raises(UserError) as caught:
        build_plan(study(SEARCH.format(hardware="B200", shapes="study", trials=4, baseline="bf16")))
    assert "study.yaml:14:9: a search, not a study (start it with: ablate search)" in str(caught.value)


def test_the_shipped_search_can_be_planned():
    found = plan_search(load_study("tiny-search"))
    assert found.first == ("bf16", "tseng", "amd-fdw-dht16", "nvidia-nvfp4")
    assert len(found.times) == 51
    assert found.search.trials == 24
