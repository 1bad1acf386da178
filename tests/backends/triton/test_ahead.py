"""The kernels compiled for GPUs that are not here, by the installed Triton and others, and read back.

A kernel costs seconds of compiling. So the usual tests compile one tile of each format for one target of each
maker. The exhaustive ones compile each tile and each variant of the quantiser for all targets, and one tile
of each format with the oldest and the newest Triton.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ablate.backends.device import KNOWN, OLDEST_TO_WIDEN_NVFP4, release
from ablate.backends.triton.policies import TILES
from tests.golden import rows_of

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)
TARGETS = [arch for arch in KNOWN if arch != "cpu"]


# One tile of each format but those named, and two variants of the quantiser, of which one divides.
ONE_OF_EACH = """
import json, sys, triton
from dataclasses import asdict
from ablate.backends.triton.compiled import VARIANTS, compile_gemm, compile_quantiser
from ablate.backends.triton.policies import TILES

target, *without = sys.argv[1:]
tiles = {each: tiles[-1] for each, tiles in TILES.items() if each[0] == target and each[1] not in without}
found = [compile_gemm(*each, tile, even=True) for each, tile in tiles.items()]
found += [compile_quantiser(target, *one) for one in VARIANTS[:2]]
print(json.dumps({"triton": triton.__version__, "compiled": [asdict(one) for one in found]}))
"""


def run(cache, *command, path=None):
    """Compile in a new process: of this one's environment and Triton it must know nothing."""
    environment = os.environ | {"TRITON_CACHE_DIR": str(cache)}
    environment.pop("TRITON_INTERPRET", None)
    if path:
        places = [str(path), environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(places)
    command = [sys.executable, "-W", "ignore", *command]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False
    )


def check_kernels(kernels, target):
    """Each GEMM has native instructions and keeps the limits of the hardware; return the formats."""
    for kernel in kernels:
        assert kernel["target"] == target
        if kernel["kernel"] == "gemm" and target == "sm_90":
            assert any("widened" in problem for problem in kernel["problems"])
        else:
            assert not kernel["problems"], kernel
            assert kernel["instructions"] or kernel["kernel"] != "gemm"
    gemms = (kernel for kernel in kernels if kernel["kernel"] == "gemm")
    return {kernel["variant"].split()[0] for kernel in gemms}


def formats_of(target):
    return {fmt for arch, fmt in TILES if arch == target}


def check_target(kernels, target):
    """Every format of the target, and each unmasked GEMM's row in the docs."""
    assert check_kernels(kernels, target) == formats_of(target)
    page = Path(__file__).with_name("instructions.txt").read_text().splitlines()
    rows = {}
    for row in page:
        if row.startswith(f"| {target} | "):
            rows[row.split(" | ")[1]] = row
    for kernel in kernels:
        if kernel["kernel"] == "gemm" and not kernel["variant"].endswith("masked"):
            row = rows[kernel["variant"]]
            assert row.endswith(f"| {kernel['shared_bytes'] / 1024:.0f} KiB |")
            assert all(
                f"| `{name}` | {count} |" in row
                for name, count in kernel["instructions"].items()
            )
    return rows


FULLY = ("sm_100", "gfx950")
"""Targets of which every tile is compiled: one for each vendor's own FP4 instructions."""


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "target", [target for target in TARGETS if target not in FULLY]
)
def test_one_tile_of_each_format_is_native_and_within_limits(target, tmp_path):
    result = run(tmp_path, "-c", ONE_OF_EACH, target)
    assert result.returncode == 0, result.stderr[-3000:]
    check_target(json.loads(result.stdout)["compiled"], target)


@pytest.mark.exhaustive
@pytest.mark.parametrize("target", FULLY)
def test_every_tile_and_variant_is_native_and_within_limits(target, tmp_path):
    from ablate.backends.triton.compiled import SCALES, VARIANTS

    result = run(tmp_path, "-m", "ablate.check", target, "--json")
    assert result.returncode == 0, result.stderr[-3000:]
    kernels = json.loads(result.stdout)["compiled"]
    rows = check_target(kernels, target)
    number = sum(len(TILES[target, fmt]) for fmt in formats_of(target))
    # With and without masks; the quantiser's variants, and tensors' scales.
    assert len(kernels) == 2 * number + len(VARIANTS) + len(SCALES)
    assert len(rows) == number


@pytest.mark.exhaustive
@pytest.mark.parametrize("target", ["sm_90", *FULLY])
def test_one_tile_of_each_format_with_another_triton(target, other_triton, tmp_path):
    version, folder = other_triton
    without = ["nvfp4"] if target == "sm_90" and version < OLDEST_TO_WIDEN_NVFP4 else []
    result = run(tmp_path, "-c", ONE_OF_EACH, target, *without, path=folder)
    assert result.returncode == 0, result.stderr[-3000:]
    answer = json.loads(result.stdout)
    assert release(answer["triton"]) == version
    formats = check_kernels(answer["compiled"], target)
    assert formats == formats_of(target) - set(without)


@pytest.mark.parametrize(
    ("backend", "line", "other"),
    [
        ("cuda", "div.rn.f32 \t%r3, %r1, %r2;", "div.full.f32 \t%r3, %r1, %r2;"),
        ("cuda", "sqrt.rn.f32 \t%r3, %r1;", "sqrt.approx.ftz.f32 \t%r3, %r1;"),
        ("cuda", "mul.f32 \t%r3, %r1, %r2;", "fma.rn.f32 \t%r3, %r1, %r2, %r4;"),
        ("cuda", "cvt.rpi.ftz.f32.f32 \t%r3, %r1;", "cvt.rmi.ftz.f32.f32 \t%r3, %r1;"),
        ("cuda", "mad.lo.s32 \t%r3, %r1, %r2, %r4;", "add.ftz.f32 \t%r3, %r1, %r2;"),
        ("hip", "\tv_mul_f32_e32 v1, v2, v3", "\tv_fmac_f32_e32 v1, v2, v3"),
        ("hip", "\tv_rcp_f32_e32 v1, v2", "\tv_rcp_f32_e32 v1, v2\n" * 2),
        (
            "hip",
            "\tv_sqrt_f32_e32 v1, v2\n" + "\tv_fma_f32 v1, v2, v3, v4\n" * 2,
            "\tv_sqrt_f32_e32 v1, v2",
        ),
    ],
)
def test_arithmetic_with_other_bits_is_found(backend, line, other):
    from ablate.backends.triton.compiled import inexact

    assert inexact(line, backend) == []
    assert inexact(other, backend) != []


# Too few rows for a tcgen05 tile, too short a K for one scaled instruction, more tensor memory than there is,
# more registers and more shared memory than there are.
WRONG = rows_of("""
sm_100 | 64, 128, 128, 4    | no native instruction
sm_120 | 128, 128, 32, 8    | does not compile
sm_100 | 256, 256, 128, 8   | traps, tensor memory
gfx950 | 256, 256, 256, 8, 2 | spilled, shared memory
""")


@pytest.mark.exhaustive
@pytest.mark.parametrize(("target", "tile", "problems"), WRONG)
def test_a_wrong_tile_is_found(target, tile, problems, tmp_path):
    code = (
        "from ablate.backends.triton.compiled import compile_gemm\n"
        "from ablate.backends.triton.policies import Tile\n"
        f"print('; '.join(compile_gemm({target!r}, 'mxfp4', Tile({tile})).problems))"
    )
    result = run(tmp_path, "-c", code)
    told = result.stdout + result.stderr[-1500:]
    assert any(problem in result.stdout for problem in problems.split(", ")), told
