"""``ablate check`` of this machine, of a device, and of hardware that is not here."""

import json

import pytest
from click.testing import CliRunner

from ablate.backends import preflight
from ablate.backends.preflight import CheckResult
from ablate.backends.select import load_backend
from ablate.check import __main__ as door
from ablate.check import run
from ablate.check.run import PARTS
from ablate.cli import cli, main

FIRST = {name: PARTS[name] for name in ("device", "exact probe", "Hadamard")}


def call(*arguments):
    return CliRunner().invoke(cli, ["check", *arguments], catch_exceptions=False)


def test_this_machines_table_fits_a_terminal_and_its_back_ends_are_tested():
    result = call()
    assert result.exit_code == 0
    assert "mxfp4" in result.output
    assert max(len(line) for line in result.output.splitlines()) <= 80
    assert "self-test of emulated: " in result.output
    tests = json.loads(call("--json").output)["self_tests"]
    assert {one["backend"] for one in tests} >= {"emulated", "torch"}
    assert all(one["passed"] for one in tests)


def test_a_failed_self_test_is_told(monkeypatch):
    bad = CheckResult(backend="torch", check="product: fp8_e4m3", passed=False, detail="off by 3")
    monkeypatch.setattr(preflight, "quick_self_test", lambda *_: (bad,))
    result = call()
    assert result.exit_code == 1
    assert "self-test of torch: FAILED: product: fp8_e4m3: off by 3" in result.output


@pytest.fixture
def compiled(monkeypatch):
    """Stand in for the kernels, which take minutes to compile (tests/backends/triton/test_ahead.py does)."""
    monkeypatch.setattr(door, "compiled_for", lambda arch, _: ({"compiled": [arch]}, int(arch == "sm_80")))


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100", "sm_120", "gfx942", "gfx950"])
def test_other_hardware_can_be_asked_of(arch, compiled):
    result = call(arch, "--json")
    content = json.loads(result.output)
    assert content["device"]["arch"] == arch
    assert content["device"]["here"] is False
    modes = {(row["backend"], row["format"]): row["mode"] for row in content["backends"]}
    assert modes["emulated", "mxfp4"] == "emulated"
    assert modes["torch", "mxfp4"] == ("native" if arch in ("sm_100", "gfx950") else "no")
    assert all(row["detail"] for row in content["backends"])
    assert (content["compiled"], result.exit_code) == ([arch], int(arch == "sm_80"))


def test_without_triton_no_kernel_is_compiled(monkeypatch):
    monkeypatch.setattr(door, "triton_fault", lambda: "Triton is not installed (pip install triton)")
    result = call("gfx950")
    assert result.exit_code == 0
    assert (
        result.output.splitlines()[0] == "CDNA 4: MI350X, MI355X (gfx950), not here: as its support is known"
    )
    assert "The kernels are not compiled: Triton is not installed (pip install triton)." in result.output


def test_details_say_why_not(compiled):
    assert "torch         mxfp4       no: " in call("sm_90", "--details").output


def prove(folder, *arguments):
    return call("cpu", "--out", str(folder), *arguments)


def test_a_device_passes_here_and_the_same_command_goes_on_where_it_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "PARTS", FIRST)
    first = prove(tmp_path, "--minutes", "1e-9")
    assert first.exit_code == 0, first.output
    assert "Parts: 3 not run. Record: " in first.output
    assert first.output.endswith("The same command goes on with what was not run.\n")
    result = prove(tmp_path)
    assert result.exit_code == 0, result.output
    assert (
        "passed  exact probe: exact probe: mxfp4 (emulated): 12288 products equal to the bit" in result.output
    )
    assert "failed" not in result.output
    assert f"Parts: 3 passed. Record: {tmp_path}/cpu-" in result.output.splitlines()[-1]


def test_a_fault_of_a_device_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "PARTS", {"exact probe": PARTS["exact probe"]})
    backend = load_backend("emulated")
    original = backend.multiply
    monkeypatch.setattr(backend, "multiply", lambda a, b: original(a, b) * 1.01)
    result = prove(tmp_path, "--json")
    content = json.loads(result.output)
    assert result.exit_code == 1
    failed = [one for one in content["parts"][0]["findings"] if one["result"] == "failed"]
    assert failed[0]["check"] == "exact probe: mxfp4"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["cuda:7"], "device 'cuda:7' cannot be used ("),
        (["sm_1"], "no architecture 'sm_1' (expected cpu, sm_80, sm_90"),
        (["toaster"], "check: unknown recipe 'toaster' ("),
        (["cpu", "--minutes", "0"], "--minutes: expected a number above 0, got 0"),
        (["cpu", "--minutes", "nan"], "--minutes: expected a number above 0, got nan"),
        (["cpu", "--draws", "8"], "--draws: not for a device"),
        (["--backend", "torch"], "--backend: not for this machine"),
        (["tseng", "--minutes", "3"], "--minutes: not for a quantiser"),
        (["quickstart", "--arm", "a", "--arm", "b"], "--arm: one arm is checked at a time"),
    ],
)
def test_bad_options_are_one_line(capsys, monkeypatch, arguments, line):
    monkeypatch.setattr("sys.argv", ["ablate", "check", *arguments])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    assert line in capsys.readouterr().err
