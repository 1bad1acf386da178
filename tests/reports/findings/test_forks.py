"""Arms that fork: their cost counts from the fork, and is named so wherever it is said."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats
from synthetic_study import build_study

from ablate.base.errors import UserError
from ablate.reports import analyse, load_frames, write_report
from ablate.reports.findings.compare import compare, trend
from ablate.reports.words.caveats import warnings
from ablate.reports.words.compare import compare_table
from ablate.reports.words.tables import arms_table
from ablate.reports.words.verdict import write_verdict
from ablate.results.stops import unneeded_runs

AT, TARGET = 250, 1.1
TOKENS = np.arange(50, 1501, 50)
PACES = np.exp(np.random.default_rng(3).normal(0, 0.05, 4))
SLOWER = (1.20, 1.24, 1.18, 1.22)


def falling(pace, slower=1.0, at=0):
    """Return a curve whose tokens after ``at`` count for less."""
    gone = np.minimum(TOKENS, at) + np.maximum(TOKENS - at, 0) / slower
    return [(int(t), float(4 * (1 + g * pace / 20) ** -0.4)) for t, g in zip(TOKENS, gone, strict=True)]


CURVES = {
    "bf16": [falling(pace) for pace in PACES],
    "whole": [falling(pace, 1.1) for pace in PACES],
    "forked": [falling(pace, slow, AT) for pace, slow in zip(PACES, SLOWER, strict=True)],
}


@pytest.fixture
def study(make_study):
    return lambda curves=CURVES, **more: make_study(
        curves, forks={"forked": ("bf16", AT)}, **{"target": {"value": TARGET}} | more
    )


def arms_of(store):
    return {arm.name: arm for arm in analyse(load_frames(store)).arms}


def crossing(points):
    tokens, loss = np.array(points).T
    return float(np.exp(np.interp(-TARGET, -loss, np.log(tokens))))


def test_the_cost_is_the_paired_ratio_of_the_tokens_after_the_fork(study):
    # Where the rate is not known to be constant crossings are interpolated.
    arms = arms_of(study(training={"schedule": "cosine"}, intervals="own"))
    after = {
        name: np.array([crossing(points) for points in CURVES[name]]) - AT for name in ("bf16", "forked")
    }
    logs = np.log(after["forked"] / after["bf16"])
    half = stats.t.ppf(0.975, 3) * logs.std(ddof=1) / 2
    cost = arms["forked"].token_cost
    assert (cost.estimate, cost.low, cost.high) == pytest.approx(
        np.expm1([logs.mean(), logs.mean() - half, logs.mean() + half])
    )
    assert (cost.counted_from, cost.pairs, cost.kind) == (AT, 4, "interval")
    assert 0.18 < cost.estimate < 0.24  # it is slower by that from there on, whatever came before
    assert arms["forked"].counted_from == AT
    assert [run.tokens_to_target for run in arms["forked"].runs] == pytest.approx(list(after["forked"]))
    assert [run.tokens_to_target for run in arms["bf16"].runs] == pytest.approx(list(after["bf16"] + AT))
    assert arms["forked"].difference.tokens == TOKENS[-1]
    sweep = arms["forked"].sweep
    assert all(abs(one.estimate - 0.21) < 0.03 for one in sweep.costs if one.estimate is not None)


def test_whole_arms_of_the_study_are_what_they_were(study, make_study):
    whole = {name: CURVES[name] for name in ("bf16", "whole")}
    alone = arms_of(make_study(whole, target={"value": TARGET}))
    beside = arms_of(study())
    assert alone["whole"].token_cost == beside["whole"].token_cost
    assert beside["whole"].token_cost.counted_from == 0
    assert beside["whole"].token_cost.pairs is None


def test_it_is_named_in_verdict_table_method_and_json(study):
    store = study()
    analysis = analyse(load_frames(store))
    sentences = dict(zip(("whole", "forked"), write_verdict(analysis).findings, strict=True))
    assert sentences["forked"].text.endswith(" from 250 on, n\u00a0=\u00a04 pairs, emulated.")
    assert "fork" not in sentences["whole"].text
    table = arms_table(analysis)
    assert "From … on: counted from the fork" in table.caption
    assert [sum(cell.endswith(" from 250 on") for cell in row) for row in table.rows] == [0, 0, 2]
    page = write_report(store).html.read_text()
    assert "mean log (T − fork) of the baseline" in page
    assert "never pooled" in page


def test_a_target_that_is_reached_before_the_fork_has_no_cost(study):
    store = study(target={"value": 2.0})
    analysis = analyse(load_frames(store))
    arm = next(arm for arm in analysis.arms if arm.name == "forked")
    assert arm.token_cost.kind == "none"
    cautions = [one for one in warnings(analysis, ()) if "before the fork" in one]
    assert len(cautions) == 1
    assert cautions[0].endswith("after it (forked): take a lower target, or an earlier fork.")


def test_runs_that_miss_the_target_give_a_bound_from_the_fork(study):
    short = {**CURVES, "forked": [points[:8] for points in CURVES["forked"]]}
    cost = arms_of(study(short))["forked"].token_cost
    after = np.array([crossing(points) for points in CURVES["bf16"]]) - AT
    left = short["forked"][0][-1][0] - AT
    assert cost.kind == "bound"
    assert cost.low == pytest.approx(np.expm1(np.log(left) - np.log(after).mean()))


def test_a_baseline_that_forks_with_the_arm_and_the_arm_that_both_leave(make_study):
    curves = {"base": CURVES["bf16"], "arm": CURVES["forked"], "trunk": CURVES["whole"]}
    forks = {"base": ("trunk", AT), "arm": ("trunk", AT)}
    arms = arms_of(make_study(curves, forks=forks, target={"value": TARGET}))
    assert {name: arm.counted_from for name, arm in arms.items()} == {"base": AT, "arm": AT, "trunk": AT}
    assert arms["arm"].token_cost.estimate == pytest.approx(0.21, abs=0.02)
    assert arms["trunk"].token_cost.pairs == 4


def test_costs_of_another_origin_are_not_compared(study, tmp_path):
    stores = [study(), build_study(tmp_path, CURVES, study="b", target={"value": TARGET})]
    frames = tuple(load_frames(store) for store in stores)
    found = compare(analyse(frames[0]), analyse(frames[1]), frames)
    ratios = {arm.name: arm.ratio for arm in found.arms}
    assert ratios["forked"].note == "counted from different places: not one question"
    assert ratios["whole"].estimate is not None
    assert any(" from 250 on" in cell for row in compare_table(found).rows for cell in row)


def test_no_trend_over_costs_from_a_fork(make_study):
    curves = {name: CURVES[name] for name in ("bf16", "forked")}
    frames = [
        load_frames(
            make_study(
                curves, forks={"forked": ("bf16", AT)}, model={"width": width, "heads": 2}, study=f"s{width}",
                target={"value": TARGET},
            )
        )
        for width in (64, 128)
    ]  # fmt: skip
    with pytest.raises(UserError, match="forked: its cost is counted from a fork"):
        trend([analyse(one) for one in frames], frames)


def test_effects_do_not_pool_arms_that_are_counted_from_different_places(study):
    factors = {"whole": {"recipe.gemms": "F"}, "forked": {"recipe.gemms": "all"}}
    found = analyse(load_frames(study(factors=factors))).token_effects
    assert (found.terms, found.reason) == ((), "the arms' tokens are not counted from one place: no effects")


def test_the_stop_rule_looks_at_the_cost_from_the_fork(study):
    slow = {**CURVES, "forked": [falling(pace, 1.5, AT) for pace in PACES]}
    states = {("forked", 3): "pending"}
    rule = {"settled": {"looks": [2, 3, 4]}}
    target = {"value": TARGET, "within": {"kind": "cost", "value": 0.3}}
    frames = load_frames(study(slow, states=states, stop=rule, target=target))
    found = unneeded_runs(frames)
    assert list(found) == [run.id for run in frames.plan.arm("forked").runs[2:]]
    assert all("outside of the margin" in why for why in found.values())  # of all its tokens it is 24 % more
    assert arms_of_frames(frames)["forked"].stopped is not None


def arms_of_frames(frames):
    return {arm.name: arm for arm in analyse(frames).arms}


def test_the_speed_of_what_it_leaves_does_not_count(study):
    store = study()
    run = store.run(store.plan().arm("forked").runs[0].id)
    lines = run.metrics_path.read_text().splitlines()
    slow = [
        line.replace("31000.0", "9.0") if f'"step":{i // 2 + 1},' in line and i < 20 else line
        for i, line in enumerate(lines)
    ]
    run.metrics_path.write_text("\n".join(slow) + "\n")
    run.write_status(run.status())
    assert slow != lines
    row = next(run for run in arms_of(store)["forked"].runs)
    assert row.tokens_per_sec == 31000.0


def test_the_evaluation_interval_is_a_larger_share_of_what_is_left(study):
    slower = {**CURVES, "forked": [falling(pace, 1.15, AT) for pace in PACES]}
    found = [one for one in warnings(analyse(load_frames(study(slower))), ()) if "evaluation interval" in one]
    # 50 of about 484 tokens are 10 %, and of the 234 after the fork 21 %
    assert len(found) == 1
    assert "the token cost of whole, forked." in found[0].replace("\u00a0", " ")
