from __future__ import annotations

import pytest
from jsonschema import Draft202012Validator
from ruamel.yaml import YAML

from ablate.study import shipped_studies
from ablate.study.schema import json_schema

GRID = """\
name: s
description: every shape of a value
baseline: b
target: {perplexity: 27.1, crossing: first_eval}
seeds: [0, 3]
paired_seeds: true
arms:
  a:
  b: {from: a, description: d, recipe: {wgrad: fp8, dgrad: {format: mxfp4, stabiliser: sr}}}
  d: {backend: reference, recipe: {preset: tseng, layers: [{last: 1, recipe: bf16}], phases: []}}
  c: {model: {kv_heads: null}, training: {grad_clip: null}}
grid:
  from: b
  factors:
    recipe: [fp8, {gemms: [fprop]}]
    recipe.gemms: {none: [], all: [fprop, dgrad, wgrad]}
    recipe.wgrad: [fp8, {format: mxfp4}, null]
    model: {small: {width: 64}}
    training.learning_rate: [1, 1e-3]
    data.paths: [[a], [b, c]]
  zip: [[model, training.learning_rate]]
  exclude: [{recipe.gemms: none, recipe: fp8}]
  senseless: drop
"""

# what is changed in the file above -> how
BROKEN = {
    "unknown key": ("paired_seeds", "paired"),
    "unknown recipe of a layer": ("{last: 1, recipe: bf16}", "{last: 1, recipe: bf61}"),
    "layers within layers": (
        "{last: 1, recipe: bf16}",
        "{last: 1, recipe: {layers: []}}",
    ),
    "unknown preset": ("preset: tseng", "preset: tsengg"),
    "unknown factor": ("training.learning_rate: [", "training.learning_rat: ["),
    "a factor without values": ("[1, 1e-3]", "[]"),
    "a factor of one value": ("[1, 1e-3]", "1e-3"),
    "no unit": ("{perplexity: 27.1, crossing: first_eval}", "27.1"),
    "no seeds": ("[0, 3]", "0"),
}


@pytest.fixture(scope="module")
def validator():
    Draft202012Validator.check_schema(json_schema())
    return Draft202012Validator(json_schema())


def load(text):
    return YAML(typ="safe", pure=True).load(text)


def test_shipped_studies_and_every_shape_of_a_value_satisfy_the_schema(validator):
    for path in shipped_studies().values():
        validator.validate(load(path.read_text()))
    validator.validate(load(GRID))


@pytest.mark.parametrize("case", BROKEN)
def test_broken_files_do_not_satisfy_it(validator, case):
    old, new = BROKEN[case]
    assert old in GRID
    assert not validator.is_valid(load(GRID.replace(old, new, 1)))
