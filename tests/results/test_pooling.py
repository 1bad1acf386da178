"""Runs that differ in what the study does not compare are set apart, unless it says so."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from synthetic_study import line, rewrite

from ablate.reports import analyse, load_frames
from ablate.reports.words.caveats import warnings
from ablate.results.ends import find_set_apart
from tests.golden import rows_of

CURVES = {"bf16": [line(3, 2, 1)] * 3, "fp4": [line(3, 2.3, 1)] * 3}


@pytest.fixture
def study(make_study):
    """Make a study with changed records: ``odd`` of fp4's last run, ``rest`` of all others."""

    def make(odd, rest=None, **plan):
        store = make_study(CURVES, **plan)
        entries = [entry for arm in store.plan().arms for entry in arm.runs]
        for entry in entries:
            run = store.run(entry.id)
            if changes := odd if entry is entries[-1] else rest:
                rewrite(run, run.environment_path, **changes)
        return load_frames(store)

    return make


SETTINGS = """
{} | {} |
{"code": "another"} | {"code": "one"} | code: another, one
{"fingerprints": ["a1", "b2"]} | {"fingerprints": ["a1"]} | arithmetic: a1 then b2, a1
{"gpu": "NVIDIA B200"} | {} | device: NVIDIA B200, CPU
{"gpu": "NVIDIA B200", "backend_mode": "imported"} | {} |
{"world_size": 8} | {"world_size": 1} | world_size: 8, 1
# What a record does not tell is no difference.
{"world_size": 8} | {} |
{"ablate": null, "git_commit": null} | {} |
"""


def waiving(frames, setting):
    return replace(frames, plan=replace(frames.plan, waive=(setting,)))


@pytest.mark.parametrize(("odd", "rest", "apart"), rows_of(SETTINGS))
def test_a_run_of_another_setting_than_most_is_no_result(study, odd, rest, apart):
    frames = study(json.loads(odd), json.loads(rest))
    analysis = analyse(frames)
    assert [arm.n for arm in analysis.arms] == [3, 2 if apart else 3]
    if not apart:
        assert analysis.set_apart == ()
        return
    (run,) = analysis.set_apart
    assert run.run == frames.plan.arms[1].runs[2].id
    assert f"{run.setting}: {run.own}, {run.others}" == apart
    said = "".join(warnings(analysis, ()))
    what = f"{run.setting.replace('_', ' ')} ({run.own}; "
    assert f"Not pooled: 1 run of fp4, of other {what}" in said
    assert [arm.n for arm in analyse(waiving(frames, run.setting)).arms] == [3, 3]


def test_code_that_an_arm_tests_is_that_of_most_of_its_runs(make_study):
    store = make_study(CURVES | {"again": CURVES["fp4"]})
    plan = store.plan()
    edited = plan.arms[2].runs[2].id
    for arm, entry in plan.runs():
        code = "base" if arm.name == "bf16" else "new"
        run = store.run(entry.id)
        if entry.id == edited:
            code = "edited"
        rewrite(run, run.environment_path, code=code)
    frames = load_frames(store)
    tested = {"code": (None, "new")}
    arms = (plan.arms[0], *(replace(arm, differs=tested) for arm in plan.arms[1:]))
    frames = replace(frames, plan=replace(plan, arms=arms))
    assert [run.run for run in find_set_apart(frames)] == [edited]


MEASURED = """
data       | {"data_digest": "other"}
tokenizer  | {"vocab_size": 999}
evaluation | {"training": {"tokens": 300, "eval_tokens": 7}}
evaluation | {"training": {"tokens": 300, "eval_tokens": 5, "eval_windows": "first"}}
evaluation | {"training": {"tokens": 300, "eval_tokens": 5, "evaluate_in": "bf16"}}
           | {"training": {"tokens": 300, "eval_tokens": 5, "evaluate_in": "both"}}
"""


@pytest.mark.parametrize(("setting", "change"), rows_of(MEASURED))
def test_an_arm_measured_with_something_else_has_no_token_cost(
    make_study, setting, change
):
    store = make_study(CURVES)
    training = {"tokens": 300, "eval_tokens": 5}
    same = {"data_digest": "d", "vocab_size": 256, "training": training}
    configs = {"bf16": same, "fp4": same | json.loads(change)}
    for arm, entry in store.plan().runs():
        run = store.run(entry.id)
        rewrite(run, run.config_path, **configs[arm.name])
    frames = load_frames(store)
    assert {run.setting for run in find_set_apart(frames)} == {setting} - {""}
    assert (analyse(frames).arms[1].token_cost.kind == "none") == bool(setting)
    assert analyse(waiving(frames, setting)).arms[1].token_cost.kind != "none"
