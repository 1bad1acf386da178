"""Which steps runs have in common, and who trains them: runs of 32 steps of 512 tokens.

``shared_steps.txt`` has the recipes of runs in each line, then what each run takes from another one.
``REWRITE=1`` writes what stands under them anew.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from ablate.run.config import Fork, ResourcesConfig
from ablate.run.schedule import shared_prefixes
from tests.golden import check_answers

STEP = 512
OWN = ResourcesConfig()
LATE = {"phases": [{"from_tokens": 10 * STEP, "recipe": "mxfp4"}]}


def shared(runs):
    """Return holder and step by run; every prefix ends at a whole step."""
    prefixes = shared_prefixes(runs)
    assert all(prefix.tokens == prefix.step * STEP for prefix in prefixes.values())
    return {run: (prefix.holder, prefix.step) for run, prefix in prefixes.items()}


def test_runs_share_the_steps_before_the_first_that_differs(make_config):
    def told(line):
        written = {} if line.startswith("#") else yaml.safe_load(line)
        configs = {}
        forks = {}
        for name, recipe in written.items():
            if isinstance(recipe, list):
                recipe, *forks[name] = recipe  # noqa: PLW2901
            configs[name] = make_config(recipe, seed=int(name[1:] or 0))
        for name, (parent, step) in forks.items():
            before = configs[parent]
            fork = Fork(
                tokens=step * STEP, recipe=before.recipe, training=before.training
            )
            configs[name] = replace(configs[name], fork=fork)
        runs = [(name, config, OWN) for name, config in configs.items()]
        for name, (holder, step) in shared(runs).items():
            yield f"{name}: {step} steps of {holder}"

    check_answers(Path(__file__).with_name("shared_steps.txt"), told)


@pytest.mark.parametrize(
    ("changes", "resources", "shares"),
    [
        ({}, OWN, True),
        ({"evaluate_in": "both"}, OWN, False),
        ({"learning_rate": 1e-3}, OWN, False),
        ({}, ResourcesConfig(cpus=2), False),
        ({}, ResourcesConfig(hang_after_sec=9.0), True),
    ],
)
def test_other_settings_share_nothing(make_config, changes, resources, shares):
    runs = [
        ("a", make_config(), OWN),
        ("b", make_config(LATE, **changes), resources),
    ]
    assert shared(runs) == ({"b": ("a", 9)} if shares else {})


def test_a_run_that_cannot_hold_a_state_is_passed_over(make_config):
    late_fp8 = {"phases": [{"from_tokens": 10 * STEP, "recipe": "fp8"}]}
    recipes = {"a": "bf16", "b": LATE, "c": late_fp8}
    runs = [(name, make_config(recipe), OWN) for name, recipe in recipes.items()]
    prefixes = shared_prefixes(
        runs, can_hold=lambda run, step: run != "a" and step == 9
    )
    assert {run: prefix.holder for run, prefix in prefixes.items()} == {"c": "b"}
    assert (
        shared_prefixes(runs, salt="other code")["b"].key
        != shared_prefixes(runs)["b"].key
    )
