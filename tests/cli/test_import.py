"""``ablate import``: what goes into a report. What it prints: ``transcripts``; refuses: ``refusals.yaml``."""

import shutil
from pathlib import Path

from tests.cli.command import ablate


def test_names_that_steer_a_terminal_or_a_page_are_visible_text_in_every_file(tmp_path):
    folder = Path(
        shutil.copytree(
            Path(__file__).parent / "transcripts" / "import", tmp_path / "logs"
        )
    )
    red, reversed_ = "fp8\x1b[31m", "\u202efp4"
    arms = (f"--arm={red}=fp8.csv", f"--arm={reversed_}=fp4.csv", f"--baseline={red}")
    imported = ablate(
        "import", "csv", *arms, "--target", "val_loss=3.5", "--study", "s", cwd=folder
    )
    assert "fp8\\x1b[31m: 3 runs, 15 evaluations\n\\u202efp4: 3 runs" in imported.out
    assert ablate("report", "s", cwd=folder).code == 0
    written = [
        path
        for path in (folder / "runs/s").rglob("*.*")
        if path.suffix not in (".png", ".db", "")
    ]
    assert {path.suffix for path in written} >= {".md", ".csv", ".json", ".html"}
    for path in written:
        assert not {"\x1b", "\u202e"} & set(path.read_text()), path
