import math

import pytest
from scipy import optimize, stats

from ablate.base.files import append_line
from ablate.plan import estimate, read_progress
from ablate.plan.estimate import (
    FLOPS_PER_CPU_CORE,
    SPREAD,
    START_SEC,
    approximate_quantile,
    cost_found,
    moderating_degrees,
)
from ablate.plan.plan import StudyProgress
from ablate.store import Status, StudyStore

STUDY = """\
name: s
baseline: a
target: {val_loss: 2.1}
seeds: 4
base:
  training: {tokens: 409_600, eval_tokens: 3_072, eval_every_tokens: 40_960}
arms:
  a:
  b: {recipe: mxfp4}
"""
NOTHING = StudyProgress(states={}, tokens_per_sec={})
WORK = 409_600 + 10 * 3_072 / 3


@pytest.fixture
def planned(plan):
    return plan(STUDY)


@pytest.fixture
def store(tmp_path):
    return StudyStore(tmp_path / "storage" / "s")


def finish(store, run, speeds, state="finished"):
    run_dir = store.run(run.id)
    run_dir.create({})
    for speed in speeds:
        row = {"kind": "train", "tokens": 1, "step": 1, "tokens_per_sec": speed}
        append_line(run_dir.metrics_path, row)
    run_dir.write_status(Status(state=state))


@pytest.mark.parametrize(
    ("base", "cores", "run", "wall"),  # both over the time of a run on one core
    [
        ("", 2, 1, 8 / 2),
        ("", 100, 1, 1),
        ("  resources: {devices_per_run: 2}\n", 2, 1 / 2, 8 / 2),
        (
            "  resources: {gpus: 1}\n",
            64,
            FLOPS_PER_CPU_CORE / 100e12,
            8 * FLOPS_PER_CPU_CORE / 100e12,
        ),
    ],
    ids=["cores", "many cores", "devices share a run", "GPUs one after the other"],
)
def test_a_modelled_time_is_operations_over_the_assumed_rate(
    plan, base, cores, run, wall
):
    planned = plan(STUDY.replace("base:\n", f"base:\n{base}"))
    costs = estimate(planned, NOTHING, cores=cores)
    arm = planned.arms[0]
    seconds = WORK * arm.size.flops_per_token / FLOPS_PER_CPU_CORE
    assert costs.run_seconds["a"] == pytest.approx(run * seconds)
    assert costs.wall_seconds == pytest.approx(wall * seconds + START_SEC)
    assert costs.ground == {"a": "modelled", "b": "modelled"}
    rows = arm.batches.metric_rows
    assert (rows, costs.storage_bytes) == (100 + 10, 8 * (12 * 1024 + 180 * rows))


@pytest.mark.parametrize(
    ("how", "recipe", "evaluations"),
    [
        ("bf16", "mxfp4", 1),
        ("both", "mxfp4", 2),
        ("both", "bf16", 1),
        ("both", "{gemms: [dgrad, wgrad]}", 1),
    ],
)
def test_a_second_evaluation_takes_time_where_it_is_made(
    plan, how, recipe, evaluations
):
    text = STUDY.replace("40_960}", f"40_960, evaluate_in: {how}}}")
    text = text.replace("  a:\n", "  a: {recipe: fp8}\n")
    planned = plan(text.replace("recipe: mxfp4", f"recipe: {recipe}"))
    work = 409_600 + evaluations * 10 * 3_072 / 3
    seconds = work * planned.arm("b").size.flops_per_token / FLOPS_PER_CPU_CORE
    costs = estimate(planned, NOTHING, cores=2)
    assert costs.run_seconds["b"] == pytest.approx(seconds)


def test_measured_speeds_are_used_and_scale_the_rest(planned, store, tmp_path):
    assert read_progress(planned, StudyStore(tmp_path / "nowhere" / "s")) == NOTHING
    runs = planned.arms[0].runs
    finish(store, runs[0], [1000.0, 3000.0])
    finish(store, runs[1], [2000.0])
    finish(store, runs[2], [9000.0], state="failed")
    progress = read_progress(planned, store)
    assert progress.tokens_per_sec == {"a": 2000.0}
    assert [progress.state(run.id) for run in runs] == [
        "finished",
        "finished",
        "failed",
        "pending",
    ]
    costs = estimate(planned, progress, cores=1)
    assert costs.ground == {"a": "measured", "b": "scaled"}
    # of one shape
    assert costs.run_seconds == pytest.approx({"a": WORK / 2000, "b": WORK / 2000})
    assert costs.wall_seconds == pytest.approx(6 * WORK / 2000 + START_SEC)
    for _, run in planned.runs():
        finish(store, run, [1000.0])
    assert estimate(planned, read_progress(planned, store), cores=2).wall_seconds == 0


def test_of_a_model_that_the_study_does_not_describe_only_finished_runs_tell_the_time(
    plan, store
):
    planned = plan(STUDY.replace("base:\n", "base:\n  trainer: t.py:run\n"))
    assert [(arm.size, arm.layers) for arm in planned.arms] == [(None, ())] * 2
    costs = estimate(planned, NOTHING, cores=1)
    assert (costs.run_seconds, costs.wall_seconds) == ({}, None)
    finish(store, planned.arms[0].runs[0], [2000.0])
    costs = estimate(planned, read_progress(planned, store), cores=1)
    assert costs.run_seconds == pytest.approx(dict.fromkeys("ab", WORK / 2000))
    assert costs.wall_seconds == pytest.approx(7 * WORK / 2000 + START_SEC)


@pytest.mark.parametrize("arms", [1, 6])
@pytest.mark.parametrize("seeds", [1, 2, 3, 8, 30])
@pytest.mark.parametrize("moderated", [True, False])
def test_the_cost_found_is_that_of_the_noncentral_t(seeds, arms, moderated):
    cost = cost_found(seeds, arms, moderated=moderated, spread=SPREAD)
    degrees = seeds - 1
    if moderated:
        degrees += moderating_degrees(arms, degrees * (arms - 1))
    if seeds < 2 or degrees < 2:
        assert cost is None
        return
    edge = stats.t.ppf(0.975, degrees)
    assert approximate_quantile(degrees, 0.05) == pytest.approx(edge, rel=0.01)
    reach = optimize.brentq(
        lambda effect: stats.nct.sf(edge, degrees, effect) - 0.8, 0.1, 50
    )
    assert math.log1p(cost) == pytest.approx(
        reach * SPREAD / math.sqrt(seeds), rel=0.12
    )
