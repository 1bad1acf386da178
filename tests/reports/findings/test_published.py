"""Published figures stand beside the arm that they are about."""

from __future__ import annotations

import pytest

from ablate.recipes import PRESETS, Recipe, RecipeSpec, resolve
from ablate.reports.findings.gemms import kind_of, published_for


def figures(recipe):
    return [one.figure for one in published_for(recipe)]


@pytest.mark.parametrize(
    ("name", "figure"),
    [
        ("amd-f", "8–9 % more tokens"),
        ("amd-fd-sr", "10–11 % more tokens"),
        ("amd-fdw", "26–27 % more tokens"),
        ("amd-fdw-sr", "does not converge"),
        ("amd-fdw-rht16", "does not converge"),
        ("amd-fdw-dht32", "8–9 % more tokens"),
        ("tseng", "+0.02 nats (345M), 0.00 (1.3B), 0.00 (6.7B)"),
        ("tseng-rht", "+0.02 nats (345M)"),
    ],
)
def test_the_presets_of_a_paper_have_its_figure(name, figure):
    assert figures(PRESETS[name].recipe) == [figure]


def test_nvidias_recipe_has_both_sources():
    assert len(figures(PRESETS["nvidia-nvfp4"].recipe)) == 2


def test_a_short_recipe_of_the_same_kind_has_it_too():
    recipe = resolve(RecipeSpec(gemms=["fprop", "dgrad", "wgrad"], stabiliser="dht", hadamard_size=16))
    assert figures(recipe) == ["8–9 % more tokens"]


ALL = ["fprop", "dgrad", "wgrad"]


@pytest.mark.parametrize(
    ("recipe", "stabiliser"),
    [
        ({"gemms": ALL, "dgrad": {"dy": {"rounding": "stochastic"}}}, "sr*"),
        ({"gemms": ALL, "fprop": {"stabiliser": "sr"}}, "sr*"),
        ({"gemms": ALL, "wgrad": {"stabiliser": "dht"}}, "dht*"),
        ({"gemms": ALL, "wgrad": {"stabiliser": "rht"}}, "rht*"),
        ({"preset": "rocm-te-sr"}, "sr(rocm)"),
    ],
)
def test_what_is_published_of_all_operands_is_not_of_a_part_of_them(recipe, stabiliser):
    resolved = resolve(RecipeSpec(**recipe))
    assert kind_of(resolved).stabiliser == stabiliser
    assert figures(resolved) == []


def test_what_nobody_has_published_has_nothing():
    assert figures(resolve(RecipeSpec(gemms=ALL, deoscillate={}))) == []
    assert kind_of(Recipe()) is None
    assert figures(PRESETS["te-hybrid-fp8"].recipe) == []
    assert figures(resolve(RecipeSpec(gemms=["wgrad"]))) == []
    assert (
        figures(resolve(RecipeSpec(gemms=["fprop", "dgrad", "wgrad"], stabiliser="dht", hadamard_size=64)))
        == []
    )
