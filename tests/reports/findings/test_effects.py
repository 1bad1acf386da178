"""Effects of factors: against textbook sums of squares and scipy."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy import stats
from synthetic_study import smooth_curve

from ablate.reports.findings.analyse import analyse
from ablate.reports.findings.effects import factor_effects, holm
from ablate.reports.words.tables import effect_table
from ablate.results.frames import load_frames


def design(rng, cells, value, *, n=4, noise=0.02):
    """Return rows of cells (levels of the factors a, b, …), n runs each, of seeds that are no pairs."""
    each = [cell for cell in cells for _ in range(n)]
    return [
        (dict(zip("abc", cell, strict=False)), seed, value(*cell) + rng.normal(0, noise))
        for seed, cell in enumerate(each)
    ]


SQUARE = [*itertools.product((0, 1), (0, 1))]


def by_term(found):
    return {effect.term: effect for effect in found.terms}


def test_a_balanced_two_by_two_by_the_textbook():
    rows = design(np.random.default_rng(0), SQUARE, lambda a, b: 18 + 0.1 * a + 0.03 * b + 0.05 * a * b, n=5)
    found = by_term(factor_effects(rows))
    y = np.array([value for *_, value in rows]).reshape(2, 2, 5)
    within = y.var(axis=2, ddof=1).mean()
    (low, high), (other_low, other_high) = y.mean(axis=2)
    contrasts = {
        "a": other_low + other_high - low - high,
        "b": high + other_high - low - other_low,
        "a × b": other_high - other_low - high + low,
    }
    for term, contrast in contrasts.items():
        expected = contrast**2 * 5 / 4 / within
        assert found[term].f == pytest.approx(expected)
        assert found[term].p == pytest.approx(stats.f.sf(expected, 1, 16))
    assert found["a"].levels == pytest.approx({"0": -contrasts["a"] / 4, "1": contrasts["a"] / 4})
    # A baseline beside the grid is left out; order and unit do not matter.
    named = [({"recipe": "bf16"}, 0, value) for value in (17.0, None)]
    assert factor_effects([*named, *rows]) == factor_effects(rows)
    other = by_term(factor_effects([(cell, seed, 1000 * v + 7) for cell, seed, v in reversed(rows)]))
    assert [other[term].p for term in found] == pytest.approx([one.p for one in found.values()])


def test_noise_alone_is_significant_as_seldom_as_it_should():
    rng = np.random.default_rng(1)
    terms = [factor_effects(design(rng, SQUARE, lambda *_: 18)).terms for _ in range(800)]
    p = np.array([[effect.p for effect in each] for each in terms])
    assert np.all(np.abs((p < 0.05).mean(axis=0) - 0.05) < 0.025)
    assert np.mean([min(effect.p_holm for effect in each) < 0.05 for each in terms]) < 0.075


def test_three_levels_and_unequal_numbers():
    cells = [*itertools.product("xyz", (1, 2)), ("x", 2), ("y", 1), ("y", 1), ("z", 1)]
    rows = design(np.random.default_rng(2), cells, lambda a, _: 0.1 * "xyz".index(a), n=2, noise=0.01)
    found = factor_effects(rows)
    terms = by_term(found)
    assert [terms[term].degrees for term in ("a", "b", "a × b")] == [2, 1, 2]
    assert found.residual_degrees == len(rows) - 6
    assert terms["a"].p_holm < 1e-6
    assert terms["b"].p_holm > 0.05
    assert terms["a"].levels["z"] == pytest.approx(0.1, abs=0.02)


@pytest.mark.parametrize(
    "cells",
    [
        [(0, 0, 0), (0, 1, 1), (1, 0, 1), (1, 1, 0)],  # the half fraction of three factors: c = a + b
        [(0, 0, 0), (0, 1, 0), (1, 0, 0)],  # a missing cell
    ],
)
def test_an_interaction_that_the_design_cannot_tell_apart_is_not_tested(cells):
    found = by_term(
        factor_effects(design(np.random.default_rng(3), cells, lambda a, *_: 0.1 * a, noise=0.01))
    )
    assert found["a"].p < 1e-3
    assert (found["a × b"].degrees, found["a × b"].p) == (0, None)


def test_one_dropped_cell_leaves_what_the_others_tell_of_the_interaction():
    """The rest of a real interaction must not be counted as error."""
    cells = [cell for cell in itertools.product(range(3), range(3)) if cell != (2, 2)]
    rows = design(np.random.default_rng(9), cells, lambda a, b: 0.1 * (a == b == 1), n=3, noise=0.01)
    found = factor_effects(rows)
    both = by_term(found)["a × b"]
    assert both.degrees == 3
    assert both.p < 1e-6
    assert found.residual == pytest.approx(0.01, rel=0.5)
    assert found.residual_degrees == len(rows) - len(cells)


def test_a_seed_is_a_block_where_seeds_are_pairs():
    """What all arms share of a seed is no error: the F of a two-way layout with blocks, by hand."""
    rng = np.random.default_rng(8)
    y = 0.03 * np.arange(2)[:, None, None] + rng.normal(0, 0.2, 4) + rng.normal(0, 0.01, (2, 2, 4))
    rows = [({"a": a, "b": b}, seed, y[a, b, seed]) for a, b in SQUARE for seed in range(4)]
    by_seed = y - y.mean(axis=(0, 1))
    rest = by_seed - by_seed.mean(axis=2, keepdims=True)
    f = 8 * ((by_seed.mean(axis=(1, 2))) ** 2).sum() / ((rest**2).sum() / (16 - 4 - 3))
    paired, apart = (factor_effects(rows, paired=paired) for paired in (True, False))
    assert by_term(paired)["a"].f == pytest.approx(f)
    assert paired.residual_degrees == 9
    assert by_term(paired)["a"].p < 0.01 < by_term(apart)["a"].p
    assert by_term(paired)["a"].levels == pytest.approx(by_term(apart)["a"].levels)


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([({"a": 1, "b": 2}, 1.0), ({"a": 2, "b": 2}, 2.0)], "fewer than two factors that vary"),
        ([({"a": 1, "b": 2}, 1.0), ({"a": 2, "c": 1}, 2.0)], "fewer than two"),  # which is the grid?
        ([({"a": a, "b": b}, None if a else 1.0) for a, b in SQUARE], "2 of 4 runs have no known value"),
        ([({"a": a, "b": b}, a + b / 2) for a, b in SQUARE], "no run to spare for the error"),
        ([({"a": a, "b": b}, float(a)) for a, b in SQUARE for _ in "xy"], "no error to test against"),
        ([], "fewer than two"),
    ],
)
def test_no_effects(rows, reason):
    found = factor_effects([(cell, seed, value) for seed, (cell, value) in enumerate(rows)])
    assert found.terms == ()
    assert reason in found.reason


def test_a_grid_has_its_table(make_study):
    rng = np.random.default_rng(6)
    cells = {"base": {}} | {
        f"{gemm}, {rule}": {"recipe.gemms": gemm, "recipe.scale": rule}
        for gemm in ("fprop", "wgrad") for rule in ("floor", "even")
    }  # fmt: skip
    curves = {
        name: [smooth_curve(rng, cost=0.2 * (factors.get("recipe.gemms") == "wgrad")) for _ in range(3)]
        for name, factors in cells.items()
    }
    analysis = analyse(load_frames(make_study(curves, factors=cells)))
    assert analysis.token_effects.runs == 12  # the baseline is no cell of the grid
    rows = effect_table(analysis).rows
    assert [row[0] for row in rows] == ["recipe.gemms", "recipe.scale", "recipe.gemms × recipe.scale"]
    assert "wgrad +" in rows[0][1]
    assert rows[0][4] in ("<0.001", "0.001", "0.002")
    assert not effect_table(analyse(load_frames(make_study({"a": curves["base"]})))).rows


def test_holm():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == pytest.approx([1.0, 1.0])
    assert holm([]) == []
