"""``ablate import``: what goes into a report. What it prints: ``transcripts``; refuses: ``refusals.yaml``."""

import shutil
from pathlib import Path

import pytest

from tests.cli.command import ablate

COMMON = ("--target", "val_loss=3.5", "--study")


@pytest.fixture
def call(tmp_path):
    folder = Path(shutil.copytree(Path(__file__).parent / "transcripts" / "import", tmp_path / "logs"))

    def call(*words):
        ended = ablate(*words, cwd=folder)
        assert ended.code == 0, ended
        return ended.out

    call.folder = folder
    return call


def test_names_that_steer_a_terminal_or_a_page_are_visible_text_in_every_file(call):
    red, reversed_ = "fp8\x1b[31m", "\u202efp4"
    arms = (f"--arm={red}=fp8.csv", f"--arm={reversed_}=fp4.csv", f"--baseline={red}")
    said = call("import", "csv", *arms, *COMMON, "s")
    assert "fp8\\x1b[31m: 3 runs, 15 evaluations\n\\u202efp4: 3 runs" in said
    call("report", "s")
    runs = call.folder / "runs/s"
    written = [path for path in runs.rglob("*.*") if path.suffix not in (".png", ".db", "")]
    assert {path.suffix for path in written} >= {".md", ".csv", ".json", ".html"}
    for path in written:
        assert not {"\x1b", "\u202e"} & set(path.read_text()), path
