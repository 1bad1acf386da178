from __future__ import annotations

import pytest

from ablate.base.errors import UserError
from ablate.study import load_study, shipped_studies

SYNTAX: dict[str, tuple[str | bytes, list[str]]] = {
    "empty": ("", ["1:1: the file is empty"]),
    "only a comment": ("# nothing\n", ["1:1: the file is empty"]),
    "a list": ("- a\n- b\n", ["1:1: a study is a mapping of keys to values"]),
    "a word": ("bf16\n", ["1:1: a study is a mapping of keys to values"]),
    "null": ("~\n", ["1:1: a study is a mapping of keys to values"]),
    "a tab": (
        "base:\n\tmodel: 1\n",
        ["2:1: not valid YAML: a tab where only spaces may indent (indent with spaces)"],
    ),
    "a colon too many": (
        "name: a: b\n",
        [
            (
                "1:8: not valid YAML: mapping values are not allowed here "
                "(a ': ' inside a text needs quotes; or check "
                "the indentation, and the line before for a ':' without a space)"
            )
        ],
    ),
    "an open bracket": (
        "seeds: [1, 2\nname: x\n",
        [
            (
                "2:5: not valid YAML: expected ',' or ']', but got ':' "
                "(while parsing a flow sequence that begins on line 1)"
            )
        ],
    ),
    "an open quote": (
        "name: 'x\n",
        [
            (
                "2:1: not valid YAML: found unexpected end of stream "
                "(while scanning a quoted scalar that begins on line 1)"
            )
        ],
    ),
    "an unknown alias": (
        "name: *x\n",
        ["1:7: not valid YAML: found undefined alias 'x' (a text that starts with '*' needs quotes)"],
    ),
    "a character that needs quotes": (
        "name: @x\n",
        ["1:7: not valid YAML: found character '@' that cannot start any token (quote the text)"],
    ),
    "two documents": ("name: a\n---\nname: b\n", ["2:1: a second YAML document (a study file holds one)"]),
    "not UTF-8": (b"name: x\ndescription: caf\xe9\n", ["2:17: not UTF-8 text (byte 0xe9)"]),
    "UTF-16": ("name: x\n".encode("utf-16"), ["1:1: not UTF-8 text (byte 0xff)"]),
    "a control character": (
        "name: x\ndescription: \x07\n",
        ["2:14: a character that YAML does not allow: '\\x07'"],
    ),
    "binary": (bytes(range(256)), ["2:118: not UTF-8 text (byte 0x80)"]),
    "an escape beyond Unicode": (
        'name: s\nbaseline: "\\U00110000"\n',
        [
            (
                "2:12: not valid YAML: an escape that is no character "
                "(ValueError: chr() arg not in range(0x110000))"
            )
        ],
    ),
    "an alias in itself": ("base: &b {model: *b}\n", ["1:7: base.model: an alias that contains itself"]),
    "nested": ("a: " + "[" * 60 + "]" * 60, ["1:54: nested more than 50 deep"]),
    "nested beyond all": ("[" * 2000, ["1:1: nested more than 50 deep"]),
    "aliases that multiply": (
        "a: &a [x,x,x,x,x,x,x,x,x,x]\n"
        + "".join(
            f"{chr(98 + i)}: &{chr(98 + i)} [{','.join(['*' + chr(97 + i)] * 10)}]\n" for i in range(6)
        ),
        ["1:24: more than 200000 values; are there nested aliases?"],
    ),
}


@pytest.mark.parametrize("case", SYNTAX)
def test_each_fault_of_syntax_has_its_line(case, problems):
    text, expected = SYNTAX[case]
    assert problems(text) == expected


def test_an_error_inside_the_yaml_library_is_still_one_line(problems, monkeypatch):
    def fail(*_):
        raise AssertionError("first line\nsecond line")

    monkeypatch.setattr("ruamel.yaml.YAML.compose", fail)
    assert problems("name: s") == ["1:1: not valid YAML (AssertionError: first line)"]


def test_a_file_that_is_no_study_by_its_size(problems):
    assert problems(b"#" * (2 * 2**20)) == ["larger than 1 MiB: not a study file"]


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
