"""``ablate backends`` and ``ablate doctor``."""

import json

import pytest
from click.testing import CliRunner

from ablate.backends.select import load_backend
from ablate.cli import cli, main


def call(*arguments):
    return CliRunner().invoke(cli, arguments, catch_exceptions=False)


def test_the_table_of_this_machine_fits_a_terminal():
    result = call("backends")
    assert result.exit_code == 0
    assert "mxfp4" in result.output
    assert max(len(line) for line in result.output.splitlines()) <= 100


@pytest.mark.parametrize("arch", ["cpu", "sm_90", "sm_100", "sm_120", "gfx950"])
def test_other_hardware_can_be_asked_of(arch):
    content = json.loads(call("backends", "--arch", arch, "--json").output)
    assert content["device"]["arch"] == arch
    assert content["device"]["here"] is False
    modes = {(row["backend"], row["format"]): row["mode"] for row in content["backends"]}
    assert modes["emulated", "mxfp4"] == "emulated"
    assert modes["torch", "mxfp4"] == ("native" if arch in ("sm_100", "gfx950") else "no")
    assert all(row["detail"] for row in content["backends"])


def test_details_say_why_not():
    assert (
        "needs a GPU" in call("backends", "--details").output
        or "not installed" in call("backends", "--details").output
    )


def test_an_unknown_architecture_is_one_line(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["ablate", "backends", "--arch", "sm_1"])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    assert "--arch: unknown architecture 'sm_1' (expected cpu, sm_90" in capsys.readouterr().err


def test_the_doctor_passes_here():
    result = call("doctor", "--quick", "--device", "cpu", "--backend", "emulated", "--backend", "torch")
    assert result.exit_code == 0, result.output
    assert "exact probe: mxfp4: 12288 products equal to the bit" in result.output
    assert "FAIL" not in result.output
    assert result.output.rstrip().endswith("checks passed.")


def test_the_doctor_finds_a_fault(monkeypatch):
    backend = load_backend("emulated")
    original = backend.multiply
    monkeypatch.setattr(backend, "multiply", lambda a, b: original(a, b) * 1.01)
    result = call("doctor", "--quick", "--device", "cpu", "--backend", "emulated", "--json")
    content = json.loads(result.output)
    assert result.exit_code == 1
    assert content["passed"] is False
    assert any(not one["passed"] and one["check"] == "exact probe: mxfp4" for one in content["results"])


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--backend", "fast"], "--backend: no back end 'fast' (expected auto, emulated"),
        (["--device", "cuda:7"], "--device: 'cuda:7' cannot be used ("),
        (["--device", "toaster"], "--device: 'toaster' cannot be used ("),
    ],
)
def test_bad_options_are_one_line(capsys, monkeypatch, arguments, line):
    monkeypatch.setattr("sys.argv", ["ablate", "doctor", *arguments])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    assert line in capsys.readouterr().err
