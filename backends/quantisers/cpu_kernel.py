"""The compiled CPU quantiser, with the reference's bits: build it, load it, give it an operand's policy.

``kernel/`` is compiled on first use (a few seconds) into the user's cache. The file name includes a
hash of the source, the compiler's version and the CPU's features, so that a shared home directory can
serve different machines. A new build is moved into place only after it gave the same bits as plain torch, for
every policy of the presets and of each kind; its hash is kept beside it and compared at each load, so that a
file in which a bit has flipped is built anew. What others could have put there is never loaded. Without a
compiler plain torch does all the work, many times slower; ``loaded()`` says why.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import hashlib
import math
import os
import platform
import shutil
import stat
import struct
import subprocess
import tempfile
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.resources import files
from pathlib import Path

import torch
from torch import Tensor

from ablate.backends.protocol import Draw
from ablate.backends.quantisers import block_scaled
from ablate.backends.quantisers.block_scaled import BlockScaled
from ablate.base.files import (
    cache_folder,
    changed_by_others,
    hash_of,
    read_record,
    users_cache_folder,
    write_record,
)
from ablate.numerics.formats import E2M1, ELEMENTS, SCALE_ADD
from ablate.numerics.philox import Key
from ablate.numerics.quantiser import (
    Quantized,
    check_operand,
    fp8_descale,
    fp8_scale,
    fp32_scale,
    round_operand,
    searched_scale,
)
from ablate.numerics.rotate import permutation_of, signs_of, unrotate
from ablate.numerics.scales import (
    eden_tensor_scale,
    four_six_divisor,
    fp32,
    nvfp4_tensor_scale,
    searched_clip,
    ue5m3_tensor_scale,
)
from ablate.recipes import GEMMS, PRESETS, OperandPolicy, block_shape
from ablate.recipes.policy import MS_EDEN

_FLAGS = (
    "-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math",
    "-std=c++17", "-shared", "-fPIC", "-pthread",
)  # fmt: skip
_WRITTEN_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_THREADING_MIN_ELEMENTS = 1 << 18
"""Below this size a thread costs more than it saves."""
_RULES = {
    "quest": 1, "tensor": 2, "delayed": 2, "two_level": 3, "ue5m3": 5, "two_level_ue5m3": 5, "four_six": 6,
    "ms_eden": 7, "ms_eden_unscaled": 8,
}  # fmt: skip
_RULES |= dict.fromkeys(block_scaled.RULES, 9) | {"searched": 10}
"""Every other is E8M0: 0."""
_DIVIDED_LEVEL = 4
"""Two levels over whole numbers."""
_SCALES = (*SCALE_ADD, *_RULES)
_ROUNDINGS = ("nearest", "stochastic", "stochastic_rocm", "nearest_away", "nearest_toward_zero")
_LARGEST_HADAMARD = 128
_PAIR = 32


class _Job(ctypes.Structure):
    """``struct Job`` of kernel/job.h, field by field."""

    _fields_ = [
        *[(name, ctypes.c_void_p) for name in ("src", "dst", "mask", "signs", "order", "scales")],
        *[(name, ctypes.c_int64) for name in ("rows", "cols", "src_stride", "tile_rows", "tile_cols")],
        *[(name, ctypes.c_int32) for name in ("src_bf16", "product_bf16", "axis", "square", "block")],
        *[(name, ctypes.c_int32) for name in ("hadamard", "rotated_bf16", "rule", "rounding")],
        *[(name, ctypes.c_int32) for name in ("mantissa_bits", "min_exponent")],
        *[(name, ctypes.c_uint32) for name in ("scale_add", "scale_emax")],
        *[(name, ctypes.c_float) for name in ("factor", "element_max", "prescale", "undo", "norm")],
        *[(name, ctypes.c_float) for name in ("tensor_scale", "block_multiplier", "tensor_descale")],
        ("error_divisor", ctypes.c_float),
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
    blocks += [replace(nearest, rounding=ties) for ties in ("nearest_away", "nearest_toward_zero")]
    blocks += [OperandPolicy(format="mxfp4_e3m0", rounding="stochastic")]
    blocks += [replace(nearest, hadamard=16), replace(stochastic, hadamard=32, signs="step", permute=True)]
    blocks += [OperandPolicy(format="fp8_e5m2", scale="row", rounding="stochastic")]
    blocks += [OperandPolicy(format="fp4_e3m0", scale="searched")]
    tensors = [OperandPolicy(format="fp8_e4m3"), OperandPolicy(format="fp8_e5m2"), nvfp4]
    tensors += [replace(nvfp4, block="16x16"), OperandPolicy(format="nvint4", rounding="stochastic")]
    tensors += [replace(nvfp4, scale="two_level_ue5m3", rounding="stochastic", prescale=0.75)]
    tensors += [replace(nvfp4, scale=scale, hadamard=32, signs="step") for scale in MS_EDEN]
    tensors += [replace(nvfp4, scale="four_six", rounding="stochastic", hadamard=16)]
    cases = [(odd, policy, axis) for policy in blocks for axis in (0, 1)]
    cases += [(x, policy, axis) for policy in tensors for axis in (0, 1)]
    tall = replace(stochastic, hadamard=128, signs="call", rotated_bf16=True, permute=True)
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
    rotated = odd.t().contiguous().to(torch.bfloat16)
    clipped = rotated > 0
    back = _way_back(library, rotated, tall, key, clipped)
    expected = unrotate((rotated * clipped).float(), tall, key).to(torch.bfloat16)
    return torch.equal(back.nan_to_num(nan=99.0), expected.nan_to_num(nan=99.0))


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
    library.ablate_way_back.argtypes = [job, ctypes.c_int]
    library.ablate_way_back.restype = None
    block_scaled.declare(library, _Job)
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


@dataclass(frozen=True, kw_only=True)
class _Build:
    """How the kernel is built on this machine, and where it is kept. ``compiler``: None, there is none."""

    compiler: str | None
    version: str
    flags: tuple[str, ...]
    sources: dict[str, bytes]
    target: Path


def _flags(instructions: str) -> tuple[str, ...]:
    """Return the compiler's flags for torch's own instructions, which ATEN_CPU_CAPABILITY can narrow."""
    if platform.machine() != "x86_64":
        return _FLAGS
    wide = {"AVX512": ("-mprefer-vector-width=512",), "AVX2": ("-mno-avx512f",)}
    return (*_FLAGS, *wide.get(instructions, ("-mno-avx512f", "-mno-avx2")))


def _sources() -> dict[str, bytes]:
    folder = files("ablate.backends").joinpath("kernel")
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir(), key=lambda file: file.name)}


def _compile(build: _Build) -> str | None:
    """Compile, check the bits, move into place. Return None, or the reason of a failure."""
    assert build.compiler is not None
    with tempfile.TemporaryDirectory(dir=build.target.parent) as folder:
        code, library = Path(folder) / "kernel.cpp", Path(folder) / "kernel.so"
        for name, content in build.sources.items():
            (Path(folder) / name).write_bytes(content)
        done = subprocess.run(
            [build.compiler, *build.flags, "-o", str(library), str(code)],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode != 0:
            return f"{build.compiler} failed: {(done.stderr.strip().splitlines() or ['no message'])[0]}"
        if not _bits_agree(ctypes.CDLL(str(library))):
            return f"the build of {build.compiler} does not give the bits of plain torch"
        library.chmod(0o755)
        record = {"hash_of_kernel": hash_of(library.read_bytes()), "compiler": build.compiler}
        library.replace(build.target)
        write_record(build.target.with_suffix(".json"), record)
    return None


def _open_whole(target: Path) -> int | None:
    """Open the library if nobody else can change it and it is as it was when its bits were checked.

    Returns the file's descriptor: whatever happens to the path, this file is the one that was looked at.
    """
    with contextlib.suppress(OSError, ValueError, KeyError), target.open("rb") as file:
        known = read_record(target.with_suffix(".json"))["hash_of_kernel"]
        if changed_by_others(_path_of(file.fileno(), target)) is None and hash_of(file.read()) == known:
            return os.dup(file.fileno())
    return None


def _path_of(descriptor: int, path: Path) -> Path:
    """Return a path that leads to the open file, or the file's own path where the system has none."""
    opened = Path(f"/proc/self/fd/{descriptor}")
    return opened if opened.exists() else path


def folder() -> tuple[Path, str | None]:
    """Return the folder of the compiled kernel, and why it is not the usual one.

    Others must not write there: what lies in it is loaded into this process.
    """
    usual, why = cache_folder("kernels"), None
    for here in (usual, users_cache_folder("kernels")):
        try:
            here.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = here.stat()
            if status.st_mode & _WRITTEN_BY_OTHERS and status.st_uid == os.geteuid():
                here.chmod(status.st_mode & ~_WRITTEN_BY_OTHERS)
            fault = changed_by_others(here)
        except OSError as error:
            fault = f"{here}: {error.strerror or error}"
        if fault is None:
            return here, why
        why = why or fault
    return _private_folder(), why


@lru_cache(maxsize=1)
def _private_folder() -> Path:
    private = tempfile.mkdtemp(prefix="ablate-kernels-")
    atexit.register(shutil.rmtree, private, ignore_errors=True)
    return Path(private)


def _build_here() -> _Build:
    sources, flags = _sources(), _flags(torch.backends.cpu.get_cpu_capability())
    compiler = _compiler()
    version = ""
    if compiler:
        done = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False)
        version = done.stdout.splitlines()[0] if done.stdout else compiler
    what = repr((sources, version, _cpu_features(), flags))
    identity = hashlib.sha256(what.encode()).hexdigest()[:16]
    target = folder()[0] / f"{identity}.so"
    return _Build(compiler=compiler, version=version, flags=flags, sources=sources, target=target)


def will_build() -> bool:
    """Whether ``loaded`` has to compile first, which takes 10 to 40 s."""
    build = None if _is_off() else _build_here()
    if build is None or build.compiler is None:
        return False
    descriptor = _open_whole(build.target)
    if descriptor is not None:
        os.close(descriptor)
    return descriptor is None


def _is_off() -> bool:
    return os.environ.get("ABLATE_CPU_KERNEL") == "off"


@lru_cache(maxsize=1)
def loaded() -> tuple[ctypes.CDLL | None, str]:
    """Return the kernel, built if necessary, and one line about it; or None and the reason."""
    if _is_off():
        return None, "switched off by ABLATE_CPU_KERNEL=off"
    build = _build_here()
    target = build.target
    descriptor = _open_whole(target)
    if descriptor is None:
        if build.compiler is None:
            return None, "no C++ compiler found (install g++ for a several times faster emulation)"
        try:
            with target.with_suffix(".lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                descriptor = _open_whole(target)
                if descriptor is None and (why := _compile(build)):
                    return None, why
        except OSError as error:
            return None, f"cannot build into {target.parent}: {error}"
        descriptor = _open_whole(target) if descriptor is None else descriptor
    if descriptor is None:
        return None, f"{target} has changed since it was built"
    try:
        # The descriptor stays open: the loader knows a library by this path.
        library = ctypes.CDLL(str(_path_of(descriptor, target)))
    except OSError as error:
        return None, f"cannot load {target}: {error}"
    _declare(library)
    where, why_there = folder()
    return library, f"compiled by {build.version}{f' into {where} ({why_there})' if why_there else ''}"


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
        and x.numel() > 0
        and x.device.type == "cpu"
        and x.dtype in (torch.bfloat16, torch.float32)
        and loaded()[0] is not None
    )


def _supports(policy: OperandPolicy) -> bool:
    return (
        policy.format in ELEMENTS
        and policy.format != "if4"
        and policy.scale in _SCALES
        and (policy.rounding in _ROUNDINGS[:2] or ELEMENTS[policy.format] == E2M1)
        and not (policy.scale in ("quest", "four_six") and policy.block in ("32x32", "16x16"))
        and policy.hadamard <= _LARGEST_HADAMARD
        and not (policy.hadamard == _LARGEST_HADAMARD and policy.block in ("32x32", "16x16"))
        and not (policy.hadamard and policy.scale in block_scaled.RULES)
    )


def multiplied(a: BlockScaled, b: BlockScaled) -> Tensor | None:
    """Return A Bᵀ in bf16, or None where this CPU or these scales need another way."""
    library = loaded()[0]
    return None if library is None else block_scaled.multiply(library, a, b)


def undoes(grad: Tensor, policy: OperandPolicy) -> bool:
    """Whether the compiled kernel takes a gradient back through a policy's mask and rotation."""
    fits = grad.device.type == "cpu" and grad.dtype == torch.bfloat16 and grad.numel() > 0
    return fits and policy.hadamard <= _LARGEST_HADAMARD and loaded()[0] is not None


def gradient_through(grad: Tensor, policy: OperandPolicy, key: Key | None, mask: Tensor | None) -> Tensor:
    """Do the same as a back end's ``gradient_through``, with the same bits, by the compiled kernel."""
    library = loaded()[0]
    assert library is not None
    return _way_back(library, grad, policy, key, mask)


def _way_back(
    library: ctypes.CDLL, grad: Tensor, policy: OperandPolicy, key: Key | None, mask: Tensor | None
) -> Tensor:
    grad, mask = grad.contiguous(), None if mask is None else mask.contiguous()
    signs, order = _of_groups(policy, key, 1, inverse=True)
    out = torch.empty_like(grad)
    job = _Job(
        src=grad.data_ptr(), dst=out.data_ptr(), mask=_address(mask), signs=_address(signs),
        order=_address(order), rows=grad.shape[0], cols=grad.shape[1], src_stride=grad.shape[1],
        src_bf16=True, factor=1.0,
        hadamard=policy.hadamard, norm=_norm(policy),
    )  # fmt: skip
    library.ablate_way_back(ctypes.byref(job), _threads(grad))
    return out


def compiled_round_operand(
    x: Tensor, draw: Draw, *, axis: int, factor: float = 1.0
) -> Quantized | BlockScaled:
    """Do the same as ``round_operand``, with the same bits and errors, by the compiled kernel.

    ``factor`` multiplies a matrix in bf16 first, in fp32, rounded to bf16 for source ``forward_bf16``.
    """
    check_operand(x, draw.policy, axis, draw.key)
    library = loaded()[0]
    assert library is not None
    return _call(library, x, draw, axis % 2, factor)


def _threads(x: Tensor) -> int:
    return torch.get_num_threads() if x.numel() >= _THREADING_MIN_ELEMENTS else 1


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _norm(policy: OperandPolicy) -> float:
    return 1.0 / math.sqrt(policy.hadamard) if policy.hadamard else 1.0


def _of_groups(
    policy: OperandPolicy, key: Key | None, axis: int, *, inverse: bool = False
) -> tuple[Tensor | None, Tensor | None]:
    """Return the signs (fp32) and the permutation or its inverse (int32) as the kernel reads them.

    Along the columns: for as many elements as a rotation handles at a time, even before odd ones in each 32.
    """
    signs, order = signs_of(policy, key), permutation_of(policy, key)
    if order is not None and inverse:
        order = order.argsort()
    if axis == 1:
        signs = None if signs is None else _even_first(signs.repeat(_LARGEST_HADAMARD // len(signs)))
        order = None if order is None else _order_of_columns(order)
    return signs, None if order is None else order.to(torch.int32)


def _even_first(of_elements: Tensor) -> Tensor:
    return of_elements.view(-1, _PAIR // 2, 2).transpose(1, 2).reshape(-1).contiguous()


def _order_of_columns(order: Tensor) -> Tensor:
    groups = torch.arange(_LARGEST_HADAMARD).view(-1, len(order))
    element_at = _even_first(torch.arange(_LARGEST_HADAMARD))
    return element_at.argsort()[_even_first(groups[:, order].reshape(-1))]


def _call(
    library: ctypes.CDLL, x: Tensor, draw: Draw, axis: int, factor: float = 1.0
) -> Quantized | BlockScaled:
    policy, key, amax = draw.policy, draw.key, draw.amax
    if x.stride(1) != 1:
        x = x.contiguous()
    threads = _threads(x)
    signs, order = _of_groups(policy, key, axis)
    job = _job(x, policy, axis, key)
    job.factor, job.signs, job.order = factor, _address(signs), _address(order)
    if policy.scale in block_scaled.RULES:
        return _in_tiles(library, x, draw, axis, job)
    descale = 1.0 / policy.prescale
    if job.rule >= _RULES["tensor"]:
        if amax is None:
            amax_bits = library.ablate_amax_bits(ctypes.byref(job), threads)
            amax = struct.unpack("<f", struct.pack("<I", amax_bits))[0]
        if policy.scale in MS_EDEN:
            job.tensor_scale, job.tensor_descale = eden_tensor_scale(amax)
            descale = job.tensor_descale
        elif policy.scale.endswith("ue5m3"):
            job.tensor_descale = ue5m3_tensor_scale(amax, policy.scale)
            descale = fp32(job.tensor_descale / policy.prescale)
        elif policy.format in ("nvfp4", "nvint4"):
            encode, tensor_descale = nvfp4_tensor_scale(amax, policy.scale, job.element_max)
            job.block_multiplier = fp32(encode * fp32(1 / 6)) if job.rule == _RULES["two_level"] else encode
            job.tensor_scale, job.error_divisor = amax, four_six_divisor(policy)
            job.tensor_descale = tensor_descale
            descale = fp32(tensor_descale / policy.prescale)
        else:
            job.tensor_scale = fp8_scale(amax, policy.format)
            descale = fp32(fp8_descale(job.tensor_scale) / policy.prescale)
    if policy.undo == "operand":
        job.undo, descale = 1.0 / policy.prescale, 1.0
    out = torch.empty(x.shape, dtype=torch.bfloat16)
    mask = torch.empty(x.shape, dtype=torch.bool) if policy.mask else None
    job.dst, job.mask = out.data_ptr(), _address(mask)
    library.ablate_quantise(ctypes.byref(job), threads)
    return Quantized(values=out, descale=descale, mask=mask, axis=axis)


def _in_tiles(library: ctypes.CDLL, x: Tensor, draw: Draw, axis: int, job: _Job) -> BlockScaled:
    policy, threads = draw.policy, _threads(x)
    job.tile_rows, job.tile_cols = block_scaled.tile_of(x, policy, axis)
    if policy.scale == "searched":
        rows = (x if axis == 1 else x.t()).float() * job.factor
        if job.product_bf16 and job.src_bf16:
            rows = rows.to(torch.bfloat16).float()
        clip = searched_clip(rows, ELEMENTS[policy.format])
        given = scales = searched_scale(clip if axis == 1 else clip.t(), policy)
    else:
        scale = fp32_scale(block_scaled.tile_amax(library, job, threads), policy)
        given, scales = scale.down, scale.up
    out = torch.empty(x.shape, dtype=torch.bfloat16)
    job.dst, job.scales = out.data_ptr(), given.data_ptr()
    library.ablate_quantise(ctypes.byref(job), threads)
    return BlockScaled(elements=out, scales=scales, axis=axis)


def _job(x: Tensor, policy: OperandPolicy, axis: int, key: Key | None) -> _Job:
    element = ELEMENTS[policy.format]
    rows, columns = block_shape(policy)
    key_words = key.words() if key else (0, 0)
    # A group rotated along the rows is processed in chunks of rows, whatever shares a scale.
    block = max(columns, 16) if axis == 0 and policy.hadamard else columns
    return _Job(
        src=x.data_ptr(), rows=x.shape[0], cols=x.shape[1], src_stride=x.stride(0),
        src_bf16=x.dtype == torch.bfloat16, factor=1.0, product_bf16=policy.source == "forward_bf16",
        axis=axis, square=rows > 1, block=block,
        hadamard=policy.hadamard, norm=_norm(policy), rotated_bf16=policy.rotated_bf16,
        rule=_DIVIDED_LEVEL if policy.format == "nvint4" else _RULES.get(policy.scale, 0),
        rounding=_ROUNDINGS.index(policy.rounding),
        mantissa_bits=element.mantissa_bits, min_exponent=element.min_exponent, element_max=element.max,
        scale_add=SCALE_ADD[policy.scale](element) if policy.scale in SCALE_ADD else 0,
        scale_emax=element.max_exponent, prescale=policy.prescale, undo=1.0,
        key0=key_words[0], key1=key_words[1],
        step=key.step & 0xFFFFFFFF if key else 0, call=key.call & 0xFFFFFFFF if key else 0,
    )  # fmt: skip
