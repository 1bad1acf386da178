from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from synthetic_study import ENVIRONMENT, line, resolved_recipe, smooth_curve

from ablate.reports import write_report
from ablate.reports.findings.analyse import analyse
from ablate.reports.findings.gemms import Step, greatest_step
from ablate.reports.words.caveats import warnings
from ablate.reports.words.tables import arms_table, design_table
from ablate.reports.words.verdict import write_verdict
from ablate.results.cost import Cost
from ablate.results.frames import load_frames
from ablate.store.records import Environment, with_whole


def arms_of(store):
    return {arm.name: arm for arm in analyse(load_frames(store)).arms}


def naive_tokens_to_target(points, target):
    """Return the crossing of a curve that falls all the way, in one line of numpy."""
    tokens, loss = np.array(points).T
    return float(np.exp(np.interp(-target, -loss, np.log(tokens))))


def test_numbers_agree_with_a_computation_in_a_few_lines(make_study):
    rng = np.random.default_rng(3)
    tokens = np.arange(50, 1001, 50)

    def falling(pace):
        return [(int(t), float(4 * (1 + t * pace / 20) ** -0.4)) for t in tokens]

    curves = {
        "bf16": [falling(p) for p in np.exp(rng.normal(0, 0.03, 4))],
        "fp4": [falling(p / 1.15) for p in np.exp(rng.normal(0, 0.03, 4))],
    }
    schedule = {"schedule": "cosine"}  # no span in which the rate is constant: crossings are interpolated
    arms = arms_of(make_study(curves, target={"value": 1.1}, training=schedule, intervals="own"))
    t = {name: [naive_tokens_to_target(points, 1.1) for points in runs] for name, runs in curves.items()}
    assert [run.tokens_to_target for run in arms["fp4"].runs] == pytest.approx(t["fp4"])
    assert arms["fp4"].tokens_to_target.estimate == pytest.approx(stats.gmean(t["fp4"]))
    welch = stats.ttest_ind(np.log(t["fp4"]), np.log(t["bf16"]), equal_var=False).confidence_interval()
    cost = arms["fp4"].token_cost
    assert cost.estimate == pytest.approx(stats.gmean(t["fp4"]) / stats.gmean(t["bf16"]) - 1)
    assert (cost.low, cost.high) == pytest.approx((np.exp(welch.low) - 1, np.exp(welch.high) - 1))
    assert arms["fp4"].break_even.estimate == pytest.approx(1 + cost.estimate)
    last = {name: [points[-1][1] for points in runs] for name, runs in curves.items()}
    assert arms["fp4"].final_loss.estimate == pytest.approx(np.mean(last["fp4"]))
    assert arms["fp4"].difference.estimate == pytest.approx(np.mean(last["fp4"]) - np.mean(last["bf16"]))
    assert arms["bf16"].token_cost == Cost(kind="baseline")


def test_hit_censored_diverged_and_missing_are_counted_apart(make_study):
    hit, short = line(3, 2, 1), line(3, 2.9, 2.8)
    store = make_study(
        {"a": [hit] * 2, "b": [hit, short, line(3, 9), hit, hit, hit]},
        states={("b", 2): "diverged", ("b", 3): "failed", ("b", 4): "running", ("b", 5): "pending"},
        target={"value": 2.0},
    )
    arm = arms_of(store)["b"]
    assert (arm.n, arm.hit, arm.censored, arm.diverged, arm.missing) == (3, 1, 1, 1, 3)
    assert arm.token_cost.estimate is None
    assert [run.end for run in arm.runs] == ["hit", "censored", "diverged", *["missing"] * 3]


def test_target_as_perplexity(make_study):
    curves = {"a": [line(3, 2, 1)], "b": [line(3, 2, 1)]}
    loss = arms_of(make_study(curves, target={"value": 1.5}))
    perplexity = arms_of(make_study(curves, target={"kind": "perplexity", "value": float(np.exp(1.5))}))
    assert perplexity["a"].tokens_to_target.estimate == pytest.approx(loss["a"].tokens_to_target.estimate)


def test_first_eval_counts_whole_intervals(make_study):
    store = make_study({"a": [line(3, 2.2, 1.8, 1)]}, target={"value": 2.0, "crossing": "first_eval"})
    assert arms_of(store)["a"].runs[0].tokens_to_target == 300


def test_resolution_is_the_evaluation_interval_over_the_baseline(make_study):
    analysis = analyse(load_frames(make_study({"a": [line(3, 2.5, 1.5)]}, target={"value": 2.0})))
    assert analysis.resolution.tokens == 100
    assert analysis.resolution.share_of_tokens_to_target == pytest.approx(100 / (200 * 300) ** 0.5)


@pytest.mark.parametrize(
    ("change", "timing"),
    [
        ({}, "emulated"),
        ({"backend_mode": "native"}, "native"),
        ({"backend_mode": "native", "timing_valid": False}, "unvouched"),
        ({"backend_mode": "upcast"}, "emulated"),
    ],
)
def test_timing_is_native_only_if_all_vouch_for_it(make_study, change, timing):
    store = make_study({"a": [line(3, 1)] * 2}, environment=ENVIRONMENT | change)
    assert analyse(load_frames(store)).timing.kind == timing


def test_who_did_which_gemm_makes_no_other_environment(make_study):
    def choice(operands, backend, mode):
        return {"gemm": "fprop", "operands": operands, "backend": backend, "mode": mode, "detail": "d"}

    store = make_study({"a": [line(3, 1)] * 2, "b": [line(3, 1)] * 2})
    frames = load_frames(store)
    bf16, fp4 = choice("bf16", "emulated", "native"), choice("mxfp4", "torch", "native")
    failed = {"backend": "torch", "check": "exact probe: mxfp4", "passed": False, "detail": "d"}
    for number, (run_id, environment) in enumerate(list(frames.environments.items())):
        said = {
            "backend_choices": [bf16, fp4] if number >= 2 else [bf16],
            "self_tests": [failed] if number == 3 else [],
        }
        frames.environments[run_id] = with_whole(Environment, environment.whole | said)
    analysis = analyse(frames)
    assert len(analysis.environments) == 1
    assert analysis.backends == (("bf16 by emulated, native: d", 4), ("mxfp4 by torch, native: d", 2))
    assert analysis.failed_self_tests == 1
    assert any("failed its self-test before 1 of the runs" in text for text in warnings(analysis, ()))


def test_no_environment_is_not_native(make_study):
    assert analyse(load_frames(make_study({"a": [line(3, 1)]}, environment=None))).timing.kind == "emulated"


def test_steps_are_pairs_that_differ_in_one_gemm(ladder):
    steps = analyse(load_frames(ladder)).steps
    assert [(s.gemm, s.from_arm, s.to_arm) for s in steps] == [
        ("fprop", "bf16", "fprop"),
        ("dgrad", "fprop", "fprop+dgrad"),
        ("wgrad", "fprop+dgrad", "all three"),
    ]


def test_the_baselines_second_arm_makes_no_steps(make_study):
    arms = {"a": resolved_recipe(), "b": resolved_recipe("fprop"), "a again": resolved_recipe()}
    frames = load_frames(make_study({name: [line(3, 1)] for name in arms}, resolved=arms))

    def steps():
        return [(step.from_arm, step.to_arm) for step in analyse(frames).steps]

    assert steps() == [("a", "b"), ("a again", "b")]
    arms = (*frames.plan.arms[:2], replace(frames.plan.arms[2], again=True))
    frames = replace(frames, plan=replace(frames.plan, arms=arms))
    assert steps() == [("a", "b")]


@pytest.mark.parametrize(
    "more", [{"phases": [{"from_tokens": 9}]}, {"rules": [{"last": 1}]}, {"deoscillate": {"window": 9}}]
)
def test_no_step_where_other_parts_of_the_recipe_differ(make_study, more):
    arms = {"a": resolved_recipe() | dict.fromkeys(more), "b": resolved_recipe("fprop") | more}
    store = make_study({name: [line(3, 1)] for name in arms}, resolved=arms)
    assert analyse(load_frames(store)).steps == ()
    arms["a"] = resolved_recipe() | more
    store = make_study({name: [line(3, 1)] for name in arms}, resolved=arms)
    assert len(analyse(load_frames(store)).steps) == 1


def test_no_step_where_something_else_differs_too(make_study):
    store = make_study(
        {"a": [line(3, 1)], "b": [line(3, 1)]},
        resolved={"a": resolved_recipe(), "b": resolved_recipe("fprop")},
    )
    assert len(analyse(load_frames(store)).steps) == 1
    run = store.run(store.plan().arms[1].runs[0].id)
    config = run.config()
    config["training"]["learning_rate"] = 1.0
    (run.path / "config.json").unlink()
    run.create(config)
    assert analyse(load_frames(store)).steps == ()


def step(gemm, low, high, kind="interval"):
    cost = Cost(kind=kind, estimate=(low + high) / 2, low=low, high=high)
    return Step(gemm=gemm, from_arm="x", to_arm="y", cost=cost)


def test_the_greatest_step_needs_intervals_that_do_not_overlap():
    assert greatest_step([step("fprop", 0.01, 0.04), step("wgrad", 0.1, 0.2)]) == "wgrad"
    assert greatest_step([step("fprop", 0.01, 0.12), step("wgrad", 0.1, 0.2)]) is None
    assert greatest_step([step("wgrad", 0.1, 0.2)]) is None
    assert greatest_step([step("fprop", 0.01, 0.04), step("wgrad", 0.1, 0.2, kind="point")]) is None


@pytest.mark.exhaustive
@settings(max_examples=25)
@given(seed=st.integers(0, 1000))
def test_the_order_of_rows_in_the_frames_does_not_matter(seed, tmp_path_factory):
    from synthetic_study import build_study, smooth_curve

    rng = np.random.default_rng(seed)
    store = build_study(
        tmp_path_factory.mktemp("order"),
        {name: [smooth_curve(rng, cost=cost) for _ in range(3)] for name, cost in (("a", 0), ("b", 0.1))},
        target={"value": 2.14},
    )
    frames = load_frames(store)
    shuffled = type(frames)(
        **{
            **{
                name: getattr(frames, name)
                for name in ("plan", "configs", "environments", "attempts", "throughput", "faults")
            },
            "runs": frames.runs,
            # Sorted by tokens within a run again: that is what the frames promise.
            "evals": frames.evals.sample(frac=1, random_state=seed).sort_values("tokens", kind="stable"),
        }
    )
    one, other = (
        [(arm.name, arm.token_cost, arm.final_loss, [run.outcome for run in arm.runs]) for arm in found.arms]
        for found in (analyse(shuffled), analyse(frames))
    )
    assert one == other


def test_what_an_arm_differs_in_leaves_out_what_is_not_set(make_study):
    store = make_study({"a": [line(3, 1)], "b": [line(3, 1)]})
    plan = store.plan()
    dy = {"rounding": "stochastic", "scale": None}
    differs = {
        "recipe.gemms": ([], ["fprop", "dgrad"]),
        "recipe.dgrad": (None, {"stabiliser": None, "dy": dy, "hadamard_size": 16}),
    }
    store.write_plan(replace(plan, arms=(plan.arms[0], replace(plan.arms[1], differs=differs))))
    rows = design_table(analyse(load_frames(store))).rows
    gemms, dgrad = rows[1][1].split("; ")
    assert gemms == "recipe.gemms: [] → [fprop, dgrad]"
    assert dgrad == "recipe.dgrad: null → {dy: {rounding: stochastic}, hadamard_size: 16}"


def test_a_loss_difference_before_the_end_says_where_it_is_read(make_study):
    """Two arms of 1,485 and 1,480 steps have their last common evaluation at 1,250."""

    def run(last, shift):
        at = [*range(250, 1251, 250), last]
        return [(t, float(5 - 0.6 * np.log(t) + shift)) for t in at]

    curves = {
        "a": [run(1485, 0.001 * seed) for seed in (0, 1)],
        "b": [run(1480, 0.002 * seed) for seed in (0, 1)],
    }
    analysis = analyse(load_frames(make_study(curves, target={"value": 1.0}, training={"tokens": 1480})))
    assert analysis.others[0].difference.tokens == 1250
    (row,) = (row for row in arms_table(analysis).rows if row[0] == "b")
    assert row[-1].replace("\u00a0", " ").endswith("at 1.25 k")
    assert any("Not the final loss difference: b at 1.25" in text for text in warnings(analysis, ()))
    whole = {name: [run(1485, 0.001 * seed) for seed in (0, 1)] for name in "ab"}
    alike = analyse(load_frames(make_study(whole, target={"value": 1.0}, training={"tokens": 1485})))
    assert not any("Not the final loss" in text for text in warnings(alike, ()))


def test_the_evaluation_interval_is_that_at_the_crossing(make_study):
    """Dense evaluations elsewhere do not make the crossing sharper."""
    at = [100, 110, 120, 130, 140, 400, 800, 810, 820]
    points = [(t, float(5 - 0.6 * np.log(t))) for t in at]
    analysis = analyse(load_frames(make_study({"a": [points] * 2}, target={"value": 1.2})))
    assert analysis.resolution.tokens == 400


def test_runs_cut_at_the_budget_are_compared_as_pairs_where_seeds_are_pairs(make_study):
    paces = (1.0, 1.2, 0.8, 1.1)

    def curve(pace, last=10):
        return [(100 * n, float(5 - 0.6 * np.log(100 * n * pace))) for n in range(1, last + 1)]

    curves = {"a": [curve(p) for p in paces], "b": [curve(p / 1.3, 6) for p in paces]}
    widths = {}
    for paired in (True, False):
        store = make_study(
            curves, target={"value": 1.4}, paired_seeds=paired, training={"schedule": "cosine"}
        )
        cost = analyse(load_frames(store)).others[0].token_cost
        assert cost.kind == "bound"
        widths[paired] = cost.restricted.high - cost.restricted.low
    assert widths[True] != widths[False]


def test_just_missed_says_what_the_loss_difference_comes_to_in_tokens(make_study):
    at = np.arange(100, 1501, 100)
    curves = {
        "a": [[(int(t), float(5 - 0.6 * np.log(t) + 0.001 * seed)) for t in at] for seed in range(3)],
        "b": [[(int(t), float(5 - 0.6 * np.log(t / 1.2) + 0.0012 * seed)) for t in at] for seed in range(3)],
    }
    target = float(5 - 0.6 * np.log(1400))
    analysis = analyse(load_frames(make_study(curves, target={"value": target}, paired_seeds=True)))
    arm = analysis.others[0]
    assert arm.token_cost.kind == "bound"
    assert arm.behind.estimate == pytest.approx(0.2, abs=0.005)
    assert arm.behind.low < 0.2 < arm.behind.high
    text = " ".join(write_verdict(analysis).sentences).replace("\u00a0", " ")
    assert f"over the slope of a's curve there, about +{100 * arm.behind.estimate:.1f} %" in text
    assert "at that loss and not at the target" in text
    decaying = make_study(
        curves, target={"value": target}, training={"schedule": "cosine"}, model={"width": 64, "layers": 1}
    )
    assert analyse(load_frames(decaying)).others[0].behind.estimate is None


def test_a_margin_is_judged_in_lead_table_and_json(make_study):
    rng = np.random.default_rng(5)
    curves = {
        name: [smooth_curve(rng, cost=cost, seed_noise=0.004) for _ in range(4)]
        for name, cost in (("a", 0.0), ("near", 0.0), ("far", 0.3))
    }
    target = {"value": 2.2, "within": {"kind": "cost", "value": 0.05}}
    store = make_study(curves, target=target)
    analysis = analyse(load_frames(store))
    assert {arm.name: arm.standing for arm in analysis.arms} == {
        "a": None,
        "near": "within",
        "far": "outside",
    }
    lead, count, near, far = write_verdict(analysis).sentences[:4]
    assert lead.replace("\u00a0", " ").startswith("Take near (")
    assert count.endswith("within the margin (1) and more tokens (1).")
    assert near.endswith("Against the margin: within.")
    assert far.endswith("Against the margin: outside.")
    assert [row[-1] for row in arms_table(analysis).rows] == ["–", "within", "outside"]
    content = json.loads(write_report(store).json.read_text())
    assert content["target"]["within"] == {"kind": "cost", "value": 0.05}
    assert [arm["standing"] for arm in content["arms"]] == [None, "within", "outside"]
