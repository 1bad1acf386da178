"""``ablate pilot`` through the command line, on made-up runs; on real Ray: ``tests/test_examples.py``."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import pytest

from ablate.base.files import append_line
from ablate.execute import driver
from ablate.store import Status
from tests.cli.command import ablate
from tests.workflow.test_run import Mirror

STUDY = """\
# my study
name: tiny
baseline: bf16  # high precision
target: null
seeds: 3
base:
  model: {width: 32, layers: 1, heads: 2, ffn: 32}
  data: {source: text, paths: [text.txt], tokenizer: bytes}
  training: {tokens: 20_480, seq_len: 64, batch_size: 16, eval_tokens: 4096, eval_every_tokens: 1024}
arms:
  bf16: {recipe: bf16}
  fp4: {recipe: mxfp4}
tune:
  fields: {learning_rate: {low: 1.0e-3, high: 1.0e-2, log: true}}
  tokens: 2_048
  trials: 2
"""
SPEEDS = {"bf16": 100.0, "fp4": 25.0}


@pytest.fixture
def executed(tmp_path, monkeypatch):
    """Run studies without Ray: each run is a line in ln tokens; returns the seeds and arms of each call."""
    (tmp_path / "text.txt").write_text("\n\n".join(f"Paragraph {n} has its words. " * 8 for n in range(300)))
    (tmp_path / "tiny.yaml").write_text(STUDY)
    calls = []

    def execute_study(store, runs, **_options):
        calls.append([(run.arm, run.config.seed) for run in runs])
        for request in runs:
            run = store.run(request.run_id)
            run.create({})
            for at in range(1024, 20_481, 1024):
                loss = 6 - 0.3 * math.log(at / (1 + 0.05 * request.config.seed))
                row = {"tokens": at, "step": at // 1024, "time_unix": 1.7e9}
                append_line(run.metrics_path, row | {"kind": "eval", "val_loss": loss})
                append_line(run.metrics_path, row | {"kind": "train", "tokens_per_sec": 5000.0})
            run.write_status(Status(state="finished", attempt=1))
        return driver.ExecutionEnd(states={run.run_id: "finished" for run in runs}, interrupted=False)

    monkeypatch.setattr(driver, "execute_study", execute_study)
    monkeypatch.setattr("ablate.track.process.start_mirror", lambda _folder, uri: Mirror(uri))
    timed = [SimpleNamespace(arm=arm, median=speed, backend_mode="emulated") for arm, speed in SPEEDS.items()]
    monkeypatch.setattr("ablate.workflow.pilot.arm_speeds", lambda *_args, **_options: (timed, None))
    return calls


def test_the_pilot_trains_the_baseline_alone_and_its_target_is_written_into_the_file(executed, tmp_path):
    done = ablate("pilot", "tiny.yaml", "--write", cwd=tmp_path)
    assert done.code == 0, done
    assert executed == [[("bf16", 0), ("bf16", 1)]]  # no trials, no other arm
    assert "seeds 0 and 1 reach 3.144 nats per token after" in done.out
    assert "pairs of runs spread by 3.5%" in done.out
    assert "the rest of the study, 3 seeds an arm: about" in done.out
    assert "a token of fp4 takes 4.0 times the baseline's time" in done.out
    written = (tmp_path / "tiny.yaml").read_text()
    assert written.startswith(STUDY.split("target", maxsplit=1)[0] + "target: {val_loss: 3.144}  # nats")
    assert written.endswith(STUDY.partition("target: null\n")[2])
    assert not (tmp_path / "runs/tiny/report").exists()

    again = ablate("pilot", "tiny.yaml", "--json", cwd=tmp_path)
    assert len(executed) == 1  # the same runs, of a study that now has a target
    advice = json.loads(again.out)
    assert advice["own"] == advice["take"]
    assert advice["take"]["val_loss"] == 3.144
    assert [row["cost"] for row in advice["needed"]] == [0.2, 0.1, 0.05, 0.03]
    assert (
        "--write: tiny.yaml has a target already"
        in ablate("pilot", "tiny.yaml", "--write", cwd=tmp_path).line
    )


def test_without_a_target_the_report_compares_final_losses(executed, tmp_path):
    (tmp_path / "tiny.yaml").write_text(STUDY.partition("tune:")[0])
    done = ablate("run", "tiny.yaml", cwd=tmp_path)
    assert done.code == 0, done
    assert "Final loss of 1 arm against bf16" in done.out
    report = json.loads((tmp_path / "runs/tiny/report/report.json").read_text())
    assert report["target"] is None
    assert report["arms"][1]["final_loss"]["difference"]["estimate"] == pytest.approx(0.0)


def test_a_study_of_one_seed_has_no_pilot(executed, tmp_path):
    (tmp_path / "tiny.yaml").write_text(STUDY.replace("seeds: 3", "seeds: 1"))
    assert "a pilot needs two seeds" in ablate("pilot", "tiny.yaml", cwd=tmp_path).line
    assert executed == []
