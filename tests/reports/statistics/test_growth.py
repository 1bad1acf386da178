"""Whether a cost still grows at the target, against crossings read off by hand and scipy's intervals."""

import numpy as np
import pytest
import scipy.stats
from synthetic_study import smooth_curve

from ablate.reports.findings.analyse import analyse
from ablate.reports.read.load import load_frames
from ablate.reports.statistics.cost import is_settled
from ablate.reports.statistics.growth import cost_growth
from ablate.reports.statistics.losses import Curve

TOKENS = np.arange(10_000, 1_000_001, 10_000)
TARGET = 2.0


def curve(seed, lag=0.0, pace=1.0, end="hit", last=None):
    """A loss that flattens; ``lag`` nats above it, or ``pace`` times as many tokens behind it."""
    loss = 1.0 + 40.0 * (TOKENS * (1 + 0.01 * seed) / pace) ** -0.3 + lag
    return Curve(run_id=f"{seed}", arm="x", seed=seed, end=end, tokens=TOKENS[:last], loss=loss[:last])


def at(one, loss):
    return float(np.interp(-loss, -one.loss, one.tokens))


@pytest.mark.parametrize("paired", [False, True])
def test_of_a_constant_lag_in_loss_the_cost_grows_as_much_as_by_hand(paired):
    base = [curve(seed) for seed in range(4)]
    arm = [curve(seed, lag=0.05 + 0.01 * (seed % 2)) for seed in range(4)]
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
    base, arm = [curve(seed) for seed in range(3)], [curve(seed, pace=1.3) for seed in range(3)]
    assert cost_growth(arm, base, TARGET).estimate == pytest.approx(0.0, abs=0.002)


@pytest.mark.parametrize(
    ("arm", "more", "reason"),
    [
        ([curve(0), curve(1, end="diverged")], {}, "diverged"),
        ([curve(0), curve(1, last=3)], {}, "not every run"),
        ([], {}, "not every run"),
        ([curve(0), curve(1)], {"decay_begins": 100_000}, "rate fell"),
        ([curve(0, pace=1e-5), curve(1)], {}, "not every run"),
        ([curve(0, pace=0.07), curve(1)], {}, "no evaluation before half"),
    ],
)
def test_where_there_is_no_estimate_it_says_why(arm, more, reason):
    found = cost_growth(arm, [curve(0), curve(1)], TARGET, **more)
    assert found.kind == "none"
    assert found.estimate is None
    assert reason in found.reason


def test_a_target_near_the_first_evaluation_has_no_half_way():
    base = [curve(seed) for seed in range(2)]
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
            list(zip(TOKENS.tolist(), curve(seed, lag=lag[name]).loss.tolist(), strict=True))
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
            list(zip(TOKENS.tolist(), curve(seed, lag[name]).loss.tolist(), strict=True)) for seed in (0, 1)
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
