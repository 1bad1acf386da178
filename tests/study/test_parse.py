from __future__ import annotations

import pytest

from ablate.base.errors import UserError
from ablate.study import load_study, shipped_studies


def test_an_error_inside_the_yaml_library_is_still_one_line(outcome, monkeypatch):
    def fail(*_):
        raise AssertionError("first line\nsecond line")

    monkeypatch.setattr("ruamel.yaml.YAML.compose", fail)
    assert outcome("name: s") == ["1:1: not valid YAML (AssertionError: first line)"]


def test_a_study_that_is_not_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").touch()
    neither = "no such file, and no shipped study of that name"
    starters = [name for name in shipped_studies() if not name.startswith("findings-")]
    shipped = f"shipped studies: {', '.join(starters)}"
    assert {"quickstart", "amd-ladder"} <= set(starters) < shipped_studies().keys()
    cases = {
        "nothing.yaml": f"nothing.yaml: no such file ({shipped})",
        "quickstart.yaml": "quickstart.yaml: no such file (did you mean 'quickstart'?)",
        "quickstrat": f"quickstrat: {neither} (did you mean 'quickstart'?)",
        "nothing": f"nothing: {neither} ({shipped})",
        "mine": "mine.yaml:1:1: ",  # the file of that name
        "mine.yml": "mine.yml: no such file (did you mean 'mine.yaml'?)",
        "findings-hadamrd": f"findings-hadamrd: {neither} ({shipped})",  # the findings' studies are no hint
        "": ".: a folder, not a study file",
        str(tmp_path): f"{tmp_path}: a folder, not a study file",
    }
    for name, expected in cases.items():
        with pytest.raises(UserError) as caught:
            load_study(name)
        assert str(caught.value).startswith(expected.removesuffix(")"))


@pytest.mark.parametrize("name", ["a\0b.yaml", "x" * 5000, "x" * 300 + "/y"])
def test_a_name_that_no_file_can_have(name):
    with pytest.raises(UserError):
        load_study(name)


def test_a_study_is_found_by_name_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load_study("quickstart").name == "quickstart"
    (tmp_path / "quickstart").mkdir()  # a folder of that name is not in the way
    assert load_study("quickstart").name == "quickstart"
