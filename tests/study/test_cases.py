"""What study files give: what a valid one means, or the exact lines of what is wrong in it.

``errors`` holds a small file for each fault, ``NAME.yaml``, and beside it the lines, ``NAME.txt``; ``cases``
has files of cases. ``study.yaml:`` is left out of the lines.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.golden import cases, check, check_text

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


def test_a_data_file(outcome):
    expected = ["larger than 1 MiB: not a study file"]
    assert outcome(b"#" * (2 * 2**20)) == expected
