"""Token cost over the target, and its growth up to it, against crossings read off by hand and scipy."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic_study import smooth_curve

from ablate.reports.findings.analyse import analyse
from ablate.reports.statistics.sweep import MOST_TARGETS, cost_growths, move_target
from ablate.results.cost import is_settled, token_cost
from ablate.results.frames import load_frames
from ablate.results.losses import Curve
from ablate.run.outcome import Outcome, outcome


def target_sweep(arm, base):
    found = move_target({"a": (arm, base)}, {"a": 0.05}, moderated=False).get("a")
    return found and found.sweep


def cost_growth(arm, base, target, *, decay_begins=None, paired=False):
    sides, falls = {"a": (arm, base)}, {"a": decay_begins}
    return cost_growths(sides, {"a": 0.05}, target, decay_begins=falls, paired=paired, moderated=False)["a"]


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
    assert np.allclose([cost.estimate for cost in sweep.costs], 0.2, atol=0.02)
    assert all(cost.low < cost.estimate < cost.high for cost in sweep.costs)
    assert (sweep.n, sweep.n_baseline) == (3, 3)


def test_a_cost_that_depends_on_the_target():
    base = [curve(seed, 1.0) for seed in range(2)]
    shifted = [Curve(**{**vars(one), "loss": one.loss + 0.05}) for one in base]
    sweep = target_sweep(shifted, base)
    known = [cost.estimate for cost in sweep.costs if cost.estimate is not None]
    # A constant difference of the loss costs the more tokens the flatter the curve is.
    assert known[-1] > 1.3 * known[len(known) // 3] > 0
    assert {cost.low for cost in sweep.costs} == {None}  # equal runs: no spread, no band


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
    assert sweep.costs[i] == cost


def test_many_evaluations_are_thinned():
    runs = [curve(seed, 1.0 + 0.01 * seed, points=1000) for seed in range(4)]
    assert len(target_sweep(runs[:2], runs[2:]).targets) <= MOST_TARGETS


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


def test_runs_that_diverged_bound_the_cost_at_every_target():
    base, arm = [curve(seed, 1.0) for seed in range(3)], [curve(3, 1.1), curve(4, 1.1, end="diverged")]
    lost = Outcome(seed=4, end="diverged", low=40_000)
    own = float(base[0].loss[20]) + 1e-3
    found = move_target(
        {"a": (arm, base), "b": (base, base)}, {"a": 0.05, "b": 0.05}, own, lost={"a": [lost]}
    )
    assert own in found["a"].targets
    assert found["a"].targets == found["b"].targets
    assert found["a"].sweep is None
    for ends, base_ends, cost in zip(
        *(getattr(found["a"], key) for key in ("ends", "base_ends", "costs")), strict=True
    ):
        assert lost in ends
        assert cost == token_cost(ends, base_ends)
        assert cost.kind == "bound"


@settings(max_examples=40)
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
    for mine, others in zip(one.costs, other.costs, strict=True):
        known = others.estimate
        assert mine.estimate == (None if known is None else pytest.approx(known, rel=1e-6))


TOKENS = np.arange(10_000, 1_000_001, 10_000)
TARGET = 2.0


def flat(seed, lag=0.0, pace=1.0, end="hit", last=None):
    """A loss that flattens; ``lag`` nats above it, or ``pace`` times as many tokens behind it."""
    loss = 1.0 + 40.0 * (TOKENS * (1 + 0.01 * seed) / pace) ** -0.3 + lag
    return Curve(run_id=f"{seed}", arm="x", seed=seed, end=end, tokens=TOKENS[:last], loss=loss[:last])


def at(one, loss):
    return float(np.exp(np.interp(-loss, -one.loss, np.log(one.tokens))))


@pytest.mark.parametrize("paired", [False, True])
def test_of_a_constant_lag_in_loss_the_cost_grows_as_much_as_by_hand(paired):
    base = [flat(seed) for seed in range(4)]
    arm = [flat(seed, lag=0.05 + 0.01 * (seed % 2)) for seed in range(4)]
    found = cost_growth(arm, base, TARGET, paired=paired)

    half = 0.5 * scipy.stats.gmean([at(one, TARGET) for one in base])
    between = np.interp(half, TOKENS, np.mean([one.loss for one in base], axis=0))
    logs = [[np.log(at(one, TARGET) / at(one, between)) for one in side] for side in (arm, base)]
    compare = scipy.stats.ttest_rel if paired else scipy.stats.ttest_ind
    interval = compare(*logs, **({} if paired else {"equal_var": False})).confidence_interval()
    assert found.estimate == pytest.approx(np.exp(np.mean(logs[0]) - np.mean(logs[1])) - 1, rel=1e-6)
    assert (found.low, found.high) == pytest.approx(tuple(np.expm1(interval)), rel=1e-6)
    assert found.low > 0


def test_of_a_constant_share_of_tokens_it_does_not():
    base, arm = [flat(seed) for seed in range(3)], [flat(seed, pace=1.3) for seed in range(3)]
    assert cost_growth(arm, base, TARGET).estimate == pytest.approx(0.0, abs=0.002)


@pytest.mark.parametrize(
    ("arm", "more", "reason"),
    [
        ([flat(0), flat(1, end="diverged")], {}, "diverged"),
        ([flat(0), flat(1, last=3)], {}, "not every run"),
        ([], {}, "not every run"),
        ([flat(0), flat(1)], {"decay_begins": 100_000}, "rate fell"),
        ([flat(0, pace=1e-5), flat(1)], {}, "not every run"),
        ([flat(0, pace=0.07), flat(1)], {}, "no evaluation before half"),
    ],
)
def test_where_there_is_no_estimate_it_says_why(arm, more, reason):
    found = cost_growth(arm, [flat(0), flat(1)], TARGET, **more)
    assert found.kind == "none"
    assert found.estimate is None
    assert reason in found.reason


def test_a_target_near_the_first_evaluation_has_no_half_way():
    base = [flat(seed) for seed in range(2)]
    assert "before half of the way" in cost_growth(base, base, float(base[0].loss[1]) + 1e-3).reason


def test_where_nothing_grows_it_is_found_as_seldom_as_promised(make_study):
    rng = np.random.default_rng(0)

    def side():
        runs = [np.array(smooth_curve(rng, cost=0.1)) for _ in range(5)]
        return [
            Curve(run_id="x", arm="x", seed=seed, end="hit", tokens=run[:, 0], loss=run[:, 1])
            for seed, run in enumerate(runs)
        ]

    assert sum(is_settled(cost_growth(side(), side(), 2.2)) for _ in range(400)) <= 0.08 * 400


def test_the_analysis_has_it_and_not_for_the_baseline(make_study):
    lag = {"a": 0.0, "b": 0.05}
    points = {
        name: [
            list(zip(TOKENS.tolist(), flat(seed, lag=lag[name]).loss.tolist(), strict=True))
            for seed in (0, 1, 2)
        ]
        for name in lag
    }
    analysis = analyse(load_frames(make_study(points, target={"value": TARGET})))
    assert analysis.baseline_arm.cost_growth.kind == "baseline"
    (other,) = analysis.others
    assert other.cost_growth.low > 0


@pytest.mark.parametrize("decaying", ["a", "b"])
def test_a_decay_of_either_of_the_two_counts(make_study, decaying):
    lag = {"a": 0.0, "b": 0.05}
    points = {
        name: [
            list(zip(TOKENS.tolist(), flat(seed, lag[name]).loss.tolist(), strict=True)) for seed in (0, 1)
        ]
        for name in lag
    }
    store = make_study(
        points,
        target={"value": TARGET},
        model={"width": 64, "layers": 1},
        own_training={decaying: {"schedule": "wsd", "decay_tokens": 900_000}},
    )
    (other,) = analyse(load_frames(store)).others
    assert "rate fell" in other.cost_growth.reason
