"""What is claimed of an arm, what is advised, and which cautions stand beside it (``cases.txt``)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from synthetic_study import analysed, lines, resolved_recipe, smooth_curve, whole_config
from texts import said_of

from ablate.cli.common import verdict_lines
from ablate.recipes import read_recipe
from ablate.reports.words.caveats import warnings
from ablate.run.command import Command
from ablate.run.log_rows import LogSource
from tests.golden import cases, check

FALLING = [
    [(tokens, 4 * (1 + tokens * pace / 20) ** -0.4) for tokens in range(50, 1501, 50)]
    for pace in (1.0, 1.03, 0.98, 1.04)
]
"""Losses of the seeds of an arm, by tokens."""


def costly(costs, seeds, noise):
    """Return curves of each arm; ``seeds`` and ``noise`` are of all arms, or of each by name."""
    rng = np.random.default_rng(7)
    curves = {}
    for name, cost in costs.items():
        number = seeds[name] if isinstance(seeds, dict) else seeds
        spread = noise[name] if isinstance(noise, dict) else noise
        curves[name] = [
            smooth_curve(rng, cost=cost, seed_noise=spread) for _ in range(number)
        ]
    return curves


def raised(run, after, *by):
    """Raise the losses of a run after so many tokens: by its own evaluation, and by that in bf16."""
    return [
        (tokens, *(loss + (tokens > after) * more for more in by))
        for tokens, loss in run
    ]


def study_of(make_study, keys):
    """Make the study that a case asks for."""
    seeds = keys.pop("seeds", 3)
    noise = keys.pop("noise", 0.01)
    if "costs" in keys:
        curves = costly(keys.pop("costs"), seeds, noise)
    elif "lines" in keys:
        curves = lines(keys.pop("lines"))
    else:
        curves = {}
        for name, change in keys.pop("falling").items():
            curves[name] = [raised(run, *change) for run in FALLING]
    resolved = {}
    for name, recipe in keys.pop("recipes", {}).items():
        resolved[name] = resolved_recipe(*recipe.pop("gemms", ()), **recipe)
    states = {}
    for run, state in keys.pop("states", {}).items():
        arm, seed = run.split()
        states[arm, int(seed)] = state
    is_bare = keys.pop("bare", False)
    shift = keys.pop("shift", 0)
    store = make_study(curves, resolved=resolved, states=states, **keys)
    plan = store.plan()
    if is_bare:
        plan = replace(plan, target=None)
    if shift:
        first, second = plan.arms
        runs = tuple(replace(run, seed=run.seed + shift) for run in second.runs)
        plan = replace(plan, arms=(first, replace(second, runs=runs)))
    store.write_plan(plan)
    return store


@pytest.mark.parametrize("case", cases(Path(__file__).with_name("cases.txt")))
def test_what_is_said(make_study, case):
    keys = yaml.safe_load(case[2])
    shares = keys.pop("shares", None)
    analysis = analysed(study_of(make_study, keys))
    if shares:
        arms = [replace(arm, fp4_share=shares[arm.name]) for arm in analysis.arms]
        analysis = replace(analysis, arms=tuple(arms))
    check(case, said_of(analysis))


def test_arms_that_no_line_of_the_log_had_to_prove_are_named(make_study):
    analysis = analysed(make_study(lines("a: 3 1.9; b: 3 2; c: 3 2")))
    trainer = Command(command=["x"], metrics=LogSource(preset="megatron"))
    proved = replace(trainer, expect=["NVFP4 kernel"])
    runs = [("bf16", trainer), ("mxfp4", trainer), ("mxfp4", proved)]
    arms = []
    for arm, (recipe, way) in zip(analysis.arms, runs, strict=True):
        config = replace(whole_config(read_recipe(recipe)), trainer=way)
        arms.append(replace(arm, config=config))
    text = "\n".join(warnings(replace(analysis, arms=tuple(arms)), ()))
    assert text.count("nothing in the log of b had to show that low precision ran") == 1


def test_the_matrix_says_what_no_sentence_repeats_on_the_terminal(written):
    shown = "\n".join(verdict_lines(written("ladder")))
    assert "\nGEMMs in FP4 " in shown
    assert "fp8 is inconclusive against bf16" in shown
    assert "all three costs more tokens" not in shown, "the matrix says it"
