"""A study that runs without Ray and MLflow: each run is written as a trainer would, along a known curve."""

import math
from types import SimpleNamespace

import pytest

from ablate.base.files import append_line
from ablate.execute import driver
from ablate.store import Status
from ablate.track.cursor import MirrorReport

STUDY = """\
name: tiny
baseline: bf16
target: null
seeds: 2
base:
  model: {width: 32, layers: 1, heads: 2, ffn: 32}
  data: {source: text, paths: [text.txt], tokenizer: bytes}
  training: {tokens: 20_480, seq_len: 64, batch_size: 16, eval_tokens: 4096, eval_every_tokens: 1024}
arms:
  bf16: {recipe: bf16}
  fp4: {recipe: mxfp4}
"""
TEXT = "\n\n".join(f"Paragraph {n} has its words. " * 8 for n in range(300))


def without_mlflow(monkeypatch):
    def start(_folder, uri):
        return SimpleNamespace(tracking_uri=str(uri), stop=MirrorReport)

    monkeypatch.setattr("ablate.track.process.start_mirror", start)


def loss_at(tokens, seed):
    """A straight line in ln tokens."""
    return 6 - 0.3 * math.log(tokens / (1 + 0.05 * seed))


@pytest.fixture
def executed(tmp_path, monkeypatch):
    """Write the study, and run studies without Ray; returns the (arm, seed) of each call. Seed 7 fails."""
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "tiny.yaml").write_text(STUDY)
    monkeypatch.chdir(tmp_path)
    calls = []

    def execute_study(store, runs, **_options):
        calls.append([(run.arm, run.config.seed) for run in runs])
        states = {}
        for request in runs:
            run, seed = store.run(request.run_id), request.config.seed
            run.create({"seed": seed})
            for at in range(1024, 20_481, 1024):
                row = {"tokens": at, "step": at // 1024, "time_unix": 1.7e9}
                append_line(run.metrics_path, row | {"kind": "eval", "val_loss": loss_at(at, seed)})
                append_line(run.metrics_path, row | {"kind": "train", "tokens_per_sec": 5000.0})
            states[request.run_id] = "failed" if seed == 7 else "finished"
            run.write_status(Status(state=states[request.run_id], attempt=1, message="a fault"))
        return driver.ExecutionEnd(states=states, interrupted=False)

    monkeypatch.setattr(driver, "execute_study", execute_study)
    without_mlflow(monkeypatch)
    return calls
