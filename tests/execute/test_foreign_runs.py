"""A study of models and a trainer of the user's own, through the command line and Ray."""

import json

import pytest

from tests.cli.command import ablate

pytestmark = pytest.mark.xdist_group("ray")

MODEL = """\
import torch
from torch import nn

from ablate.train import TrainResult

class Net(nn.Module):
    def __init__(self, vocab_size):
        super().__init__()
        self.table = nn.Embedding(vocab_size, 64)
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))
        self.head = nn.Linear(64, vocab_size)

    def forward(self, tokens):
        x = self.table(tokens)
        for block in self.blocks:
            x = x + torch.relu(block(x))
        return self.head(x)

def build(*, vocab_size, seq_len):
    return Net(vocab_size)

def run(config, on_metrics, *, tokens, should_stop, checkpoints, device):
    for step in range(1, 4):
        on_metrics({"kind": "eval", "tokens": 7000 * step - 1000, "step": step, "val_loss": 6.0 / step})
    return TrainResult(state="finished", tokens=20_000, step=3)
"""
STUDY = """\
name: own
baseline: bf16
target: {val_loss: 4.0}
seeds: 1
base:
  model: {function: mine.py:build}
  training: {tokens: 20_000, eval_every_tokens: 5_000, batch_size: 8, eval_tokens: 8192}
arms:
  bf16: {recipe: bf16}
  mxfp4: {recipe: mxfp4}
  hf: {recipe: mxfp4, model: {hf: config}}
  trainer: {recipe: bf16, trainer: mine.py:run}
"""
CONFIG = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1,
    "num_attention_heads": 2,
}  # fmt: skip


@pytest.mark.exhaustive
@pytest.mark.usefixtures("local_ray")
def test_models_and_a_trainer_of_the_users(tmp_path):
    pytest.importorskip("transformers")
    (tmp_path / "mine.py").write_text(MODEL)
    (tmp_path / "s.yaml").write_text(STUDY)
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "config.json").write_text(json.dumps(CONFIG))
    done = ablate("run", "s.yaml", cwd=tmp_path)
    assert done.code == 0, done
    status = ablate("status", "own", "--json", cwd=tmp_path)
    ends = {run["arm"]: run["val_loss"] for run in json.loads(status.out)["runs"]}
    assert ends["trainer"] == 2.0
    assert all(ends[arm] < 5.0 for arm in ("bf16", "mxfp4", "hf"))
