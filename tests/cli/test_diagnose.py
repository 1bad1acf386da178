"""``ablate diagnose``: a model of any kind, its ranking, and one line for what cannot be used."""

import json
import re
from dataclasses import replace

import pytest

from ablate.execute.worker import execute_run
from ablate.store import RunDir
from tests.cli.command import ablate
from tests.execute.kill import make_run, task_of

QUICK = "--seq-len 32 --sequences 2 --device cpu"
MODEL = """\
from torch import nn

class Net(nn.Module):
    def __init__(self, vocab_size):
        super().__init__()
        self.table = nn.Embedding(vocab_size, 64)
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))
        self.head = nn.Linear(64, vocab_size)

    def forward(self, tokens):
        x = self.table(tokens)
        for block in self.blocks:
            x = x + block(x).relu()
        return self.head(x)

def build(*, vocab_size, seq_len):
    return Net(vocab_size)
"""


@pytest.fixture
def call(tmp_path, monkeypatch):
    monkeypatch.setenv("ABLATE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "80")
    (tmp_path / "text").mkdir()
    for n in range(40):
        text = f"The error of document {n} is structured, not random. " * 20
        (tmp_path / "text" / f"{n}.txt").write_text(text)
    (tmp_path / "net.py").write_text(MODEL)
    return lambda words: ablate(f"diagnose {words}", cwd=tmp_path, storage=tmp_path)


@pytest.fixture
def found(call):
    return lambda words: json.loads(call(f"{words} --draws 2 --device cpu --json").out)


def test_a_users_model_on_a_users_text(found, tmp_path):
    recipe = "'{gemms: [fprop, wgrad], stabiliser: sr}'"
    content = found(
        f"net.py:build --data text --recipe {recipe} {QUICK} --out harm.json"
    )
    assert content == json.loads((tmp_path / "harm.json").read_text())
    assert content["weights"] == "random initial weights of seed 0"
    assert content["tokens"] == 64
    assert content["recipe"].startswith("Fprop+Wgrad mxfp4")
    assert {(one["layer"], one["gemm"]) for one in content["gemms"]} == {
        (f"blocks.{n}", gemm) for n in (0, 1) for gemm in ("fprop", "wgrad")
    }
    assert content["gemms"][0]["harm"] >= content["gemms"][-1]["harm"]
    assert content["gemms"][0]["diagnosis"]["product"]["draws"] == 2
    assert content["out_of_reach"] == []


def test_a_preset_and_the_table(call):
    layer = "--layers blocks.0.attention.out"
    shown = call(f"gpt-tiny --data text {layer} {QUICK}").out
    assert "\ngpt-tiny, random initial weights of seed 0; mxfp4; 64 tokens\n" in shown
    assert shown.count("\nblocks.0.attention.out") == 3
    assert re.search(r"The first \d of 3 GEMMs make \d+% of the predicted harm", shown)
    assert "A prediction from one batch" in shown


def test_a_runs_checkpoint_and_final_weights_with_its_own_recipe_and_another(
    call, found, tmp_path
):
    run = make_run(RunDir(tmp_path / "study" / "runs" / "0123456789abcdef"), 1, 6)
    task = task_of(run, tmp_path)
    task.stop_path.touch()
    assert execute_run(task).state == "interrupted"
    content = found(f"{run.path} {QUICK}")
    assert content["weights"] == "the checkpoint after step 1"
    assert {one["gemm"] for one in content["gemms"]} == {"dgrad", "wgrad"}  # tseng's
    other = found(f"{run.path} {QUICK} --recipe te-hybrid-fp8-delayed")
    assert {one["gemm"] for one in other["gemms"]} == {"fprop", "dgrad", "wgrad"}
    task.stop_path.unlink()
    assert execute_run(task).state == "finished"
    assert call(run.path).line == (
        f"{run.path}: no weights were kept (train it again with: ablate run STUDY --set keep_weights=true "
        f"--set name=ANOTHER)"
    )
    run.status_path.unlink()
    assert execute_run(replace(task, keep_weights=True)).state == "finished"
    # as --set name=… leaves it
    RunDir(tmp_path / "without" / "runs" / run.run_id).path.mkdir(parents=True)
    assert found(f"0123 {QUICK}")["weights"] == "the weights at its end"
    kept = run.weights / "model.safetensors"
    kept.write_bytes(kept.read_bytes()[:-9])
    assert call(run.path).line.startswith(f"{run.weights}: cannot be read: ")


def test_a_hugging_face_folder_without_weights_is_drawn(found, tmp_path):
    pytest.importorskip("transformers")
    content = {
        "model_type": "llama", "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 64,
    }  # fmt: skip
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/config.json").write_text(json.dumps(content))
    content = found("./hf --data text --layers *.down_proj --sequences 2")
    assert content["tokens"] == 2 * 64  # no longer than the model's positions
    assert {one["layer"] for one in content["gemms"]} == {
        "model.layers.0.mlp.down_proj"
    }


def test_what_no_recipe_reaches_is_named_and_one_file_of_text_is_read_from_its_beginning(
    call, found, tmp_path
):
    hidden = MODEL.replace(
        "self.head =", "self.mixing = nn.Parameter(torch.eye(64))\n        self.head ="
    )
    hidden = "import torch\n" + hidden.replace(
        "self.head(x)", "self.head(x @ self.mixing)"
    )
    (tmp_path / "mixing.py").write_text(hidden)
    (tmp_path / "one.txt").write_text("abcdefgh" * 9)
    (tmp_path / "same.jsonl").write_text(json.dumps({"text": "abcdefgh" * 9}) + "\n")
    one = found(f"mixing.py:build --data one.txt {QUICK}")
    assert one == found(f"mixing.py:build --data same.jsonl {QUICK}")
    assert one["out_of_reach"] == ["mixing"]
    shown = call(f"mixing.py:build --data one.txt {QUICK}").out
    assert "Not diagnosed, as no recipe reaches them: mixing." in shown


def test_a_budget_proposes_what_stays_in_bf16_and_its_study_can_be_planned(
    call, tmp_path
):
    asked = f"net.py:build --data text {QUICK} --budget 30% --write which.yaml"
    shown = call(asked).out
    assert "BF16 in the last 15% of the blocks" in shown
    planned = ablate("plan which.yaml --json", cwd=tmp_path, storage=tmp_path)
    arms = [arm["name"] for arm in json.loads(planned.out)["arms"]]
    assert arms[:2] == ["bf16", "all in FP4"]
    assert call(asked).line == "--write: cannot write which.yaml: File exists"
