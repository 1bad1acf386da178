"""The stop rule: its level against a published one and a simulation of its own, and what it decides."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from runs_in_words import runs_of
from synthetic_study import analysed, arms_of, resolved_recipe, smooth_curve
from texts import check_words, said_of

from ablate.base.files import append_line
from ablate.results.cost import token_costs
from ablate.results.frames import load_frames
from ablate.results.intervals import Method
from ablate.results.stop_rule import decide, level_of
from ablate.results.stops import Unneeded, seeds_to_begin
from ablate.store.plan_file import Margin, Settled, StopRule
from tests.golden import rows_of


def test_the_level_of_two_looks_is_pococks_where_seeds_are_many():
    """Two equally spaced looks by the normal theory: Pocock (1977), table 1."""
    many = StopRule(settled=Settled(looks=(10_000, 20_000)))
    assert level_of(many) == pytest.approx(0.0294, abs=0.001)
    assert level_of(DIVERGED) == level_of(None) == 0.05


# ---- the decision ----------------------------------------------------------------------------------------

BASE = runs_of("100 101 99 100.5 99.5")
SETTLED = StopRule(settled=Settled(looks=(2, 3, 4, 5)))
BOTH, DIVERGED = replace(SETTLED, diverged=2), StopRule(diverged=2)
NARROW = StopRule(settled=Settled(looks=(2, 3, 4, 5), narrower_than=0.2))
LEVEL = level_of(SETTLED)


UNPAIRED = Method(moderated=False, alpha=LEVEL)
PAIRED = replace(UNPAIRED, paired=True)
MODERATED = replace(PAIRED, moderated=True)
RULES = {
    "both": (BOTH, UNPAIRED, {}),
    "first diverged": (replace(BOTH, diverged=1), UNPAIRED, {}),
    "diverged": (DIVERGED, UNPAIRED, {}),
    "never": (DIVERGED, UNPAIRED, {"never": frozenset({"arm"})}),
    "settled": (SETTLED, UNPAIRED, {}),
    "paired": (SETTLED, PAIRED, {}),
    "narrow": (NARROW, PAIRED, {}),
    "within 5 %": (SETTLED, PAIRED, {"margin": Margin(kind="cost", value=0.05)}),
    "within 3 %": (SETTLED, PAIRED, {"margin": Margin(kind="cost", value=0.03)}),
}
DECISIONS = """
145 155 150 - -            | 100 101 99 100.5 99.5 | both           | 3 | settled after 3 of at most 5 seeds
# Later runs change nothing, and which ended first plays no part.
145 155 150 100 -          | 100 101 99 100.5 99.5 | both           | 3 | settled after 3
150 - 155 150 -            | 100 101 99 100.5 99.5 | both           |   |
98 108 101 - -             | 100 101 99 100.5 99.5 | both           |   |
# Two seeds are too few at that level; the baseline has too few; nothing is left to be stopped.
146 154 - - -              | 100 101 99 100.5 99.5 | both           |   |
145 155 150 - -            | 100 101 - - -         | both           |   |
145 155 150 150 151        | 100 101 99 100.5 99.5 | both           |   |
100.1 101 99.1 - -         | 100 101 99 100.5 99.5 | within 5 %     | 2 | inside of the margin
120 121 119 - -            | 100 101 99 100.5 99.5 | within 5 %     | 2 | outside of the margin
# Settled, but the margin is not.
103 104.2 101.8 - -        | 100 101 99 100.5 99.5 | within 3 %     |   |
100.1 101.3 99 - -         | 100 101 99 100.5 99.5 | narrow         | 2 | narrower than 20 %
100.1 101.3 99 - -         | 100 101 99 100.5 99.5 | paired         |   |
# With runs cut at the budget the cost is too low, and still above zero.
x300 c298 x301 - -         | 100 101 99 100.5 99.5 | settled        | 2 | its token cost is settled
x200 - x200 - -            | 100 101 99 100.5 99.5 | both           |   | 2 of its runs
x200 x200 - - -            | 100 101 99 100.5 99.5 | never          |   |
x200 x200 145 155 150      | 100 101 99 100.5 99.5 | diverged       |   |
100 101 99 100.5 99.5      | x200 x200 - - -       | diverged       |   |
# Seeds after the look do not change what was decided at it.
145 155 150 x200 -         | 100 101 99 100.5 99.5 | first diverged | 3 | is settled
"""


@pytest.mark.parametrize(("arm", "base", "rule", "seeds", "reason"), rows_of(DECISIONS))
def test_an_arm_is_stopped_for_a_reason_or_goes_on(arm, base, rule, seeds, reason):
    rule, how, more = RULES[rule]
    arms = {"base": runs_of(base), "arm": runs_of(arm)}
    found = decide(arms, rule, how, baseline="base", **more).stopped
    assert set(found) <= {"arm", "base"}
    assert ("arm" in found) == bool(reason)
    if reason:
        seeds = int(seeds) if seeds else None
        assert reason in found["arm"].reason
        assert found["arm"].seeds == seeds
        assert found["arm"].kind == ("diverged" if seeds is None else "settled")


def test_a_look_waits_for_every_arm_so_that_it_does_not_depend_on_who_is_first():
    runs = {"base": BASE, "a": runs_of("150 152 - - -"), "b": runs_of("100 - - - -")}
    found = decide(runs, SETTLED, MODERATED, baseline="base")
    assert (found.seeds, found.stopped) == (2, {})
    # a run that failed is not waited for
    failed = replace(runs["b"][1], lost=True)
    runs["b"][1] = failed
    assert set(decide(runs, SETTLED, MODERATED, baseline="base").stopped) == {"a"}
    # Two results of three seeds are no third look.
    runs["b"] = runs_of("120 - 119 - -")
    runs["b"][1] = failed
    assert set(decide(runs, SETTLED, MODERATED, baseline="base").stopped) == {"a"}


def test_settled_arms_stay_so_and_when_no_arm_needs_another_run_the_baseline_needs_none():
    for going, seeds in (("98 108 - - -", 3), ("98 108 101 99 -", 5)):
        costly = runs_of("150 152 149 - -")
        arms = {"base": BASE, "costly": costly, "open": runs_of(going)}
        found = decide(arms, SETTLED, MODERATED, baseline="base")
        assert (set(found.stopped), found.seeds) == ({"costly"}, seeds)
    few = runs_of("100 101 - - -")
    arms = {"base": few, "costly": runs_of("150 152 - - -"), "again": few}
    never = frozenset({"again"})
    done = decide(arms, SETTLED, MODERATED, baseline="base", never=never)
    assert set(done.stopped) == set(arms)
    assert {stop.seeds for stop in done.stopped.values()} == {done.seeds} == {2}


# ---- a study ---------------------------------------------------------------------------------------------

STOP = {"diverged": 2, "settled": {"looks": [2, 3, 4, 5]}}


@pytest.fixture
def stopped(make_study):
    """bf16 and a fair arm with all their runs; a bad arm after three seeds; an arm that diverges."""
    rng = np.random.default_rng(3)

    def runs(count, **more):
        return [smooth_curve(rng, **more) for _ in range(count)]

    curves = {
        "bf16": runs(5),
        "fair": runs(5, cost=0.02),
        "bad": [*runs(3, cost=0.5), runs(1, cost=-0.5)[0][:4], []],
        "wild": [*runs(2, cost=0.1, diverge_at=200_000), [], [], []],
    }
    states = dict.fromkeys(
        [("bad", 4), ("wild", 2), ("wild", 3), ("wild", 4)], "pending"
    )
    states |= {("bad", 3): "stopped", ("wild", 0): "diverged", ("wild", 1): "diverged"}
    return make_study(
        curves, states=states, target={"value": 2.14}, stop=STOP, intervals="own"
    )


def test_the_report_counts_a_stopped_arms_runs_at_its_look_alone(stopped):
    check_words("arms are stopped early", said_of(analysed(stopped)))
    arms = arms_of(stopped)
    bad = arms["bad"]
    seeds = bad.stopped.seeds
    assert (bad.stopped.kind, bad.n) == ("settled", seeds)
    assert [run.end for run in bad.runs[seeds:]] == ["unused"] * bad.count("unused")
    assert bad.power is arms["wild"].token_cost.restricted is None
    assert arms["fair"].stopped is None
    assert {arm.alpha for arm in arms.values()} == {LEVEL}
    # A run that ended after the look by chance is not used.
    late = stopped.run(stopped.plan().arms[2].runs[3].id)
    row = {"kind": "eval", "step": 1, "val_loss": 1.9}
    for tokens in range(100_000, 1_000_001, 100_000):
        append_line(late.metrics_path, row | {"tokens": tokens})
    late.write_status(replace(late.status(), state="finished", tokens=1_000_000))
    after = arms_of(stopped)["bad"]
    assert (after.token_cost, after.runs[3].end) == (bad.token_cost, "unused")


def test_what_is_unneeded_is_what_the_report_does_not_use(stopped):
    runs = [run for arm in arms_of(stopped).values() for run in arm.runs]
    found = Unneeded(stopped)()
    assert set(found) == {run.run_id for run in runs if run.end == "unused"}
    assert "2 of its runs have diverged" in found.values()
    stopped.write_plan(replace(stopped.plan(), stop=None))
    assert Unneeded(stopped)() == {}
    arms = arms_of(stopped)
    assert (arms["bad"].n, arms["bad"].count("missing")) == (3, 2)
    assert {arm.alpha for arm in arms.values()} == {0.05}


def settled_study(make_study, arms, **more):
    """A study with seeds until settled; ``arms``: the tokens to a loss of 2 of each seed that has run."""

    curves = {}
    states = {}
    for name, own in arms.items():
        curves[name] = [[]] * 5
        for seed in range(5):
            states[name, seed] = "stopped"
        for seed, tokens in enumerate(map(float, own.split())):
            del states[name, seed]
            losses = [
                (at, 2 + 0.5 * math.log(tokens / at)) for at in range(50, 401, 25)
            ]
            curves[name][seed] = losses
    stop = {"settled": {"looks": [2, 3, 4, 5]}}
    target = {"value": 2.0}
    return make_study(
        curves, states=states, target=target, stop=stop, paired_seeds=True, **more
    )


def test_an_arm_that_is_settled_keeps_the_interval_of_its_look(make_study):
    """Later seeds of other arms change nothing in it."""
    arms = {
        "base": "200 202 199 201", "quick": "222 226", "later": "205 203 209 214", "wild": "200 207 181 228",
    }  # fmt: skip
    found = arms_of(settled_study(make_study, arms))
    assert found["quick"].stopped.seeds == 2
    first = {name: runs_of(own)[:2] for name, own in arms.items()}
    base = first.pop("base")
    sides = {name: (own, base) for name, own in first.items()}
    at_look = token_costs(sides, MODERATED)["quick"]
    cost = found["quick"].token_cost
    assert (cost.low, cost.high) == pytest.approx((at_look.low, at_look.high), rel=1e-3)
    assert cost.low > 0


def test_a_step_from_the_baseline_is_the_headlines_cost(make_study):
    arms = {
        "bf16": "200 202 199 201 200",
        "fprop": "300 306",
        "both": "320 322 330 318 325",
    }
    resolved = {
        "bf16": resolved_recipe(),
        "fprop": resolved_recipe("fprop"),
        "both": resolved_recipe("fprop", "dgrad"),
    }
    analysis = analysed(settled_study(make_study, arms, resolved=resolved))
    first, second = analysis.steps
    arm = analysis.others[0]
    assert arm.stopped is not None
    assert first.cost == arm.token_cost
    assert (second.cost.n, second.cost.n_baseline) == (arm.n, arm.n)


def test_a_baseline_alone_has_nothing_to_settle(make_study):
    store = settled_study(make_study, {"base": "200 202"})
    assert seeds_to_begin(load_frames(store)) == 2
    assert len(Unneeded(store)()) == 3
