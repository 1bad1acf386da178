"""What no verb takes: one line that says why, exit code 2, and nothing is made (``refusals.yaml``)."""

import shutil
from pathlib import Path

import pytest
import yaml

from tests.cli.command import ablate

HERE = Path(__file__).parent
REFUSALS = yaml.safe_load((HERE / "refusals.yaml").read_text(encoding="utf-8"))
WORDS = REFUSALS.pop("words")
NET = """\
from torch import nn

def build(*, vocab_size, seq_len, width=64):
    model = nn.Sequential(nn.Embedding(vocab_size, width))
    model.inner, model.head = nn.Linear(width, width), nn.Linear(width, vocab_size)
    return model
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("user") / "folder"
    shutil.copytree(HERE / "refusals", folder)
    (folder / "empty").mkdir()
    (folder / "loop").symlink_to("loop")
    (folder / "net.py").write_text(NET)
    return folder


@pytest.mark.parametrize(
    ("command", "line"),
    [pair for refused in REFUSALS.values() for pair in refused.items()],
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
