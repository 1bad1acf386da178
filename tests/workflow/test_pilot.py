"""``ablate pilot`` through the command line, on made-up runs; on real Ray: ``tests/test_examples.py``."""

from __future__ import annotations

import json
from types import SimpleNamespace

from tests.cli.command import ablate
from tests.workflow.fakes import STUDY

TUNED = f"""\
# my study
{STUDY.replace("seeds: 2", "seeds: 3")}
tune:
  fields: {{learning_rate: {{low: 1.0e-3, high: 1.0e-2, log: true}}}}
  tokens: 2_048
  trials: 2
"""


def test_the_pilot_trains_the_baseline_alone_and_its_target_is_written(executor, tmp_path, monkeypatch):
    timed = [
        SimpleNamespace(arm=arm, median=speed, backend_mode="emulated")
        for arm, speed in (("bf16", 100.0), ("fp4", 25.0))
    ]
    speeds = SimpleNamespace(arms=timed)
    monkeypatch.setattr("ablate.workflow.pilot.arm_speeds", lambda *_args, **_options: speeds)
    (tmp_path / "tiny.yaml").write_text(TUNED)
    done = ablate("pilot", "tiny.yaml", "--write", cwd=tmp_path)
    assert done.code == 0, done
    assert executor.calls == [[("bf16", 0), ("bf16", 1)]]  # no trials, no other arm
    assert "seeds 0 and 1 reach 3.144 nats per token after" in done.out
    assert "pairs of runs spread by 4.4%, as FP4 arms of docs/findings do" in done.out
    assert "the rest of the study, 3 seeds an arm: about" in done.out
    assert "a token of fp4 takes 4.0 times the baseline's time" in done.out
    written = (tmp_path / "tiny.yaml").read_text()
    assert written.startswith(TUNED.partition("null")[0] + "{val_loss: 3.144}  # nats")
    assert written.endswith(TUNED.partition("target: null\n")[2])
    assert not (tmp_path / "runs/tiny/report").exists()

    again = ablate("pilot", "tiny.yaml", "--json", cwd=tmp_path)
    assert len(executor.calls) == 1  # the same runs, of a study that now has a target
    advice = json.loads(again.out)
    assert advice["own"] == advice["take"]
    assert advice["take"]["val_loss"] == 3.144
    assert [row["cost"] for row in advice["needed"]] == [0.2, 0.1, 0.05, 0.03]
    said = ablate("pilot", "tiny.yaml", "--write", cwd=tmp_path).line
    assert "--write: tiny.yaml has a target already" in said
