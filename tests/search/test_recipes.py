"""A search's plan, what a run's end means to it, which one may go on, and the study that confirms it."""

import math
from dataclasses import asdict, replace

import pytest

from ablate.base.errors import UserError
from ablate.base.files import append_line
from ablate.recipes import PRESETS
from ablate.search.halving import DIVERGED
from ablate.search.recipes import (
    LOCK,
    check_same,
    confirm_study,
    plan_search,
    result_of,
)
from ablate.store import Status, StudyStore
from ablate.study import load_study

SEARCH = """\
name: s
baseline: bf16
target: {val_loss: 2.0}
base: {model: {ffn: 384}}
arms:
  bf16: {recipe: bf16}
  tseng: {recipe: tseng}
  nvfp4: {recipe: {gemms: [fprop], format: nvfp4}}
grid:
  senseless: drop
  factors:
    recipe.gemms: {none: [], F: [fprop], D: [dgrad]}
    recipe.stabiliser: [none, sr]
search: {hardware: B200, shapes: llama-8b, trials: 4, budgets: [100_000, 200_000], seed: 3}
"""


@pytest.fixture
def planned(tmp_path):
    """Plan the search with some of its text replaced."""

    def plan(*changes):
        text = SEARCH
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        (tmp_path / "study.yaml").write_text(text)
        return plan_search(load_study(tmp_path / "study.yaml"))

    return plan


def test_the_budgets_differ_in_tokens_alone(planned):
    search = planned()
    tokens = [arm.config.training.tokens for plan in search.plans for arm in plan.arms]
    assert tokens == [100_000] * 7 + [200_000] * 7
    assert {run.seed for plan in search.plans for _, run in plan.runs()} == {3}
    assert search.arm(200_000, "tseng").config.training.tokens == 200_000
    assert search.first == ("bf16", "tseng", "nvfp4")
    assert search.levels("F sr") == {"recipe.gemms": "F", "recipe.stabiliser": "sr"}
    assert search.levels("tseng") == {}


@pytest.fixture
def store(tmp_path):
    return StudyStore(tmp_path / "runs" / "s")


@pytest.fixture
def end(store):
    """Write a run's end, and return what it means."""

    def write(planned, name, curve, state="finished", budget=100_000):
        arm = planned.arm(budget, name)
        run = store.run(arm.runs[0].id)
        run.create(asdict(arm.config))
        for step, (tokens, loss) in enumerate(curve):
            row = {"kind": "eval", "tokens": tokens, "step": step, "val_loss": loss}
            append_line(run.metrics_path, row)
        run.write_status(Status(state=state, message="why"))
        return result_of(planned, store, arm)

    return write


def test_the_loss_at_the_end_of_the_budget_or_a_bound(planned, end):
    search = planned()
    assert end(search, "bf16", [(50_000, 2.5), (100_000, 2.25)]).values == (2.25, 1.0)
    assert end(search, "tseng", [], state="failed").failed == "why"
    diverged = end(search, "F sr", [(50_000, 9.9)], state="diverged")
    assert diverged.values == (1.5 * math.log(256), search.times["F sr"])
    assert diverged.violation == DIVERGED
    with pytest.raises(UserError, match="the baseline 'bf16' diverged"):
        end(search, "bf16", [(200_000, 9.9)], state="diverged", budget=200_000)


def test_the_token_cost_is_against_the_baselines_run_or_a_bound_with_a_violation(
    planned, end
):
    search = planned(("search: {", "search: {objective: token_cost, "))
    half_way = (40_000 * 60_000) ** 0.5  # in ln tokens
    misses = [(50_000, 3.0), (100_000, 2.3)]
    result = end(search, "bf16", [(40_000, 3.0), (60_000, 1.0), (100_000, 0.9)])
    assert (result.values, result.violation) == ((0.0, 1.0), None)
    result = end(search, "tseng", [(40_000, 3.0), (80_000, 1.0), (100_000, 0.9)])
    assert result.values[0] == pytest.approx((4 / 3) ** 0.5 - 1)
    bound = pytest.approx(100_000 / half_way - 1)
    result = end(search, "F sr", misses)
    assert (result.values[0], result.violation) == (bound, pytest.approx(0.3))
    result = end(search, "D none", [(50_000, 9.0)], "diverged")
    assert (result.values[0], result.violation) == (bound, DIVERGED)
    with pytest.raises(
        UserError, match="does not reach the target within 200,000 tokens"
    ):
        end(search, "bf16", misses, budget=200_000)


def test_another_search_of_the_name_is_refused(planned, store):
    check_same(planned(), store)
    check_same(planned(("trials: 4", "trials: 6")), store)
    for old, new, keys in (
        ("seed: 3", "seed: 4", "seed, recipes"),
        (", 200_000]", "]", "budgets, recipes"),
        ("search: {", "search: {objective: token_cost, ", "objective "),
    ):
        with pytest.raises(UserError, match=f"with other {keys}"):
            check_same(planned((old, new)), store)
    lock = store.path / LOCK
    lock.unlink()
    lock.mkdir()  # it cannot be read, which is not the same as gone
    with pytest.raises(UserError, match=f"^{lock}: .*remove it to go on"):
        check_same(planned(), store)


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
search: {hardware: B200, shapes: llama-8b, trials: 99, budgets: [1_000_000, 2_000_000], seed: 7}
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
  'a: "name" #1': {recipe: {gemms: [dgrad], stabiliser: sr}}
"""


def test_the_study_that_confirms_is_the_same_but_for_the_seeds_with_every_published_recipe(
    tmp_path,
):
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "a.txt").write_text("text " * 40_000)
    arms = ""
    recipes = set()
    for name, preset in PRESETS.items():
        # Without their layers some are the same recipe.
        recipe = replace(preset.recipe, rules=()).text
        if not preset.recipe.is_high_precision and recipe not in recipes:
            recipes.add(recipe)
            arms += f"  {name}: {{recipe: {{preset: {name}, layers: []}}}}\n"
    (tmp_path / "search.yaml").write_text(HEAD + arms)
    study = load_study(tmp_path / "search.yaml")
    search = plan_search(study)
    text = confirm_study(search, [*search.times][1:], "search.yaml")
    (tmp_path / "confirm.yaml").write_text(text)
    again = load_study(tmp_path / "confirm.yaml")
    assert (again.name, again.seeds) == ("s-confirm", (8, 9, 10, 11, 12))
    assert (again.search, again.target) == (None, study.target)
    assert again.training == replace(study.training, tokens=2_000_000)
    assert len(again.arms) == len(search.times) > 20
    before = {arm.name: arm for arm in study.arms}
    for arm in again.arms:
        for part in ("model", "data", "recipe", "backend", "resources"):
            assert getattr(arm, part) == getattr(before[arm.name], part)
