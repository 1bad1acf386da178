"""Which steps runs have in common, and who trains them: runs of 32 steps of 512 tokens."""

from dataclasses import replace

import pytest

from ablate.recipes import RecipeSpec
from ablate.run.config import Fork, ResourcesConfig
from ablate.run.schedule import shared_prefixes

STEP = 512
ALL = ["fprop", "dgrad", "wgrad"]
BF16 = RecipeSpec()
FP4 = RecipeSpec(gemms=ALL)
FPROP = RecipeSpec(gemms=["fprop"])
DELAYED = RecipeSpec(preset="te-hybrid-fp8-delayed")


def phases(*starts):
    """A recipe in bf16 that changes at these tokens, or after this fraction, to other recipes."""
    places = [
        ("from_fraction" if start < 1 else "from_tokens", start, recipe)
        for start, recipe in starts
    ]
    return RecipeSpec(
        phases=[{key: start, "recipe": recipe} for key, start, recipe in places]
    )


def late(step, recipe="mxfp4"):
    return phases((step * STEP, recipe))


def reset(**start):
    return RecipeSpec(gemms=ALL, deoscillate={"window": 3, **start})


@pytest.fixture
def runs_of(make_config):
    def runs(recipes, forks=(), resources=None, seed=0, **changes):
        configs = {
            name: make_config(recipe, seed=seed) for name, recipe in recipes.items()
        }
        for name, parent, step in forks:
            of = configs[parent]
            fork = Fork(tokens=step * STEP, recipe=of.recipe, training=of.training)
            configs[name] = replace(configs[name], fork=fork)
        if changes:
            configs["b"] = replace(
                configs["b"], training=replace(configs["b"].training, **changes)
            )
        return [
            (
                f"{name}{seed or ''}",
                config,
                (resources if name == "b" else None) or ResourcesConfig(),
            )
            for name, config in configs.items()
        ]

    return runs


def found(runs, **options):
    """Return holder and step by run; every prefix ends at a whole step."""
    prefixes = shared_prefixes(runs, **options)
    assert all(prefix.tokens == prefix.step * STEP for prefix in prefixes.values())
    return {run: (prefix.holder, prefix.step) for run, prefix in prefixes.items()}


@pytest.mark.parametrize(
    ("recipes", "forks", "shared"),
    [
        ({"a": BF16, "b": FP4}, (), {}),
        ({"a": BF16, "b": late(10), "c": late(20)}, (), {"b": ("a", 9), "c": ("a", 19)}),
        ({"a": DELAYED, "b": FP4}, [("b", "a", 10)], {}),  # its past belongs to one recipe
        ({"a": BF16, "b": phases((10 * STEP + 1, "mxfp4"))}, (), {"b": ("a", 10)}),  # begins with step 11
        (
            {"a": FP4, "b": reset(from_tokens=10 * STEP), "c": reset(from_fraction=0.5), "d": reset()}, (),
            {"b": ("a", 9), "c": ("a", 15)},
        ),
        (
            {"b": late(10), "c": phases((10 * STEP, "mxfp4"), (20 * STEP, "fp8")), "a": BF16}, (),
            {"c": ("b", 19), "a": ("b", 9)},
        ),
        (
            {"a": BF16, "b": FP4, "c": FPROP, "d": FP4}, [("b", "a", 10), ("c", "a", 10), ("d", "a", 16)],
            {"b": ("a", 9), "c": ("a", 9), "d": ("a", 15)},
        ),
        # A fork is the same state as a phase at that place.
        ({"b": late(10), "c": FP4, "a": BF16}, [("c", "a", 10)], {"c": ("b", 9), "a": ("b", 9)}),
    ],
)  # fmt: skip
def test_runs_share_the_steps_before_the_first_that_differs(
    runs_of, recipes, forks, shared
):
    assert found(runs_of(recipes, forks)) == shared


@pytest.mark.parametrize(
    ("changes", "shares"),
    [
        ({}, True),
        ({"evaluate_in": "both"}, False),
        ({"learning_rate": 1e-3}, False),
        ({"resources": ResourcesConfig(cpus=2)}, False),
        ({"resources": ResourcesConfig(hang_after_sec=9.0)}, True),
    ],
)
def test_settings_and_seeds_share_nothing_with_each_other(runs_of, changes, shares):
    recipes = {"a": BF16, "b": late(10)}
    assert found(runs_of(recipes, **changes)) == ({"b": ("a", 9)} if shares else {})
    if not changes:
        two = [*runs_of(recipes), *runs_of(recipes, seed=1)]
        assert found(two) == {"b": ("a", 9), "b1": ("a1", 9)}


def test_a_run_that_cannot_hold_a_state_is_passed_over(runs_of):
    runs = runs_of({"a": BF16, "b": late(10), "c": late(10, "fp8")})
    prefixes = shared_prefixes(
        runs, can_hold=lambda run, step: run != "a" and step == 9
    )
    assert {run: prefix.holder for run, prefix in prefixes.items()} == {"c": "b"}
    assert (
        shared_prefixes(runs, salt="other code")["b"].key
        != shared_prefixes(runs)["b"].key
    )
