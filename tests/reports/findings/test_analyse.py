"""The numbers of whole studies, held to a few lines of numpy; arms that fork from another among them."""

from __future__ import annotations

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
    return [(int(t), float(5 - 0.6 * np.log(t * pace))) for t in at]


def test_numbers_agree_with_a_computation_in_a_few_lines(make_study):
    rng = np.random.default_rng(3)
    curves = {
        "bf16": [falling(p) for p in np.exp(rng.normal(0, 0.03, 4))],
        "fp4": [falling(p / 1.15) for p in np.exp(rng.normal(0, 0.03, 4))],
    }
    arms = arms_of(make_study(curves, target={"value": 1.1}, training=COSINE))
    t = {
        name: [crossing(points, 1.1) for points in runs]
        for name, runs in curves.items()
    }
    assert [run.tokens_to_target for run in arms["fp4"].runs] == pytest.approx(t["fp4"])
    assert arms["fp4"].tokens_to_target.estimate == pytest.approx(stats.gmean(t["fp4"]))
    ratio = stats.gmean(t["fp4"]) / stats.gmean(t["bf16"])
    assert (
        arms["fp4"].token_cost.estimate,
        arms["fp4"].break_even.estimate,
    ) == pytest.approx((ratio - 1, ratio))
    last = {
        name: np.mean([points[-1][1] for points in runs])
        for name, runs in curves.items()
    }
    assert arms["fp4"].difference.estimate == pytest.approx(last["fp4"] - last["bf16"])
    assert arms["bf16"].token_cost == Cost(kind="baseline")


@pytest.mark.parametrize(
    ("target", "tokens"),
    [
        ({"value": 1.5}, (200 * 300) ** 0.5),
        ({"kind": "perplexity", "value": float(np.exp(1.5))}, (200 * 300) ** 0.5),
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
            falling(1, [100, 110, 120, 130, 140, 400, 800, 810, 820]),
            1.2,
            400,
            400 / np.exp(3.8 / 0.6),
        ),
    ],
)
def test_the_evaluation_interval_is_that_at_the_crossing_over_the_baseline(
    make_study, points, target, tokens, share
):
    found = analysed(
        make_study({"a": [points] * 2}, target={"value": target})
    ).resolution
    assert (found.tokens, found.share_of_tokens_to_target) == (
        tokens,
        pytest.approx(share),
    )


def test_who_did_which_gemm_makes_no_other_environment(make_study):
    def choice(operands, backend):
        return {
            "operands": operands,
            "backend": backend,
            "mode": "native",
            "detail": "d",
        }

    frames = load_frames(make_study({"a": [line(3, 1)] * 2, "b": [line(3, 1)] * 2}))
    both = [choice("bf16", "emulated"), choice("mxfp4", "torch")]
    for number, (run_id, environment) in enumerate(list(frames.environments.items())):
        said = {
            "backend_choices": both[: 1 + number // 2],
            "self_tests": [{"passed": False}] * (number == 3),
        }
        frames.environments[run_id] = with_whole(Environment, environment.whole | said)
    analysis = analyse(frames)
    assert len(analysis.environments) == 1
    assert analysis.backends == (
        ("bf16 by emulated, native: d", 4),
        ("mxfp4 by torch, native: d", 2),
    )
    assert any(
        "failed its self-test before 1 of the runs" in text
        for text in warnings(analysis, ())
    )


def test_arms_whose_sums_keep_different_bits_are_named(make_study):
    def test(backend, detail, bits):
        return {
            "backend": backend,
            "detail": detail,
            "figures": {"kept_32_apart_bits": bits},
            "passed": True,
        }

    bf16 = test("emulated", "sums keep 24 bits", 24.0)
    fp8 = test("torch", "sums keep 14 bits within 128 products", 14.0)
    names = {"a": [bf16], "b": [bf16, fp8], "c": [fp8]}

    def warning(tests_of_arms):
        frames = load_frames(
            make_study({name: [line(3, 1)] * 2 for name in tests_of_arms})
        )
        for run_id, environment in list(frames.environments.items()):
            tests = tests_of_arms[frames.runs[run_id].arm]
            with_tests = environment.whole | {"self_tests": tests}
            frames.environments[run_id] = with_whole(Environment, with_tests)
        found = [
            text
            for text in warnings(analyse(frames), ())
            if "accumulators of different width" in text
        ]
        return next(iter(found), None)

    kept = "sums keep 24 bits (a); sums keep 14 bits within 128 products (b, c)."
    assert kept in warning(names)
    assert warning({"a": [bf16], "b": [bf16]}) is None
    assert warning({"a": [], "b": [fp8]}) is None


def test_the_baselines_second_arm_makes_no_steps(make_study):
    arms = {
        "a": resolved_recipe(),
        "b": resolved_recipe("fprop"),
        "a again": resolved_recipe(),
    }
    frames = load_frames(
        make_study({name: [line(3, 1)] for name in arms}, resolved=arms)
    )
    again = (*frames.plan.arms[:2], replace(frames.plan.arms[2], again=True))
    for plan, count in ((frames.plan, 2), (replace(frames.plan, arms=again), 1)):
        assert len(analyse(replace(frames, plan=plan)).steps) == count


@pytest.mark.parametrize(("last", "read_at"), [(1480, 1250), (1485, 1485)])
def test_a_loss_difference_before_the_end_says_where_it_is_read(
    make_study, last, read_at
):
    """Two arms of 1,485 and 1,480 steps have their last common evaluation at 1,250."""
    curves = {
        name: [
            falling(1 + 0.01 * seed, [*range(250, 1251, 250), end]) for seed in (0, 1)
        ]
        for name, end in (("a", 1485), ("b", last))
    }
    store = make_study(curves, target={"value": 1.0}, training={"tokens": last})
    analysis = analysed(store)
    assert analysis.others[0].difference.tokens == read_at
    early = read_at == 1250
    assert arms_table(analysis).rows[1][-1].endswith("at 1.25\u00a0k") == early
    assert (
        any(
            "Not the final loss difference: b at 1.25" in text
            for text in warnings(analysis, ())
        )
        == early
    )


# ---- arms that fork --------------------------------------------------------------------------------------

AT, TARGET = 250, 1.1
TOKENS = np.arange(50, 1501, 50)
PACES = np.exp(np.random.default_rng(3).normal(0, 0.05, 4))


def forking(slower=(1.20, 1.24, 1.18, 1.22), at=AT):
    """Curves whose tokens after ``at`` count for less."""
    curves = []
    for pace, slow in zip(PACES, slower, strict=True):
        gone = np.minimum(TOKENS, at) + np.maximum(TOKENS - at, 0) / slow
        curves.append(
            [
                (int(t), float(4 * (1 + g * pace / 20) ** -0.4))
                for t, g in zip(TOKENS, gone)  # noqa: B905
            ]
        )
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
    after = {
        name: np.array([crossing(one, TARGET) for one in CURVES[name]]) - AT
        for name in CURVES
    }
    logs = np.log(after["forked"] / after["bf16"])
    cost = arms["forked"].token_cost
    low, high = stats.ttest_1samp(logs, 0).confidence_interval()
    assert (cost.estimate, cost.low, cost.high) == pytest.approx(
        tuple(np.expm1([logs.mean(), low, high]))
    )
    assert (cost.counted_from, cost.pairs, cost.kind) == (AT, 4, "interval")
    assert [run.tokens_to_target for run in arms["forked"].runs] == pytest.approx(
        list(after["forked"])
    )
    assert [run.tokens_to_target for run in arms["bf16"].runs] == pytest.approx(
        list(after["bf16"] + AT)
    )
    assert arms["forked"].difference.tokens == TOKENS[-1]
    for _, one in arms["forked"].moved.sweep:
        assert one.estimate is None or abs(one.estimate - 0.21) < 0.03
    # Whole arms are what they are without it.
    whole = {name: CURVES[name] for name in ("bf16", "whole")}
    alone = arms_of(
        make_study(whole, target={"value": TARGET}, training=COSINE, intervals="own")
    )
    assert alone["whole"].token_cost == arms["whole"].token_cost


def test_a_target_before_the_fork_or_beyond_the_budget(study):
    analysis = analysed(study(target={"value": 2.0}))
    assert analysis.arms[2].token_cost.kind == "none"
    assert any(
        "before the fork (forked): evaluate earlier" in one
        for one in warnings(analysis, ())
    )
    short = CURVES | {"forked": [points[:8] for points in CURVES["forked"]]}
    cost = arms_of(study(short, training=COSINE))["forked"].token_cost
    after = np.array([crossing(points, TARGET) for points in CURVES["bf16"]]) - AT
    left = short["forked"][0][-1][0] - AT
    assert (cost.kind, cost.low) == (
        "bound",
        pytest.approx(np.expm1(np.log(left) - np.log(after).mean())),
    )


def test_a_baseline_that_forks_with_the_arm_and_the_arm_that_both_leave(make_study):
    curves = {"base": CURVES["bf16"], "arm": CURVES["forked"], "trunk": CURVES["whole"]}
    forks = {"base": ("trunk", AT), "arm": ("trunk", AT)}
    arms = arms_of(make_study(curves, forks=forks, target={"value": TARGET}))
    assert {arm.counted_from for arm in arms.values()} == {AT}
    assert arms["arm"].token_cost.estimate == pytest.approx(0.21, abs=0.02)
    assert arms["trunk"].token_cost.pairs == 4


def test_costs_of_another_origin_are_not_compared_nor_pooled(study, tmp_path):
    small, large, plain = (
        load_frames(
            build_study(
                tmp_path, CURVES, study=name, model={"width": width, "heads": 2}, **more
            )
        )
        for name, width, more in (
            ("s", 64, FORKS),
            ("l", 128, FORKS),
            ("p", 128, {"target": {"value": TARGET}}),
        )
    )
    found = compare([analyse(small), analyse(plain)], [small, plain])
    assert found.left_out == {
        "forked": "counted from different places: not one question"
    }
    assert found.arms[0].token_cost.change.estimate is not None
    found = compare([analyse(small), analyse(large)], [small, large])
    assert found.left_out == {}


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
    alone, beside = (
        arms_of(
            make_study(
                some,
                target={"value": 1.1},
                states=ended,
                stop={"settled": {"looks": [3, 4]}},
            )
        )
        for some in ({name: curves[name] for name in "ab"}, curves)
    )
    assert beside["b"].stopped.seeds == 3
    assert beside["b"].token_cost == alone["b"].token_cost


def test_the_speed_of_what_it_leaves_does_not_count(study):
    store = study()
    run = store.run(store.plan().arm("forked").runs[0].id)
    lines = run.metrics_path.read_text().splitlines()
    slow = [
        row.replace("31000.0", "9.0") if i < 10 else row for i, row in enumerate(lines)
    ]
    run.metrics_path.write_text("\n".join(slow[:14]) + "\n")
    run.write_status(run.status())
    assert arms_of(store)["forked"].runs[0].tokens_per_sec == 31000.0


def test_the_evaluation_interval_is_a_larger_share_of_what_is_left(study):
    slower = CURVES | {"forked": forking([1.15] * 4)}
    (found,) = (
        one
        for one in warnings(analysed(study(slower)), ())
        if "evaluation interval" in one
    )
    # 50 of about 484 tokens are 10 %, and of the 234 after the fork 21 %
    assert "The token cost of whole and forked is" in found.replace("\u00a0", " ")
