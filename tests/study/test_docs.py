"""docs/spec.md has a table of every section; its examples and those of docs/data.md are studies."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from ablate.study.schema import json_schema
from tests.golden import check_text
from tests.study.conftest import SHORTEST

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "spec.md").read_text()
BLOCKS = re.findall(
    r"```yaml\n(.*?)```", PAGE + (DOCS / "data.md").read_text(), re.DOTALL
)
HEAD = "name: s\nbaseline: a\ntarget: {val_loss: 3.3}\narms:\n  a:\n    "


def test_every_section_has_its_table():
    text = PAGE + (DOCS / "diagnostics.md").read_text()
    shown = {
        name.partition(":")[0]
        for mark in re.findall(r"<!-- keys: (.*) -->", text)
        for name in mark.split()
    }
    # An arm is laid over the base, whose sections have tables; an entry of layers takes what a recipe does.
    assert shown == {"StudyFile", *json_schema()["$defs"]} - {
        "ArmSection",
        "LayerRecipeSpec",
    }


@pytest.mark.parametrize("page", ["spec.md", "diagnostics.md"])
def test_the_tables_are_those_of_the_schema(page):
    with_tables = runpy.run_path(str(DOCS / "key_tables.py"))["with_tables"]
    check_text(DOCS / page, with_tables((DOCS / page).read_text()))


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.split("\n", 1)[0])
def test_examples_can_be_loaded(block, study):
    block = SHORTEST + block if block.startswith("base:") else block
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
