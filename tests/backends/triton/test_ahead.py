"""The kernels compiled for GPUs that are not here, by the newest and the oldest Triton, and read back."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ablate.backends.availability import OLDEST_TRITON
from ablate.backends.triton.tiles import TILES, Tile

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
    pytest.mark.exhaustive,
    pytest.mark.timeout(1200),
]
OLDEST = ".".join(map(str, (*OLDEST_TRITON, 0)))
NATIVE = {
    ("sm_100", "mxfp4"): "UTCOMMA",
    ("sm_100", "nvfp4"): "UTCOMMA.4X",
    ("sm_100", "mxfp8"): "UTCQMMA",
    ("sm_103", "mxfp4"): "UTCOMMA",
    ("sm_103", "nvfp4"): "UTCOMMA.BLOCK16",
    ("sm_103", "mxfp8"): "UTCQMMA",
    ("sm_120", "mxfp4"): "OMMA.SF.16864.F32.E2M1.E2M1.E8",
    ("sm_120", "nvfp4"): "OMMA.SF.16864.F32.E2M1.E2M1.UE4M3.4X",
    ("sm_120", "mxfp8"): "QMMA.SF.16832.F32.E4M3.E4M3.E8",
    ("gfx950", "mxfp4"): "v_mfma_scale_f32_32x32x64_f8f6f4",
    ("gfx950", "mxfp8"): "v_mfma_scale_f32_32x32x64_f8f6f4",
}


def start(cache, *arguments, path=None):
    # In new processes: of this one's environment and Triton they must know nothing, and both cores are used.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache), "PYTHONWARNINGS": "ignore"}
    if path:
        environment["PYTHONPATH"] = str(path)
    command = [sys.executable, "-m", "ablate.backends.testing.ahead", *arguments]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    folder = tmp_path_factory.mktemp("triton")
    newest = start(folder / "newest-cache", "--json")
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder / "oldest")]
    got = subprocess.run([*install, f"triton=={OLDEST}"], capture_output=True, text=True, check=False)
    oldest = start(folder / "oldest-cache", "--json", path=folder / "oldest") if got.returncode == 0 else None
    done = {}
    for name, process in (("newest", newest), ("oldest", oldest)):
        if process is None:
            continue
        out, errors = process.communicate()
        assert out.startswith("{"), errors[-3000:]
        done[name] = json.loads(out) | {"returncode": process.returncode}
    return done


@pytest.mark.parametrize("version", ["newest", "oldest"])
def test_every_tile_is_native_and_within_limits(compiled, version):
    if version not in compiled:
        pytest.skip(f"Triton {OLDEST} could not be installed: no package index")
    found = compiled[version]
    assert version == "newest" or found["triton"] == OLDEST
    assert found["returncode"] == 0
    gemms = [one for one in found["compiled"] if one["kernel"] == "gemm"]
    seen = {(one["target"], one["variant"].split()[0]) for one in gemms}
    assert seen >= NATIVE.keys()
    assert set(TILES) - seen <= {("sm_90", "nvfp4")}  # Triton 3.6 does not compile it
    for one in gemms:
        if one["target"] == "sm_90":
            assert any("widened" in problem for problem in one["problems"])
        else:
            assert not one["problems"], one
            assert sum(one["instructions"].values()) > 0
    assert not [one for one in found["compiled"] if one["kernel"] == "quantise" and one["problems"]]


def test_the_machine_code_has_the_instructions_of_the_hardware(compiled):
    for one in compiled["newest"]["compiled"]:
        which = (one["target"], one["variant"].split()[0])
        if one["kernel"] == "gemm" and which in NATIVE:
            assert list(one["machine_instructions"]) == [NATIVE[which]], one


WRONG = {
    # Too few rows for a tcgen05 tile, too short a K for one scaled instruction, more tensor memory than there
    # is, more registers and more shared memory than there are.
    "a short tile": ("sm_100", "mxfp4", Tile(bm=64, bn=128, bk=128, warps=4), "no native instruction"),
    "a short K": ("sm_120", "mxfp4", Tile(bm=128, bn=128, bk=32, warps=8), "does not compile"),
    "tensor memory": ("sm_100", "mxfp4", Tile(bm=256, bn=256, bk=128, warps=8), "traps|tensor memory"),
    "spills": ("gfx950", "mxfp4", Tile(bm=256, bn=256, bk=256, warps=8, stages=2), "spilled|shared memory"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_tile_is_found(name, tmp_path):
    target, fmt, tile, expected = WRONG[name]
    code = (
        "from ablate.backends.testing.ahead import compile_gemm\n"
        "from ablate.backends.triton.tiles import Tile\n"
        f"print('; '.join(compile_gemm({target!r}, {fmt!r}, {tile!r}).problems))"
    )
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert any(word in done.stdout for word in expected.split("|")), done.stdout + done.stderr[-1500:]


def test_the_table_in_the_docs_is_what_the_compiler_gives(compiled):
    from ablate.backends.testing.ahead import Compiled, markdown

    found = [
        Compiled(**{**one, "problems": tuple(one["problems"])}) for one in compiled["newest"]["compiled"]
    ]
    page = (Path(__file__).parents[3] / "docs" / "native.md").read_text()
    assert markdown(found) in page
