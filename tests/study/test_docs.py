"""docs/spec.md names every key, and its examples are studies."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from ablate.study.schema import json_schema

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "spec.md").read_text()
BLOCKS = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
HEAD = "name: s\nbaseline: a\ntarget: {val_loss: 3.3}\narms:\n  a:\n    "


def test_every_key_is_explained():
    schema = json_schema()
    keys = set(schema["properties"])
    for section in schema["$defs"].values():
        keys |= set(section["properties"])
    missing = {key for key in keys if not re.search(rf"`(\w+\.)*{key}`", PAGE)}
    assert missing <= {"val_loss", "model", "data", "training", "recipe"}  # these head their own sections
    assert all(f"`base.{section}`" in PAGE for section in missing - {"val_loss"})


def test_stated_defaults_are_the_schemas():
    stated = {}
    for line in (PAGE + (DOCS / "diagnostics.md").read_text()).splitlines():
        if row := re.fullmatch(r"\| (`[\w., `]+`) \|.*\| ([^|]+) \|", line):
            keys = re.findall(r"(\w+)`", row[1])
            values = row[2].split(", ") if len(keys) > 1 else [row[2].split(":")[0].replace(",", "")]
            for key, value in zip(keys, values * (len(keys) // len(values)), strict=True):
                stated.setdefault(key, []).append(plain(value.strip("`")))
    fields = [field for section in json_schema()["$defs"].values() for field in section["properties"].items()]
    compared = [
        (key, field["default"], stated[key])
        for key, field in fields
        if field.get("default") is not None and key in stated
    ]
    assert len(compared) > 50
    assert [row for row in compared if row[1] not in row[2]] == []


def plain(value):
    try:
        return json.loads(value)
    except ValueError:
        return value


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.split("\n", 1)[0])
def test_examples_can_be_loaded(block, study):
    if block.startswith("name:"):
        assert study(block).arms
        return
    for line in block.splitlines():
        recipe = line if "fp4" in line or "gemms" in line else ""
        assert study(HEAD + recipe + "\n").arms


def test_the_grids_name_in_the_text_is_one_of_its_names(study):
    grid = next(block for block in BLOCKS if "grid:" in block)
    names = {arm.name for arm in study(grid).arms}
    assert "F+D dht 16 width=128 learning_rate=4e-3" in names
    assert len(study(grid).folded) == 6
