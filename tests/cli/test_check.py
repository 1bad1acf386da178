"""``ablate check``: back ends here and on other hardware, a device, and quantisers."""

import json
import re

import pytest

from ablate.backends import select
from ablate.backends.device import NO_COMPILER
from ablate.backends.select import load_backend
from ablate.check import __main__ as door
from ablate.check import certificate, run
from ablate.check.run import PARTS
from ablate.cli import check as cli_check
from tests.cli.command import ablate

QUANTISERS = """
from ablate.numerics import OperandPolicy, fake_quantize

def right(x):
    return fake_quantize(x, OperandPolicy(format="mxfp4"))

def rceil(x):
    return fake_quantize(x, OperandPolicy(format="mxfp4", scale="rceil"))
"""


@pytest.fixture
def check(tmp_path):
    def call(words, code=0):
        ended = ablate(f"check {words}", cwd=tmp_path)
        assert ended.code == code, ended
        return json.loads(ended.out) if "--json" in words else ended.out

    return call


def test_this_machines_table_fits_a_terminal_and_its_back_ends_are_tested(
    check, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "80")
    shown = check("backends")
    assert "mxfp4" in shown
    assert max(map(len, shown.splitlines())) <= 80
    assert "self-test of emulated: " in shown
    tests = check("backends --json")["self_tests"]
    assert {test["backend"] for test in tests} >= {"emulated", "torch"}
    assert all(test["passed"] for test in tests)
    monkeypatch.setattr(cli_check, "cpp_compiler", lambda: None)
    assert check("backends").endswith(f"{NO_COMPILER}\n")
    bad = {"check": "product: fp8_e4m3", "passed": False, "detail": "off by 3"}
    monkeypatch.setattr(select, "quick_self_test", lambda *_: (bad,))
    shown = check("backends", code=1)
    assert "self-test of torch: FAILED: product: fp8_e4m3: off by 3" in shown


@pytest.mark.parametrize(("arch", "native"), [("sm_80", 0), ("gfx950", 1)])
def test_other_hardware_can_be_asked_of(check, monkeypatch, arch, native):
    # Kernels take minutes to compile: tests/backends/triton/test_ahead.py.
    monkeypatch.setattr(
        door, "compiled_for", lambda arch, _: ({"compiled": [arch]}, native)
    )
    content = check(f"backends {arch} --json", code=native)
    assert (content["device"]["arch"], content["device"]["here"]) == (arch, False)
    assert content["compiled"] == [arch]
    modes = {
        (row["backend"], row["format"]): row["mode"]
        for row in content["backends"]
        if row["detail"]
    }
    assert modes["emulated", "mxfp4"] == "emulated"
    assert modes["torch", "mxfp4"] == ("no", "native")[native]
    assert f"torch         mxfp4       {modes['torch', 'mxfp4']}: " in check(
        f"backends {arch} --details", code=native
    )


def test_without_triton_no_kernel_is_compiled(check, monkeypatch):
    monkeypatch.setattr(
        door, "triton_fault", lambda: "Triton is not installed (pip install triton)"
    )
    shown = check("backends gfx950")
    assert shown.startswith(
        "CDNA 4: MI350X, MI355X (gfx950), not here: as its support is known\n"
    )
    assert (
        "The kernels are not compiled: Triton is not installed (pip install triton)."
        in shown
    )


def test_a_device_is_checked_and_a_fault_of_it_is_exit_code_1(check, monkeypatch):
    monkeypatch.setattr(run, "PARTS", {"exact probe": PARTS["exact probe"]})
    shown = check("device cpu --out proof --minutes 1e-9")
    assert shown.endswith(
        "The same command run again continues with what was not run.\n"
    )
    backend = load_backend("emulated")
    original = backend.multiply
    monkeypatch.setattr(backend, "multiply", lambda a, b: original(a, b) * 1.01)
    assert "1 failed. Record: proof/cpu-" in check("device cpu --out proof", code=1)


def test_a_recipe_as_a_table_that_fits_the_terminal(check, monkeypatch):
    monkeypatch.setenv("COLUMNS", "110")
    monkeypatch.setattr(certificate, "SIDE", 256)
    shown = check("recipe rocm-te-sr --draws 8 --device cpu")
    lines = shown.splitlines()
    assert max(map(len, lines)) < 200
    assert all(len(line) <= 110 for line in lines if "±" in line and "Gaussian" in line)
    for pattern in (
        "gain by place in the block, repeating: 0.998",
        "the noise of elements 1 apart correlates by 0.1",
        "of the error's energy scale bias ",
        "\ndgrad.w, wgrad.dy, wgrad.x .* no\n",
    ):
        assert re.search(pattern, shown)
    assert lines[-1] == "rocm-te-sr is what it claims to be."
    content = check("arm quickstart 'all three + sr' --draws 8 --device cpu --json")
    assert content["subject"] == "quickstart, arm 'all three + sr'"
    names = [name for alike in content["operands"] for name in alike["operands"]]
    assert len(set(names)) == 6


def test_a_function_and_its_exit_code(check, monkeypatch, tmp_path):
    monkeypatch.setattr(certificate, "SIDE", 256)
    (tmp_path / "quant.py").write_text(QUANTISERS)
    content = check(
        "function quant.py:right --as mxfp4 --draws 8 --json --out found.json"
    )
    assert content["holds"]
    assert content == json.loads((tmp_path / "found.json").read_text())
    (operand,) = content["operands"]
    assert operand["differences"] == operand["disagreements"] == []
    assert (
        operand["figures"]["Gaussian"]["gain"]
        == operand["definition"]["Gaussian"]["gain"]
    )
    wrong = check("function quant.py:rceil --as mxfp4 --draws 8", code=1)
    assert "other" in wrong
    assert wrong.endswith("quant.py:rceil is NOT what it claims to be.\n")
