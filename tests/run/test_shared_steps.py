"""Which steps runs have in common, and who trains them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ablate.recipes import PRESETS, RecipeSpec, resolve
from ablate.run.config import Fork, ResourcesConfig
from ablate.run.shared_steps import kept_by, shared_prefixes

STEP = 512
BF16 = RecipeSpec()
FP4 = RecipeSpec(gemms=["fprop", "dgrad", "wgrad"])


def late(start, recipe="mxfp4", **entry):
    return RecipeSpec(phases=[{"from_tokens": start, "recipe": recipe} | entry])


@pytest.fixture
def share(make_config):
    """Find the prefixes of runs on 32 steps of 512 tokens, given their recipes by name."""

    def find(resources=None, seeds=(0,), changes=None, forks=None, **recipes):
        runs = []
        for seed in seeds:
            for name, recipe in recipes.items():
                config = make_config(recipe, seed=seed, **(changes or {}).get(name, {}))
                if name in (forks or {}):
                    parent, step = forks[name]
                    of = make_config(recipes[parent], seed=seed)
                    fork = Fork(tokens=step * STEP, recipe=of.recipe, training=of.training)
                    config = replace(config, fork=fork)
                own = (resources or {}).get(name, ResourcesConfig())
                runs.append((name if len(seeds) == 1 else f"{name}{seed}", config, own))
        return {
            run: (prefix.holder, prefix.step, prefix.tokens) for run, prefix in shared_prefixes(runs).items()
        }

    return find


def test_what_never_changes_shares_nothing(share):
    assert share(a=BF16, b=FP4) == {}


def test_a_phase_is_shared_up_to_the_step_before_it(share):
    assert share(a=BF16, b=late(10 * STEP), c=late(20 * STEP)) == {
        "b": ("a", 9, 9 * STEP),
        "c": ("a", 19, 19 * STEP),
    }
    assert share(a=BF16, b=late(10 * STEP + 1)) == {"b": ("a", 10, 10 * STEP)}  # it begins with step 11


def test_de_oscillation_is_shared_up_to_the_step_before_it(share):
    def reset(**start):
        return RecipeSpec(gemms=["fprop", "dgrad", "wgrad"], deoscillate={"window": 3, **start})

    assert share(a=FP4, b=reset(from_tokens=10 * STEP), c=reset(from_fraction=0.5), d=reset()) == {
        "b": ("a", 9, 9 * STEP),
        "c": ("a", 15, 15 * STEP),
    }


def test_evaluations_in_another_precision_share_nothing(share):
    recipes = {"a": BF16, "b": late(10 * STEP)}
    assert share(**recipes, changes={"b": {"evaluate_in": "both"}}) == {}


def test_two_phases_alike_and_a_third_that_differs(share):
    one = late(10 * STEP)
    two = RecipeSpec(phases=[*one.phases, *late(20 * STEP, "fp8").phases])
    assert share(b=one, c=two, a=BF16) == {"c": ("b", 19, 19 * STEP), "a": ("b", 9, 9 * STEP)}


def test_a_fraction_is_the_same_as_its_tokens(share):
    half = RecipeSpec(phases=[{"from_fraction": 0.5, "recipe": "mxfp4"}])
    later = RecipeSpec(phases=[*late(16 * STEP).phases, *late(24 * STEP, "fp8").phases])
    assert share(a=half, b=later) == {"b": ("a", 23, 23 * STEP)}


def test_seeds_and_settings_share_nothing_with_each_other(share):
    assert share(a=BF16, b=late(10 * STEP), changes={"b": {"learning_rate": 1e-3}}) == {}
    assert share(a=BF16, b=late(10 * STEP), resources={"b": ResourcesConfig(cpus=2)}) == {}
    assert share(a=BF16, b=late(10 * STEP), resources={"b": ResourcesConfig(hang_after_sec=9.0)})
    found = share(a=BF16, b=late(10 * STEP), seeds=(0, 1))
    assert found == {"b0": ("a0", 9, 9 * STEP), "b1": ("a1", 9, 9 * STEP)}


def test_delayed_scales_share_nothing(make_config):
    delayed = replace(make_config(), recipe=PRESETS["te-hybrid-fp8-delayed"].recipe)
    fork = Fork(tokens=10 * STEP, recipe=delayed.recipe, training=delayed.training)
    runs = [("a", delayed, ResourcesConfig()), ("b", replace(make_config(FP4), fork=fork), ResourcesConfig())]
    assert shared_prefixes(runs) == {}


def test_a_fork_shares_its_parents_steps_and_its_own_with_other_forks(share):
    forks = {"b": ("a", 10), "c": ("a", 10), "d": ("a", 16)}
    found = share(a=BF16, b=FP4, c=RecipeSpec(gemms=["fprop"]), d=FP4, forks=forks)
    assert found == {"b": ("a", 9, 9 * STEP), "c": ("a", 9, 9 * STEP), "d": ("a", 15, 15 * STEP)}
    assert share(b=FP4, c=RecipeSpec(gemms=["fprop"]), a=BF16, forks={"b": ("a", 10), "c": ("a", 10)}) == {
        "c": ("b", 9, 9 * STEP),
        "a": ("b", 9, 9 * STEP),
    }


def test_a_fork_is_the_same_state_as_a_phase_at_that_place(share):
    own = resolve(FP4)
    assert own.fprop != resolve(BF16).fprop
    assert share(b=late(10 * STEP), c=FP4, a=BF16, forks={"c": ("a", 10)})["c"] == ("b", 9, 9 * STEP)


def test_a_run_that_cannot_hold_a_state_is_passed_over(make_config):
    configs = {
        "a": make_config(BF16),
        "b": make_config(late(10 * STEP)),
        "c": make_config(late(10 * STEP, "fp8")),
    }
    runs = [(name, config, ResourcesConfig()) for name, config in configs.items()]
    found = shared_prefixes(runs, can_hold=lambda run, step: run != "a" and step == 9)
    assert {run: prefix.holder for run, prefix in found.items()} == {"c": "b"}
    assert kept_by(found) == {"b": {9: found["c"].key}}
    assert shared_prefixes(runs, salt="other code")["b"].key != shared_prefixes(runs)["b"].key
