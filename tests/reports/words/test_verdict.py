"""What is claimed of an arm, what is advised, and which cautions stand beside it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner
from synthetic_study import (
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
    analysis = analyse(load_frames(store))
    verdict = write_verdict(analysis)
    cautions = (*caveats.notices(analysis), *caveats.warnings(analysis, ()))
    return verdict, " ".join((*verdict.sentences, *cautions)).replace(words.NBSP, " ")


def curves(costs, seeds, noise=0.01):
    """``noise``: of all arms, or of each by name."""
    rng = np.random.default_rng(7)
    spreads = noise if isinstance(noise, dict) else dict.fromkeys(costs, noise)
    return {
        name: [smooth_curve(rng, cost=cost, seed_noise=spreads[name]) for _ in range(seeds)]
        for name, cost in costs.items()
    }


def runs(text):
    """Return the evaluations of ``ARM: LOSS LOSS, LOSS LOSS; ARM: …``, a comma between runs."""
    arms = (arm.split(":") for arm in text.split("; "))
    return {name: [line(*map(float, run.split())) for run in own.split(",")] for name, own in arms}


TARGET = {"value": 2.14}
LOW = {"value": 2.0}
SPREADS = {"bf16": 0.08, "fp4": 0.01, "fp8": 0.01}
SPREAD_CURVES = curves({"bf16": 0, "fp4": 0.2, "fp8": 0.1}, 5, SPREADS)
BUDGET = {"target": LOW, "training": {"tokens": 400}}
LATE = runs("a: 3 2.5 1.8 1.7, 3 2.4 1.8 1.7; b: 3 2.9 2.8 1.99, 3 2.8 2.7 1.9")
HIT = "3 2.5 1.8 1.7, 3 2.45 1.8 1.7"
MISSED = "3 2.9 2.801 2.7, 3 2.9 2.801 2.7"
CASES = {
    # name: (curves, plan, tones of the arms, what is said, and behind a ! what is not)
    "costs are claimed": (
        curves({"bf16": 0, "fp4": 0.2, "fast": -0.2}, 5), {"target": TARGET}, ["more", "fewer"],
        ["fp4 costs more tokens than bf16: +", "fast needs fewer tokens than bf16: −", "n = 5, emulated",
         "no claim on speed", "Take fast (−", "and more tokens (1).", "!evaluation interval ("],
    ),
    "an interval holds zero": (
        curves({"bf16": 0, "same": 0.0}, 3, 0.05), {"target": TARGET}, ["open"],
        ["same is inconclusive against bf16", "excludes costs above", "not settled (1).",
         "Smaller than the evaluation interval", "!Take same"],
    ),
    "the baseline spreads more": (
        SPREAD_CURVES, {"target": TARGET}, None, ["The runs of bf16, the baseline, spread more than"],
    ),
    "own intervals": (
        SPREAD_CURVES, {"target": TARGET, "intervals": "own"}, None, ["!the baseline, spread more"],
    ),
    "one seed": (
        curves({"bf16": 0, "fp4": 0.2}, 1), {"target": TARGET}, ["open"],
        ["fp4 against bf16 is no finding: +", "(n = 1: no interval)", "Nothing is settled yet",
         "One or two results only: bf16, fp4."],
    ),
    "equal seeds": (
        runs("a: 3 1.9, 3 1.9; b: 3 2.5 1.9, 3 2.5 1.9"), {"target": TARGET}, ["open"],
        ["Nothing is settled yet", "(all runs gave the same figure: no interval)", "!n = 1"],
    ),
    "met by the first evaluation": (
        runs("a: 3 1.9, 3 1.9; b: 2 1.9, 2 1.9"), {"target": TARGET}, None,
        ["at the target by the first evaluation", "or before the fork (b): evaluate earlier"],
    ),
    "bounds": (
        runs(f"a: {HIT}; b: {MISSED}; c: 3 9, 3 9"),
        BUDGET | {"states": {("c", 0): "diverged", ("c", 1): "diverged"}}, ["more", "diverged"],
        ["In these runs b took at least", "of 2 runs 2 ended before the target", "all its runs (2) diverged",
         "with all runs cut at the budget +"],
    ),
    "a bound that the cut runs do not bear out": (
        runs(f"a: 3 2.5 1.8 1.7, 3 2.95 2.9 1.7; b: {MISSED}"), BUDGET, ["bound"],
        ["In these runs b took at least "],
    ),
    "near the budget": (
        LATE, {"target": LOW, "training": {"tokens": 415}}, None,
        [", near the budget", "only in the last 5% of its budget"],
    ),
    "far from it": (LATE, {"target": LOW, "training": {"tokens": 480}}, None, ["!near the budget"]),
    "the baseline misses": (
        runs("a: 3 1.8, 3 2.9; b: 3 1.8, 3 1.8"), {"target": LOW}, None,
        ["the baseline itself did not reach the target in 1 of 2 runs", "b is inconclusive", "!Take b"],
    ),
    "neither reaches it": (
        runs("a: 3 2.9; b: 3 2.9"), {"target": LOW}, ["none"], ["For b no token cost can be given ("],
    ),
    "a target that all reach": (
        runs(f"a: {HIT}; b: {MISSED}; c: 3 2.5 1.8 1.7, 3 9"),
        {"target": LOW, "states": {("c", 1): "diverged"}}, None,
        ["All runs that have not diverged reach a validation loss of 2.81 nats/token: with"],
    ),
    "that target": (
        runs(f"a: {HIT}; b: {MISSED}"), {"target": {"value": 2.81}}, ["more"], ["!runs that have not"],
    ),
    "a perplexity that all reach": (
        runs(f"a: {HIT}; b: {MISSED}"), {"target": {"kind": "perplexity", "value": 7.0}}, None,
        ["reach a validation perplexity of 16.5 (2.8034 nats/token): with",
         "(`ablate report synthetic --target 16.5 --out FOLDER`) a cost can be given"],
    ),
    "no results": (
        {"a": [[]], "b": [[]]}, {"states": {("a", 0): "pending", ("b", 0): "failed"}}, [],
        ["No results yet: none of the 2 runs has finished or diverged."],
    ),
    "one arm": (
        runs("a: 3 2.5"), {"target": LOW}, [], ["The study has one arm, a", "n = 1", "!Brackets"],
    ),
    "partial": (
        runs("a: 3 1, 3 1; b: 3 2, 3 2"),
        {"states": {("a", 1): "running", ("b", 0): "failed", ("b", 1): "failed"}}, None,
        ["Partial: 3 of 4 runs are no results (2 failed, 1 running). Without any result: b."],
    ),
    "cosine": (
        curves({"a": 0, "b": 0.3}, 3), {"target": TARGET, "training": {"schedule": "cosine"}}, ["more"],
        ["The cosine schedule is tied to the token budget", "!Partial", "!results only"],
    ),
    "a margin of the loss without a cost": (
        {"a": [line(3, 2.4, 2.0, 2.0)] * 5, "b": [line(3, 2.5, 2.1, 2.001 + 0.001 * i) for i in range(5)]},
        {"target": {"value": 2.0035, "within": {"kind": "loss", "value": 0.05}}, "training": {"tokens": 400}},
        ["within"], ["Take b (", ": within the margin."],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("study", "plan", "tones", "said"), CASES.values(), ids=CASES)
def test_what_is_said(make_study, study, plan, tones, said):
    verdict, text = verdict_of(make_study(study, **plan))
    assert tones is None or [finding.tone for finding in verdict.findings] == tones
    for phrase in said:
        assert (phrase.lstrip("!") in text) == (phrase[0] != "!"), (phrase, text)


COSTS = {"bf16": 0.0, "fp8": 0.0, "F": 0.01, "all": 0.3, "all SR": 0.3, "all DHT": 0.03, "F DHT": 0.0}
SHARES = {"bf16": 0.0, "fp8": 0.0, "F": 0.25, "all": 0.75, "all SR": 0.75, "all DHT": 0.75, "F DHT": 0.25}
WITHIN = TARGET | {"within": {"kind": "cost", "value": 0.05}}


@pytest.mark.parametrize(
    ("noise", "plan", "take", "said"),
    [
        # Fewest tokens: not fp8, which has no GEMM in FP4.
        (0.006, {"target": WITHIN}, "all DHT", "Fewest tokens: F DHT ("),
        (0.06, {"target": WITHIN}, None, "shown to be within ±5 % in token cost. Most in FP4: all DHT ("),
        (0.006, {"target": TARGET}, None, "shown to need fewer tokens than bf16. Most in FP4: all DHT ("),
        (0.006, {"target": TARGET}, None, "all DHT pays where it trains 1.0"),
        (0.006, {"target": TARGET}, None, "as good as bf16, name a margin (target.within)."),
        (0.006, {"target": TARGET, "baseline": "all"}, "all DHT", ": fewer tokens."),
    ],
)
def test_of_the_arms_that_will_do_the_one_with_most_in_fp4_is_taken(make_study, noise, plan, take, said):
    analysis = analyse(load_frames(make_study(curves(COSTS, 5, noise), **plan)))
    arms = tuple(replace(arm, fp4_share=SHARES[arm.name]) for arm in analysis.arms)
    verdict = write_verdict(replace(analysis, arms=arms))
    assert verdict.take == take
    assert said in f"{verdict.lead} {verdict.more}".replace(words.NBSP, " ")


@pytest.mark.parametrize("target", [TARGET, None])
def test_what_was_not_moderated_is_not_called_so(make_study, target):
    def said(arms, **more):
        store = make_study(curves(arms, 3), target=TARGET, paired_seeds=True, **more)
        if target is None:
            write_record(store.plan_path, read_record(store.plan_path) | {"target": None})
        analysis = analyse(load_frames(store))
        text = " ".join((*write_verdict(analysis).notes, *map(": ".join, definitions(analysis))))
        return ("moderated by the other arms' spread" in text, "(moderated)" in text)

    one, two = {"a": 0.0, "b": 0.1}, {"a": 0.0, "b": 0.1, "c": 0.2}
    assert said(one) == (False, False)
    assert said(two) == (True, target is not None)
    assert said(two, intervals="own") == (False, False)


@pytest.mark.parametrize("target", [TARGET, None])
def test_seeds_that_make_no_pairs_are_named_beside_the_interval(make_study, target):
    store = make_study(curves({"a": 0.0, "b": 0.1}, 3), target=TARGET, paired_seeds=True)
    plan = read_record(store.plan_path)
    for run in plan["arms"][1]["runs"]:
        run["seed"] += 2
    write_record(store.plan_path, plan | ({} if target else {"target": None}))
    assert "ewer than 2 pairs of seeds: compared unpaired" in verdict_of(store)[1]


@pytest.mark.parametrize(
    ("seeds", "noise", "said"),
    [(5, 0.005, "Wgrad adds most: from FD to FDW +2"), (2, 0.08, "is not settled")],
)
def test_which_gemm_adds_most_only_if_the_intervals_allow(make_study, seeds, noise, said):
    gemms = {"bf16": (), "F": ("fprop",), "FD": ("fprop", "dgrad"), "FDW": ("fprop", "dgrad", "wgrad")}
    costs = {"bf16": 0, "F": 0.03, "FD": 0.05, "FDW": 0.3}
    resolved = {name: resolved_recipe(*own) for name, own in gemms.items()}
    store = make_study(curves(costs, seeds, noise), resolved=resolved, target=TARGET)
    assert said in next(note for note in verdict_of(store)[0].notes if "adds most" in note)


def test_a_cost_that_cannot_be_given_is_no_cost_of_nothing_in_the_matrix(make_study):
    resolved = {
        f"{gemm} {size}": resolved_recipe(gemm, hadamard=size)
        for gemm in ("fprop", "wgrad")
        for size in (0, 16)
    }
    resolved = {"bf16": resolved_recipe()} | resolved | {"fp8": resolved_recipe(rest="fp8_e4m3")}
    store = make_study({name: [line(3, 2.9)] for name in resolved}, resolved=resolved, target=LOW)
    analysis = analyse(load_frames(store))
    (table,) = matrix_tables(analysis, write_verdict(analysis).findings)
    assert {cell for row in table.rows for cell in row[1:]} == {"cannot be judged"}
    shown = CliRunner().invoke(cli, ["report", str(store.path)], catch_exceptions=False).output
    assert "\nFprop         cannot be judged  cannot be judged\nWgrad " in shown
    assert "For fp8 no token cost can be given" in shown
    assert "For fprop 16" not in shown, "the matrix says it"


@pytest.mark.parametrize(
    ("decay", "expected"),
    [
        (190, ["begun to fall (b 1 of 2 crossings)"]),
        (260, ["begun to fall (a 1 of 1 crossing, b 2 of 2 crossings)"]),
        (90, []),
    ],
)
def test_crossings_in_the_decay_are_named(make_study, decay, expected):
    store = make_study(
        runs("a: 2.1 2 1.9 1.8, 3 2.5 2.3 2.2; b: 2.1 2 1.9 1.8, 3 2.5 1.9 1.8"),
        training={"schedule": "wsd", "decay_tokens": decay, "tokens": 400},
        target={"value": 2.05},
        model={"width": 64, "layers": 1},
    )
    found = [text for text in caveats.warnings(analyse(load_frames(store)), ()) if "learning rate" in text]
    assert [said in text for said, text in zip(expected, found, strict=True)] == [True] * len(expected)


def test_warnings_that_do_not_apply_are_silent(make_study):
    rng = np.random.default_rng(1)
    costs = {"a": 0.0, "b": 0.2}
    store = make_study(
        {name: [smooth_curve(rng, cost=cost, every=5_000) for _ in range(3)] for name, cost in costs.items()},
        target=TARGET,
    )
    assert caveats.warnings(analyse(load_frames(store)), ()) == ()


def test_native_timing_is_told_with_the_token_cost(tmp_path):
    store = native_study(tmp_path)
    base = speed_of(store, "fp8")
    rates = tuple(3 * rate for rate in base.tokens_per_sec)
    write_throughput(store, base, speed_of(store, "fp4", tokens_per_sec=rates))
    verdict, text = verdict_of(store)
    note = next(note for note in verdict.notes if note.startswith("End to end"))
    assert "fp4 goes to the target at 2.86× [2.46, 3.32] the speed of fp8 (timed: alone)" in note
    assert "no claim on speed" not in text
