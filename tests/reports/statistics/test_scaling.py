"""The scaling law: its fit against scipy's, its intervals against known truths, and what it does not tell."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from scaling_coverage import ARMS, BUDGETS, DESIGNS, LAWS, SIZES, Design, coverage, loss_of, simulated
from scipy import optimize, stats

from ablate.reports.read.losses import LossPoint
from ablate.reports.statistics import law_fit
from ablate.reports.statistics.law_fit import Key
from ablate.reports.statistics.scaling import NEVER, NO_BOUND, fit_scaling


def exact(law="1", arms=ARMS, sizes=SIZES, budgets=BUDGETS):
    """Losses without noise, one run a cell."""
    return [
        LossPoint(
            arm=arm,
            parameters=size,
            tokens=budget,
            seed=0,
            loss=loss_of(law, size, budget, *factors),
            run=f"{arm} {size} {budget}",
        )
        for arm, factors in arms.items()
        for size in sizes
        for budget in budgets
    ]


def fitted(points, **more):
    found = fit_scaling(points, "bf16", **({"paired": True} | more))
    assert not isinstance(found, str), found
    return found


@pytest.fixture
def few(monkeypatch):
    monkeypatch.setattr(law_fit, "REPLICATES", 200)


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.usefixtures("few")
def test_a_law_without_noise_is_recovered(law):
    found = fitted(exact(law))
    a, alpha, b, beta, gamma, e = LAWS[law]
    expected = {"A": a, "alpha": alpha, "B": b, "beta": beta, "gamma": gamma, "E": e}
    assert found.law == pytest.approx(expected, rel=0.05)
    for arm in found.arms:
        assert (arm.eff_n.estimate, arm.eff_d.estimate) == pytest.approx(ARMS[arm.name], rel=2e-3)
    assert found.goodness.residual_sd < 1e-4
    assert found.goodness.seed_sd is None


@pytest.mark.usefixtures("few")
def test_the_fit_is_no_worse_than_scipys_from_the_truth():
    rng = np.random.default_rng(1)
    points = [
        replace(one, loss=one.loss + 0.02 * rng.standard_t(2)) for one in exact("0.28") if one.arm == "bf16"
    ]
    cells = {Key(one.arm, one.parameters, one.tokens): [one] for one in points}
    own = law_fit._fit(cells, ("bf16",), ("parameters", "tokens"), 1e-3, gamma=True)
    n, d, y = (np.log([getattr(one, name) for one in points]) for name in ("parameters", "tokens", "loss"))

    def residual(theta):
        a, alpha, b, beta, gamma, e = theta
        return y - np.log((np.exp(a - alpha * n) + np.exp(b - beta * d)) ** gamma + e)

    a, alpha, b, beta, gamma, e = LAWS["0.28"]
    start = [math.log(a), alpha, math.log(b), beta, gamma, e]
    theirs = optimize.least_squares(residual, start, loss="huber", f_scale=1e-3, x_scale="jac", max_nfev=5000)
    assert own.cost <= 2 * theirs.cost * 1.001
    assert np.abs(own.residual).max() > 5e-3  # where Huber's loss is linear


@pytest.mark.usefixtures("few")
def test_one_stray_cell_moves_the_factors_little():
    clean = list(simulated(Design(seeds=3), np.random.default_rng(2)))
    stray = [
        replace(one, loss=one.loss + 0.08)
        if (one.arm, one.parameters, one.tokens) == ("less", SIZES[0], BUDGETS[-1])
        else one
        for one in clean
    ]
    before, after = fitted(clean), fitted(stray)
    assert after.goodness.largest[0] == Key("less", SIZES[0], BUDGETS[-1])
    assert after.goodness.largest[1] == pytest.approx(0.08, abs=0.015)
    for one, other in zip(before.arms, after.arms, strict=True):
        assert other.eff_n.estimate == pytest.approx(one.eff_n.estimate, abs=0.015)
        assert other.eff_d.estimate == pytest.approx(one.eff_d.estimate, abs=0.02)


@pytest.mark.usefixtures("few")
def test_the_same_losses_give_the_same_report_in_whatever_order():
    points = list(simulated(Design(seeds=3), np.random.default_rng(3)))
    turned = sorted(points, key=lambda one: (list(ARMS).index(one.arm), -one.seed, -one.tokens))
    assert fitted(points) == fitted(points)
    assert fitted(turned) == fitted(points)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("few")
def test_gamma_is_freed_only_where_the_losses_ask_for_it():
    rng = np.random.default_rng(4)
    ones = [fitted(list(simulated(Design(seeds=3), rng))).law["gamma"] for _ in range(20)]
    assert ones.count(1.0) >= 19
    assert fitted(list(simulated(Design(seeds=3, law="0.28"), rng))).law["gamma"] == pytest.approx(
        0.28, abs=0.1
    )


@pytest.mark.usefixtures("few")
def test_with_too_few_sizes_only_the_budget_is_fitted_and_that_is_said():
    found = fitted(exact(arms={"bf16": (1, 1), "less": (1, 0.85)}, sizes=SIZES[:2]))
    assert found.axes == ("tokens",)
    assert found.why_not == (
        "eff_N needs losses at 3 sizes at least, and the baseline has 2 sizes: add a study of another size; "
        "fitted at 60,000,000 parameters alone"
    )
    assert found.law["A"] is None
    (less,) = found.arms
    assert less.eff_n is None
    assert less.eff_d.estimate == pytest.approx(0.85, rel=3e-3)
    assert found.by_law(Key("less", SIZES[1], BUDGETS[0])) == pytest.approx(
        loss_of("1", SIZES[1], BUDGETS[0], 1.0, 0.85), rel=1e-3
    )


@pytest.mark.usefixtures("few")
def test_with_one_budget_only_the_size_is_fitted():
    found = fitted(exact(budgets=BUDGETS[:1]))
    assert found.axes == ("parameters",)
    assert "and the baseline has 1 budget: add a study of another budget, and 1 more" in found.why_not
    smaller = next(arm for arm in found.arms if arm.name == "smaller")
    assert smaller.eff_n.estimate < 0.75
    assert smaller.eff_d is None


def test_what_cannot_carry_a_law_is_refused_with_what_is_missing():
    text = fit_scaling(exact(sizes=SIZES[:2], budgets=BUDGETS[:2]), "bf16", paired=True)
    assert "eff_N needs losses at 3 sizes" in text
    assert "eff_D needs losses at 3 budgets" in text
    assert fit_scaling(exact(), "none", paired=True) == "no loss of the baseline 'none'"
    flat = [replace(one, loss=2.0) for one in exact()]
    assert fit_scaling(flat, "bf16", paired=True) == "all losses are the same"
    cross = [one for one in exact() if SIZES.index(one.parameters) * BUDGETS.index(one.tokens) == 0]
    assert "a law over both needs 6" in fit_scaling(
        [one for one in cross if SIZES[3] != one.parameters and BUDGETS[3] != one.tokens], "bf16", paired=True
    )


@pytest.mark.usefixtures("few")
def test_an_arm_with_too_few_cells_is_left_out():
    points = [
        one for one in exact() if one.arm != "less" or (one.parameters, one.tokens) == (SIZES[0], BUDGETS[0])
    ]
    found = fitted(points)
    assert [arm.name for arm in found.arms] == ["smaller"]
    assert found.left_out == {"less": "losses at 1 of the sizes and budgets, needed are 4"}


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize(("axis", "noun"), [("parameters", "size"), ("tokens", "budget")])
def test_an_arm_of_one_size_or_one_budget_has_no_two_factors(axis, noun):
    place = {"parameters": SIZES[0], "tokens": BUDGETS[0]}[axis]
    points = [one for one in exact() if one.arm != "less" or getattr(one, axis) == place]
    found = fitted(points)
    assert found.left_out == {"less": f"losses at one {noun} alone"}
    assert [arm.name for arm in found.arms] == ["smaller"]


@pytest.mark.usefixtures("few")
def test_a_factor_that_the_losses_do_not_bound_is_said_to_be_so():
    rng = np.random.default_rng(5)
    # The size does nothing here but noise.
    points = [
        replace(
            one, parameters=size, loss=1.5 + 30 * one.tokens**-0.2 + rng.normal(0, 0.004), run=f"{i} {size}"
        )
        for i, one in enumerate(exact(arms={"bf16": (1, 1), "x": (1, 1)}, sizes=SIZES[:1]))
        for size in SIZES
    ]
    arm = fitted(points).arms[0]
    assert arm.eff_n.note is not None
    assert None in (arm.eff_n.low, arm.eff_n.high)
    assert arm.eff_n.note == NO_BOUND or arm.eff_n.note.startswith("no ")
    assert arm.eff_d.note is None


@pytest.mark.usefixtures("few")
def test_the_token_cost_at_a_place_is_where_the_arms_curve_meets_the_baselines_loss():
    place = (1_000_000_000, 20_000_000_000)
    found = fitted(exact("0.28"), at=[place])
    assert found.predictions[0].beyond == pytest.approx((place[0] / SIZES[-1], place[1] / BUDGETS[-1]))
    goal = found.by_law(Key("bf16", *place))
    for one in found.predictions[0].places[1:]:
        meets = optimize.brentq(
            lambda log_d, arm=one.arm: found.by_law(Key(arm, place[0], math.exp(log_d))) - goal, 20, 35
        )
        assert one.cost.estimate == pytest.approx(math.exp(meets) / place[1] - 1, rel=1e-6)
        assert one.gap.estimate == pytest.approx(found.by_law(Key(one.arm, *place)) - goal)
    less = found.predictions[0].places[2]
    assert less.cost.estimate == pytest.approx(1 / 0.85 - 1, rel=0.02)  # with eff_N = 1 it is so everywhere


@pytest.mark.usefixtures("few")
def test_a_loss_that_an_arm_never_gets_to_has_a_bound_alone():
    points = list(simulated(Design(seeds=3), np.random.default_rng(6)))
    cost = fitted(points, at=[(SIZES[0], 10**13)]).predictions[0].places[1].cost
    assert (cost.estimate, cost.high, cost.note) == (None, None, NEVER)


@pytest.mark.usefixtures("few")
def test_the_loss_gap_is_the_mean_over_cells_of_the_paired_differences():
    points = list(simulated(Design(seeds=4), np.random.default_rng(8)))
    table = np.array([one.loss for one in points]).reshape(len(SIZES), len(ARMS), len(BUDGETS), 4)
    arm = fitted(points).arms[1]
    by_seed = (table[:, 2] - table[:, 0]).mean(axis=1)  # sizes × seeds
    variances = by_seed.var(axis=1, ddof=1) / 4 / len(SIZES) ** 2
    degrees = variances.sum() ** 2 / (variances**2 / 3).sum()
    low, high = stats.t.interval(0.95, degrees, loc=by_seed.mean(), scale=math.sqrt(variances.sum()))
    assert arm.gap_cells == 16
    assert (arm.gap.estimate, arm.gap.low, arm.gap.high) == pytest.approx((by_seed.mean(), low, high))


@pytest.mark.usefixtures("few")
def test_with_one_run_a_cell_the_gaps_interval_is_over_cells():
    points = list(simulated(Design(seeds=1), np.random.default_rng(9)))
    table = np.array([one.loss for one in points]).reshape(len(SIZES), len(ARMS), len(BUDGETS))
    gaps = (table[:, 1] - table[:, 0]).ravel()
    low, high = stats.t.interval(0.95, 15, loc=gaps.mean(), scale=stats.sem(gaps))
    gap = fitted(points, paired=False).arms[0].gap
    assert (gap.estimate, gap.low, gap.high) == pytest.approx((gaps.mean(), low, high))


@pytest.mark.usefixtures("few")
def test_losses_of_one_run_are_not_taken_for_independent_ones():
    rng = np.random.default_rng(10)
    runs = {(arm, size, seed): rng.normal(0, 0.004) for arm in ARMS for size in SIZES for seed in range(3)}
    points = [
        replace(one, seed=seed, loss=one.loss + off, run=f"{arm} {size} {seed}")
        for one in exact()
        for (arm, size, seed), off in runs.items()
        if (arm, size) == (one.arm, one.parameters)
    ]
    apart = [replace(one, run=f"{one.run} {one.tokens}") for one in points]
    widths = [
        np.mean([arm.eff_n.high - arm.eff_n.low for arm in fitted(own, paired=False).arms])
        for own in (points, apart)
    ]
    assert widths[0] > 1.1 * widths[1]


@pytest.mark.usefixtures("few")
@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("seed", range(6))
def test_losses_that_follow_no_law_still_give_numbers_or_a_reason(seed):
    rng = np.random.default_rng(seed)
    points = [
        replace(one, loss=10 ** rng.uniform(-6, 3) if seed % 2 else rng.uniform(1, 9))
        for one in exact(sizes=SIZES[: 2 + seed % 3])
        if rng.random() < 0.9
    ]
    found = fit_scaling(points, "bf16", paired=False)
    assert isinstance(found, str) or all(
        part is None or math.isfinite(part)
        for arm in found.arms
        for factor in (arm.eff_n, arm.eff_d)
        if factor is not None
        for part in (factor.estimate, factor.low, factor.high)
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("design", DESIGNS[:2], ids=str)
@pytest.mark.usefixtures("few")
def test_intervals_hold_the_truth_in_every_design(design):
    found = coverage(design, 100)
    # 200 intervals: two standard errors are 3 points. Of losses read off one run they are too narrow.
    assert all(share >= (0.85 if design.read else 0.88) for share, _ in found.values())
