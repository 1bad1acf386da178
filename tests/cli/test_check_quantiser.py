"""``ablate check`` of a recipe or a function: the table, the JSON, and the exit code."""

import json

import pytest
from click.testing import CliRunner

from ablate.check import certificate
from ablate.cli import cli

FILE = """
from ablate.numerics import OperandPolicy, fake_quantize

def right(x):
    return fake_quantize(x, OperandPolicy(format="mxfp4"))

def ceil(x):
    return fake_quantize(x, OperandPolicy(format="mxfp4", scale="ceil"))
"""


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(certificate, "SIDE", 256)


def call(*arguments):
    return CliRunner().invoke(cli, ["check", *arguments, "--device", "cpu"], catch_exceptions=False)


def test_a_recipe_as_a_table_that_fits_the_terminal():
    done = call("rocm-te-sr", "--draws", "8")
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) < 200
    tables = [line for line in lines if "±" in line and "Gaussian" in line]
    assert all(len(line) <= 110 for line in tables)
    assert any("gain by place in the block, repeating: 0.998" in line for line in lines)
    assert any("the noise of elements 1 apart correlates by 0.1" in line for line in lines)
    assert any(line.startswith("Wgrad") and "no" in line for line in lines)
    assert lines[-1] == "rocm-te-sr is what it claims to be."


def test_a_function_and_its_exit_code(tmp_path):
    (tmp_path / "quant.py").write_text(FILE)
    out = tmp_path / "found.json"
    done = call(f"{tmp_path}/quant.py:right", "--as", "mxfp4", "--draws", "8", "--json", "--out", str(out))
    content = json.loads(done.stdout)
    assert (done.exit_code, content["holds"]) == (0, True)
    assert content == json.loads(out.read_text())
    (one,) = content["operands"]
    assert one["differences"] == one["disagreements"] == content["products"] == []
    assert one["figures"]["Gaussian"]["gain"] == one["definition"]["Gaussian"]["gain"]

    wrong = call(f"{tmp_path}/quant.py:ceil", "--as", "mxfp4", "--draws", "8")
    assert wrong.exit_code == 1
    assert "scale" in wrong.stdout
    assert wrong.stdout.rstrip().endswith("quant.py:ceil is NOT what it claims to be.")


def test_an_arm_of_a_study_and_few_draws():
    content = json.loads(call("quickstart", "--arm", "all three + sr", "--draws", "8", "--json").stdout)
    assert content["subject"] == "quickstart, arm 'all three + sr'"
    assert {name for one in content["operands"] for name in one["operands"]} == {
        "fprop.x", "fprop.w", "dgrad.dy", "dgrad.w", "wgrad.dy", "wgrad.x",
    }  # fmt: skip
    assert call("mxfp4", "--draws", "2").exit_code == 2
