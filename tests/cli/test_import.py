"""``ablate import``: what goes into a report. What it prints: ``transcripts``; refuses: ``refusals.yaml``."""

import shutil
from itertools import product
from pathlib import Path

import pytest

from tests.cli.command import ablate


@pytest.mark.parametrize(
    "place",
    [
        "{arm}-{seed}/main",
        "{arm}/version_{seed}/m",
        "v2/{arm}/seed={seed}",
        "{arm}/{seed}",
    ],
)
def test_arms_and_seeds_are_found_in_the_names_of_folders(tmp_path, place):
    for arm, seed in product(("bf16", "nvfp4"), (3, 5)):
        file = tmp_path / f"logs/{place.format(arm=arm, seed=seed)}.csv"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("tokens,val_loss\n9,4\n18,3\n")
    words = ("--study", "s", "--baseline", "bf16")
    done = ablate("import csv logs", *words, cwd=tmp_path)
    for arm in ("bf16", "nvfp4"):
        assert f"\n{arm}: seeds 3, 5 by the names (" in done.out
    done = ablate("import csv", str(file), *words, cwd=tmp_path)
    assert "neither a column 'arm' nor a folder names its arm" in done.line


def test_names_that_steer_a_terminal_or_a_page_are_visible_text_in_every_file(tmp_path):
    folder = Path(
        shutil.copytree(
            Path(__file__).parent / "transcripts" / "import", tmp_path / "logs"
        )
    )
    red, reversed_ = "fp8\x1b[31m", "\u202efp4"
    arms = (f"--arm={red}=fp8.csv", f"--arm={reversed_}=fp4.csv", f"--baseline={red}")
    imported = ablate(
        "import csv", *arms, "--target", "val_loss=3.5", "--study", "s", cwd=folder
    )
    assert "fp8\\x1b[31m: 3 runs, 15 evaluations\n\\u202efp4: 3 runs" in imported.out
    assert ablate("report s", cwd=folder).code == 0
    written = [
        path
        for path in (folder / "runs/s").rglob("*.*")
        if path.suffix not in (".png", ".db", "")
    ]
    assert {path.suffix for path in written} >= {".md", ".csv", ".json", ".html"}
    for path in written:
        assert not {"\x1b", "\u202e"} & set(path.read_text()), path
