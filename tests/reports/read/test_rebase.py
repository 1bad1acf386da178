"""The same runs against another arm, and at another target."""

import math
from dataclasses import replace

import pytest

from ablate.base.errors import UserError
from ablate.reports.findings.analyse import analyse
from ablate.reports.read.rebase import read_against, target_after
from ablate.results.frames import load_frames
from ablate.store.plan_file import LockedTuning, StopRule, Target

TUNING = LockedTuning(
    study="study tune", done=True, fields={}, sampler="grid", trials=1, tokens=10, seeds=(1,), groups=(),
    tuned={},
)  # fmt: skip


@pytest.fixture
def frames(make_study):
    curves = {
        "bf16": [[(10, 3.0), (20, 2.0), (30, 1.0)], [(12, 3.4), (20, 2.2), (28, 1.4)]],
        "all": [[(10, 3.5), (20, 2.5), (30, 1.5)], [(10, 3.5), (20, 2.6), (30, 1.4)]],
        "mended": [[(10, 3.1), (20, 2.1), (30, 1.1)]] * 2,
    }
    return load_frames(make_study(curves))


def with_plan(frames, **more):
    return replace(frames, plan=replace(frames.plan, **more))


def test_costs_are_those_against_the_other_arm(frames):
    there = analyse(read_against(frames, baseline="all", target=2.0))
    assert (there.baseline, there.plan.target.value) == ("all", 2.0)
    mended = next(arm for arm in there.arms if arm.name == "mended")
    # A tenth of the way from 20 to 30 tokens, in logarithms, against half of it: by hand.
    assert mended.tokens_to_target.estimate == pytest.approx(20 * 1.5**0.1)
    assert there.baseline_arm.tokens_to_target.estimate == pytest.approx(20 * 1.5**0.5)
    assert mended.token_cost.estimate == pytest.approx(1.5**-0.4 - 1)
    assert [arm.name for arm in there.others] == ["bf16", "mended"]
    assert read_against(frames) is frames
    assert read_against(frames, baseline="bf16").plan == frames.plan


def test_what_an_arm_differs_in_is_told_against_the_new_baseline(frames):
    gemms = {"recipe.gemms": ([], ["fprop"])}
    rate = {"training.learning_rate": (1e-3, 2e-3)}
    rht = {"recipe.stabiliser": ("none", "dht")}
    differs = {"bf16": {}, "all": gemms | rate, "mended": gemms | rht}
    arms = tuple(
        replace(arm, differs=differs[arm.name], again=arm.name == "mended")
        for arm in frames.plan.arms
    )
    read = read_against(with_plan(frames, arms=arms), baseline="all").plan.arms
    rate_back = {"training.learning_rate": (2e-3, 1e-3)}
    assert {arm.name: arm.differs for arm in read} == {
        "bf16": {"recipe.gemms": (["fprop"], [])} | rate_back,
        "all": {},
        "mended": rate_back | rht,
    }
    assert not any(arm.again for arm in read)


@pytest.mark.parametrize(
    ("options", "plan", "line"),
    [
        (
            {"baseline": "al"},
            {},
            "--baseline: no arm 'al' in study 'synthetic' (arms: all, bf16, mended)",
        ),
        ({"target": -1.0}, {}, "--target: -1 is no val_loss (expected above 0)"),
        (
            {"target": float("nan")},
            {},
            "--target: nan is no val_loss (expected above 0)",
        ),
        (
            {"baseline": "all"},
            {"stop": StopRule(diverged=2)},
            "has 'stop', which chose its runs",
        ),
        ({"target": 2.0}, {"tuning": TUNING}, "has 'tune', which chose its runs"),
        (
            {"target": Target(kind="perplexity", value=9.0)},
            {"loss_unit": "bits"},
            "these losses are in bits per token",
        ),
    ],
)
def test_what_is_refused(frames, options, plan, line):
    with pytest.raises(UserError) as caught:
        read_against(with_plan(frames, **plan), **options)
    assert line in str(caught.value)


def test_the_target_that_the_baseline_reaches_after_so_many_tokens(frames, make_study):
    assert target_after(frames, 20) == 2.1
    assert target_after(frames, 25) == pytest.approx((1.5 + 1.7) / 2)
    assert target_after(read_against(frames, baseline="all"), 20) == 2.55
    perplexity = with_plan(frames, target=Target(kind="perplexity", value=20.0))
    assert target_after(perplexity, 20) == pytest.approx(math.exp(2.1), abs=5e-4)
    for outside in (11, 29):
        with pytest.raises(
            UserError, match=f"--after: {outside} tokens is outside .*from 12 to 28"
        ):
            target_after(frames, outside)
    first, run = next(
        (run_id, run) for run_id, run in frames.runs.items() if run.arm == "bf16"
    )
    diverged = {first: run._replace(status=replace(run.status, state="diverged"))}
    # the run that did not diverge
    assert target_after(replace(frames, runs=frames.runs | diverged), 20) == 2.2
    with pytest.raises(UserError, match=r"'bf16' in study .* has no losses yet"):
        target_after(load_frames(make_study({"bf16": [[]], "all": [[(10, 3.0)]]})), 10)
