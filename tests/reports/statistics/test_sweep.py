"""Token cost over the target."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ablate.reports.statistics.cost import token_cost
from ablate.reports.statistics.losses import Curve
from ablate.reports.statistics.sweep import MOST_TARGETS, target_sweep
from ablate.run.outcome import outcome


def curve(seed, stretch, *, points=40, noise=0.0, end="hit", every=1000):
    tokens = np.arange(1, points + 1) * every
    rng = np.random.default_rng(seed)
    loss = 1.5 + 3.0 * (1 + tokens / stretch / 4000) ** -0.5 + rng.normal(0, noise, points)
    return Curve(run_id=str(seed), arm="a", seed=seed, end=end, tokens=tokens, loss=loss)


def test_a_stretched_axis_costs_the_same_at_every_target():
    base = [curve(seed, 1.0 + 0.001 * seed) for seed in range(3)]
    arm = [curve(seed, 1.2 * (1.0 + 0.001 * seed)) for seed in range(3)]
    sweep = target_sweep(arm, base)
    assert len(sweep.targets) > 10
    assert np.all(np.diff(sweep.targets) < 0)
    # Interpolation is linear on a curve: off by a little, and by less where it is flat.
    assert np.allclose(sweep.cost, 0.2, atol=0.02)
    assert all(low < cost < high for low, cost, high in zip(sweep.low, sweep.cost, sweep.high, strict=True))
    assert (sweep.n, sweep.n_baseline) == (3, 3)


def test_a_cost_that_depends_on_the_target():
    base = [curve(seed, 1.0) for seed in range(2)]
    shifted = [Curve(**{**vars(one), "loss": one.loss + 0.05}) for one in base]
    sweep = target_sweep(shifted, base)
    known = [cost for cost in sweep.cost if cost is not None]
    # A constant difference of the loss costs the more tokens the flatter the curve is.
    assert known[-1] > 1.3 * known[len(known) // 3] > 0
    assert set(sweep.low) == {None}  # equal runs: no spread, no band


def test_each_target_is_read_as_the_studys_own():
    base, arm = (
        [curve(s, k, noise=0.004) for s in seeds] for k, seeds in ((1.0, (0, 1, 2)), (1.15, (3, 4, 5)))
    )
    sweep = target_sweep(arm, base)
    i = len(sweep.targets) // 2
    ends = [
        [
            outcome(seed=one.seed, state="finished", tokens=one.tokens, loss=one.loss,
                    target=float(sweep.targets[i]), rule="confirmed", budget_tokens=40_000)
            for one in runs
        ]
        for runs in (arm, base)
    ]  # fmt: skip
    cost = token_cost(*ends)
    assert (sweep.cost[i], sweep.low[i], sweep.high[i]) == (cost.estimate, cost.low, cost.high)


def test_many_evaluations_are_thinned():
    runs = [curve(seed, 1.0 + 0.01 * seed, points=1000) for seed in range(4)]
    assert len(target_sweep(runs[:2], runs[2:]).targets) <= MOST_TARGETS + 1


HIGH = Curve(run_id="1", arm="b", seed=1, end="censored", tokens=np.arange(3), loss=np.full(3, 9.0))


@pytest.mark.parametrize(
    ("arm", "base"),
    [
        ([], [curve(0, 1)]),
        ([curve(0, 1, end="diverged")], [curve(1, 1)]),
        ([curve(0, 1, points=1)], [curve(1, 1)]),
        ([curve(0, 1)], [HIGH]),
        ([curve(0, 1, end="missing")], [curve(1, 1)]),
    ],
    ids=["no run", "diverged", "one evaluation", "apart", "missing"],
)
def test_no_sweep(arm, base):
    assert target_sweep(arm, base) is None


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.floats(0.001, 1000), st.permutations(range(4)))
def test_order_and_unit_of_tokens_do_not_matter(seed, unit, order):
    runs = [curve(seed + i, 1 + 0.05 * i, noise=0.01) for i in range(4)]
    scaled = [Curve(**{**vars(one), "tokens": one.tokens * unit}) for one in runs]
    one = target_sweep(runs[:2], runs[2:])
    shuffled = [scaled[i] for i in order]
    arm = [run for run in shuffled if run.seed in (seed, seed + 1)]
    other = target_sweep(arm, [run for run in shuffled if run not in arm])
    if one is None:
        assert other is None
        return
    assert np.allclose(one.targets, other.targets)
    for mine, others in zip(one.cost, other.cost, strict=True):
        assert mine == (None if others is None else pytest.approx(others, rel=1e-6))
