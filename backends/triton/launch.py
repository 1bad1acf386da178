"""Convert an operand's policy to a launch of the quantise kernel: codes and scales, or dequantised values.

Nothing here waits for the device or copies to it: tensor scales stay on it, signs are drawn by the kernel.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ablate.backends.device import device_of
from ablate.backends.triton.policies import (
    BITS,
    BLOCK,
    Side,
    scale_constants,
    side_of,
    tile,
)
from ablate.backends.triton.quantise import WORDS, quantise_kernel, scale_kernel
from ablate.numerics.philox import Key
from ablate.numerics.quantiser import Quantized, check_operand
from ablate.numerics.rotate import shared_key

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ablate.backends.protocol import Draw
    from ablate.recipes import OperandPolicy

_LARGEST_GRID = 65_535
_WIDE = 1 << 22
"""From this stride on, 31 bits do not hold a place in a tile of up to 512 rows or columns."""
_NO_KEY = Key(seed=0, layer="", gemm="", operand="", step=0)
_OFF = (None, None, None, None, *(0 for _ in WORDS))


class Memory(NamedTuple):
    """The memory of one side: output, scale bytes, mask, and the tensor's scales."""

    out: Tensor
    scales: Tensor | None = None
    mask: Tensor | None = None
    tensor: Tensor | None = None

    def descale(self, policy: OperandPolicy) -> float | Tensor:
        """Return the factor that is left for the accumulator."""
        return 1.0 / policy.prescale if self.tensor is None else self.tensor[3:]


def quantise_values(x: Tensor, draws: Mapping[int, Draw]) -> dict[int, Quantized]:
    """Quantise and dequantise to bf16 along one or both axes in one read; arguments as ``quantise``."""
    quantized = {}
    for axis, memory in quantise(x, draws, "values").items():
        descale = memory.descale(draws[axis].policy)
        quantized[axis] = Quantized(
            values=memory.out, descale=descale, mask=memory.mask, axis=axis
        )
    return quantized


def quantise(x: Tensor, draws: Mapping[int, Draw], output: str) -> dict[int, Memory]:
    """Quantise a matrix along one or both axes in one read.

    Args:
        x: [R, C] in bf16, fp16 or fp32, of any strides.
        draws: by contraction axis: 1 contracts over C, 0 over R and gives the transposed copy. All of one
            step and call.
        output: ``codes``, packed with the contraction last, or ``values`` in bf16 as stored.

    Raises:
        ValueError: a dtype, shape or missing key that a policy cannot take.
    """
    for axis, draw in draws.items():
        check_operand(x, draw.policy, axis, draw.key)
    tensors = tensor_scales(x, draws)
    sides = {}
    for axis, draw in draws.items():
        policy = draw.policy
        scales = None
        if output == "codes":
            n, k = x.shape if axis else x.shape[::-1]
            out = x.new_empty(n, k * BITS.get(policy.format, 8) // 8, dtype=torch.uint8)
            if policy.format in BLOCK:
                scales = x.new_empty(n, k // BLOCK[policy.format], dtype=torch.uint8)
        else:
            out = x.new_empty(x.shape, dtype=torch.bfloat16)
        mask = x.new_empty(x.shape, dtype=torch.bool) if policy.mask else None
        sides[axis] = Memory(out, scales, mask, tensors.get(axis))
    if x.numel():
        launch(x, draws, sides, output)
    return sides


def tensor_scales(x: Tensor, draws: Mapping[int, Draw]) -> dict[int, Tensor]:
    """Compute the scales of the whole tensor where a policy has one: fp32 [4], as ``scale_kernel`` says."""
    scaled = {
        axis: draw for axis, draw in draws.items() if draw.policy.has_tensor_scale
    }
    if not x.numel():
        return {axis: _scales_of(x, draw, None) for axis, draw in scaled.items()}
    rotated = {
        axis: draw
        for axis, draw in scaled.items()
        if draw.policy.hadamard and draw.amax is None
    }
    parts: dict[int, Tensor] = {}
    if rotated:
        programs = math.prod(plan_of(x, rotated, "amax").grid(x))
        parts = {axis: x.new_empty(programs, dtype=torch.float32) for axis in rotated}
        launch(x, rotated, {axis: Memory(part) for axis, part in parts.items()}, "amax")
    amax: Tensor | None = None
    tensors: dict[int, Tensor] = {}
    of_policy: dict[OperandPolicy, Tensor] = {}  # both axes may have the same
    for axis, draw in scaled.items():
        if axis in rotated or draw.amax is not None:
            tensors[axis] = _scales_of(x, draw, parts.get(axis))
            continue
        if draw.policy not in of_policy:
            if amax is None:
                amax = torch.linalg.vector_norm(x, torch.inf)
            of_policy[draw.policy] = _scales_of(x, draw, amax)
        tensors[axis] = of_policy[draw.policy]
    return tensors


def _scales_of(x: Tensor, draw: Draw, parts: Tensor | None) -> Tensor:
    """Compute a tensor's scales from parts of its largest magnitude, or from the amax that is given."""
    amax = 0.0
    if isinstance(draw.amax, Tensor):
        parts = draw.amax
    elif draw.amax is not None:
        amax = draw.amax
    tensor = x.new_empty(4, dtype=torch.float32)
    with on_device(x):
        scale_kernel[(1,)](
            parts,
            0 if parts is None else parts.numel(),
            amax,
            tensor,
            **scale_constants(draw.policy),
            num_warps=4,
            enable_fp_fusion=False,
        )
    return tensor


class _Plan(NamedTuple):
    """What every launch for two policies and an output has in common."""

    rows: Side
    columns: Side
    tile_rows: int
    tile_columns: int
    warps: int

    def grid(self, x: Tensor) -> tuple[int, int, int]:
        """Count the tiles of a matrix: along a row, down a column and, where CUDA takes no more, again."""
        rows, columns = x.shape
        down = -(-rows // self.tile_rows)
        return (
            -(-columns // self.tile_columns),
            min(down, _LARGEST_GRID),
            -(-down // _LARGEST_GRID),
        )


@lru_cache(maxsize=1024)
def _plan(
    rows: OperandPolicy | None, columns: OperandPolicy | None, output: str, arch: str
) -> _Plan:
    return _Plan(
        side_of(rows, output), side_of(columns, output), *tile(rows, columns, arch)
    )


def plan_of(x: Tensor, draws: Mapping[int, Draw], output: str) -> _Plan:
    """Return what a launch compiles and how large its tiles are."""
    rows = draws[1].policy if 1 in draws else None
    columns = draws[0].policy if 0 in draws else None
    arch = device_of(str(x.device)).arch if x.device.type == "cuda" else "cpu"
    return _plan(rows, columns, output, arch)


@lru_cache(maxsize=65_536)
def _key_words(
    policy: OperandPolicy, seed: int, layer: str, gemm: str, operand: str
) -> tuple[int, ...]:
    """Return the kernel's WORDS of one operand; 0 for what its policy does not draw."""
    key = Key(seed=seed, layer=layer, gemm=gemm, operand=operand, step=0)
    signs = (0, 0)
    order = (0, 0)
    if policy.signs != "none":
        signs = shared_key(policy, key, "signs").words()
    if policy.permute:
        order = shared_key(policy, key, "permutation").words()
    return tuple(_signed(word) for word in (*key.words(), *signs, *order))


def launch(
    x: Tensor,
    draws: Mapping[int, Draw],
    memory: Mapping[int, Memory],
    output: str,
    plan: _Plan | None = None,
) -> None:
    """Launch the kernel on a matrix that is not empty; ``plan``: ``plan_of`` these, or with another tile."""
    plan = plan or plan_of(x, draws, output)
    step = 0
    call = 0
    position = None
    sides: list[Any] = []
    for axis in (1, 0):
        if axis not in draws:
            sides += _OFF
            continue
        draw = draws[axis]
        key = draw.key or _NO_KEY
        sides += memory[axis]
        sides += _key_words(draw.policy, key.seed, key.layer, key.gemm, key.operand)
        position = position if draw.position is None else draw.position
        step = max(step, key.step)
        call = max(call, key.call)
    strides = x.stride()
    with on_device(x):
        quantise_kernel[plan.grid(x)](
            x,
            *x.shape,
            *strides,
            _signed(step),
            _signed(call),
            position,
            *sides,
            R=plan.rows,
            C=plan.columns,
            TILE_ROWS=plan.tile_rows,
            TILE_COLUMNS=plan.tile_columns,
            WIDE=max(*x.shape, *strides) >= _WIDE,
            num_warps=plan.warps,
            enable_fp_fusion=False,
        )


def _signed(word: int) -> int:
    """Return a 32-bit word as the int32 with the same bits, so that its type never depends on its value."""
    return (word + (1 << 31)) % (1 << 32) - (1 << 31)


_HERE: AbstractContextManager[Any] = nullcontext()


def on_device(x: Tensor) -> AbstractContextManager[Any]:
    """Make x's GPU the current one for a launch; do nothing if it is, or on a CPU (the interpreter)."""
    if x.device.type != "cuda" or x.device.index == torch.cuda.current_device():
        return _HERE
    return torch.cuda.device(x.device)
