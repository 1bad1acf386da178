"""``ablate diagnose``: a model of any kind, its ranking, and one line for what cannot be used."""

import json
import re
from dataclasses import asdict, replace

import pytest
from click.testing import CliRunner

from ablate.base.errors import UserError
from ablate.cli import cli
from ablate.execute.worker import execute_run
from ablate.store import RunDir
from tests.execute.kill import task_of, tiny_config

QUICK = ("--seq-len", "32", "--sequences", "2", "--device", "cpu")
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


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ABLATE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def text(tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    for n in range(40):
        (folder / f"{n}.txt").write_text(f"The error of document {n} is structured, not random. " * 20)
    return str(folder)


@pytest.fixture
def function(tmp_path):
    (tmp_path / "net.py").write_text(MODEL)
    return f"{tmp_path}/net.py:build"


def call(*arguments):
    return CliRunner().invoke(cli, ["diagnose", *arguments], catch_exceptions=False, standalone_mode=False)


def fault(*arguments):
    with pytest.raises(UserError) as caught:
        call(*arguments)
    return str(caught.value)


def test_a_users_model_on_a_users_text(function, text, tmp_path):
    out = tmp_path / "harm.json"
    recipe = "{gemms: [fprop, wgrad], stabiliser: sr}"
    options = ("--recipe", recipe, "--draws", "2", *QUICK, "--json", "--out", str(out))
    done = call(function, "--data", text, *options)
    content = json.loads(done.stdout)
    assert content == json.loads(out.read_text())
    assert (content["weights"], content["tokens"]) == ("random initial weights of seed 0", 64)
    assert content["recipe"].startswith("Fprop+Wgrad mxfp4")
    assert {(one["layer"], one["gemm"]) for one in content["gemms"]} == {
        (f"blocks.{n}", gemm) for n in (0, 1) for gemm in ("fprop", "wgrad")
    }
    assert content["gemms"][0]["harm"] >= content["gemms"][-1]["harm"]
    assert content["gemms"][0]["diagnosis"]["product"]["draws"] == 2


def test_a_preset_and_the_table(text, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    done = call("gpt-tiny", "--data", text, "--layers", "blocks.0.attention.out", *QUICK)
    lines = done.stdout.splitlines()
    assert "gpt-tiny, random initial weights of seed 0; mxfp4; 64 tokens" in lines
    assert sum(line.startswith("blocks.0.attention.out") for line in lines) == 3
    assert re.search(r"The first \d of 3 GEMMs make \d+% of the predicted harm", done.stdout)
    assert "A prediction from one batch" in done.stdout


def test_a_runs_checkpoint_and_final_weights_with_its_own_recipe_and_another(tmp_path):
    run = RunDir(tmp_path / "study" / "runs" / "0123456789abcdef")
    run.create(asdict(tiny_config(seed=1, steps=6)))
    (tmp_path / "stop").touch()
    task = task_of(run, tmp_path)
    assert execute_run(task).state == "interrupted"
    content = json.loads(call(str(run.path), *QUICK, "--draws", "2", "--json").stdout)
    assert content["weights"] == "the checkpoint after step 1"
    assert {one["gemm"] for one in content["gemms"]} == {"dgrad", "wgrad"}  # tseng's
    other = json.loads(call(str(run.path), *QUICK, "--recipe", "te-hybrid-fp8-delayed", "--json").stdout)
    assert {one["gemm"] for one in other["gemms"]} == {"fprop", "dgrad", "wgrad"}
    (tmp_path / "stop").unlink()
    assert execute_run(replace(task)).state == "finished"
    assert fault(str(run.path)) == (
        f"{run.path}: no weights were kept (train it again with: ablate run STUDY --set keep_weights=true "
        f"--set name=ANOTHER --storage {tmp_path})"
    )
    run.status_path.unlink()
    assert execute_run(replace(task, keep_weights=True)).state == "finished"
    RunDir(tmp_path / "without" / "runs" / run.run_id).path.mkdir(parents=True)  # as --set name=… leaves it
    content = json.loads(call("0123", "--storage", str(tmp_path), *QUICK, "--draws", "2", "--json").stdout)
    assert content["weights"] == "the weights at its end"
    kept = run.weights / "model.safetensors"
    kept.write_bytes(kept.read_bytes()[:-9])
    assert fault(str(run.path)).startswith(f"{run.weights}: cannot be read: ")
    assert fault("feed", "--storage", str(tmp_path)).startswith(f"no run 'feed' in {tmp_path}")


def test_a_hugging_face_folder_without_weights_is_drawn(tmp_path, text):
    pytest.importorskip("transformers")
    folder = tmp_path / "hf"
    folder.mkdir()
    content = {
        "model_type": "llama", "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 64,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(content))
    options = ("--data", text, "--layers", "*.down_proj", "--sequences", "2", "--device", "cpu", "--json")
    found = json.loads(call(str(folder), *options).stdout)
    assert found["tokens"] == 2 * 64  # no longer than the model's positions
    assert {one["layer"] for one in found["gemms"]} == {"model.layers.0.mlp.down_proj"}


def test_what_no_recipe_reaches_is_named(tmp_path, text):
    path = tmp_path / "mixing.py"
    hidden = MODEL.replace("self.head =", "self.mixing = nn.Parameter(torch.eye(64))\n        self.head =")
    path.write_text("import torch\n" + hidden.replace("self.head(x)", "self.head(x @ self.mixing)"))
    done = call(f"{path}:build", "--data", text, *QUICK)
    assert "Not diagnosed, as no recipe reaches them: mixing." in done.stdout
    content = json.loads(call(f"{path}:build", "--data", text, *QUICK, "--json").stdout)
    assert content["out_of_reach"] == ["mixing"]


def test_one_file_of_text_is_enough_and_read_from_its_beginning(function, tmp_path):
    one = tmp_path / "one.txt"
    one.write_text("abcdefgh" * 9)
    rows = []
    for data in (one, tmp_path / "same.jsonl"):
        if data != one:
            data.write_text(json.dumps({"text": one.read_text()}) + "\n")
        rows.append(json.loads(call(function, "--data", str(data), *QUICK, "--json").stdout)["gemms"])
    assert rows[0] == rows[1]
