"""Time the GEMMs of a recipe on a device: quantising and multiplying separately, compared with bf16 and FP8.

Each figure is the median over repeats; compared figures are measured in turns. On a CPU, or for an emulated
format, it is the time of the emulation and says nothing about FP4 hardware: ``mode`` tells which.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ablate.backends.device import device_of
from ablate.backends.protocol import Draw
from ablate.backends.select import Selection
from ablate.numerics.philox import Key
from ablate.recipes import OPERANDS, GemmPolicy, OperandPolicy
from ablate.recipes.policy import CONTRACTED, STORED, contracted_axis, other_dimension

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ablate.backends.protocol import Backend, Operand
    from ablate.recipes import Gemm

_WARM_UPS = 3
_BF16 = GemmPolicy()
_FP8_OPERAND = OperandPolicy(format="fp8_e4m3")
_FP8 = GemmPolicy(left=_FP8_OPERAND, right=_FP8_OPERAND)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The size of a linear layer's pass: tokens M, in-features K, out-features N."""

    tokens: int
    inputs: int
    outputs: int

    @property
    def sizes(self) -> dict[str, int]:
        """The dimensions by letter."""
        return {"M": self.tokens, "N": self.outputs, "K": self.inputs}


@dataclass(frozen=True, kw_only=True)
class GemmTime:
    """One GEMM of one layer, in milliseconds; rates in TFLOP/s for the multiplication alone.

    ``total_ms``, ``speed_over_bf16`` and ``speed_over_fp8`` (one scale per tensor) include both quantising
    and multiplying.
    """

    gemm: Gemm
    m: int
    n: int
    k: int
    backend: str
    mode: str
    quantise_ms: float
    multiply_ms: float
    bf16_ms: float
    fp8_ms: float
    fp8_mode: str
    tflops: float
    total_ms: float
    speed_over_bf16: float
    speed_over_fp8: float


def dimensions(gemm: Gemm, shape: Shape) -> tuple[int, int, int]:
    """Return (rows and columns of the result, contracted dimension) of a layer's GEMM."""
    left, right = OPERANDS[gemm]
    letters = other_dimension(gemm, left), other_dimension(gemm, right), CONTRACTED[gemm]
    m, n, k = (shape.sizes[letter] for letter in letters)
    return m, n, k


def time_gemm(
    gemm: Gemm, policy: GemmPolicy, shape: Shape, selection: Selection, where: str, *, repeats: int = 20
) -> GemmTime:
    """Time one GEMM of a layer on a torch device.

    Raises:
        ValueError: an unsupported GEMM, or a shape that the policy's groups do not divide.
    """
    device = device_of(where)
    backend, support = selection.choose(policy, device)
    fp8, fp8_support = Selection("auto").choose(_FP8, device)
    bf16, _ = Selection("auto").choose(_BF16, device)
    tensors = _tensors(gemm, shape, where)
    ours, fp8s = _work(backend, gemm, policy, tensors), _work(fp8, gemm, _FP8, tensors)
    work = [*ours, *fp8s, _work(bf16, gemm, _BF16, tensors)[1]]
    quantise_ms, multiply_ms, fp8_quantise_ms, fp8_multiply_ms, bf16_ms = medians_ms(work, where, repeats)
    m, n, k = dimensions(gemm, shape)
    total_ms, fp8_ms = quantise_ms + multiply_ms, fp8_quantise_ms + fp8_multiply_ms
    tflops = 2 * m * n * k / (multiply_ms * 1e-3) / 1e12
    return GemmTime(
        gemm=gemm, m=m, n=n, k=k, backend=backend.name, mode=support.mode, quantise_ms=quantise_ms,
        multiply_ms=multiply_ms, bf16_ms=bf16_ms, fp8_ms=fp8_ms, fp8_mode=fp8_support.mode,
        tflops=tflops, total_ms=total_ms,
        speed_over_bf16=bf16_ms / total_ms, speed_over_fp8=fp8_ms / total_ms,
    )  # fmt: skip


def _tensors(gemm: Gemm, shape: Shape, where: str) -> tuple[Tensor, Tensor]:
    drawn = []
    for seed, name in enumerate(OPERANDS[gemm]):
        sizes = [shape.sizes[letter] for letter in STORED[name]]
        drawn.append(torch.randn(sizes, generator=torch.Generator().manual_seed(seed)))
    left, right = (one.to(torch.bfloat16).to(where) for one in drawn)
    return left, right


def _work(
    backend: Backend, gemm: Gemm, policy: GemmPolicy, tensors: tuple[Tensor, Tensor]
) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return two calls: one quantises both operands, the other multiplies already quantised operands."""
    sides = []
    for side, name, tensor in zip(("left", "right"), OPERANDS[gemm], tensors, strict=True):
        key = Key(seed=0, layer="bench", gemm=gemm, operand=side, step=1)
        sides.append((tensor, Draw(policy=getattr(policy, side), key=key), contracted_axis(gemm, name)))

    def quantise() -> tuple[Operand, ...]:
        return tuple(backend.quantize(tensor, draw, axis=axis) for tensor, draw, axis in sides)

    left, right = quantise()
    return quantise, lambda: backend.multiply(left, right)


def medians_ms(work: Sequence[Callable[[], object]], where: str, repeats: int) -> list[float]:
    """Return the median time of each call in milliseconds, measured in turns."""
    measured: list[list[float]] = [[] for _ in work]
    for turn in range(_WARM_UPS + repeats):
        for times, call in zip(measured, work, strict=True):
            elapsed = elapsed_ms(call, where)
            if turn >= _WARM_UPS:
                times.append(elapsed)
    return [statistics.median(times) for times in measured]


def elapsed_ms(call: Callable[[], object], where: str) -> float:
    """Return the time of one call on a torch device, by the device's own clock if it has one."""
    if torch.device(where).type != "cuda":
        started = time.perf_counter()
        call()
        return (time.perf_counter() - started) * 1e3
    make: Any = torch.cuda.Event
    begin, end = make(enable_timing=True), make(enable_timing=True)
    begin.record()
    call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))
