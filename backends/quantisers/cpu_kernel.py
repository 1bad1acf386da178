"""The compiled CPU quantiser: convert an operand's policy to a kernel job with the reference's bits.

A new build is used only after it gave the same bits as plain torch. Without a compiler plain torch does
all the work, many times slower; ``availability()`` reports that.
"""

from __future__ import annotations

import ctypes
import math
import struct
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from ablate.backends.quantisers.cpu_build import load_kernel, openmp_runtime
from ablate.numerics.formats import ELEMENTS, SCALE_ADD
from ablate.numerics.philox import Key
from ablate.numerics.quantiser import (
    Quantized,
    check_operand,
    fp8_descale,
    fp8_scale,
    nvfp4_tensor_scale,
    round_operand,
    signs_of,
)
from ablate.numerics.scales import eden_tensor_scale, fp32
from ablate.recipes import OperandPolicy, block_shape

_THREADING_MIN_ELEMENTS = 1 << 18
"""Below this size a thread costs more than it saves."""
_RULES = {
    "quest": 1,
    "tensor": 2,
    "delayed": 2,
    "two_level": 3,
    "four_six": 4,
    "ms_eden": 5,
}  # every other: E8M0, 0
_SCALES = (*SCALE_ADD, *_RULES)
_ROUNDINGS = ("nearest", "stochastic", "stochastic_rocm")
_LARGEST_HADAMARD = 128
_PAIR = 32


@dataclass(frozen=True, kw_only=True)
class Availability:
    """Whether the compiled quantiser can be used, and one line about the reason."""

    usable: bool
    reason: str


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
    """Compare policies of every kind with plain torch, including blocks with a NaN and an Inf."""
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
    cases = [(odd, policy, 1) for policy in blocks] + [(odd, policy, 0) for policy in blocks]
    tall = replace(stochastic, hadamard=128, signs="call", rotated_bf16=True)
    cases += [(odd, tall, 0), (odd.t().contiguous(), tall, 1), (odd, replace(nearest, hadamard=64), 0)]
    for axis in (0, 1):
        cases += [(x, OperandPolicy(format="fp8_e4m3"), axis), (x, OperandPolicy(format="fp8_e5m2"), axis)]
        cases += [(x, nvfp4, axis), (x, replace(nvfp4, block="16x16"), axis)]
        cases += [(x, replace(nvfp4, scale="ms_eden", hadamard=32, signs="step"), axis)]
        cases += [(x, replace(nvfp4, scale="four_six", rounding="stochastic", hadamard=16), axis)]
    for tensor, policy, axis in cases:
        ours = _call(library, tensor, policy, axis, key)
        theirs = round_operand(tensor, policy, axis=axis, key=key)
        if not torch.equal(ours.values.nan_to_num(nan=99.0), theirs.values.nan_to_num(nan=99.0)):
            return False
        if ours.descale != theirs.descale:
            return False
        if theirs.mask is not None and (ours.mask is None or not torch.equal(ours.mask, theirs.mask)):
            return False
    return True


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
    if (runtime := openmp_runtime()) is not None:
        names = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
        library.ablate_use_threads_of(*(ctypes.cast(runtime[name], ctypes.c_void_p) for name in names))


@lru_cache(maxsize=1)
def _load() -> tuple[ctypes.CDLL | None, str]:
    library, reason = load_kernel(_bits_agree)
    if library is not None:
        _declare(library)
    return library, reason


def availability() -> Availability:
    """Build or load the kernel and return whether it can be used."""
    library, reason = _load()
    return Availability(usable=library is not None, reason=reason)


def takes(x: Tensor, policy: OperandPolicy) -> bool:
    """Whether the compiled kernel supports this operand; plain torch does all others."""
    return (
        policy.format in ELEMENTS
        and policy.scale in _SCALES
        and not (policy.scale in ("quest", "four_six") and policy.block in ("32x32", "16x16"))
        and policy.hadamard <= _LARGEST_HADAMARD
        and not (policy.hadamard == _LARGEST_HADAMARD and policy.block in ("32x32", "16x16"))
        and not policy.permute
        and x.device.type == "cpu"
        and x.dtype in (torch.bfloat16, torch.float32)
        and _load()[0] is not None
    )


def compiled_round_operand(
    x: Tensor, policy: OperandPolicy, *, axis: int, key: Key | None, amax: float | None = None
) -> Quantized:
    """Do the same as ``round_operand``, with the same bits, by the compiled kernel.

    Raises:
        ValueError: as ``round_operand``.
    """
    check_operand(x, policy, axis, key)
    library = _load()[0]
    assert library is not None
    return _call(library, x, policy, axis % 2, key, amax=amax)


def _call(
    library: ctypes.CDLL,
    x: Tensor,
    policy: OperandPolicy,
    axis: int,
    key: Key | None,
    *,
    amax: float | None = None,
) -> Quantized:
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
        src=x.data_ptr(),
        signs=None if signs is None else signs.data_ptr(),
        rows=x.shape[0],
        cols=x.shape[1],
        src_stride=x.stride(0),
        src_bf16=x.dtype == torch.bfloat16,
        axis=axis,
        square=rows > 1,
        block=block,
        hadamard=policy.hadamard,
        rotated_bf16=policy.rotated_bf16,
        rule=_RULES.get(policy.scale, 0),
        rounding=_ROUNDINGS.index(policy.rounding),
        mantissa_bits=element.mantissa_bits,
        min_exponent=element.min_exponent,
        scale_add=SCALE_ADD[policy.scale](element) if policy.scale in SCALE_ADD else 0,
        scale_emax=element.max_exponent,
        element_max=element.max,
        prescale=policy.prescale,
        undo=1.0,
        norm=1.0 / math.sqrt(policy.hadamard) if policy.hadamard else 1.0,
        key0=key_words[0],
        key1=key_words[1],
        step=key.step & 0xFFFFFFFF if key else 0,
        call=key.call & 0xFFFFFFFF if key else 0,
    )
