"""What the plan says that seeds will find, against scipy's noncentral t."""

from __future__ import annotations

import math

import pytest
from scipy import optimize, stats

from ablate.plan.estimate import SPREAD, cost_found, moderating_degrees


@pytest.mark.parametrize("arms", [1, 2, 6, 40])
@pytest.mark.parametrize("seeds", [2, 3, 5, 8, 30])
@pytest.mark.parametrize("moderated", [True, False])
def test_the_cost_found_is_that_of_the_noncentral_t(seeds, arms, moderated):
    found = cost_found(seeds, arms, moderated=moderated)
    degrees = seeds - 1 + (moderating_degrees(arms, (seeds - 1) * (arms - 1)) if moderated else 0)
    if degrees < 2:
        assert found is None
        return
    edge = stats.t.ppf(0.975, degrees)
    reach = optimize.brentq(lambda effect: stats.nct.sf(edge, degrees, effect) - 0.8, 0.1, 50)
    assert math.log1p(found) == pytest.approx(reach * SPREAD / math.sqrt(seeds), rel=0.12)


def test_one_seed_finds_nothing():
    assert cost_found(1, 6, moderated=True) is None
