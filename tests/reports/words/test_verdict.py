from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner
from synthetic_study import (
    TRAINING,
    line,
    native_study,
    resolved_recipe,
    smooth_curve,
    speed_of,
    write_throughput,
)

from ablate.base.files import read_record, write_record
from ablate.cli import cli
from ablate.reports.findings.analyse import analyse
from ablate.reports.pages.render import definitions
from ablate.reports.words import caveats
from ablate.reports.words import format as words
from ablate.reports.words.tables import matrix_tables
from ablate.reports.words.verdict import write_verdict
from ablate.results.frames import load_frames


def verdict_of(store):
    verdict = write_verdict(analyse(load_frames(store)))
    return verdict, " ".join(verdict.sentences).replace(words.NBSP, " ")


def curves(costs, seeds, noise=0.01):
    rng = np.random.default_rng(7)
    return {
        name: [smooth_curve(rng, cost=cost, seed_noise=noise) for _ in range(seeds)]
        for name, cost in costs.items()
    }


TARGET = {"value": 2.14}


def test_a_cost_is_claimed_where_the_interval_excludes_zero(make_study):
    verdict, text = verdict_of(make_study(curves({"bf16": 0, "fp4": 0.2, "fast": -0.2}, 5), target=TARGET))
    assert [finding.tone for finding in verdict.findings] == ["more", "fewer"]
    assert "fp4 costs 1" in text or "fp4 costs 2" in text
    assert "more tokens than bf16 [+" in text
    assert "fast needs" in text
    assert "fewer tokens than bf16 [−" in text
    assert "n = 5" in text
    assert "not adjusted for there being 2" in text
    assert "no claim on speed" in text


COSTS = {"bf16": 0.0, "fp8": 0.0, "F": 0.01, "all": 0.3, "all SR": 0.3, "all DHT": 0.03, "F DHT": 0.0}
SHARES = {"bf16": 0.0, "fp8": 0.0, "F": 0.25, "all": 0.75, "all SR": 0.75, "all DHT": 0.75, "F DHT": 0.25}


@pytest.fixture
def grid(make_study):
    """Return the verdict on arms with such shares of their FLOPs in FP4, whose runs spread so much."""

    def judge(noise=0.006, **more):
        analysis = analyse(load_frames(make_study(curves(COSTS, 5, noise), **more)))
        arms = tuple(replace(arm, fp4_share=SHARES[arm.name]) for arm in analysis.arms)
        return write_verdict(replace(analysis, arms=arms))

    return judge


def test_of_the_arms_within_the_margin_the_one_with_most_in_fp4_is_taken(grid):
    within = TARGET | {"within": {"kind": "cost", "value": 0.05}}
    verdict = grid(target=within)
    assert verdict.take == "all DHT"
    lead = verdict.lead.replace(words.NBSP, " ")
    assert lead.startswith("Take all DHT: it is within ±5 % in token cost of bf16 (+")
    assert "the most of 4 such arms. Fewest tokens of them: F DHT (" in lead  # and not fp8: no GEMM is in FP4
    assert verdict.more == ""
    # Where the seeds spread more, it takes more of them; what has less in FP4 is no question then.
    verdict = grid(0.06, target=within)
    assert verdict.take is None
    assert verdict.lead.replace(words.NBSP, " ").startswith(
        "No arm is shown to be within ±5 % in token cost of bf16. Most in FP4: all DHT, "
    )
    assert verdict.more == (
        "To settle all DHT, run about 12 more seeds. "
        "To settle F and F DHT would take more than 20 more seeds."
    )


def test_without_a_margin_the_least_costly_arms_are_named_and_what_they_take(grid):
    verdict = grid(target=TARGET)
    assert verdict.take is None
    assert verdict.lead.startswith("No arm is shown to need fewer tokens than bf16. Most in FP4: all DHT, +")
    assert "; fewest tokens: F DHT, " in verdict.lead
    assert verdict.more.startswith("all DHT pays where it trains 1.0")
    assert "To show that an arm is as good as bf16, name a margin (target.within)." in verdict.more
    cheap = grid(target=TARGET, baseline="all")
    assert cheap.take == "all DHT"
    assert cheap.lead.startswith("Take all DHT: it needs fewer tokens than all (−")


def test_a_margin_of_the_loss_may_hold_where_no_cost_is_known(make_study):
    points = [line(3, 2.5, 2.1, 2.001 + 0.001 * seed) for seed in range(5)]
    margin = {"value": 2.0035, "within": {"kind": "loss", "value": 0.05}}
    verdict, _ = verdict_of(
        make_study({"a": [line(3, 2.4, 2.0, 2.0)] * 5, "b": points}, target=margin, training={"tokens": 400})
    )
    assert verdict.findings[0].tone == "within"
    assert verdict.take == "b"


def test_an_interval_that_holds_zero_is_inconclusive(make_study):
    verdict, text = verdict_of(make_study(curves({"bf16": 0, "same": 0.0}, 3, noise=0.05), target=TARGET))
    assert verdict.findings[0].tone == "open"
    assert "same is inconclusive" in text
    assert verdict.count.endswith("1 is not settled.")
    assert verdict.take is None


def test_a_baseline_that_spreads_more_than_the_arms_is_named(make_study):
    rng = np.random.default_rng(3)
    study = {
        name: [smooth_curve(rng, cost=cost, seed_noise=noise) for _ in range(5)]
        for name, cost, noise in (("bf16", 0, 0.08), ("fp4", 0.2, 0.01), ("fp8", 0.1, 0.01))
    }
    named = "The runs of bf16, the baseline, spread more than those of the arms: every interval takes"
    assert named in verdict_of(make_study(study, target=TARGET))[1]
    assert named not in verdict_of(make_study(study, target=TARGET, baseline="fp8"))[1]
    assert named not in verdict_of(make_study(study, target=TARGET, intervals="own"))[1]


def test_one_seed_is_no_finding(make_study):
    verdict, text = verdict_of(make_study(curves({"bf16": 0, "fp4": 0.2}, 1), target=TARGET))
    assert verdict.findings[0].tone == "open"
    assert "n = 1: no interval" in text
    assert "no finding" in text


def test_equal_seeds_are_not_called_one_seed(make_study):
    verdict, _ = verdict_of(
        make_study({"a": [line(3, 1.9)] * 3, "b": [line(3, 2.5, 1.9)] * 3}, target=TARGET)
    )
    assert verdict.lead == "Nothing is settled yet (all runs gave the same figure: no interval)."
    verdict, _ = verdict_of(make_study({"a": [line(3, 1.9)], "b": [line(3, 2.5, 1.9)]}, target=TARGET))
    assert "without a second seed" in verdict.lead


def test_of_a_target_met_from_the_first_evaluation_on_a_lower_one_is_asked_for(make_study):
    studies = {"a": [line(3, 1.9)] * 2, "b": [line(2.0, 1.9)] * 2}
    verdict, _ = verdict_of(make_study(studies, target=TARGET))
    assert verdict.lead.endswith(
        "Runs are at it by their first evaluation: take a lower one, or evaluate earlier."
    )
    verdict, _ = verdict_of(make_study(studies | {"b": [line(3, 2.9)] * 2}, target=TARGET))
    assert verdict.lead.endswith("Take one that more runs reach, or a larger budget.")
    pending = {("b", 0): "pending", ("b", 1): "pending"}
    verdict, _ = verdict_of(make_study(studies, states=pending, target=TARGET))
    assert verdict.lead == "Nothing can be chosen yet: no arm but a has a result."


@pytest.mark.parametrize("target", [TARGET, None])
def test_what_was_not_moderated_is_not_called_so(make_study, target):
    def said(arms, **more):
        store = make_study(curves(arms, 3), target=TARGET, **more)
        if target is None:
            write_record(store.plan_path, read_record(store.plan_path) | {"target": None})
        analysis = analyse(load_frames(store))
        text = " ".join((*write_verdict(analysis).notes, *map(": ".join, definitions(analysis))))
        return ("moderated by the other arms' spread" in text, "(moderated)" in text)

    one, two = {"a": 0.0, "b": 0.1}, {"a": 0.0, "b": 0.1, "c": 0.2}
    assert said(one, paired_seeds=True) == (False, False)
    assert said(two, paired_seeds=True) == (True, target is not None)
    assert said(two, paired_seeds=True, intervals="own") == (False, False)


@pytest.mark.parametrize("target", [TARGET, None])
def test_seeds_that_make_no_pairs_are_named_beside_the_interval(make_study, target):
    store = make_study(curves({"a": 0.0, "b": 0.1}, 3), target=TARGET, paired_seeds=True)
    plan = read_record(store.plan_path)
    for i, run in enumerate(plan["arms"][1]["runs"]):
        run["seed"] = run["seed"] + 2
        assert run["seed"] == i + 2
    write_record(store.plan_path, plan | ({} if target else {"target": None}))
    assert "ewer than 2 pairs of seeds: compared unpaired" in verdict_of(store)[1]


def test_which_gemm_adds_most_only_if_the_intervals_allow(make_study):
    resolved = {
        "bf16": resolved_recipe(),
        "F": resolved_recipe("fprop"),
        "FD": resolved_recipe("fprop", "dgrad"),
        "FDW": resolved_recipe("fprop", "dgrad", "wgrad"),
    }
    costs = {"bf16": 0, "F": 0.03, "FD": 0.05, "FDW": 0.3}
    _, text = verdict_of(make_study(curves(costs, 5, noise=0.005), resolved=resolved, target=TARGET))
    assert "Wgrad adds most: from FD to FDW +2" in text
    _, text = verdict_of(make_study(curves(costs, 2, noise=0.08), resolved=resolved, target=TARGET))
    assert "Which GEMM adds most is not settled" in text


def test_censored_and_diverged_arms_get_bounds_in_words(make_study):
    hit, short = line(3, 2.5, 1.8, 1.7), line(3, 2.9, 2.8, 2.7)
    near = line(3, 2.45, 1.8, 1.7)
    store = make_study(
        {"a": [hit, near], "b": [short, short], "c": [line(3, 9), line(3, 9)]},
        states={("c", 0): "diverged", ("c", 1): "diverged"},
        target={"value": 2.0},
        training={"tokens": 400},
    )
    verdict, text = verdict_of(store)
    assert [finding.tone for finding in verdict.findings] == ["more", "diverged"]
    assert "In these runs b took at least" in text
    assert "of 2 runs 2 ended before the target" in text
    assert "c did not reach the target: all 2 runs diverged" in text


def test_a_bound_is_worded_as_one_of_these_runs_whatever_the_cut_runs_say(make_study):
    short = line(3, 2.9, 2.8, 2.7)
    store = make_study(
        {"a": [line(3, 2.5, 1.8, 1.7), line(3, 2.95, 2.9, 1.7)], "b": [short, short], "c": [short]},
        target={"value": 2.0},
        training={"tokens": 400},
    )
    verdict, text = verdict_of(store)
    assert [finding.tone for finding in verdict.findings] == ["bound", "bound"]
    assert ", which holds zero, n = 2, emulated)." in text
    for finding in verdict.findings:
        assert f"In these runs {finding.arm} took at least " in finding.text


@pytest.mark.parametrize(("budget", "near"), [(415, True), (480, False), (0, False)])
def test_a_cost_near_the_budget_is_named_beside_it(make_study, budget, near):
    store = make_study(
        {
            "a": [line(3, 2.5, 1.8, 1.7), line(3, 2.4, 1.8, 1.7)],
            "b": [line(3, 2.9, 2.8, 1.99), line(3, 2.8, 2.7, 1.9)],
        },
        target={"value": 2.0},
        training={"tokens": budget},
    )
    verdict, text = verdict_of(store)
    assert (", near the budget" in verdict.lead) == near
    assert ("A run reached the target only in the last 5 % of its budget." in text) == near


def test_a_baseline_that_misses_the_target_is_said_first_of_all(make_study):
    hit, short = line(3, 2.5, 1.8, 1.7), line(3, 2.9, 2.8, 2.7)
    verdict, text = verdict_of(make_study({"a": [hit, short], "b": [hit, hit]}, target={"value": 2.0}))
    assert "the baseline itself did not reach the target in 1 of 2 runs" in verdict.lead
    assert "b is inconclusive" in text
    verdict, text = verdict_of(make_study({"a": [short], "b": [short]}, target={"value": 2.0}))
    assert verdict.findings[0].tone == "none"
    assert "For b no token cost can be given (" in text


def test_a_cost_that_cannot_be_given_is_no_cost_of_nothing_in_the_matrix(make_study):
    short = line(3, 2.9, 2.8, 2.7)
    resolved = {
        f"{gemm} {size}": resolved_recipe(gemm, hadamard=size)
        for gemm in ("fprop", "wgrad")
        for size in (0, 16)
    }
    study = {name: [short] for name in ("bf16", *resolved)}
    resolved["bf16"] = resolved_recipe()
    study["fp8"], resolved["fp8"] = [short], resolved_recipe(rest="fp8_e4m3")
    store = make_study(study, resolved=resolved, target={"value": 2.0})
    analysis = analyse(load_frames(store))
    (table,) = matrix_tables(analysis, write_verdict(analysis).findings)
    assert {cell for row in table.rows for cell in row[1:]} == {"cannot be judged"}
    shown = CliRunner().invoke(cli, ["report", str(store.path)], catch_exceptions=False).output
    assert "\nFprop         cannot be judged  cannot be judged\nWgrad " in shown
    assert "For fp8 no token cost can be given" in shown
    assert "For fprop 16" not in shown, "the matrix says it"


def test_a_target_that_all_runs_reach_is_named_and_gives_every_arm_a_cost(make_study):
    hit, short = line(3, 2.5, 1.8, 1.7), line(3, 2.9, 2.801, 2.7)
    gone = line(3, 9)
    curves = {"a": [hit, hit], "b": [short, short], "c": [hit, gone]}
    store = make_study(curves, states={("c", 1): "diverged"}, target={"value": 2.0})
    _, text = verdict_of(store)
    assert "All runs that have not diverged reach a validation loss of 2.81 nats/token: with" in text
    _, text = verdict_of(make_study(curves, states={("c", 1): "diverged"}, target={"value": 2.81}))
    assert "reach a validation loss" not in text
    assert (
        analyse(load_frames(make_study({"a": [hit], "b": [short]}, target={"value": 2.81}))).arms[1].hit == 1
    )
    perplexity = {"kind": "perplexity", "value": 7.0}
    _, text = verdict_of(make_study({"a": [hit, hit], "b": [short, short]}, target=perplexity))
    assert "All runs reach a validation perplexity of 16.5 (2.8034 nats/token): with" in text
    assert "(`ablate report synthetic --target 16.5 --out FOLDER`) a cost can be given" in text


def test_no_results_and_one_arm(make_study):
    _, text = verdict_of(make_study({"a": [[]], "b": [[]]}, states={("a", 0): "pending", ("b", 0): "failed"}))
    assert text == "No results yet: none of the 2 runs has finished or diverged."
    _, text = verdict_of(make_study({"a": [line(3, 1)]}, target={"value": 2.0}))
    assert "one arm" in text
    _, text = verdict_of(make_study({"a": [line(3, 2.5)]}, target={"value": 2.0}))
    assert "0 reached" in text


def test_notice_of_a_partial_study(make_study):
    store = make_study(
        {"a": [line(3, 1)] * 2, "b": [line(3, 2)] * 2},
        states={("a", 1): "running", ("b", 0): "failed", ("b", 1): "failed"},
    )
    (notice,) = caveats.notices(analyse(load_frames(store)))
    assert notice == "Partial: 3 of 4 runs are no results (2 failed, 1 running). Without any result: b."


def test_no_notice_of_a_whole_study(ladder):
    assert not list(caveats.notices(analyse(load_frames(ladder))))


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"target": TARGET}, "Smaller than the evaluation interval"),
        ({"target": {"value": 4.9}}, "The first evaluation is already at or under the target"),
        ({"training": {"schedule": "cosine"}, "target": TARGET}, "cosine schedule"),
    ],
)
def test_warnings_that_apply(make_study, more, expected):
    found = caveats.warnings(analyse(load_frames(make_study(curves({"a": 0, "b": 0.01}, 3), **more))), ())
    assert any(expected in warning for warning in found)


@pytest.mark.parametrize(
    ("training", "expected"),
    [
        ({"schedule": "wsd", "decay_tokens": 190}, "begun to fall (b 1 of 2 crossings)"),
        ({"schedule": "wsd", "decay_tokens": 260}, "begun to fall (a 1 of 1 crossing, b 2 of 2 crossings)"),
        ({"schedule": "wsd", "decay_tokens": 90}, None),
        ({"schedule": "constant"}, None),
    ],
)
def test_crossings_in_the_decay_are_named(make_study, training, expected):
    after_150, after_275, never = line(2.1, 2.0, 1.9, 1.8), line(3, 2.5, 1.9, 1.8), line(3, 2.5, 2.3, 2.2)
    store = make_study(
        {"a": [after_150, never], "b": [after_150, after_275]},
        training=training | {"tokens": 400},
        target={"value": 2.05},
        model={"width": 64, "layers": 1},
    )
    found = [text for text in caveats.warnings(analyse(load_frames(store)), ()) if "learning rate" in text]
    assert [expected is not None and expected in text for text in found] == [True] * (expected is not None)


def test_warnings_that_do_not_apply_are_silent(make_study):
    store = make_study(
        {
            name: [smooth_curve(np.random.default_rng(s + 1), cost=cost, every=5_000) for s in range(3)]
            for name, cost in {"a": 0.0, "b": 0.2}.items()
        },
        training=TRAINING,
        target=TARGET,
    )
    assert caveats.warnings(analyse(load_frames(store)), ()) == ()


@pytest.mark.parametrize(
    ("factor", "outcome"),
    [(3.0, "so it is faster."), (1.05, "not settled."), (0.3, "so it is slower.")],
)
def test_native_timing_is_judged_with_the_token_cost(tmp_path, factor, outcome):
    store = native_study(tmp_path)
    base = speed_of(store, "fp8")
    rates = tuple(factor * rate for rate in base.tokens_per_sec)
    write_throughput(store, base, speed_of(store, "fp4", tokens_per_sec=rates))
    verdict, text = verdict_of(store)
    note = next(note for note in verdict.notes if note.startswith("End to end"))
    assert "fp4 goes to the target at" in note
    assert "the speed of fp8, timed alone" in note
    assert note.endswith(outcome)
    assert "no claim on speed" not in text
