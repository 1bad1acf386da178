from __future__ import annotations

import pytest

from ablate.base.errors import UserError
from ablate.study import load_study, shipped_studies


def test_an_error_inside_the_yaml_library_is_still_one_line(problems, monkeypatch):
    def fail(*_):
        raise AssertionError("first line\nsecond line")

    monkeypatch.setattr("ruamel.yaml.YAML.compose", fail)
    assert problems("name: s") == ["1:1: not valid YAML (AssertionError: first line)"]


def test_yaml_1_2_and_its_notation_of_numbers(study):
    text = """\
%YAML 1.2
---
name: on  # no boolean
description: 2026-01-01
baseline: off
target: {val_loss: 33e-1}
base:
  training: {learning_rate: 1e-3, tokens: 1_000_000}
  model: {layers: 0x10, tied_head: False}
arms:
  off:
"""
    loaded = study("﻿" + text)
    assert (loaded.name, loaded.description, loaded.baseline) == ("on", "2026-01-01", "off")
    assert loaded.arms[0].training.learning_rate == 1e-3
    assert loaded.arms[0].training.tokens == 1_000_000
    assert loaded.arms[0].model.layers == 16
    assert loaded.arms[0].model.tied_head is False


def test_anchors_and_merge_keys(study):
    text = """\
name: s
baseline: a
target: {perplexity: 27.1, crossing: first_eval}
base:
  model: &small {width: 64, ffn: 96, heads: 2}
arms:
  a:
  b:
    model: {<<: *small, ffn: 128}
  c:
    model: {<<: [{layers: 2}, {layers: 3, ffn: 160}]}
"""
    _, b, c = study(text).arms
    assert (b.model.width, b.model.ffn) == (64, 128)
    assert (c.model.layers, c.model.ffn) == (2, 160)


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
        "mine": f"mine: {neither} (did you mean 'mine.yaml'?)",
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
