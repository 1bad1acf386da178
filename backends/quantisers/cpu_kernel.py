"""The compiled CPU quantiser, with the reference's bits: build it, load it, give it an operand's policy.

``kernel/`` is compiled on first use (a few seconds) into the user's cache. The file name includes a
hash of the source, the compiler's version and the CPU's features, so that a shared home directory can
serve different machines. A new build is moved into place only after it gave the same bits as plain torch, for
every policy of the presets and of each kind; its hash is kept beside it and compared at each load, so that a
file in which a bit has flipped is built anew. Without a compiler plain torch does all the work, many times
slower; ``loaded()`` says why.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import math
import os
import platform
import shutil
import struct
import subprocess
import tempfile
from dataclasses import replace
from functools import lru_cache
from importlib.resources import files
from pathlib import Path

import torch
from torch import Tensor

from ablate.backends.protocol import Draw
from ablate.base.files import cache_folder, hash_of, read_record, write_record
from ablate.numerics.formats import ELEMENTS, SCALE_ADD
from ablate.numerics.philox import Key
from ablate.numerics.quantiser import (
    Quantized,
    check_operand,
    fp8_descale,
    fp8_scale,
    round_operand,
)
from ablate.numerics.rotate import signs_of
from ablate.numerics.scales import eden_tensor_scale, fp32, nvfp4_tensor_scale
from ablate.recipes import GEMMS, PRESETS, OperandPolicy, block_shape

_FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-std=c++17", "-shared", "-fPIC", "-pthread")
_THREADING_MIN_ELEMENTS = 1 << 18
"""Below this size a thread costs more than it saves."""
_RULES = {"quest": 1, "tensor": 2, "delayed": 2, "two_level": 3, "four_six": 4, "ms_eden": 5}
"""Every other is E8M0: 0."""
_SCALES = (*SCALE_ADD, *_RULES)
_ROUNDINGS = ("nearest", "stochastic", "stochastic_rocm")
_LARGEST_HADAMARD = 128
_PAIR = 32


class _Job(ctypes.Structure):
    """``struct Job`` of kernel/job.h, field by field."""

    _fields_ = [
        *[(name, ctypes.c_void_p) for name in ("src", "dst", "mask", "signs")],
        *[(name, ctypes.c_int64) for name in ("rows", "cols", "src_stride")],
        *[(name, ctypes.c_int32) for name in ("src_bf16", "axis", "square", "block", "hadamard")],
        *[(name, ctypes.c_int32) for name in ("rotated_bf16", "rule", "rounding")],
        *[(name, ctypes.c_int32) for name in ("mantissa_bits", "min_exponent")],
        *[(name, ctypes.c_uint32) for name in ("scale_add", "scale_emax")],
        *[(name, ctypes.c_float) for name in ("element_max", "prescale", "undo", "norm")],
        *[(name, ctypes.c_float) for name in ("tensor_scale", "block_multiplier", "tensor_descale")],
        *[(name, ctypes.c_uint32) for name in ("key0", "key1", "step", "call")],
    ]


def _bits_agree(library: ctypes.CDLL) -> bool:
    """Compare policies of every kind and preset with plain torch, including blocks with a NaN and an Inf."""
    _declare(library)
    if library.ablate_job_size() != ctypes.sizeof(_Job):
        return False
    x = torch.randn(128, 160, generator=torch.Generator().manual_seed(0)) * 8
    odd = x.clone()
    odd[3, 5], odd[40, 70] = float("nan"), float("inf")
    key = Key(seed=1, layer="self-test", gemm="wgrad", operand="x", step=2)
    nearest = OperandPolicy(format="mxfp4")
    stochastic = replace(nearest, rounding="stochastic", prescale=0.75)
    nvfp4 = OperandPolicy(format="nvfp4")
    blocks = [nearest, stochastic, replace(stochastic, undo="operand"), replace(nearest, block="32x32")]
    blocks += [replace(nearest, scale="quest", mask=True), OperandPolicy(format="mxfp8", scale="rceil")]
    blocks += [replace(nearest, rounding="stochastic_rocm", scale="even")]
    blocks += [OperandPolicy(format="mxfp4_e3m0", rounding="stochastic")]
    blocks += [replace(nearest, hadamard=16), replace(stochastic, hadamard=32, signs="step")]
    tensors = [OperandPolicy(format="fp8_e4m3"), OperandPolicy(format="fp8_e5m2"), nvfp4]
    tensors += [replace(nvfp4, block="16x16"), replace(nvfp4, scale="ms_eden", hadamard=32, signs="step")]
    tensors += [replace(nvfp4, scale="four_six", rounding="stochastic", hadamard=16)]
    cases = [(odd, policy, axis) for policy in blocks for axis in (0, 1)]
    cases += [(x, policy, axis) for policy in tensors for axis in (0, 1)]
    tall = replace(stochastic, hadamard=128, signs="call", rotated_bf16=True)
    cases += [(odd, tall, 0), (odd.t().contiguous(), tall, 1), (odd, replace(nearest, hadamard=64), 0)]
    cases += [(x[:, :128].contiguous(), policy, axis) for policy in _preset_policies() for axis in (0, 1)]
    for tensor, policy, axis in cases:
        ours = _call(library, tensor, Draw(policy=policy, key=key), axis)
        theirs = round_operand(tensor, policy, axis=axis, key=key)
        if not torch.equal(ours.values.nan_to_num(nan=99.0), theirs.values.nan_to_num(nan=99.0)):
            return False
        if ours.descale != theirs.descale:
            return False
        if theirs.mask is not None and (ours.mask is None or not torch.equal(ours.mask, theirs.mask)):
            return False
    return True


def _preset_policies() -> list[OperandPolicy]:
    """Return the different policies of all presets that the kernel supports; delayed scales need a past."""
    policies = {
        getattr(getattr(preset.recipe, gemm), side): None
        for preset in PRESETS.values()
        for gemm in GEMMS
        for side in ("left", "right")
    }
    return [policy for policy in policies if _supports(policy) and policy.scale != "delayed"]


def _declare(library: ctypes.CDLL) -> None:
    job = ctypes.POINTER(_Job)
    library.ablate_quantise.argtypes = [job, ctypes.c_int]
    library.ablate_quantise.restype = None
    library.ablate_amax_bits.argtypes = [job, ctypes.c_int]
    library.ablate_amax_bits.restype = ctypes.c_uint32
    library.ablate_job_size.argtypes = []
    library.ablate_job_size.restype = ctypes.c_int64
    library.ablate_use_threads_of.argtypes = [ctypes.c_void_p] * 3
    library.ablate_use_threads_of.restype = None
    if (runtime := _openmp_runtime()) is not None:
        names = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
        library.ablate_use_threads_of(*(ctypes.cast(runtime[name], ctypes.c_void_p) for name in names))


def _compiler() -> str | None:
    names = (os.environ.get("CXX", ""), "g++", "clang++", "c++")
    return next(filter(None, map(shutil.which, names)), None)


def _cpu_features() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith(("flags", "Features")):
                return line
    return platform.processor()


def _build(compiler: str, sources: dict[str, bytes], target: Path) -> str | None:
    """Compile, check the bits, move into place. Return None, or the reason of a failure."""
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        code, library = Path(folder) / "kernel.cpp", Path(folder) / "kernel.so"
        for name, content in sources.items():
            (Path(folder) / name).write_bytes(content)
        vectors = ("-mprefer-vector-width=512",) if platform.machine() == "x86_64" else ()
        done = subprocess.run(
            [compiler, *_FLAGS, *vectors, "-o", str(library), str(code)],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode != 0:
            return f"{compiler} failed: {(done.stderr.strip().splitlines() or ['no message'])[0]}"
        if not _bits_agree(ctypes.CDLL(str(library))):
            return f"the build of {compiler} does not give the bits of plain torch"
        record = {"hash_of_kernel": hash_of(library.read_bytes()), "compiler": compiler}
        library.replace(target)
        write_record(target.with_suffix(".json"), record)
    return None


def _is_whole(target: Path) -> bool:
    """Whether the library is there as it was when its bits were checked."""
    try:
        known = read_record(target.with_suffix(".json"))["hash_of_kernel"]
        return bool(hash_of(target.read_bytes()) == known)
    except (OSError, ValueError, KeyError):
        return False


@lru_cache(maxsize=1)
def loaded() -> tuple[ctypes.CDLL | None, str]:
    """Return the kernel, built if necessary, and one line about it; or None and the reason."""
    if os.environ.get("ABLATE_CPU_KERNEL") == "off":
        return None, "switched off by ABLATE_CPU_KERNEL=off"
    folder = files("ablate.backends").joinpath("kernel")
    sources = {file.name: file.read_bytes() for file in sorted(folder.iterdir(), key=lambda file: file.name)}
    compiler = _compiler()
    version = ""
    if compiler:
        done = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False)
        version = done.stdout.splitlines()[0] if done.stdout else compiler
    what = repr((sources, version, _cpu_features(), _FLAGS))
    identity = hashlib.sha256(what.encode()).hexdigest()[:16]
    cache = cache_folder("kernels")
    target = cache / f"{identity}.so"
    if not _is_whole(target):
        if compiler is None:
            return None, "no C++ compiler found (install g++ for a several times faster emulation)"
        try:
            cache.mkdir(parents=True, exist_ok=True)
            with (cache / f"{identity}.lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not _is_whole(target) and (why := _build(compiler, sources, target)):
                    return None, why
        except OSError as error:
            return None, f"cannot build into {cache}: {error}"
    try:
        library = ctypes.CDLL(str(target))
    except OSError as error:
        return None, f"cannot load {target}: {error}"
    _declare(library)
    return library, f"compiled by {version or 'an earlier compiler'}"


def _openmp_runtime() -> ctypes.CDLL | None:
    """Return the OpenMP library that torch uses in this process, or None if it is unknown."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
            path = line.split(maxsplit=5)[-1]
            if Path(path).name.startswith(("libgomp", "libiomp5", "libomp")):
                runtime = ctypes.CDLL(path)
                return runtime if hasattr(runtime, "GOMP_parallel") else None
    return None


def takes(x: Tensor, policy: OperandPolicy) -> bool:
    """Whether the compiled kernel supports this operand; plain torch does all others."""
    return (
        _supports(policy)
        and x.device.type == "cpu"
        and x.dtype in (torch.bfloat16, torch.float32)
        and loaded()[0] is not None
    )


def _supports(policy: OperandPolicy) -> bool:
    return (
        policy.format in ELEMENTS
        and policy.scale in _SCALES
        and not (policy.scale in ("quest", "four_six") and policy.block in ("32x32", "16x16"))
        and policy.hadamard <= _LARGEST_HADAMARD
        and not (policy.hadamard == _LARGEST_HADAMARD and policy.block in ("32x32", "16x16"))
        and not policy.permute
    )


def compiled_round_operand(x: Tensor, draw: Draw, *, axis: int) -> Quantized:
    """Do the same as ``round_operand``, with the same bits and errors, by the compiled kernel."""
    check_operand(x, draw.policy, axis, draw.key)
    library = loaded()[0]
    assert library is not None
    return _call(library, x, draw, axis % 2)


def _call(library: ctypes.CDLL, x: Tensor, draw: Draw, axis: int) -> Quantized:
    policy, key, amax = draw.policy, draw.key, draw.amax
    if x.stride(1) != 1:
        x = x.contiguous()
    threads = torch.get_num_threads() if x.numel() >= _THREADING_MIN_ELEMENTS else 1
    signs = signs_of(policy, key)
    if signs is not None and axis == 1:  # even before odd elements in each 32, the kernel's order
        signs = signs.repeat(2) if len(signs) < _PAIR else signs
        signs = signs.view(-1, _PAIR // 2, 2).transpose(1, 2).reshape(-1).contiguous()
    job = _job(x, policy, axis, key, signs)
    descale = 1.0 / policy.prescale
    if job.rule >= _RULES["tensor"]:
        if amax is None:
            amax_bits = library.ablate_amax_bits(ctypes.byref(job), threads)
            amax = struct.unpack("<f", struct.pack("<I", amax_bits))[0]
        if policy.scale == "ms_eden":
            job.tensor_scale, job.tensor_descale = eden_tensor_scale(amax)
            descale = job.tensor_descale
        elif policy.format == "nvfp4":
            encode, tensor_descale = nvfp4_tensor_scale(amax, policy.scale)
            job.block_multiplier = fp32(encode * fp32(1 / 6))
            job.tensor_descale = tensor_descale
            descale = fp32(tensor_descale / policy.prescale)
        else:
            job.tensor_scale = fp8_scale(amax, policy.format)
            descale = fp32(fp8_descale(job.tensor_scale) / policy.prescale)
    if policy.undo == "operand":
        job.undo, descale = 1.0 / policy.prescale, 1.0
    out = torch.empty(x.shape, dtype=torch.bfloat16)
    mask = torch.empty(x.shape, dtype=torch.bool) if policy.mask else None
    job.dst = out.data_ptr()
    job.mask = None if mask is None else mask.data_ptr()
    library.ablate_quantise(ctypes.byref(job), threads)
    return Quantized(values=out, descale=descale, mask=mask, axis=axis)


def _job(x: Tensor, policy: OperandPolicy, axis: int, key: Key | None, signs: Tensor | None) -> _Job:
    element = ELEMENTS[policy.format]
    rows, columns = block_shape(policy)
    key_words = key.words() if key else (0, 0)
    # A group rotated along the rows is processed in chunks of rows, whatever shares a scale.
    block = max(columns, 16) if axis == 0 and policy.hadamard else columns
    return _Job(
        src=x.data_ptr(), signs=None if signs is None else signs.data_ptr(),
        rows=x.shape[0], cols=x.shape[1], src_stride=x.stride(0), src_bf16=x.dtype == torch.bfloat16,
        axis=axis, square=rows > 1, block=block,
        hadamard=policy.hadamard, norm=1.0 / math.sqrt(policy.hadamard) if policy.hadamard else 1.0,
        rotated_bf16=policy.rotated_bf16,
        rule=_RULES.get(policy.scale, 0), rounding=_ROUNDINGS.index(policy.rounding),
        mantissa_bits=element.mantissa_bits, min_exponent=element.min_exponent, element_max=element.max,
        scale_add=SCALE_ADD[policy.scale](element) if policy.scale in SCALE_ADD else 0,
        scale_emax=element.max_exponent, prescale=policy.prescale, undo=1.0,
        key0=key_words[0], key1=key_words[1],
        step=key.step & 0xFFFFFFFF if key else 0, call=key.call & 0xFFFFFFFF if key else 0,
    )  # fmt: skip
