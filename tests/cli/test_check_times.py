"""``ablate check --time``: each arm's GEMMs at the shapes of its model, or those of each format."""

import json

import pytest
from click.testing import CliRunner

from ablate.backends.select import Selection
from ablate.check.speed import Shape, dimensions, time_gemm
from ablate.cli import cli, main
from ablate.modelled.hardware import PEAKS, peak_tflops
from ablate.recipes import GemmPolicy, OperandPolicy

STUDY = """\
name: s
baseline: plain
target: {val_loss: 3.0}
base: {model: {width: 64, layers: 3, heads: 4, kv_heads: 2, ffn: 96}, training: {tokens: 65536}}
arms:
  plain: {recipe: bf16}
  fp4: {recipe: {gemms: [fprop, wgrad], layers: [{last: 1, recipe: bf16}]}}
"""


@pytest.fixture
def study(tmp_path):
    path = tmp_path / "s.yaml"
    path.write_text(STUDY)
    return str(path)


@pytest.mark.parametrize(("gemm", "mnk"), [("fprop", (6, 4, 5)), ("dgrad", (6, 5, 4)), ("wgrad", (4, 5, 6))])
def test_dimensions(gemm, mnk):
    assert dimensions(gemm, Shape(tokens=6, inputs=5, outputs=4)) == mnk


def test_a_gemm_is_timed_as_what_it_is():
    mxfp4 = OperandPolicy(format="mxfp4")
    shape = Shape(tokens=64, inputs=96, outputs=32)
    one = time_gemm("wgrad", GemmPolicy(left=mxfp4, right=mxfp4), shape, Selection("auto"), "cpu", repeats=2)
    assert (one.m, one.n, one.k) == (32, 96, 64)
    assert (one.backend, one.mode) == ("emulated", "emulated")
    assert min(one.quantise_ms, one.multiply_ms, one.bf16_ms, one.fp8_ms) > 0
    assert one.tflops == pytest.approx(2 * 32 * 96 * 64 / one.multiply_ms / 1e9)
    assert one.speed_over_bf16 == pytest.approx(one.bf16_ms / (one.quantise_ms + one.multiply_ms))


def test_every_arm_layer_and_gemm_has_its_row(study, tmp_path):
    out = tmp_path / "gemms.json"
    result = CliRunner().invoke(
        cli,
        ["check", study, "--time", "--device", "cpu", "--repeats", "1", "--out", str(out)],
        catch_exceptions=False,
    )
    assert result.exit_code == 0
    assert "say nothing of FP4 hardware" in result.output
    content = json.loads(out.read_text())
    assert [one["arm"] for one in content["arms"]] == ["plain", "fp4"]
    layers = [(row["layer"], row["layers"]) for row in content["gemms"] if row["arm"] == "fp4"]
    # The last block keeps bf16, so that each of its layers has a row of its own.
    assert layers.count(("ffn.down", 2)) == layers.count(("ffn.down", 1)) == 3
    assert sum(count for _, count in layers) == 3 * (3 * 4 + 1)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--arm", "fp"], "--arm: no arm 'fp' in study 's' (arms: plain, fp4)"),
        (["--backend", "fast"], "--backend: no back end 'fast' (expected auto"),
        (["--device", "toaster"], "device 'toaster' cannot be used ("),
        (["--backend", "torch"], "arm 'fp4', attention.qkv, Fprop: back end 'torch' cannot do mxfp4 on CPU"),
        (
            ["--arm", "fp4", "--tokens", "33"],
            "arm 'fp4', attention.qkv, Wgrad: the group of 32 does not divide 33",
        ),
        (
            ["--arm", "plain", "--repeats", "1", "--out", "/no/such/folder/x"],
            "--out: cannot write /no/such/folder/x",
        ),
    ],
)
def test_bad_options_are_one_line(study, capsys, monkeypatch, arguments, line):
    monkeypatch.setattr("sys.argv", ["ablate", "check", study, "--time", "--device", "cpu", *arguments])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    assert line in capsys.readouterr().err


def test_peaks():
    assert peak_tflops("NVIDIA H100 80GB HBM3", "fp8_e4m3") == PEAKS["H100"].fp8
    assert peak_tflops("NVIDIA H100 80GB HBM3", "mxfp4") is None
    assert peak_tflops("AMD Instinct MI355X", "mxfp4") == PEAKS["MI355X"].fp4
    assert peak_tflops("CPU", "bf16") is None
    assert all(one.source for one in PEAKS.values())


def test_without_a_study_each_format_is_timed(tmp_path):
    arguments = ["check", "--time", "--tokens", "64", "--repeats", "1", "--device", "cpu", "--json"]
    content = json.loads(CliRunner().invoke(cli, arguments, catch_exceptions=False).output)
    assert {"bf16", "mxfp4", "nvfp4"} <= {one["arm"] for one in content["arms"]}
    assert {(row["m"], row["n"], row["k"]) for row in content["gemms"] if row["gemm"] == "fprop"} == {
        (64, 1024, 1024)
    }


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["quickstart"], "check: unknown recipe 'quickstart' (`ablate recipes` lists them"),
        (["--time", "--arm", "fp4"], "--arm: without a study there are no arms"),
    ],
)
def test_what_belongs_to_a_study_needs_one(capsys, monkeypatch, arguments, line):
    monkeypatch.setattr("sys.argv", ["ablate", "check", *arguments])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    assert line in capsys.readouterr().err
