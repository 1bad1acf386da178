"""``ablate backends`` and ``ablate prove``."""

import json
import sys

import pytest
from click.testing import CliRunner

from ablate.backends.select import load_backend
from ablate.cli import cli, main
from ablate.prove import command, run
from ablate.prove.arithmetic import ARITHMETIC
from ablate.prove.facts import facts
from ablate.prove.run import RestartError


def call(*arguments):
    return CliRunner().invoke(cli, arguments, catch_exceptions=False)


def test_the_table_of_this_machine_fits_a_terminal():
    result = call("backends")
    assert result.exit_code == 0
    assert "mxfp4" in result.output
    assert max(len(line) for line in result.output.splitlines()) <= 100


@pytest.mark.parametrize("arch", ["cpu", "sm_80", "sm_90", "sm_100", "sm_120", "gfx942", "gfx950"])
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
    assert "--arch: unknown architecture 'sm_1' (expected cpu, sm_80, sm_90" in capsys.readouterr().err


def prove(folder, *arguments):
    return call("prove", "--device", "cpu", "--out", str(folder), *arguments)


def test_prove_passes_here_and_goes_on_where_it_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "PARTS", {"device": facts, **ARITHMETIC})
    first = prove(tmp_path, "--minutes", "1e-9")
    assert first.exit_code == 0, first.output
    assert "6 parts not run. Record: " in first.output
    assert first.output.endswith("The same command goes on with what was not run.\n")
    result = prove(tmp_path)
    assert result.exit_code == 0, result.output
    assert (
        "passed  exact probe: exact probe: mxfp4 (emulated): 12288 products equal to the bit" in result.output
    )
    assert "failed" not in result.output
    assert f"6 parts passed. Record: {tmp_path}/cpu-" in result.output.splitlines()[-1]


def test_prove_finds_a_fault(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "PARTS", {"exact probe": ARITHMETIC["exact probe"]})
    backend = load_backend("emulated")
    original = backend.multiply
    monkeypatch.setattr(backend, "multiply", lambda a, b: original(a, b) * 1.01)
    result = prove(tmp_path, "--json")
    content = json.loads(result.output)
    assert result.exit_code == 1
    failed = [one for one in content["parts"][0]["findings"] if one["result"] == "failed"]
    assert failed[0]["check"] == "exact probe: mxfp4"


def test_a_lost_gpu_is_tested_on_by_a_new_process(tmp_path, monkeypatch, capfd):
    def lost(*_args, **_options):
        raise RestartError("CUDA error: unspecified launch failure")

    started = []
    monkeypatch.setattr(command, "prove", lost)
    monkeypatch.setattr(command.os, "execv", lambda *arguments: started.append(arguments))
    with pytest.raises(UnboundLocalError):  # a real exec does not return
        command.main("cpu", 5.0, str(tmp_path), as_json=False)
    ((program, words),) = started
    assert program == sys.executable
    assert words[1:5] == ["-m", "ablate.prove", "--device", "cpu"]
    assert 4 < float(words[6]) <= 5
    assert words[7:] == ["--out", str(tmp_path)]
    assert "lost to this process (CUDA error: unspecified launch failure)" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--device", "cuda:7"], "--device: 'cuda:7' cannot be used ("),
        (["--device", "toaster"], "--device: 'toaster' cannot be used ("),
        (["--minutes", "0"], "--minutes: expected a number above 0, got 0"),
        (["--minutes", "nan"], "--minutes: expected a number above 0, got nan"),
    ],
)
def test_bad_options_are_one_line(capsys, monkeypatch, arguments, line):
    monkeypatch.setattr("sys.argv", ["ablate", "prove", *arguments])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    assert line in capsys.readouterr().err
