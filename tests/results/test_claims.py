"""What may be stated of several arms: by scipy's tests; how often it is right: ``test_coverage``."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats
from synthetic_study import hits, token_cost

from ablate.results.claims import (
    claims_together,
    hold_together,
    may_be_least,
    p_values,
)
from ablate.results.cost import Cost
from ablate.results.intervals import Estimate, mean_estimate
from ablate.store.plan_file import Margin

FIVE = Margin(kind="cost", value=0.05)
LOSS = Margin(kind="loss", value=0.01)


def level(count):
    return 0.05 / count


def standing(p):
    """Return the claim on the margin that an arm by itself allows."""
    for kind in ("within", "outside"):
        if p.get(kind, 1) <= 0.05:
            return kind
    return "open"


def test_statements_hold_by_hochbergs_definition():
    """All of the k smallest p-values, for the greatest k with p(k) <= 5 % / (m - k + 1)."""
    sizes = set()
    for seed in range(300):
        p = np.random.default_rng(seed).uniform(0, 1, 5) ** 6
        holding = np.flatnonzero(np.sort(p) <= 0.05 / np.arange(5, 0, -1))
        count = max(holding, default=-1) + 1
        expected = set(np.argsort(p)[:count].tolist())
        assert hold_together(dict(enumerate(p)), level) == expected
        sizes.add(count)
    assert sizes == set(range(6))


def test_kinds_of_statements_do_not_count_for_each_other():
    p = {"a": {"differs": 0.03, "within": 0.9}, "b": {"within": 0.04}, "c": {}}
    assert claims_together(p, level) == {
        "a": {"differs"},
        "b": set(),
        "c": set(),
    }


def test_p_values_are_those_of_scipys_t_tests():
    places = []
    limit = math.log(1.05)
    for seed in range(40):
        rng = np.random.default_rng(seed)
        x = 18 + rng.normal(0.04 * (seed % 5 - 2), 0.02, 4)
        y = 18 + rng.normal(0, 0.01, 4)
        cost = token_cost(hits(*np.exp(x)), hits(*np.exp(y)), paired=True)

        def p_of(edge, side, gaps=x - y):
            return stats.ttest_1samp(gaps, edge, alternative=side).pvalue

        p = p_values(cost, None, FIVE)
        within = max(p_of(-limit, "greater"), p_of(limit, "less"))
        outside = min(p_of(limit, "greater"), p_of(-limit, "less"))
        assert p == pytest.approx(
            {"differs": p_of(0, "two-sided"), "within": within, "outside": outside}
        )
        assert (p["differs"] < 0.05) == (cost.low > 0 or cost.high < 0)
        places.append(standing(p))
    assert set(places) == {"within", "outside", "open"}


CUT = mean_estimate([0.19, 0.2, 0.21])


@pytest.mark.parametrize(
    ("cost", "loss", "margin", "place"),
    [
        (Cost(kind="none"), [0.001, 0.002, 0.0], LOSS, "within"),
        (Cost(kind="none"), [0.021, 0.022, 0.020], LOSS, "outside"),
        (Cost(kind="none"), [0.001, 0.030, 0.0], LOSS, "open"),
        (Cost(kind="none"), None, LOSS, "open"),
        (Cost(kind="point", figure=mean_estimate([0.0])), None, FIVE, "open"),
        (Cost(kind="bound", cut_figure=CUT), None, FIVE, "outside"),
        (Cost(kind="bound", low=0.2), None, FIVE, "open"),
    ],
)
def test_a_margin_in_loss_and_figures_without_an_interval(cost, loss, margin, place):
    p = p_values(cost, loss and mean_estimate(loss), margin)
    assert standing(p) == place
    assert ("differs" in p) == (cost.cut_figure is not None)


def test_runs_cut_at_the_budget_can_show_no_saving():
    saving = Estimate(value=-0.2, variance=1e-6, degrees=4)
    assert p_values(Cost(kind="bound", cut_figure=saving), None, FIVE) == {}


def test_the_least_of_two_is_a_one_sided_test_and_of_more_the_levels_are_shared():
    far = Estimate(value=9.0, variance=1e-9, degrees=9)
    for gap in np.random.default_rng(1).normal(0.02, 0.02, (200, 4)):
        costlier = mean_estimate(gap)
        over = {"a": {"b": costlier}, "b": {"a": mean_estimate(-gap)}}
        p = stats.ttest_1samp(gap, 0, alternative="greater").pvalue
        named = may_be_least(over, level)
        assert ("b" in named) == (p > 0.05) or "a" not in named
        third = {rival: figures | {"c": far} for rival, figures in over.items()}
        wide = may_be_least(third, level)
        assert "c" not in wide
        assert ("b" in wide) == (p > 0.025) or "a" not in wide
        assert all(part.low <= 0 <= part.high for part in wide.values())
    assert may_be_least({}, level) == {}
