"""``run_study`` as a plain call; on real Ray: ``tests/test_end_to_end.py``."""

import pytest

from ablate.base.errors import UserError
from ablate.execute.driver import request_stop
from ablate.workflow import Where
from ablate.workflow.run import run_study
from tests.cli.command import ablate
from tests.workflow.fakes import STUDY


def test_a_plain_call_says_nothing_and_returns_how_it_ended(executor, tmp_path, capfd):
    (tmp_path / "tiny.yaml").write_text(STUDY.replace("seeds: 2", "seeds: [0, 7]"))
    where = Where(storage=tmp_path / "runs")
    end = run_study("tiny.yaml", where, only=["fp4"])
    assert executor.calls[0] == [("fp4", 0), ("fp4", 7)]
    assert [*end.failed] == ["fp4 seed 7: no such luck"]
    assert (sorted(end.states), end.is_done) == (["failed", "finished"], False)
    assert end.report == where.storage / "tiny/report/report.html"
    end = run_study("tiny.yaml", where, seeds=[0])
    assert executor.calls[1] == [("bf16", 0)]
    assert (end.failed, end.is_done) == ({}, True)
    end = run_study("tiny.yaml", where, only=["fp4"])
    assert len(executor.calls) == 2  # nothing was left to run
    assert (end.failed, end.is_done) == ({}, False)  # it failed in an earlier call
    run_study("tiny.yaml", where, only=["fp4"], retry_failed=True)
    assert executor.calls[2] == [("fp4", 7)]
    assert capfd.readouterr().out == ""
    with pytest.raises(
        UserError, match=r"cannot write to .*tiny.yaml: Not a directory"
    ):
        run_study("tiny.yaml", Where(storage=tmp_path / "tiny.yaml"))


def test_a_cancelled_study_begins_no_more_seeds(executor, tmp_path):
    text = STUDY.replace("null", "{val_loss: 2.6}").replace(
        "seeds: 2", "seeds: {until: settled, at_most: 4}"
    )
    (tmp_path / "tiny.yaml").write_text(text)
    executor.begins = lambda store: request_stop(store.path)
    assert ablate("run tiny.yaml", cwd=tmp_path).code == 130
    assert len(executor.calls) == 1
