"""What study files give: what a valid one means, or the exact lines of what is wrong in it.

``errors`` holds a small file for each fault, ``NAME.yaml``, and beside it the lines, ``NAME.txt``; ``cases``
has files of cases. ``study.yaml:`` is left out of the lines. Files that are long or computed stand below.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.golden import cases, check, check_text

HEAD = """\
name: s
baseline: a
target: {val_loss: 3.3}
"""
HERE = Path(__file__).parent
FILES = sorted((HERE / "errors").glob("*.yaml"))


def test_every_file_has_its_lines_and_nothing_else_lies_there():
    assert len(FILES) >= 120
    assert {path.with_suffix(".txt") for path in FILES} == set(
        (HERE / "errors").glob("*.txt")
    )


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_each_fault_has_its_line(path, outcome):
    lines = outcome(path.read_bytes())
    check_text(path.with_suffix(".txt"), "".join(f"{line}\n" for line in lines))


@pytest.mark.parametrize("case", cases(*sorted((HERE / "cases").glob("*.txt"))))
def test_each_case_has_its_lines(case, outcome):
    check(case, outcome(case[2]))


# ruff: noqa: ISC004
COMPUTED = {
    "long names of cells": (
        f"{HEAD}arms: {{a: }}\ngrid:\n  factors:\n    data.text_field: [{'x' * 90}, y]\n"
        "    data.source: [hub]\n    data.paths: [[z]]\n",
        "6:3: grid.factors: the values make names that cannot name an arm (1 to 80 printable characters, no "
        "space around; give the values labels: {label: value})",
    ),
    "too many cells": (
        f"{HEAD}arms: {{a: }}\ngrid:\n  factors:\n"
        + "".join(
            f"    {path}: {[32 * i for i in range(1, 101)]}\n"
            for path in ("model.width", "model.ffn", "training.seq_len")
        ),
        "6:3: grid.factors: the grid has 1000000 cells (at most 100000)",
    ),
    "too many runs": (
        HEAD.replace("baseline: a", "baseline: layers=1")
        + f"seeds: 10000\ngrid:\n  factors:\n    model.layers: {list(range(1, 102))}\n",
        "4:8: seeds: 101 arms × 10000 seeds are too many runs (at most 1000000)",
    ),
    "a number with hundreds of digits": (
        f"{HEAD}base:\n  model: {{rope_base: {'1' * 400}}}\narms: {{a: }}\n",
        f"5:22: base.model.rope_base: expected a number, got {'1' * 39}…",
    ),
    "a number with thousands of digits": (
        f"{HEAD}base:\n  model: {{width: {'1' * 5000}}}\narms: {{a: }}\n",
        f"5:18: base.model.width: {'1' * 40!r} is not a number that can be read",
    ),
    "what many arms inherit": (
        HEAD.replace("baseline: a", "baseline: a0")
        + "base:\n  model: {width: 130}\narms:\n"
        + "".join(
            f"  a{i}: {{training: {{learning_rate: 0.{i + 1}}}}}\n" for i in range(9)
        ),
        "5:18: base.model.width: width 130 is not a multiple of heads 4 "
        "(the nearest width is 128 or 136; in arm 'a0')",
    ),
    "UTF-16": ("name: x\n".encode("utf-16"), "1:1: not UTF-8 text (byte 0xff)"),
    "not UTF-8": (
        b"name: x\ndescription: caf\xe9\n",
        "2:17: not UTF-8 text (byte 0xe9)",
    ),
    "a control character": (
        "name: x\ndescription: \x07\n",
        "2:14: a character that YAML does not allow: '\\x07'",
    ),
    "nested beyond all": ("[" * 2000, "1:1: more than 50 levels"),
    "aliases that multiply": (
        "a: &a [x,x,x,x,x,x,x,x,x,x]\n"
        + "".join(
            f"{b}: &{b} [{','.join([f'*{a}'] * 10)}]\n"
            for a, b in zip("abcdef", "bcdefg", strict=True)
        ),
        "1:24: more than 200000 values or 50 levels; are there nested aliases?",
    ),
    "a data file": (b"#" * (2 * 2**20), "larger than 1 MiB: not a study file"),
    "nothing": ("", "1:1: the file is empty"),
}


@pytest.mark.parametrize("case", COMPUTED)
def test_files_that_are_long_or_computed(case, outcome):
    text, line = COMPUTED[case]
    assert outcome(text) == [line]
