"""`ablate run` with a stop rule, on real Ray: a bad arm is stopped, and goes on without the rule."""

from __future__ import annotations

import json

import pytest

from ablate.store import StudyStore
from tests.cli.command import ablate

pytestmark = pytest.mark.xdist_group("ray")

TRAINER = """\
import time
from pathlib import Path

from ablate.train.loop import TrainResult

HERE = Path(__file__).parent


def train(config, on_metrics, *, tokens, should_stop, checkpoints, device):
    bad = config.training.learning_rate < 1e-4
    if bad and config.seed < 2:
        on_metrics({"kind": "eval", "tokens": 512, "step": 1, "val_loss": 9.0})
        return TrainResult(state="diverged", tokens=512, step=1, message="the loss is 9")
    for step in range(1, 21):
        # The last seeds of the bad arm wait, so that there is something to be stopped.
        while bad and not should_stop() and not (HERE / "free").exists():
            time.sleep(0.02)
        loss = 4.0 - 0.15 * step * (1 + 0.01 * config.seed)
        on_metrics({"kind": "eval", "tokens": 512 * step, "step": step, "val_loss": loss})
        if should_stop():
            return TrainResult(state="interrupted", tokens=512 * step, step=step, message="asked to")
    return TrainResult(state="finished", tokens=512 * 20, step=20)
"""
STUDY = """\
name: small
baseline: good
target: {val_loss: 2.6}
seeds: 5
stop: {diverged: 2}
base:
  trainer: trainer.py:train
  data: {source: stdlib, tokenizer: bytes, max_bytes: 500_000}
  training:
    {tokens: 10_240, seq_len: 64, batch_size: 8, warmup_tokens: 512, eval_every_tokens: 512, eval_tokens: 512}
arms:
  good: {recipe: bf16}
  bad: {recipe: bf16, training: {learning_rate: 1e-5}}
"""


def states(folder):
    store = StudyStore(folder / "runs/small")
    found = {(arm.name, run.seed): store.run(run.id).status() for arm, run in store.plan().runs()}
    return {key: (status.state, status.message) for key, status in found.items()}


def report(folder):
    found = json.loads((folder / "runs/small/report/report.json").read_text())
    return found, {arm["name"]: arm for arm in found["arms"]}


@pytest.mark.exhaustive
@pytest.mark.usefixtures("local_ray")
def test_a_bad_arm_is_stopped_and_goes_on_without_the_rule(tmp_path):
    (tmp_path / "trainer.py").write_text(TRAINER)
    (tmp_path / "small.yaml").write_text(STUDY)
    first = ablate("run", "small.yaml", cwd=tmp_path)
    assert first.code == 0, first
    assert "Early stops saved" in first.out
    found = states(tmp_path)
    assert {found["good", seed][0] for seed in range(5)} == {"finished"}
    assert {found["bad", seed] for seed in (2, 3, 4)} == {("stopped", "2 of its runs have diverged")}
    whole, arms = report(tmp_path)
    bad = arms["bad"]
    assert (bad["stopped"]["kind"], bad["n"], bad["diverged"], whole["runs_missing"]) == ("diverged", 2, 2, 0)
    assert whole["stop"]["tokens_saved"] == bad["stopped"]["tokens_saved"] > 0

    again = ablate("run", "small.yaml", cwd=tmp_path)
    assert again.code == 0, again
    assert "0 to run" in again.out
    assert "3 are not needed" in again.out
    assert states(tmp_path) == found

    (tmp_path / "small.yaml").write_text(STUDY.replace("stop: {diverged: 2}\n", ""))
    (tmp_path / "free").touch()
    free = ablate("run", "small.yaml", cwd=tmp_path)
    assert free.code == 0, free
    assert "3 to run" in free.out
    assert {states(tmp_path)["bad", seed][0] for seed in (2, 3, 4)} == {"finished"}
    whole, arms = report(tmp_path)
    assert (whole["stop"], arms["bad"]["n"]) == (None, 5)
