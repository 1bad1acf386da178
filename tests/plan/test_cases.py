"""What becomes of a planned study: its lock file, or a line for each fault that loading cannot find."""

import json
from pathlib import Path

import pytest

from ablate.base.errors import UserError
from ablate.store.plan_file import plan_to_json
from tests.golden import cases, check


@pytest.mark.parametrize("case", cases(Path(__file__).with_name("cases.txt")))
def test_each_case_has_its_lines(case, plan, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    try:
        lock = plan_to_json(plan(case[2]))
    except UserError as error:
        lines = [str(problem).replace(f"{tmp_path}/", "") for problem in error.problems]
    else:
        arms = lock.pop("arms")
        lines = [json.dumps(one).replace(f"{tmp_path}/", "") for one in (lock, *arms)]
    check(case, [line.removeprefix("study.yaml:") for line in lines])
