"""What ``ablate run`` says at its end. The whole verb is tested in ``tests/test_end_to_end.py``."""

import io

import pytest
from rich.console import Console

from ablate.cli.run import _conclude
from ablate.execute.driver import Outcome
from ablate.plan import build_plan
from ablate.spec import load_study
from ablate.store import Status, StudyStore

STUDY = """\
name: small
baseline: bf16
target: {val_loss: 2.0}
seeds: 1
arms:
  bf16: {recipe: bf16}
  fp8: {recipe: fp8}
"""


@pytest.fixture
def conclude(tmp_path):
    (tmp_path / "small.yaml").write_text(STUDY)
    plan = build_plan(load_study(tmp_path / "small.yaml"))
    store = StudyStore(tmp_path / "runs" / "small")
    ids = {run.arm: run.id for _, run in plan.runs()}
    for run_id in ids.values():
        store.run(run_id).create({})
        store.run(run_id).write_status(Status(state="finished", attempt=1))

    def call(states, *, failed=(), unfinished=(), interrupted=False, chosen=("bf16", "fp8")):
        for arm in failed:
            run = store.run(ids[arm])
            run.write_status(Status(state="failed", attempt=1, message="ValueError: no such thing"))
            run.attempt_log(1).write_text("".join(f"line {n}\n" for n in range(20)) + "[odd] markup\n")
        for arm in unfinished:
            store.run(ids[arm]).write_status(Status(state="interrupted", attempt=1))
        output = io.StringIO()
        code = _conclude(
            Console(file=output, width=200),
            store,
            plan,
            {ids[arm] for arm in chosen},
            Outcome(states={ids[arm]: state for arm, state in states.items()}, interrupted=interrupted),
            study="small.yaml",
        )
        return code, output.getvalue()

    return call


def test_all_well(conclude):
    assert conclude({"bf16": "finished", "fp8": "finished"}) == (0, "")


def test_a_failure_is_shown_with_its_last_lines(conclude):
    code, output = conclude({"bf16": "finished", "fp8": "failed"}, failed=["fp8"])
    assert code == 1
    assert "Failed: fp8 seed 0: ValueError: no such thing" in output
    assert "line 19" in output
    assert "[odd] markup" in output
    assert "line 5\n" not in output
    assert "1 run failed; try again with: ablate run small.yaml --retry-failed" in output


def test_an_old_failure_counts_only_where_it_was_asked_for(conclude):
    code, output = conclude({}, failed=["fp8"])
    assert code == 1
    assert "Failed:" not in output
    assert conclude({}, failed=["fp8"], chosen=["bf16"]) == (0, "")


def test_a_run_without_a_result_is_no_success(conclude):
    code, output = conclude({"bf16": "finished", "fp8": "interrupted"}, unfinished=["fp8"])
    assert code == 1
    assert "1 run has no result yet; go on with: ablate run small.yaml" in output


def test_an_interruption_says_how_to_go_on(conclude):
    code, output = conclude({"bf16": "interrupted"}, interrupted=True)
    assert code == 130
    assert "go on with: ablate run small.yaml" in output
