"""What no verb takes: one line that says why, exit code 2, and nothing is made (``refusals.yaml``)."""

from pathlib import Path

import pytest
import yaml

from tests.cli.command import ablate

REFUSALS = yaml.safe_load(
    Path(__file__).with_name("refusals.yaml").read_text(encoding="utf-8")
)
WORDS = REFUSALS.pop("words")
SMALL = """\
name: small
baseline: bf16
target: {val_loss: 3.5}
seeds: 2
base:
  model: {width: 64, layers: 1, heads: 2, ffn: 96}
  data: {source: text, paths: [texts], tokenizer: bytes}
arms:
  bf16: {recipe: bf16}
  fp4: {recipe: {gemms: [fprop, wgrad]}}
"""
COMMAND = """\
name: command
baseline: bf16
target: {val_loss: 3.5}
base:
  trainer: {command: [train, '{seed}', '{args}'], metrics: {preset: nanogpt}}
  training: {tokens: 1280, seq_len: 16, batch_size: 4}
arms:
  bf16: {trainer: {precision: bf16}}
  fp4: {trainer: {precision: fp4}}
"""
SEARCH_FILE = (
    SMALL.replace("seeds: 2\n", "")
    + """\
grid: {factors: {recipe.gemms: {none: [], F: [fprop]}}}
search: {hardware: B200, shapes: llama-8b, trials: 4, budgets: [60_000, 80_000]}
"""
)
NET = """\
from torch import nn

def build(*, vocab_size, seq_len, width=64):
    model = nn.Sequential(nn.Embedding(vocab_size, width))
    model.inner, model.head = nn.Linear(width, width), nn.Linear(width, vocab_size)
    return model
"""
ROWS = "tokens,val_loss,run\n" + "".join(f"{n},{5 - n},0\n" for n in (1, 2, 3))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("user")
    (folder / "texts").mkdir()
    (folder / "empty").mkdir()
    (folder / "loop").symlink_to("loop")
    texts = {
        "small.yaml": SMALL, "missing.yaml": SMALL.replace("[texts]", "[nowhere]"),
        "one-seed.yaml": SMALL.replace("seeds: 2", "seeds: 1"),
        "two.yaml": SMALL.replace("arms:", "  resources: {devices_per_run: 2}\narms:"),
        "native.yaml": SMALL.replace("wgrad]}", "wgrad]}, resources: {require_native: true}"),
        "command.yaml": COMMAND,
        "search.yaml": SEARCH_FILE,
        "no-unit.yaml": SEARCH_FILE.replace("baseline: bf16", "baseline: fp4").replace("B200", "H100"),
        "few.yaml": SEARCH_FILE.replace("trials: 4", "trials: 1"),
        "net.py": NET, "fp8.csv": ROWS, "fp4.csv": ROWS, "log.txt": "nothing",
        "steps.txt": "step:1 val_loss:4", "one.txt": "Too little.",
        "megatron.txt": " validation loss at iteration 9 | lm loss value: 7E+0 |\n" * 2,
        "empty-file.yaml": "", "printed.txt": "{'eval_loss': '2.919'}",
        "texts/one.txt": "The error of a document is structured, not random. " * 200,
    }  # fmt: skip
    for name, text in texts.items():
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize(
    ("command", "line"),
    [
        pytest.param(command, line, id=command)
        for refused in REFUSALS.values()
        for command, line in refused.items()
    ],
)
def test_what_is_refused_is_one_line_and_leaves_nothing(
    folder, monkeypatch, tmp_path, command, line
):
    monkeypatch.setenv("ABLATE_CACHE", str(tmp_path))
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "none"))
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    before = sorted(folder.rglob("*"))
    assert line in ablate(command.format(**WORDS), cwd=folder).line
    assert sorted(folder.rglob("*")) == before
