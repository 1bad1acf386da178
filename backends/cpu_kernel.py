"""The compiled CPU quantiser: built once per machine type, checked for its bits, then loaded in milliseconds.

``kernel.cpp`` is compiled on first use (a few seconds) into the user's cache, under a name that holds the
hash of the source, of the compiler's version and of the CPU's features, so that a shared home directory
serves machines that differ. A fresh build is used only after it gave the same bits as plain torch. Without
a compiler everything still works through plain torch, several times slower; ``availability()`` says so.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import os
import platform
import shutil
import struct
import subprocess
import tempfile
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from ablate.cache import cache_folder
from ablate.numerics.philox import Key
from ablate.numerics.quantize import (
    Quantized,
    check_operand,
    fake_quantize,
    fp8_descale,
    fp8_scale,
    signs_of,
)
from ablate.recipes import OperandPolicy

if TYPE_CHECKING:
    from collections.abc import Iterator

_FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-std=c++17", "-shared", "-fPIC", "-pthread")
_THREADING_MIN_ELEMENTS = 1 << 18
"""Below this a thread costs more than it saves."""


@dataclass(frozen=True, kw_only=True)
class Availability:
    """Whether the compiled quantiser can be used, and in one line why (not)."""

    usable: bool
    reason: str


def _compiler() -> str | None:
    for name in (os.environ.get("CXX"), "g++", "clang++", "c++"):
        if name and (path := shutil.which(name)):
            return path
    return None


def _cpu_features() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith(("flags", "Features")):
                return line
    return platform.processor()


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build(compiler: str, source: bytes, target: Path) -> str | None:
    """Compile, check the bits, move into place. Return None, or why it failed."""
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        code, library = Path(folder) / "kernel.cpp", Path(folder) / "kernel.so"
        code.write_bytes(source)
        vectors = ("-mprefer-vector-width=512",) if platform.machine() == "x86_64" else ()
        done = subprocess.run(
            [compiler, *_FLAGS, *vectors, "-o", str(library), str(code)],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode != 0:
            return f"{compiler} failed: {(done.stderr.strip().splitlines() or ['no message'])[0]}"
        if not _bits_agree(_open(library)):
            return f"the build of {compiler} does not give the bits of plain torch"
        library.replace(target)
    return None


def _open(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    i64, i32, u32, pointer = ctypes.c_int64, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p
    library.ablate_mxfp4.argtypes = [
        pointer, pointer, i64, i64, i64, i32, i32, i32, pointer, i32, ctypes.c_float, u32, u32, u32, u32, i32,
    ]  # fmt: skip
    library.ablate_mxfp4.restype = i32
    library.ablate_amax_bits.argtypes = [pointer, i64, i64, i64, i32]
    library.ablate_amax_bits.restype = u32
    library.ablate_fp8.argtypes = [pointer, pointer, i64, i64, i64, i32, i32, ctypes.c_float, i32]
    library.ablate_fp8.restype = None
    return library


def _bits_agree(library: ctypes.CDLL) -> bool:
    """Compare every kind of policy with plain torch, with a NaN and an Inf for those with blocks."""
    x = torch.randn(64, 96, generator=torch.Generator().manual_seed(0)) * 8
    odd = x.clone()
    odd[3, 5], odd[40, 70] = float("nan"), float("inf")
    key = Key(seed=1, layer="self-test", gemm="wgrad", operand="x", step=2)
    cases = [(x, OperandPolicy(format="fp8_e4m3", scale="tensor"))]
    cases += [(x, OperandPolicy(format="fp8_e5m2", scale="tensor"))]
    nearest = OperandPolicy(format="mxfp4", scale="floor")
    stochastic = replace(nearest, rounding="stochastic", prescale=0.75)
    cases += [(odd, nearest), (odd, stochastic)]
    sizes: tuple[Literal[16, 32], ...] = (16, 32)
    for size in sizes:
        cases += [(odd, replace(nearest, hadamard=size))]
        cases += [(odd, replace(stochastic, hadamard=size, signs="step"))]
    for tensor, policy in cases:
        for axis in (0, 1):
            ours = _call(library, tensor, policy, axis, key)
            theirs = fake_quantize(tensor, policy, axis=axis, key=key)
            same = torch.equal(ours.values.nan_to_num(nan=99.0), theirs.values.nan_to_num(nan=99.0))
            if not same or ours.descale != theirs.descale:
                return False
    return True


@lru_cache(maxsize=1)
def _load() -> tuple[ctypes.CDLL | None, str]:
    if os.environ.get("ABLATE_CPU_KERNEL") == "off":
        return None, "switched off by ABLATE_CPU_KERNEL=off"
    source = files("ablate.backends").joinpath("kernel.cpp").read_bytes()
    compiler = _compiler()
    version = ""
    if compiler:
        done = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False)
        version = done.stdout.splitlines()[0] if done.stdout else compiler
    identity = hashlib.sha256(source + repr((version, _cpu_features(), _FLAGS)).encode()).hexdigest()[:16]
    folder = cache_folder("kernels")
    target = folder / f"{identity}.so"
    if not target.exists():
        if compiler is None:
            return None, "no C++ compiler found (install g++ for a several times faster emulation)"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with _locked(folder / f"{identity}.lock"):
                if not target.exists() and (why := _build(compiler, source, target)):
                    return None, why
        except OSError as error:
            return None, f"cannot build into {folder}: {error}"
    try:
        return _open(target), f"compiled by {version or 'an earlier compiler'}"
    except OSError as error:
        return None, f"cannot load {target}: {error}"


def availability() -> Availability:
    """Build or load the kernel and say whether it can be used."""
    library, reason = _load()
    return Availability(usable=library is not None, reason=reason)


def takes(x: Tensor, policy: OperandPolicy) -> bool:
    """Return whether the compiled kernel does this operand; everything else is for plain torch."""
    return (
        policy.format != "bf16"
        and x.device.type == "cpu"
        and x.dtype in (torch.bfloat16, torch.float32)
        and _load()[0] is not None
    )


def compiled_fake_quantize(x: Tensor, policy: OperandPolicy, *, axis: int, key: Key | None) -> Quantized:
    """Do what ``fake_quantize`` does, with the same bits, by the compiled kernel.

    Raises:
        ValueError: as ``fake_quantize``.
    """
    check_operand(x, policy, axis, key)
    library = _load()[0]
    assert library is not None
    return _call(library, x, policy, axis % 2, key)


def _call(library: ctypes.CDLL, x: Tensor, policy: OperandPolicy, axis: int, key: Key | None) -> Quantized:
    if x.stride(1) != 1:
        x = x.contiguous()
    out = torch.empty(x.shape, dtype=torch.bfloat16)
    source = (x.shape[0], x.shape[1], x.stride(0), int(x.dtype == torch.bfloat16))
    threads = torch.get_num_threads() if x.numel() >= _THREADING_MIN_ELEMENTS else 1
    if policy.format != "mxfp4":
        amax_bits = library.ablate_amax_bits(x.data_ptr(), *source)
        scale = fp8_scale(struct.unpack("<f", struct.pack("<I", amax_bits))[0], policy.format)
        e5m2 = int(policy.format == "fp8_e5m2")
        library.ablate_fp8(x.data_ptr(), out.data_ptr(), *source, e5m2, scale, threads)
        return Quantized(values=out, descale=fp8_descale(scale))
    signs = signs_of(policy, key)
    key_words = key.words() if key else (0, 0)
    position = (key.step & 0xFFFFFFFF, key.call & 0xFFFFFFFF) if key else (0, 0)
    failed = library.ablate_mxfp4(
        x.data_ptr(), out.data_ptr(), *source, axis, policy.hadamard,
        None if signs is None else signs.data_ptr(), int(policy.rounding == "stochastic"), policy.prescale,
        *key_words, *position, threads,
    )  # fmt: skip
    if failed:
        raise ValueError(f"the compiled kernel has no Hadamard of size {policy.hadamard}")
    return Quantized(values=out, descale=1.0 / policy.prescale)
