"""The numbers of whole studies, held to a few lines of numpy; arms that fork from another among them."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats
from synthetic_study import (
    analysed,
    arms_of,
    build_study,
    crossing,
    line,
    parts,
    resolved_recipe,
)

from ablate.reports.findings.analyse import analyse
from ablate.reports.findings.compare import compare
from ablate.reports.words.caveats import warnings
from ablate.reports.words.tables import arms_table
from ablate.results.cost import Cost
from ablate.results.frames import load_frames
from ablate.results.stops import unneeded_runs
from ablate.store.records import Environment, with_whole

COSINE = {"schedule": "cosine"}
"""No span in which the rate is known to be constant: crossings are interpolated."""


def falling(pace, at=range(100, 1001, 100)):
    return [(tokens, 5 - 0.6 * math.log(tokens * pace)) for tokens in at]


def crossings(runs, target):
    return np.array([crossing(points, target) for points in runs])


def warned(analysis, words):
    """Return the warning with these words, with spaces that break; empty without one."""
    for text in warnings(analysis, ()):
        if words in text:
            return text.replace("\u00a0", " ")
    return ""


def test_numbers_agree_with_a_computation_in_a_few_lines(make_study):
    rng = np.random.default_rng(3)
    base = [falling(pace) for pace in np.exp(rng.normal(0, 0.03, 4))]
    slow = [falling(pace / 1.15) for pace in np.exp(rng.normal(0, 0.03, 4))]
    curves = {"bf16": base, "fp4": slow}
    arms = arms_of(make_study(curves, target={"value": 1.1}, training=COSINE))
    arm = arms["fp4"]
    tokens = crossings(slow, 1.1)
    assert [run.tokens_to_target for run in arm.runs] == pytest.approx(list(tokens))
    assert arm.tokens_to_target.estimate == pytest.approx(stats.gmean(tokens))
    ratio = stats.gmean(tokens) / stats.gmean(crossings(base, 1.1))
    costs = (arm.token_cost.estimate, arm.break_even.estimate)
    assert costs == pytest.approx((ratio - 1, ratio))
    gap = np.mean([run[-1][1] for run in slow]) - np.mean([run[-1][1] for run in base])
    assert arm.difference.estimate == pytest.approx(gap)
    assert arms["bf16"].token_cost == Cost(kind="baseline")


@pytest.mark.parametrize(
    ("target", "tokens"),
    [
        ({"value": 1.5}, (200 * 300) ** 0.5),
        ({"kind": "perplexity", "value": math.exp(1.5)}, (200 * 300) ** 0.5),
        ({"value": 1.5, "crossing": "first_eval"}, 300),
    ],
)
def test_the_target_is_a_loss_or_a_perplexity_interpolated_or_at_an_evaluation(
    make_study, target, tokens
):
    (arm,) = arms_of(make_study({"a": [line(3, 2, 1)]}, target=target)).values()
    assert arm.runs[0].tokens_to_target == pytest.approx(tokens)


@pytest.mark.parametrize(
    ("points", "target", "tokens", "share"),
    [
        (line(3, 2.5, 1.5), 2.0, 100, 100 / (200 * 300) ** 0.5),
        # Dense evaluations elsewhere do not make the crossing sharper.
        (
            falling(1, [*range(100, 141, 10), 400, 800, 810, 820]),
            1.2,
            400,
            400 / math.exp(3.8 / 0.6),
        ),
    ],
)
def test_the_evaluation_interval_is_that_at_the_crossing_over_the_baseline(
    make_study, points, target, tokens, share
):
    store = make_study({"a": [points] * 2}, target={"value": target})
    found = analysed(store).resolution
    assert found.tokens == tokens
    assert found.share_of_tokens_to_target == pytest.approx(share)


def with_environments(frames, changes):
    """Change each run's record of what it ran on."""
    for (run_id, environment), change in zip(
        list(frames.environments.items()), changes, strict=True
    ):
        whole = environment.whole | change
        frames.environments[run_id] = with_whole(Environment, whole)
    return analyse(frames)


def test_who_did_which_gemm_makes_no_other_environment(make_study):
    both = [
        {"operands": "bf16", "backend": "emulated", "mode": "native", "detail": "d"},
        {"operands": "mxfp4", "backend": "torch", "mode": "native", "detail": "d"},
    ]
    frames = load_frames(make_study({"a": [line(3, 1)] * 2, "b": [line(3, 1)] * 2}))
    changes = [{"backend_choices": both[:number]} for number in (1, 1, 2, 2)]
    changes[3]["self_tests"] = [{"passed": False}]
    analysis = with_environments(frames, changes)
    assert len(analysis.environments) == 1
    assert analysis.backends == (
        ("bf16 by emulated, native: d", 4),
        ("mxfp4 by torch, native: d", 2),
    )
    assert warned(analysis, "failed its self-test before 1 of the runs")


def test_arms_whose_sums_keep_different_bits_are_named(make_study):
    bf16 = {"detail": "sums keep 24 bits", "figures": {"kept_32_apart_bits": 24.0}}
    narrow = "sums keep 14 bits within 128 products"
    fp8 = {"detail": narrow, "figures": {"kept_32_apart_bits": 14.0}}

    def warning(**tests_of_arms):
        frames = load_frames(make_study({arm: [line(3, 1)] for arm in tests_of_arms}))
        changes = [{"self_tests": tests} for tests in tests_of_arms.values()]
        analysis = with_environments(frames, changes)
        return warned(analysis, "accumulators of different width")

    kept = f"sums keep 24 bits (a); {narrow} (b, c)."
    assert kept in warning(a=[bf16], b=[bf16, fp8], c=[fp8])
    assert not warning(a=[bf16], b=[bf16])
    assert not warning(a=[], b=[fp8])


def test_the_baselines_second_arm_makes_no_steps(make_study):
    bf16 = resolved_recipe()
    resolved = {"a": bf16, "b": resolved_recipe("fprop"), "a again": bf16}
    frames = load_frames(
        make_study({arm: [line(3, 1)] for arm in resolved}, resolved=resolved)
    )
    *arms, last = frames.plan.arms
    again = replace(frames.plan, arms=(*arms, replace(last, again=True)))
    for plan, count in ((frames.plan, 2), (again, 1)):
        assert len(analyse(replace(frames, plan=plan)).steps) == count


@pytest.mark.parametrize(("last", "read_at"), [(1480, 1250), (1485, 1485)])
def test_a_loss_difference_before_the_end_says_where_it_is_read(
    make_study, last, read_at
):
    """Two arms of 1,485 and 1,480 steps have their last common evaluation at 1,250."""
    curves = {}
    for name, end in (("a", 1485), ("b", last)):
        at = [*range(250, 1251, 250), end]
        curves[name] = [falling(pace, at) for pace in (1, 1.01)]
    store = make_study(curves, target={"value": 1.0}, training={"tokens": last})
    analysis = analysed(store)
    assert analysis.others[0].difference.tokens == read_at
    early = read_at == 1250
    assert arms_table(analysis).rows[1][-1].endswith("at 1.25\u00a0k") == early
    assert bool(warned(analysis, "Not the final loss difference: b at 1.25")) == early


# ---- arms that fork --------------------------------------------------------------------------------------

AT, TARGET = 250, 1.1
TOKENS = np.arange(50, 1501, 50)
PACES = np.exp(np.random.default_rng(3).normal(0, 0.05, 4))


def forking(slower=(1.20, 1.24, 1.18, 1.22), at=AT):
    """Curves whose tokens after ``at`` count for less."""
    curves = []
    for pace, slow in zip(PACES, slower, strict=True):
        gone = np.minimum(TOKENS, at) + np.maximum(TOKENS - at, 0) / slow
        losses = 4 * (1 + gone * pace / 20) ** -0.4
        curves.append(list(zip(TOKENS.tolist(), losses.tolist(), strict=True)))
    return curves


CURVES = {"bf16": forking([1] * 4), "whole": forking([1.1] * 4, 0), "forked": forking()}
FORKS = {"forks": {"forked": ("bf16", AT)}, "target": {"value": TARGET}}


@pytest.fixture
def study(make_study):
    return lambda curves=CURVES, **more: make_study(curves, **FORKS | more)


def test_the_cost_from_a_fork_is_the_paired_ratio_of_the_tokens_after_it(
    study, make_study
):
    arms = arms_of(study(training=COSINE, intervals="own"))
    base = crossings(CURVES["bf16"], TARGET)
    after = crossings(CURVES["forked"], TARGET) - AT
    logs = np.log(after / (base - AT))
    cost = arms["forked"].token_cost
    ends = stats.ttest_1samp(logs, 0).confidence_interval()
    assert parts(cost) == pytest.approx(tuple(np.expm1([logs.mean(), *ends])))
    assert (cost.counted_from, cost.pairs, cost.kind) == (AT, 4, "interval")
    for name, tokens in (("forked", after), ("bf16", base)):
        found = [run.tokens_to_target for run in arms[name].runs]
        assert found == pytest.approx(list(tokens))
    assert arms["forked"].difference.tokens == TOKENS[-1]
    for _, moved in arms["forked"].moved.sweep:
        assert moved.estimate is None or abs(moved.estimate - 0.21) < 0.03
    # Whole arms are what they are without it.
    whole = {name: CURVES[name] for name in ("bf16", "whole")}
    alone = arms_of(
        make_study(whole, target={"value": TARGET}, training=COSINE, intervals="own")
    )
    assert alone["whole"].token_cost == arms["whole"].token_cost


def test_a_target_before_the_fork_or_beyond_the_budget(study):
    analysis = analysed(study(target={"value": 2.0}))
    assert analysis.arms[2].token_cost.kind == "none"
    assert warned(analysis, "before the fork (forked): evaluate earlier")
    short = CURVES | {"forked": [points[:8] for points in CURVES["forked"]]}
    cost = arms_of(study(short, training=COSINE))["forked"].token_cost
    after = crossings(CURVES["bf16"], TARGET) - AT
    left = short["forked"][0][-1][0] - AT
    assert cost.kind == "bound"
    assert cost.low == pytest.approx(left / stats.gmean(after) - 1)


def test_a_baseline_that_forks_with_the_arm_and_the_arm_that_both_leave(make_study):
    curves = {"base": CURVES["bf16"], "arm": CURVES["forked"], "trunk": CURVES["whole"]}
    forks = {"base": ("trunk", AT), "arm": ("trunk", AT)}
    arms = arms_of(make_study(curves, forks=forks, target={"value": TARGET}))
    assert {arm.counted_from for arm in arms.values()} == {AT}
    assert arms["arm"].token_cost.estimate == pytest.approx(0.21, abs=0.02)
    assert arms["trunk"].token_cost.pairs == 4


def test_costs_of_another_origin_are_not_compared_nor_pooled(tmp_path):
    frames = []
    for name, width, more in (
        ("small", 64, FORKS),
        ("large", 128, FORKS),
        ("plain", 128, {"target": {"value": TARGET}}),
    ):
        model = {"width": width, "heads": 2}
        store = build_study(tmp_path, CURVES, study=name, model=model, **more)
        frames.append(load_frames(store))
    small, large, plain = zip(map(analyse, frames), frames, strict=True)
    found = compare(*zip(small, plain, strict=True))
    why = "counted from different places: not one question"
    assert found.left_out == {"forked": why}
    assert found.arms[0].token_cost.change.estimate is not None
    assert compare(*zip(small, large, strict=True)).left_out == {}


def test_the_stop_rule_looks_at_the_cost_from_the_fork(study):
    target = {"value": TARGET, "within": {"kind": "cost", "value": 0.3}}
    store = study(
        CURVES | {"forked": forking([1.5] * 4)},
        states={("forked", 3): "pending"},
        stop={"settled": {"looks": [2, 3, 4]}},
        target=target,
    )
    frames = load_frames(store)
    found = unneeded_runs(frames)
    assert list(found) == [run.id for run in frames.plan.arm("forked").runs[2:]]
    # of all its tokens it is 24 % more
    assert all("outside of the margin" in why for why in found.values())
    assert arms_of(store)["forked"].stopped is not None


def test_the_interval_of_a_look_is_not_moderated_by_arms_without_its_results(
    make_study,
):
    spread = np.array([1, 1.01, 0.99, 1])
    paces = {"a": spread, "b": 0.7 * spread, "failed": spread**9}
    curves = {name: [*map(falling, own)] for name, own in paces.items()}
    ended = {("b", 3): "pending", ("failed", 2): "failed", ("failed", 3): "failed"}
    plan = {
        "target": {"value": 1.1},
        "stop": {"settled": {"looks": [3, 4]}},
        "states": ended,
    }
    beside = arms_of(make_study(curves, **plan))["b"]
    del curves["failed"]
    assert beside.stopped.seeds == 3
    assert beside.token_cost == arms_of(make_study(curves, **plan))["b"].token_cost


def test_the_speed_of_what_it_leaves_does_not_count(study):
    store = study()
    run = store.run(store.plan().arm("forked").runs[0].id)
    lines = run.metrics_path.read_text().splitlines()
    slow = [row.replace("31000.0", "9.0") for row in lines[:10]]
    run.metrics_path.write_text("\n".join([*slow, *lines[10:14]]) + "\n")
    run.write_status(run.status())
    assert arms_of(store)["forked"].runs[0].tokens_per_sec == 31000.0


def test_the_evaluation_interval_is_a_larger_share_of_what_is_left(study):
    slower = CURVES | {"forked": forking([1.15] * 4)}
    found = warned(analysed(study(slower)), "evaluation interval")
    # 50 of about 484 tokens are 10 %, and of the 234 after the fork 21 %
    assert "The token cost of whole and forked is" in found
