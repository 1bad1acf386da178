"""What is claimed of an arm, what is advised, and which cautions stand beside it (``verdicts.txt``)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner
from synthetic_study import line, lines, resolved_recipe, smooth_curve, whole_config
from texts import check_words, said_of

from ablate.cli import cli
from ablate.recipes import read_recipe
from ablate.reports.findings.analyse import analyse
from ablate.reports.words.caveats import warnings
from ablate.results.frames import load_frames
from ablate.run.command import Command
from ablate.run.log_rows import LogSource


def curves(costs, seeds, noise=0.01):
    """``noise``: of all arms, or of each by name."""
    rng = np.random.default_rng(7)
    spreads = noise if isinstance(noise, dict) else dict.fromkeys(costs, noise)
    return {
        name: [
            smooth_curve(rng, cost=cost, seed_noise=spreads[name]) for _ in range(seeds)
        ]
        for name, cost in costs.items()
    }


TARGET = {"value": 2.14}
LOW = {"value": 2.0}
WITHIN = TARGET | {"within": {"kind": "cost", "value": 0.05}}
SPREAD_CURVES = curves(
    {"bf16": 0, "fp4": 0.2, "fp8": 0.1}, 5, {"bf16": 0.08, "fp4": 0.01, "fp8": 0.01}
)
BUDGET = {"target": LOW, "training": {"tokens": 400}}
LATE = lines("a: 3 2.5 1.8 1.7, 3 2.4 1.8 1.7; b: 3 2.9 2.8 1.99, 3 2.8 2.7 1.9")
HIT = "3 2.5 1.8 1.7, 3 2.45 1.8 1.7"
MISSED = "3 2.9 2.801 2.7, 3 2.9 2.801 2.7"
DECAY = lines("a: 2.1 2 1.9 1.8, 3 2.5 2.3 2.2; b: 2.1 2 1.9 1.8, 3 2.5 1.9 1.8")
FALLING = [
    [(tokens, 4 * (1 + tokens * pace / 20) ** -0.4) for tokens in range(50, 1501, 50)]
    for pace in (1.0, 1.03, 0.98, 1.04)
]
TWO, THREE = (
    {name: 0.1 * i for i, name in enumerate(names)} for names in ("ab", "abc")
)
COSTS = {
    "bf16": 0.0,
    "fp8": 0.0,
    "F": 0.01,
    "all": 0.3,
    "all SR": 0.3,
    "all DHT": 0.03,
    "F DHT": 0.0,
}
SHARES = {
    "bf16": 0.0,
    "fp8": 0.0,
    "F": 0.25,
    "all": 0.75,
    "all SR": 0.75,
    "all DHT": 0.75,
    "F DHT": 0.25,
}
GEMMS = {
    "bf16": (),
    "F": ("fprop",),
    "FD": ("fprop", "dgrad"),
    "FDW": ("fprop", "dgrad", "wgrad"),
}
STEPS = {
    "target": TARGET,
    "resolved": {name: resolved_recipe(*gemms) for name, gemms in GEMMS.items()},
}
MATRIX = {"bf16": resolved_recipe()} | {
    f"{gemm} {size}": resolved_recipe(gemm, hadamard=size)
    for gemm in ("fprop", "wgrad")
    for size in (0, 16)
}
MATRIX |= {"fp8": resolved_recipe(rest="fp8_e4m3")}
CASES = {
    # name: (curves, study). ``bare``: no target; ``shift``: of the second arm's seeds
    "costs are claimed": (curves({"bf16": 0, "fp4": 0.2, "fast": -0.2}, 5), {"target": TARGET}),
    "an interval holds zero": (curves({"bf16": 0, "same": 0.0}, 3, 0.05), {"target": TARGET}),
    "the baseline spreads more": (SPREAD_CURVES, {"target": TARGET}),
    "one seed": (curves({"bf16": 0, "fp4": 0.2}, 1), {"target": TARGET}),
    "equal seeds": (lines("a: 3 1.9, 3 1.9; b: 3 2.5 1.9, 3 2.5 1.9"), {"target": TARGET}),
    "met by the first evaluation": (lines("a: 3 1.9, 3 1.9; b: 2 1.9, 2 1.9"), {"target": TARGET}),
    "bounds": (
        lines(f"a: {HIT}; b: {MISSED}; c: 3 9, 3 9"),
        BUDGET | {"states": {("c", 0): "diverged", ("c", 1): "diverged"}},
    ),
    "a bound that the cut runs do not bear out": (
        lines(f"a: 3 2.5 1.8 1.7, 3 2.95 2.9 1.7; b: {MISSED}"), BUDGET,
    ),
    "near the budget": (LATE, {"target": LOW, "training": {"tokens": 415}}),
    "far from it": (LATE, {"target": LOW, "training": {"tokens": 480}}),
    "the baseline misses": (lines("a: 3 1.8, 3 2.9; b: 3 1.8, 3 1.8"), {"target": LOW}),
    "neither reaches it": (lines("a: 3 2.9; b: 3 2.9"), {"target": LOW}),
    "a target that all reach": (
        lines(f"a: {HIT}; b: {MISSED}; c: 3 2.5 1.8 1.7, 3 9"),
        {"target": LOW, "states": {("c", 1): "diverged"}},
    ),
    "a perplexity that all reach": (
        lines(f"a: {HIT}; b: {MISSED}"), {"target": {"kind": "perplexity", "value": 7.0}},
    ),
    "no results": ({"a": [[]], "b": [[]]}, {"states": {("a", 0): "pending", ("b", 0): "failed"}}),
    "one arm": (lines("a: 3 2.5"), {"target": LOW}),
    "partial": (
        lines("a: 3 1, 3 1; b: 3 2, 3 2"),
        {"states": {("a", 1): "running", ("b", 0): "failed", ("b", 1): "failed"}},
    ),
    "cosine": (curves({"a": 0, "b": 0.3}, 3), {"target": TARGET, "training": {"schedule": "cosine"}}),
    "a margin of the loss without a cost": (
        {"a": [line(3, 2.4, 2.0, 2.0)] * 5, "b": [line(3, 2.5, 2.1, 2.001 + 0.001 * i) for i in range(5)]},
        {"target": {"value": 2.0035, "within": {"kind": "loss", "value": 0.05}}, "training": {"tokens": 400}},
    ),
    # Of the arms that will do the one with most in FP4 is taken; fewest tokens: not fp8, which has none.
    "within the margin": (curves(COSTS, 5, 0.006), {"target": WITHIN, "shares": SHARES}),
    "not shown to be within": (curves(COSTS, 5, 0.06), {"target": WITHIN, "shares": SHARES}),
    "no margin": (curves(COSTS, 5, 0.006), {"target": TARGET, "shares": SHARES}),
    "a costly baseline": (curves(COSTS, 5, 0.006), {"target": TARGET, "baseline": "all", "shares": SHARES}),
    "not moderated, of two": (curves(TWO, 3), {"target": TARGET, "paired_seeds": True}),
    "moderated, of three": (curves(THREE, 3), {"target": TARGET, "paired_seeds": True}),
    "losses of three": (curves(THREE, 3), {"bare": True, "paired_seeds": True}),
    "own intervals of losses": (curves(THREE, 3), {"bare": True, "paired_seeds": True, "intervals": "own"}),
    "seeds that make no pairs": (curves(TWO, 3), {"target": TARGET, "paired_seeds": True, "shift": 3}),
    "one seed of three": (
        {"a": curves(TWO, 3)["a"], "b": curves(TWO, 1)["b"]}, {"target": TARGET, "paired_seeds": True},
    ),
    "equal arms": (curves(dict.fromkeys("abcd", 0), 3, 0.05), {"target": WITHIN, "paired_seeds": True}),
    "arms that tie": (curves({"bf16": 0.3, "a": 0, "b": 0, "c": 0.25}, 5), {"target": TARGET}),
    "a loss without a baseline": (
        lines("a: 3 1; b: 3 2"), {"states": {("a", 0): "failed"}, "bare": True},
    ),
    "one GEMM adds most": (curves({"bf16": 0, "F": 0.03, "FD": 0.05, "FDW": 0.3}, 5, 0.005), STEPS),
    "which adds most is open": (curves({"bf16": 0, "F": 0.03, "FD": 0.05, "FDW": 0.3}, 2, 0.08), STEPS),
    "a matrix without costs": (
        {name: [line(3, 2.9)] for name in MATRIX}, {"target": LOW, "resolved": MATRIX},
    ),
    **{
        f"the rate falls over the last {decay}": (
            DECAY,
            {
                "training": {"schedule": "wsd", "decay_tokens": decay, "tokens": 400},
                "target": {"value": 2.05}, "model": {"width": 64, "layers": 1},
            },
        )
        for decay in (90, 190, 260)
    },
}  # fmt: skip
CASES["forks"] = (
    {
        "bf16": FALLING,
        "fp4": [
            [(tokens, loss + 0.02 * (tokens > 250)) for tokens, loss in run]
            for run in FALLING
        ],
    },
    {"target": {"value": 1.1}, "forks": {"fp4": ("bf16", 250)}},
)
CASES["learnt or inferred"] = (
    {
        "bf16": [[(tokens, loss, loss) for tokens, loss in run] for run in FALLING],
        "fp4": [
            [(tokens, loss + 0.05, loss + 0.03) for tokens, loss in run]
            for run in FALLING
        ],
    },
    {"target": {"value": 1.1}, "training": {"evaluate_in": "both"}},
)
CASES["losses learnt or inferred"] = (CASES["learnt or inferred"][0], {"bare": True})


@pytest.mark.parametrize("name", CASES)
def test_what_is_said(make_study, name):
    arms, study = CASES[name]
    study = dict(study)
    is_bare = study.pop("bare", False)
    shift = study.pop("shift", 0)
    shares = study.pop("shares", None)
    store = make_study(arms, **study)
    plan = store.plan()
    if is_bare:
        plan = replace(plan, target=None)
    if shift:
        first, second = plan.arms
        runs = tuple(replace(run, seed=run.seed + shift) for run in second.runs)
        plan = replace(plan, arms=(first, replace(second, runs=runs)))
    store.write_plan(plan)
    analysis = analyse(load_frames(store))
    if shares:
        arms = tuple(replace(arm, fp4_share=shares[arm.name]) for arm in analysis.arms)
        analysis = replace(analysis, arms=arms)
    check_words(name, said_of(analysis))


def test_arms_that_no_line_of_the_log_had_to_prove_are_named(make_study):
    analysis = analyse(load_frames(make_study(lines("a: 3 1.9; b: 3 2; c: 3 2"))))
    trainer = Command(command=["x"], metrics=LogSource(preset="megatron"))
    trainers = {
        "a": trainer,
        "b": trainer,
        "c": replace(trainer, expect=["NVFP4 kernel"]),
    }
    arms = []
    for arm in analysis.arms:
        recipe = read_recipe("bf16" if arm.name == "a" else "mxfp4")
        arms.append(
            replace(
                arm, config=replace(whole_config(recipe), trainer=trainers[arm.name])
            )
        )
    text = "\n".join(warnings(replace(analysis, arms=tuple(arms)), ()))
    assert text.count("nothing in the log of b had to show that low precision ran") == 1


def test_the_matrix_says_what_no_sentence_repeats_on_the_terminal(make_study):
    store = make_study(
        {name: [line(3, 2.9)] for name in MATRIX}, resolved=MATRIX, target=LOW
    )
    shown = (
        CliRunner()
        .invoke(cli, ["report", str(store.path)], catch_exceptions=False)
        .output
    )
    assert "\nFprop         cannot be judged  cannot be judged\nWgrad " in shown
    assert "No token cost can be given for fp8" in shown
    assert "for fprop 16" not in shown, "the matrix says it"
