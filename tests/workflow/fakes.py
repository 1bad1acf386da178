"""Studies without Ray and MLflow: each run is written as a trainer would, along a known curve."""

import contextlib
import math
from dataclasses import asdict
from types import SimpleNamespace

import pytest

from ablate.base.files import append_line
from ablate.execute import driver
from ablate.execute.queue import ExecutionEnd
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


BEST = {"bf16": 2e-3, "fp4": 8e-3}
"""The best rate of each arm, where the loss is that of a rate."""


def loss_at(run, tokens):
    """A straight line in ln tokens."""
    return 6 - 0.3 * math.log(tokens / (1 + 0.05 * run.config.seed))


def loss_of_a_rate(run, tokens):
    """The further from its arm's best rate, the higher."""
    rate = run.config.training.learning_rate
    return (
        9
        - 0.3 * math.log(tokens)
        + math.log(rate / BEST[run.arm.partition(" ")[0]]) ** 2
    )


class Executor:
    """Runs in the place of Ray: (arm, seed) of what ran in each call, and what may go wrong.

    ``looks``: whether it asks after each evaluation which runs are needed.
    """

    def __init__(self):
        self.calls = []
        self.stops_after = 1_000_000
        self.problem, self.looks = None, False
        self.loss = loss_at
        self.end = lambda run: "failed" if run.config.seed == 7 else "finished"
        self.begins = lambda _store: None

    @property
    def ran(self):
        return [run for call in self.calls for run in call]

    def __call__(self, store, todo, unneeded=dict, **_):
        self.begins(store)
        self.calls.append([])
        states, names = {}, {run.id: arm.name for arm, run in store.plan().runs()}
        for request in todo:
            if len(self.ran) >= self.stops_after:
                interrupted = self.problem is None
                return ExecutionEnd(
                    states=states, interrupted=interrupted, problem=self.problem
                )
            run, every = store.run(request.run_id), request.config.training.tokens // 20
            run.create(asdict(request.config))
            one = SimpleNamespace(arm=names[request.run_id], config=request.config)
            state = self.end(one)
            for step in range(1, 21):
                row = {"tokens": every * step, "step": step, "time_unix": 1.7e9}
                loss = self.loss(one, every * step)
                append_line(run.metrics_path, row | {"kind": "eval", "val_loss": loss})
                append_line(
                    run.metrics_path, row | {"kind": "train", "tokens_per_sec": 5000.0}
                )
                if self.looks and request.run_id in unneeded():
                    state = "stopped"
                    break
            states[request.run_id] = state
            run.write_status(
                Status(
                    state=state, attempt=1, tokens=every * step, message="no such luck"
                )
            )
            self.calls[-1].append((one.arm, one.config.seed))
        return ExecutionEnd(states=states, interrupted=False)


@pytest.fixture
def executor(tmp_path, monkeypatch, without_figures):
    """Write the study, and run studies without Ray."""
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "tiny.yaml").write_text(STUDY)
    monkeypatch.chdir(tmp_path)
    fake = Executor()
    monkeypatch.setattr(driver, "execute_study", fake)
    monkeypatch.setattr(
        "ablate.execute.cluster.connection", lambda *_: contextlib.nullcontext()
    )
    mirror = lambda _, uri: SimpleNamespace(tracking_uri=str(uri), stop=MirrorReport)  # noqa: E731
    monkeypatch.setattr("ablate.track.process.start_mirror", mirror)
    return fake
