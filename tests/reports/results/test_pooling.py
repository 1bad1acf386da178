"""Runs that differ in what the study does not compare are set apart, unless it says so."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from synthetic_study import line, rewrite

from ablate.reports import analyse, load_frames, write_report
from ablate.results.pooling import SETTINGS, find_set_apart

CURVES = {"bf16": [line(3, 2, 1)] * 3, "fp4": [line(3, 2.3, 1)] * 3}


def change(store, arm, number, **environment):
    run = store.run(store.plan().arms[arm].runs[number].id)
    rewrite(run, run.environment_path, **environment)
    return run.run_id


def test_alike_runs_are_pooled(make_study):
    assert find_set_apart(load_frames(make_study(CURVES))) == ()


def test_a_run_of_other_code_is_no_result(make_study):
    store = make_study(CURVES)
    odd = change(store, 1, 2, code="another")
    for arm, number in ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1)):
        change(store, arm, number, code="one")
    analysis = analyse(load_frames(store))
    assert [(run.run, run.setting, run.own, run.others) for run in analysis.set_apart] == [
        (odd, "code", "another", "one")
    ]
    assert [arm.n for arm in analysis.arms] == [3, 2]
    page = write_report(store)
    assert "Not pooled: 1 run of fp4, of other code (another; the others: one)" in page.html.read_text()
    document = json.loads(page.json.read_text())
    assert document["not_pooled"][0]["setting"] == "code"


def test_a_run_that_was_moved_to_another_arithmetic_is_named_and_no_result(make_study):
    store = make_study(CURVES)
    for arm, number in ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1)):
        change(store, arm, number, fingerprints=["a1"])
    odd = change(store, 1, 2, fingerprints=["a1", "b2"])
    frames = load_frames(store)
    (apart,) = analyse(frames).set_apart
    assert (apart.run, apart.setting, apart.own, apart.others) == (odd, "arithmetic", "a1 then b2", "a1")
    page = write_report(store).html.read_text()
    assert "Not pooled: 1 run of fp4, of other arithmetic (a1 then b2; the others: a1)" in page
    assert "Partial: 1 of 6 runs are no results (1 of other arithmetic)." in page
    assert [arm.n for arm in analyse(frames, waive=["arithmetic"]).arms] == [3, 3]


def test_waived_in_the_study_or_in_the_call(make_study):
    store = make_study(CURVES, waive=["code"])
    change(store, 1, 2, code="another")
    for arm, number in ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1)):
        change(store, arm, number, code="one")
    frames = load_frames(store)
    assert [arm.n for arm in analyse(frames).arms] == [3, 3]
    assert analyse(frames).waived == ("code",)
    assert "differ in code are pooled" in write_report(store).html.read_text()
    frames = replace(frames, plan=replace(frames.plan, waive=()))
    assert [arm.n for arm in analyse(frames, waive=["code"]).arms] == [3, 3]
    assert [arm.n for arm in analyse(frames).arms] == [3, 2]


@pytest.mark.parametrize(
    ("setting", "change"),
    [
        ("data", {"data_digest": "other"}),
        ("tokenizer", {"vocab_size": 999}),
        ("evaluation", {"training": {"tokens": 300, "eval_tokens": 7}}),
        ("evaluation", {"training": {"tokens": 300, "eval_tokens": 5, "eval_windows": "first"}}),
        ("evaluation", {"training": {"tokens": 300, "eval_tokens": 5, "evaluate_in": "bf16"}}),
    ],
)
def test_an_arm_measured_with_something_else_has_no_token_cost(make_study, setting, change):
    store = make_study(CURVES)
    same = {"data_digest": "d", "vocab_size": 256, "training": {"tokens": 300, "eval_tokens": 5}}
    for arm in store.plan().arms:
        for entry in arm.runs:
            content = same | (change if arm.name == "fp4" else {})
            run = store.run(entry.id)
            rewrite(run, run.config_path, **content)
    analysis = analyse(load_frames(store))
    assert {run.setting for run in analysis.set_apart} == {setting}
    assert analysis.arms[1].token_cost.kind == "none"
    assert analyse(load_frames(store), waive=[setting]).arms[1].token_cost.kind != "none"


def test_a_second_evaluation_in_bf16_changes_not_what_is_compared(make_study):
    store = make_study(CURVES)
    for arm in store.plan().arms:
        for entry in arm.runs:
            how = "both" if arm.name == "fp4" else "recipe"
            rewrite(
                (run := store.run(entry.id)), run.config_path, training={"tokens": 300, "evaluate_in": how}
            )
    assert find_set_apart(load_frames(store)) == ()


def test_what_a_record_does_not_tell_is_no_difference(make_study):
    store = make_study(CURVES)
    change(store, 1, 0, ablate=None, git_commit=None)
    assert find_set_apart(load_frames(store)) == ()
    change(store, 1, 0, world_size=8)
    assert find_set_apart(load_frames(store)) == ()  # the others do not say how many they had
    change(store, 0, 0, world_size=1)
    change(store, 0, 1, world_size=1)
    assert [run.setting for run in find_set_apart(load_frames(store))] == ["world_size"]


def test_runs_of_another_kind_of_device_are_not_mixed_in(make_study):
    store = make_study(CURVES)
    odd = change(store, 1, 0, gpu="NVIDIA B200")
    (found,) = find_set_apart(load_frames(store))
    assert (found.run, found.setting, found.own, found.others) == (odd, "device", "NVIDIA B200", "CPU")
    change(store, 1, 0, gpu="NVIDIA B200", backend_mode="imported")
    assert find_set_apart(load_frames(store)) == ()


def test_every_setting_is_looked_at():
    assert set(SETTINGS) == {"data", "tokenizer", "evaluation", "code", "device", "arithmetic", "world_size"}
