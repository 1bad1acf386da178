"""What only planning can find in a study: of models, trainers, data and diagnostics, a line for each."""

from __future__ import annotations

from pathlib import Path

import pytest

from ablate.base.errors import UserError
from tests.golden import cases, check


@pytest.mark.parametrize("case", cases(Path(__file__).with_name("faults.txt")))
def test_each_fault_has_its_line(case, plan, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    try:
        found = [arm.name for arm in plan(case[2]).arms]
    except UserError as error:
        found = [str(problem) for problem in error.problems]
    check(case, [line.replace(f"{tmp_path}/", "").removeprefix("study.yaml:") for line in found])
