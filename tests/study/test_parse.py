from __future__ import annotations

import pytest

from ablate.base.errors import UserError
from ablate.study import load_study


def test_an_error_inside_the_yaml_library_is_still_one_line(outcome, monkeypatch):
    def fail(*_):
        raise AssertionError("first line\nsecond line")

    monkeypatch.setattr("ruamel.yaml.YAML.compose", fail)
    assert outcome("name: s") == ["1:1: not valid YAML (AssertionError: first line)"]


@pytest.mark.parametrize("name", ["a\0b.yaml", "x" * 5000, "x" * 300 + "/y"])
def test_a_name_that_no_file_can_have(name):
    with pytest.raises(UserError):
        load_study(name)


def test_a_study_is_found_by_name_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load_study("quickstart").name == "quickstart"
    (tmp_path / "quickstart").mkdir()  # a folder of that name is not in the way
    assert load_study("quickstart").name == "quickstart"
