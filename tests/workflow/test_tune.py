"""``run_study`` of a study that tunes its arms: stopped at any trial, it comes to the same values."""

import json

import pytest

from ablate.store import StudyStore
from tests.cli.command import ablate
from tests.exhaustive import rest_exhaustive
from tests.workflow.fakes import STUDY, loss_of_a_rate

TUNE = """\
tune:
  fields: {learning_rate: {low: 5.0e-4, high: 1.6e-2, log: true}}
  tokens: 2048
  trials: 4
"""


def found(folder):
    """What the search tried, how that ended, and what it chose."""
    groups = StudyStore(folder / "tiny").plan().tuning.groups
    return [
        (one.name, one.chosen, [(t.number, t.values, t.loss) for t in one.trials])
        for one in groups
    ]


@pytest.mark.parametrize(
    "after", rest_exhaustive([0, 1, 3, 6, 7, 8, 10], lambda after: after == 3)
)
def test_tuning_that_was_stopped_goes_on_to_the_same_values_and_runs(
    executor, tmp_path, after
):
    def tune(storage):
        return ablate("run tiny.yaml", cwd=tmp_path, storage=storage)

    executor.loss = loss_of_a_rate
    (tmp_path / "tiny.yaml").write_text(STUDY + TUNE)
    whole = tune("whole")
    assert whole.code == 0, whole
    assert "Tuning 2 groups of arms, 4 trials of 2,048 tokens each." in whole.out
    count = len(executor.ran)
    executor.calls.clear()
    executor.stops_after = after
    assert tune("runs").code == 130
    executor.stops_after = 1_000_000
    ended = tune("runs")
    assert ended.code == 0, ended
    assert len(executor.ran) == len(set(executor.ran)) == count  # none is trained twice
    assert found(tmp_path / "runs") == found(tmp_path / "whole")
    lock = StudyStore(tmp_path / "runs/tiny").plan()
    assert all(len(group.trials) == 4 for group in lock.tuning.groups)
    report = json.loads((tmp_path / "runs/tiny/report/report.json").read_text())
    assert (report["runs_missing"], report["baseline"]) == (
        0,
        lock.tuning.tuned["bf16"],
    )

    again = tune("runs").out
    assert "Tuning" not in again  # found before
    assert "0 to run" in again
    assert "tiny tune: " in ablate("status tiny", cwd=tmp_path).out
