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
    environment = {
        name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"
    }
    environment["TRITON_CACHE_DIR"] = str(cache)
    if path:
        environment["PYTHONPATH"] = os.pathsep.join(
            [str(path), environment.get("PYTHONPATH", "")]
        )
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
            assert (
                kernel["kernel"] != "gemm" or sum(kernel["instructions"].values()) > 0
            )
    return {
        kernel["variant"].split()[0] for kernel in kernels if kernel["kernel"] == "gemm"
    }


def check_target(kernels, target):
    """Every format of the target, and each unmasked GEMM's row in the docs."""
    assert check_kernels(kernels, target) == {
        fmt for arch, fmt in TILES if arch == target
    }
    page = Path(__file__).with_name("instructions.txt").read_text().splitlines()
    rows = {
        row.split(" | ")[1]: row for row in page if row.startswith(f"| {target} | ")
    }
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
    tiles = [
        tile for (arch, _), tiles in TILES.items() if arch == target for tile in tiles
    ]
    # With and without masks; the quantiser's variants, and tensors' scales.
    assert len(kernels) == 2 * len(tiles) + len(VARIANTS) + len(SCALES)
    assert len(rows) == len(tiles)


@pytest.mark.exhaustive
@pytest.mark.parametrize("target", ["sm_90", *FULLY])
def test_one_tile_of_each_format_with_another_triton(target, other_triton, tmp_path):
    version, folder = other_triton
    without = ["nvfp4"] if target == "sm_90" and version < OLDEST_TO_WIDEN_NVFP4 else []
    result = run(tmp_path, "-c", ONE_OF_EACH, target, *without, path=folder)
    assert result.returncode == 0, result.stderr[-3000:]
    answer = json.loads(result.stdout)
    assert release(answer["triton"]) == version
    formats = {fmt for arch, fmt in TILES if arch == target}
    assert check_kernels(answer["compiled"], target) == formats - set(without)


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
WRONG = {
    "a short tile": (
        "sm_100",
        "bm=64, bn=128, bk=128, warps=4",
        "no native instruction",
    ),
    "a short K": ("sm_120", "bm=128, bn=128, bk=32, warps=8", "does not compile"),
    "tensor memory": (
        "sm_100",
        "bm=256, bn=256, bk=128, warps=8",
        "traps|tensor memory",
    ),
    "spills": (
        "gfx950",
        "bm=256, bn=256, bk=256, warps=8, stages=2",
        "spilled|shared memory",
    ),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_tile_is_found(name, tmp_path):
    target, tile, expected = WRONG[name]
    code = (
        "from ablate.backends.triton.compiled import compile_gemm\n"
        "from ablate.backends.triton.policies import Tile\n"
        f"print('; '.join(compile_gemm({target!r}, 'mxfp4', Tile({tile})).problems))"
    )
    result = run(tmp_path, "-c", code)
    assert any(word in result.stdout for word in expected.split("|")), (
        result.stdout + result.stderr[-1500:]
    )
