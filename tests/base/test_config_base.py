"""Sections compare and hash by their content as JSON."""

from __future__ import annotations

import json

import pytest

from ablate.run.config import DataConfig, ModelConfig, TrainingConfig


def test_equal_content_is_one_key_of_a_dict():
    data = DataConfig(source="text", paths=["a"])
    same = DataConfig(paths=["a"], source="text")
    assert data == same
    assert {data: 1}[same] == 1
    assert data != DataConfig(source="text", paths=["b"])
    assert DataConfig() != TrainingConfig()
    assert json.loads(data.text)["paths"] == ["a"]


@pytest.mark.parametrize("other", [1.0, True, "1"])
def test_what_python_calls_equal_is_told_apart(other):
    models = {ModelConfig(function="m:f", options={"a": value}) for value in (1, other)}
    assert len(models) == 2
