"""Effects of factors: against textbook sums of squares and scipy."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy import stats
from synthetic_study import smooth_curve

from ablate.reports.findings.analyse import analyse
from ablate.reports.findings.effects import factor_effects as effects_of_runs
from ablate.reports.findings.effects import holm
from ablate.reports.words.tables import effect_table
from ablate.results.frames import load_frames


def factor_effects(rows):
    """Of runs whose seeds are no pairs."""
    return effects_of_runs([(factors, seed, value) for seed, (factors, value) in enumerate(rows)])


def design(rng, *, a=0.0, b=0.0, ab=0.0, noise=0.02, n=4, cells=None):
    rows = []
    for (x, y), _ in itertools.product(cells or itertools.product((0, 1), (0, 1)), range(n)):
        value = 18 + a * x + b * y + ab * x * y + rng.normal(0, noise)
        rows.append(({"gemm": ["fprop", "wgrad"][x], "stabiliser": ["none", "dht"][y]}, value))
    return rows


def by_term(found):
    return {effect.term: effect for effect in found.terms}


def test_a_balanced_two_by_two_by_the_textbook():
    rows = design(np.random.default_rng(0), a=0.1, b=0.03, ab=0.05, n=5)
    found = by_term(factor_effects(rows))
    cells = {}
    for factors, value in rows:
        cells.setdefault(tuple(factors.values()), []).append(value)
    means = {key: np.mean(values) for key, values in cells.items()}
    within = sum(np.sum((np.array(values) - means[key]) ** 2) for key, values in cells.items()) / 16
    f, w, n, d = "fprop", "wgrad", "none", "dht"
    contrasts = {
        "gemm": means[w, n] + means[w, d] - means[f, n] - means[f, d],
        "stabiliser": means[f, d] + means[w, d] - means[f, n] - means[w, n],
        "gemm × stabiliser": means[w, d] - means[w, n] - means[f, d] + means[f, n],
    }
    for term, contrast in contrasts.items():
        expected = contrast**2 * 5 / 4 / within
        assert found[term].f == pytest.approx(expected)
        assert found[term].p == pytest.approx(stats.f.sf(expected, 1, 16))
    levels = dict(found["gemm"].levels)
    assert levels["wgrad"] == pytest.approx(contrasts["gemm"] / 4)
    assert sum(levels.values()) == pytest.approx(0)


def test_a_baseline_beside_the_grid_is_left_out():
    rows = design(np.random.default_rng(0), a=0.1, b=0.03)
    named = [({"recipe": "bf16"}, value) for value in (17.0, None)]
    assert factor_effects([*named, *rows]) == factor_effects(rows)
    # Of two hand-made arms that set different factors neither is the grid.
    assert factor_effects([({"a": 1, "b": 2}, 1.0), ({"a": 2, "c": 1}, 2.0)]).terms == ()


def test_noise_alone_is_significant_as_seldom_as_it_should():
    rng = np.random.default_rng(1)
    p = np.array([[e.p for e in factor_effects(design(rng)).terms] for _ in range(800)])
    assert np.all(np.abs((p < 0.05).mean(axis=0) - 0.05) < 0.025)
    any_after_holm = np.mean(
        [min(e.p_holm for e in factor_effects(design(rng)).terms) < 0.05 for _ in range(800)]
    )
    assert any_after_holm < 0.075


def test_three_levels_and_unequal_numbers():
    rng = np.random.default_rng(2)
    rows = [
        ({"a": a, "b": b}, 0.1 * "xyz".index(a) + rng.normal(0, 0.01))
        for a, b, n in (("x", 1, 2), ("x", 2, 3), ("y", 1, 4), ("y", 2, 2), ("z", 1, 3), ("z", 2, 2))
        for _ in range(n)
    ]
    found = factor_effects(rows)
    terms = by_term(found)
    assert (terms["a"].degrees, terms["b"].degrees, terms["a × b"].degrees) == (2, 1, 2)
    assert found.residual_degrees == len(rows) - 6
    assert terms["a"].p_holm < 1e-6
    assert terms["b"].p_holm > 0.05
    assert dict(terms["a"].levels)["z"] == pytest.approx(0.1, abs=0.02)


@pytest.mark.parametrize(
    "cells",
    [
        [(0, 0, 0), (0, 1, 1), (1, 0, 1), (1, 1, 0)],  # the half fraction of three factors: c = a + b
        [(0, 0, 0), (0, 1, 0), (1, 0, 0)],  # a missing cell
    ],
)
def test_an_interaction_that_the_design_cannot_tell_apart_is_not_tested(cells):
    rng = np.random.default_rng(3)
    rows = [({"a": a, "b": b, "c": c}, 0.1 * a + rng.normal(0, 0.01)) for a, b, c in cells for _ in range(3)]
    found = by_term(factor_effects(rows))
    assert found["a"].p < 1e-3
    assert (found["a × b"].degrees, found["a × b"].p) == (0, None)


def test_a_seed_is_a_block_where_seeds_are_pairs():
    """What all arms share of a seed is no error: the F of a two-way layout with blocks, by hand."""
    rng = np.random.default_rng(8)
    seeds = rng.normal(0, 0.2, 4)
    rows = [
        ({"a": a, "b": b}, seed, 0.03 * a + seeds[seed] + rng.normal(0, 0.01))
        for a in (0, 1) for b in (0, 1) for seed in range(4)
    ]  # fmt: skip
    y = np.array([value for *_, value in rows]).reshape(2, 2, 4)
    by_seed = y - y.mean(axis=(0, 1))
    rest = by_seed - by_seed.mean(axis=2, keepdims=True)
    f = 8 * ((by_seed.mean(axis=(1, 2))) ** 2).sum() / ((rest**2).sum() / (16 - 4 - 3))
    paired, apart = (effects_of_runs(rows, paired=paired) for paired in (True, False))
    assert by_term(paired)["a"].f == pytest.approx(f)
    assert paired.residual_degrees == 9
    assert by_term(paired)["a"].p < 0.01 < by_term(apart)["a"].p
    assert by_term(paired)["a"].levels == pytest.approx(by_term(apart)["a"].levels)


def test_one_dropped_cell_leaves_what_the_others_tell_of_the_interaction():
    """The rest of a real interaction must not be counted as error."""
    rng = np.random.default_rng(9)
    cells = [(a, b) for a in range(3) for b in range(3) if (a, b) != (2, 2)]
    rows = [({"a": a, "b": b}, 0.1 * (a == b == 1) + rng.normal(0, 0.01)) for a, b in cells for _ in range(3)]
    found = factor_effects(rows)
    both = by_term(found)["a × b"]
    assert both.degrees == 3
    assert both.p < 1e-6
    assert found.residual == pytest.approx(0.01, rel=0.5)
    assert found.residual_degrees == len(rows) - len(cells)


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([({"a": 1, "b": 2}, 1.0), ({"a": 2, "b": 2}, 2.0)], "fewer than two factors that vary"),
        (
            [({"a": a, "b": b}, None if a else 1.0) for a in (0, 1) for b in (0, 1)],
            "2 of 4 runs have no known value",
        ),
        ([({"a": a, "b": b}, a + b / 2) for a in (0, 1) for b in (0, 1)], "no run to spare for the error"),
        (
            [({"a": a, "b": b}, float(a)) for a in (0, 1) for b in (0, 1) for _ in "xy"],
            "no error to test against",
        ),
        ([({"a": 1}, 1.0), ({"a": 2, "b": 1}, 1.0), ({"a": 2, "b": 2}, 1.0)], "fewer than two"),
        ([], "fewer than two"),
    ],
)
def test_no_effects(rows, reason):
    found = factor_effects(rows)
    assert found.terms == ()
    assert reason in found.reason


def test_order_of_runs_and_unit_do_not_matter():
    rows = design(np.random.default_rng(5), a=0.1, ab=0.05)
    shuffled = [(factors, 1000 * value + 7) for factors, value in reversed(rows)]
    one, other = (by_term(factor_effects(these)) for these in (rows, shuffled))
    for term in one:
        assert one[term].p == pytest.approx(other[term].p)


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
    analysis = analyse(
        load_frames(make_study(curves, factors=cells, target={"kind": "val_loss", "value": 2.2}))
    )
    found = by_term(analysis.token_effects)
    assert analysis.token_effects.runs == 12  # the baseline is no cell of the grid
    assert found["recipe.gemms"].p_holm < 0.01
    assert found["recipe.scale"].p_holm > 0.05
    table = effect_table(analysis)
    assert [row[0] for row in table.rows] == ["recipe.gemms", "recipe.scale", "recipe.gemms × recipe.scale"]
    assert "wgrad +" in table.rows[0][1]
    assert table.rows[0][4] in ("<0.001", "0.001", "0.002")


def test_a_study_without_a_grid_has_none(make_study):
    rng = np.random.default_rng(7)
    analysis = analyse(load_frames(make_study({name: [smooth_curve(rng)] * 2 for name in "ab"})))
    assert not effect_table(analysis).rows


def test_holm():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == pytest.approx([1.0, 1.0])
    assert holm([]) == []
