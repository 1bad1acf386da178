"""``run_study`` as a plain call; on real Ray: ``tests/test_end_to_end.py``."""

from __future__ import annotations

import pytest

from ablate.base.errors import UserError
from ablate.base.files import append_line
from ablate.execute import driver
from ablate.store import Status, StudyStore
from ablate.track.cursor import MirrorReport
from ablate.workflow import Listener, Where
from ablate.workflow.run import run_study

STUDY = """\
name: tiny
baseline: bf16
target: {val_loss: 2.0}
seeds: 2
base:
  model: {width: 32, layers: 1, heads: 2, ffn: 32}
  data: {source: text, paths: [text.txt], tokenizer: bytes}
  training: {tokens: 10_240, seq_len: 64, batch_size: 16, eval_tokens: 4096, eval_every_tokens: 10_240}
arms:
  bf16: {recipe: bf16}
  fp4: {recipe: mxfp4}
"""


class Mirror:
    """A mirror that has sent everything."""

    def __init__(self, uri):
        self.tracking_uri = str(uri)

    def stop(self):
        return MirrorReport()


@pytest.fixture
def executed(tmp_path, monkeypatch):
    """Run studies without Ray: seed 0 ends, seed 1 fails; returns the requests of each call."""
    (tmp_path / "text.txt").write_text("\n\n".join(f"Paragraph {n} has its words. " * 8 for n in range(300)))
    (tmp_path / "tiny.yaml").write_text(STUDY)
    monkeypatch.chdir(tmp_path)
    calls = []

    def execute_study(store, runs, **_options):
        calls.append(runs)
        states = {}
        for request in runs:
            run = store.run(request.run_id)
            run.create({"seed": request.config.seed})
            row = {"kind": "eval", "tokens": 10_240, "step": 1, "time_unix": 1.7e9, "val_loss": 1.5}
            append_line(run.metrics_path, row)
            states[request.run_id] = "failed" if request.config.seed else "finished"
            run.write_status(Status(state=states[request.run_id], attempt=1, message="a fault"))
        return driver.ExecutionEnd(states=states, interrupted=False)

    monkeypatch.setattr(driver, "execute_study", execute_study)
    monkeypatch.setattr("ablate.track.process.start_mirror", lambda _folder, uri: Mirror(uri))
    monkeypatch.setattr("ablate.workflow.run._report", lambda _store, _listener: tmp_path / "report.html")
    return calls


def test_a_plain_call_says_nothing_and_returns_how_it_ended(executed, tmp_path, capfd):
    where = Where(storage=tmp_path / "runs")
    end = run_study("tiny.yaml", where, only=["fp4"])
    assert [request.arm for request in executed[0]] == ["fp4", "fp4"]
    assert [(run.arm, run.seed, run.message) for run in end.failed] == [("fp4", 1, "a fault")]
    assert (end.num_failed, end.num_missing, end.is_done) == (1, 0, False)
    assert end.report == tmp_path / "report.html"
    end = run_study("tiny.yaml", where, seeds=[0])
    assert [(request.arm, request.config.seed) for request in executed[1]] == [("bf16", 0)]
    assert (end.failed, end.is_done) == ((), True)
    run_study("tiny.yaml", where, only=["fp4"])
    assert len(executed) == 2  # nothing was left to run
    run_study("tiny.yaml", where, only=["fp4"], retry_failed=True)
    assert [(request.arm, request.config.seed) for request in executed[2]] == [("fp4", 1)]
    assert capfd.readouterr().out == ""


def test_what_the_study_does_not_have_is_refused_before_anything_is_made(executed, tmp_path):
    with pytest.raises(UserError, match="no arm 'fp5' in study 'tiny'"):
        run_study("tiny.yaml", Where(storage=tmp_path / "runs"), only=["fp5"])
    with pytest.raises(UserError, match="7 is not a seed of study 'tiny'"):
        run_study("tiny.yaml", Where(storage=tmp_path / "runs"), seeds=[0, 7])
    assert not (tmp_path / "runs").exists()
    assert executed == []


def test_a_storage_that_cannot_be_written_is_one_line(executed, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot write to .*file: Not a directory"):
        run_study("tiny.yaml", Where(storage=tmp_path / "file"))


def test_settings_of_the_command_line_never_take_the_place_of_a_study_with_others(executed, tmp_path):
    where, said = Where(storage=tmp_path / "runs"), Listener()
    said.say = (sentences := []).append
    run_study("tiny.yaml", where)
    run_study("tiny.yaml", where, said, settings=["seeds=3"])  # the same question, and every run is kept
    assert [request.config.seed for request in executed[1]] == [2, 2]
    assert sentences[-1] == f"MLflow:  ablate dashboard tiny --storage {where.storage}"
    for setting in ("base.training.learning_rate=1e-3", "target.val_loss=1.9"):
        with pytest.raises(UserError, match=r"^--set: \S+/tiny holds .* such as --set name=tiny-2\)$"):
            run_study("tiny.yaml", where, settings=[setting])
    renamed = ["base.training.learning_rate=1e-3", "name=slow one"]
    elsewhere = Where(storage=where.storage, tracking_uri="https://me:word@mlflow")
    run_study("tiny.yaml", elsewhere, said, settings=renamed)
    assert len(executed[2]) == 4
    there = f"--storage {where.storage} --tracking-uri 'https://***@mlflow'"
    assert sentences[-1] == f"MLflow:  ablate dashboard 'slow one' {there}"
    assert StudyStore(tmp_path / "runs" / "slow one").plan().settings == tuple(renamed)
    assert not any("stay in" in sentence for sentence in sentences)

    (tmp_path / "tiny.yaml").write_text(STUDY.replace("  fp4:", "  other:").replace("mxfp4", "fp8"))
    run_study("tiny.yaml", where, said)  # an edited file is adopted, and what it leaves is said
    (left,) = [sentence for sentence in sentences if "stay in" in sentence]
    assert left.endswith("tiny, and do not count: 4.")
