"""The stop rule: its levels against published tables and an independent integral, and what it decides."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats
from synthetic_study import line, resolved_recipe, smooth_curve

from ablate.base.errors import UserError
from ablate.base.files import append_line
from ablate.reports import write_report
from ablate.reports.findings.analyse import analyse
from ablate.reports.words import caveats
from ablate.reports.words import format as words
from ablate.reports.words.verdict import write_verdict
from ablate.results.cost import token_cost, token_costs
from ablate.results.frames import load_frames
from ablate.results.stop_rule import (
    alpha_of,
    decide,
    expected_seeds,
    levels_of,
    nominal_alphas,
)
from ablate.results.stops import Unneeded, seeds_to_begin
from ablate.run.outcome import Outcome
from ablate.store.plan_file import Margin, Settled, StopRule

FIFTHS = tuple(k / 5 for k in range(1, 6))


def test_nominal_levels_are_the_published_ones():
    """Five equally spaced looks, two-sided 5 %: Reboussin, DeMets, Kim and Lan (2000)."""
    z = [-stats.norm.ppf(alpha / 2) for alpha in nominal_alphas(FIFTHS)]
    assert z == pytest.approx([2.4380, 2.4268, 2.4101, 2.3966, 2.3859], abs=2e-4)


@pytest.mark.parametrize("fractions", [(0.4, 0.6, 1.0), (0.2, 0.3, 0.9, 1.0), (0.5, 1.0)])
def test_no_more_is_spent_than_the_function_allows(fractions):
    """The chance to stay within the boundary, as the integral of the normal density over a box."""
    z = [-stats.norm.ppf(alpha / 2) for alpha in nominal_alphas(fractions)]
    times = np.array(fractions)
    covariance = np.sqrt(np.minimum.outer(times, times) / np.maximum.outer(times, times))
    for k in range(1, len(z) + 1):
        within = stats.multivariate_normal(cov=covariance[:k, :k], seed=1).cdf(
            np.array(z[:k]), lower_limit=-np.array(z[:k])
        )
        assert 1 - within == pytest.approx(0.05 * math.log1p((math.e - 1) * fractions[k - 1]), abs=2e-5)


# ---- the decision ----------------------------------------------------------------------------------------


def hits(*tokens):
    return [Outcome(seed=i, end="hit", low=float(t), high=float(t)) for i, t in enumerate(tokens)]


def missing(count, start=0):
    return [Outcome(seed=start + i, end="missing") for i in range(count)]


def diverged(seed, budget=200.0):
    return Outcome(seed=seed, end="diverged", low=budget)


BASE = hits(100, 101, 99, 100.5, 99.5)
SETTLED = StopRule(settled=Settled(looks=(2, 3, 4, 5)))
RULE = replace(SETTLED, diverged=2)


def verdicts(arm, base=BASE, rule=RULE, **more):
    return decide({"base": base, "arm": arm}, rule, baseline="base", moderated=False, **more).stopped.get(
        "arm"
    )


def test_an_arm_is_stopped_at_the_first_look_where_its_interval_leaves_zero_out():
    stop = verdicts([*hits(145, 155, 150), *missing(2, 3)])
    assert (stop.kind, stop.seeds) == ("settled", 3)
    assert stop.alpha == levels_of(RULE.settled)[1] < nominal_alphas((0.4, 0.6, 0.8, 1.0))[1]
    assert stop.reason == "its token cost is settled after 3 of at most 5 seeds"
    assert verdicts([*hits(145, 155, 150), *missing(2, 3)], rule=StopRule(diverged=2)) is None


def test_nothing_is_stopped_that_is_open_or_before_both_sides_have_their_results():
    assert verdicts([*hits(98, 108, 101), *missing(2, 3)]) is None
    assert verdicts([*hits(145, 155), *missing(3, 2)]) is None  # 2 seeds are too few at that level
    assert verdicts([*hits(145, 155, 150), *missing(2, 3)], base=[*BASE[:2], *missing(3, 2)]) is None
    gap = [*hits(150), *missing(1, 1), *hits(145, 155, 150)[1:], *missing(1, 4)]
    assert verdicts(gap) is None  # which runs ended first plays no part
    assert verdicts(hits(145, 155, 150, 150, 151)) is None  # nothing is left to be stopped


def test_the_decision_is_taken_at_the_looks_own_level():
    """A plain 95 % interval of these runs leaves zero out; that of the first look does not."""
    arm = [*hits(146, 154), *missing(3, 2)]
    assert token_cost(arm[:2], BASE[:2]).low > 0
    assert verdicts(arm) is None


def test_the_levels_of_students_t_keep_the_error_rate_over_all_looks():
    """The levels of the normal theory let paired t intervals of two to eight seeds err too often."""
    rng, repeats, looks = np.random.default_rng(5), 20_000, tuple(range(2, 9))
    drawn = rng.normal(0, 1, (repeats, looks[-1]))
    p = np.array([stats.ttest_1samp(drawn[:, :n], 0, axis=1).pvalue for n in looks])
    normal = np.array(nominal_alphas([n / looks[-1] for n in looks]))
    ours = np.array(levels_of(Settled(looks=looks)))
    error = 2 * math.sqrt(0.05 * 0.95 / repeats)
    assert (p < normal[:, None]).any(axis=0).mean() > 0.06
    assert abs((p < ours[:, None]).any(axis=0).mean() - 0.05) < error


def test_an_arm_is_settled_when_its_interval_leaves_zero_out():
    found = {"base": BASE, "costly": [*hits(150, 152, 149), *missing(2, 3)], "open": hits(98, 108, 101, 99)}
    found["open"] += missing(1, 4)
    going_on = {**found, "open": [*found["open"][:2], *missing(3, 2)]}
    early, late = (decide(one, SETTLED, baseline="base", paired=True) for one in (going_on, found))
    assert set(early.stopped) == set(late.stopped) == {"costly"}
    assert (early.stopped["costly"].kind, early.seeds) == ("settled", 3)
    assert late.seeds == 5
    assert "settled after 2 of at most 5 seeds" in late.stopped["costly"].reason
    # When no arm needs another run, the baseline needs none, nor its second arm.
    alone = {"base": [*BASE[:2], *missing(3, 2)], "costly": [*hits(150, 152), *missing(3, 2)]}
    alone["base again"] = [*hits(100, 101), *missing(3, 2)]
    done = decide(alone, SETTLED, baseline="base", paired=True, never=frozenset({"base again"}))
    assert {arm: stop.seeds for arm, stop in done.stopped.items()} == dict.fromkeys(alone, 2)
    assert done.seeds == 2


def test_a_look_waits_for_every_arm_so_that_it_does_not_depend_on_who_is_first():
    quick, slow = [*hits(150, 152), *missing(3, 2)], [*hits(100), *missing(4, 1)]
    assert decide({"base": BASE, "a": quick, "b": slow}, SETTLED, baseline="base").seeds == 2
    assert decide({"base": BASE, "a": quick, "b": slow}, SETTLED, baseline="base").stopped == {}
    # A run that failed is not waited for.
    slow[1] = replace(slow[1], lost=True)
    assert set(decide({"base": BASE, "a": quick, "b": slow}, SETTLED, baseline="base").stopped) == {"a"}


@pytest.mark.parametrize(
    ("arm", "margin", "stopped"),
    [
        ((100.1, 101, 99.1), Margin(kind="cost", value=0.05), "inside of the margin"),
        ((120, 121, 119), Margin(kind="cost", value=0.05), "outside of the margin"),
        ((103, 104.2, 101.8), Margin(kind="cost", value=0.03), None),  # settled, but the margin is not
    ],
)
def test_with_a_margin_it_is_the_margin_that_is_settled(arm, margin, stopped):
    runs = {"base": BASE, "arm": [*hits(*arm), *missing(2, 3)]}
    found = decide(runs, SETTLED, baseline="base", paired=True, margin=margin).stopped.get("arm")
    assert (found is None) == (stopped is None)
    assert found is None or stopped in found.reason


def test_an_interval_that_is_narrow_enough_is_settled_too():
    rule = StopRule(settled=Settled(looks=(2, 3, 4, 5), narrower_than=0.2))
    arm = {"base": BASE, "arm": [*hits(100.1, 101.3, 99), *missing(2, 3)]}
    assert "narrower than 20 %" in decide(arm, rule, baseline="base", paired=True).stopped["arm"].reason
    assert decide(arm, SETTLED, baseline="base", paired=True).stopped == {}


def test_what_seeds_until_settled_are_expected_to_take():
    rule = Settled(looks=tuple(range(2, 9)))
    cheap, dear = (expected_seeds(rule, cost, 0.035, arms=4, margin=None) for cost in (0.02, 0.3))
    assert 2 <= dear < 2.5
    assert 6 < cheap <= 8
    assert expected_seeds(rule, 0.0, 0.035, arms=4, margin=Margin(kind="cost", value=0.2)) < 4


def test_later_results_change_nothing_at_a_look():
    early = verdicts([*hits(145, 155, 150), *missing(2, 3)])
    late = verdicts([*hits(145, 155, 150, 100), *missing(1, 4)])
    assert early == late


def test_the_baseline_and_its_second_arm_are_never_stopped():
    arm, rule = [diverged(0), diverged(1), *missing(3, 2)], StopRule(diverged=2)
    assert verdicts(arm, rule=rule).kind == "diverged"
    assert verdicts(arm, rule=rule, never=frozenset({"arm"})) is None
    assert decide({"base": arm, "arm": BASE}, rule, baseline="base").stopped == {}


def test_diverged_runs_stop_an_arm_whatever_came_of_the_others():
    stop = verdicts([diverged(0), *missing(1, 1), diverged(2), *missing(2, 3)])
    assert (stop.kind, stop.seeds) == ("diverged", None)
    assert stop.reason == "2 of its runs have diverged"
    assert verdicts([diverged(0), *missing(4, 1)]) is None
    assert verdicts([diverged(0), diverged(1), *missing(3, 2)]).kind == "diverged"
    # Seeds after the look do not change what was decided at it.
    late = [*hits(145, 155, 150), diverged(3), *missing(1, 4)]
    assert verdicts(late, rule=replace(RULE, diverged=1)).kind == "settled"


def test_censored_and_diverged_runs_count_with_their_budget_at_a_look():
    """With runs cut at the budget the cost is too low, and still above zero."""
    arm = [diverged(0, 300), Outcome(seed=1, end="censored", low=298.0), diverged(2, 301), *missing(2, 3)]
    stop = verdicts(arm, rule=SETTLED)
    assert (stop.kind, stop.seeds) == ("settled", 2)


def test_an_arm_that_goes_on_stands_at_the_look_it_has_passed():
    alphas = levels_of(RULE.settled)
    going = [*hits(100, 102, 101), *missing(2, 3)]
    assert alpha_of(going, BASE, RULE, ended=False) == alphas[1]
    assert alpha_of(going[:1] + missing(4, 1), BASE, RULE, ended=False) == alphas[0]
    assert alpha_of(BASE, BASE, RULE, ended=True) == alphas[3]
    assert alpha_of(going, BASE, StopRule(diverged=1), ended=False) == 0.05


# ---- a study ---------------------------------------------------------------------------------------------

STOP = {"diverged": 2, "settled": {"looks": [2, 3, 4, 5]}}


@pytest.fixture
def stopped(make_study):
    """bf16 and a fair arm with all their runs; a bad arm after three seeds; an arm that diverges."""
    rng = np.random.default_rng(3)
    curves = {
        "bf16": [smooth_curve(rng) for _ in range(5)],
        "fair": [smooth_curve(rng, cost=0.02) for _ in range(5)],
        "bad": [smooth_curve(rng, cost=0.5) for _ in range(3)] + [smooth_curve(rng, cost=-0.5)[:4], []],
        "wild": [smooth_curve(rng, cost=0.1, diverge_at=200_000) for _ in range(2)] + [[], [], []],
    }
    states = {("bad", 3): "stopped", ("bad", 4): "pending"}
    states |= {("wild", seed): "diverged" for seed in (0, 1)}
    states |= {("wild", seed): "pending" for seed in (2, 3, 4)}
    return make_study(curves, states=states, target={"value": 2.14}, stop=STOP, intervals="own")


def test_the_report_counts_a_stopped_arms_runs_at_its_look_alone(stopped):
    analysis = analyse(load_frames(stopped))
    arms = {arm.name: arm for arm in analysis.arms}
    bad, wild, fair = arms["bad"], arms["wild"], arms["fair"]
    assert bad.stopped.kind == "settled"
    assert bad.n == bad.token_cost.n == bad.token_cost.n_baseline == bad.stopped.seeds
    assert bad.alpha == bad.stopped.alpha
    assert bad.token_cost.low > 0
    assert bad.missing == 0
    assert [run.end for run in bad.runs[bad.stopped.seeds :]] == ["unused"] * bad.unused
    assert bad.tokens_saved == (5 - bad.stopped.seeds) * 1_000_000 - sum(
        run.tokens for run in bad.runs[bad.stopped.seeds :]
    )
    assert bad.power is None
    assert wild.stopped.kind == "diverged"
    assert wild.token_cost.kind == "bound"
    assert wild.token_cost.restricted is None
    assert wild.tokens_saved == 3_000_000
    alphas = levels_of(stopped.plan().stop.settled)
    assert fair.alpha == alphas[-1]
    assert fair.stopped is None
    assert analysis.missing == 0
    # The same runs at the last look's level, put together by hand.
    logs = [np.log([run.tokens_to_target for run in arms[name].runs]) for name in ("fair", "bf16")]
    found = stats.ttest_ind(*logs, equal_var=False).confidence_interval(1 - alphas[-1])
    assert (fair.token_cost.low, fair.token_cost.high) == pytest.approx(
        (math.expm1(found.low), math.expm1(found.high))
    )


def test_a_run_that_ended_after_the_look_by_chance_is_not_used(stopped):
    before = {arm.name: arm for arm in analyse(load_frames(stopped)).arms}["bad"]
    plan = stopped.plan()
    late = stopped.run(plan.arms[2].runs[3].id)
    for tokens, loss in line(*[1.9] * 10, every=100_000):
        append_line(
            late.metrics_path,
            {"kind": "eval", "tokens": tokens, "step": 1, "time_unix": 1.7e9, "val_loss": loss},
        )
    late.write_status(replace(late.status(), state="finished", tokens=1_000_000))
    after = {arm.name: arm for arm in analyse(load_frames(stopped)).arms}["bad"]
    assert after.token_cost == before.token_cost
    assert after.runs[3].end == "unused"
    assert after.tokens_saved < before.tokens_saved


def test_the_verdict_names_the_level_the_stops_and_what_they_saved(stopped):
    text = " ".join(write_verdict(analyse(load_frames(stopped))).sentences).replace(words.NBSP, " ")
    assert "Brackets are repeated 95 % intervals" in text
    assert "looks after 2, 3, 4 and 5 seeds" in text
    assert "Stopped early: its token cost is settled after" in text
    assert "wild did not reach the target: all its runs (2) diverged. Stopped early: 2 of its runs" in text
    assert "biased away from zero" in text
    assert "Early stops saved" in text
    assert "Partial" not in text
    cautions = " ".join(caveats.warnings(analyse(load_frames(stopped)), ()))
    assert "add seeds" not in cautions  # of an arm that was stopped on purpose


def test_the_report_without_a_rule_is_as_it_was(stopped):
    stopped.write_plan(replace(stopped.plan(), stop=None))
    analysis = analyse(load_frames(stopped))
    arms = {arm.name: arm for arm in analysis.arms}
    assert arms["bad"].n == 3
    assert arms["bad"].missing == 2
    assert {arm.alpha for arm in analysis.arms} == {0.05}
    text = " ".join(write_verdict(analysis).sentences)
    assert "repeated" not in text
    assert "Stopped" not in text


def test_the_files_of_the_report_show_it(stopped, tmp_path):
    written = write_report(stopped, tmp_path / "out")
    document = json.loads(written.json.read_text())
    assert document["stop"]["settled"]["looks"] == [2, 3, 4, 5]
    assert document["stop"]["tokens_saved"] == sum(
        arm["stopped"]["tokens_saved"] for arm in document["arms"] if arm["stopped"]
    )
    assert document["runs_missing"] == 0
    assert "Stopped early" in written.html.read_text()
    assert "## Stopped early" in written.markdown.read_text()
    assert (written.tables / "stopped.tex").exists()


def test_no_effects_of_factors_from_a_selection(make_study):
    rng = np.random.default_rng(5)
    curves = {
        f"{a} {b}": [smooth_curve(rng, cost=0.4 * a) for _ in range(3)] + ([[]] if a else [smooth_curve(rng)])
        for a in (0, 1)
        for b in (0, 1)
    }
    factors = {name: {"a": name[0], "b": name[2]} for name in curves}
    states = {(name, 3): "stopped" for name in curves if name[0] == "1"}
    rule = {"settled": {"looks": [2, 3, 4]}}
    store = make_study(curves, factors=factors, states=states, target={"value": 2.14}, stop=rule)
    effects = analyse(load_frames(store)).token_effects
    assert effects.terms == ()
    assert "stopped early (1 0, 1 1)" in effects.reason


def test_a_step_from_the_baseline_is_the_headlines_cost(make_study):
    rng = np.random.default_rng(3)
    curves = {
        "bf16": [smooth_curve(rng) for _ in range(5)],
        "fprop": [smooth_curve(rng, cost=0.5) for _ in range(3)] + [[], []],
        "fprop+dgrad": [smooth_curve(rng, cost=0.6) for _ in range(5)],
    }
    resolved = {
        "bf16": resolved_recipe(),
        "fprop": resolved_recipe("fprop"),
        "fprop+dgrad": resolved_recipe("fprop", "dgrad"),
    }
    states = {("fprop", seed): "stopped" for seed in (3, 4)}
    store = make_study(curves, resolved=resolved, states=states, target={"value": 2.14}, stop=STOP)
    analysis = analyse(load_frames(store))
    arms = {arm.name: arm for arm in analysis.arms}
    first, second = analysis.steps
    assert arms["fprop"].stopped is not None
    assert first.cost == arms["fprop"].token_cost
    assert (second.cost.n, second.cost.n_baseline) == (arms["fprop"].n, arms["fprop"].n)


def test_what_is_unneeded_is_what_the_report_does_not_use(stopped):
    unused = {
        run.run_id for arm in analyse(load_frames(stopped)).arms for run in arm.runs if run.end == "unused"
    }
    found = Unneeded(stopped)()
    assert set(found) == unused
    assert "2 of its runs have diverged" in found.values()
    stopped.write_plan(replace(stopped.plan(), stop=None))
    assert Unneeded(stopped)() == {}


def test_a_rule_is_read_from_the_lock_file(stopped):
    assert stopped.plan().stop.settled.looks == (2, 3, 4, 5)


def test_a_plan_with_a_rule_that_is_not_known_is_refused_in_one_line(make_study):
    store = make_study({"bf16": [line(3, 2)]}, stop={"hopeless": {"cost_above": 0.1}})
    with pytest.raises(UserError, match=r"not a plan: stop\.hopeless: Unexpected .* \(write it again with"):
        store.plan()


def settled_study(make_study, arms):
    """A study with seeds until settled; ``arms``: the tokens to a loss of 2 of each seed that has run."""

    def curve(tokens):
        return [(t, float(2 + 0.5 * np.log(tokens / t))) for t in range(50, 401, 25)]

    curves = {name: [curve(t) for t in own] + [[]] * (5 - len(own)) for name, own in arms.items()}
    states = {(name, seed): "stopped" for name, own in arms.items() for seed in range(len(own), 5)}
    rule = {"settled": {"looks": [2, 3, 4, 5]}}
    return make_study(curves, states=states, target={"value": 2.0}, stop=rule, paired_seeds=True)


def test_an_arm_that_is_settled_keeps_the_interval_of_its_look(make_study):
    """Later seeds of other arms, and the level of the baseline's last look, change nothing in it."""
    arms = {
        "base": (200, 202, 199, 201), "quick": (222, 226), "later": (205, 203, 209, 214),
        "wild": (200, 207, 181, 228),
    }  # fmt: skip
    store = settled_study(make_study, arms)
    found = {arm.name: arm for arm in analyse(load_frames(store)).arms}
    rule = store.plan().stop.settled
    assert found["quick"].stopped.seeds == 2
    sides = {name: (hits(*own[:2]), hits(*arms["base"][:2])) for name, own in arms.items() if name != "base"}
    at_look = token_costs(sides, paired=True, alpha=levels_of(rule)[0])["quick"]
    cost = found["quick"].token_cost
    assert (cost.low, cost.high) == pytest.approx((at_look.low, at_look.high), rel=1e-3)
    assert cost.low > 0


def test_the_baselines_own_end_makes_no_interval_stricter(make_study):
    arms = {"base": (200, 202, 199), "quick": (300, 306), "later": (208, 213, 210)}
    found = {arm.name: arm for arm in analyse(load_frames(settled_study(make_study, arms))).arms}
    assert {name: arm.stopped.seeds for name, arm in found.items()} == {"base": 3, "quick": 2, "later": 3}
    assert found["base"].alpha == 0.05


def test_a_baseline_alone_has_nothing_to_settle(make_study):
    store = settled_study(make_study, {"base": (200, 202)})
    assert seeds_to_begin(load_frames(store)) == 2
    assert len(Unneeded(store)()) == 3
