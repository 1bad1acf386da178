"""Quantise one operand by its policy in plain torch: the rules of every back end, written once.

Back ends reproduce ``round_operand`` bit for bit. It returns values, and a factor ``descale`` that must
multiply the GEMM's fp32 accumulator (a tensor scale, or the 4/3 that undoes a 3/4 prescale).
``fake_quantize`` is for users and returns the dequantised tensor. A NaN or an Inf turns all values with the
same scale into NaN, so that errors stay visible.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ablate.numerics import formats, scales
from ablate.numerics.formats import E2M1, E4M3, ELEMENTS, INT4, UE5M3, Element
from ablate.numerics.philox import Key, random_words
from ablate.numerics.rotate import rotate, unrotate
from ablate.numerics.scales import TWO_LEVEL, fp32
from ablate.recipes import OperandPolicy, block_shape, group_size
from ablate.recipes.policy import MS_EDEN

_INPUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, kw_only=True)
class Quantized:
    """An operand after rounding, in the input's shape, and the factor still to apply to the accumulator.

    ``values`` are exact in bf16 (fp16 for that format), or fp32 if several fp32 scales within the tensor make
    them inexact in bf16; MXFP8 elements below 2^-133, bf16's smallest, are rounded to its multiples.
    ``descale`` is a number, or an fp32 tensor of one element that stays on its device. ``mask`` is true where
    a value did not clip, if the policy asks for it. ``axis`` is the contraction axis.
    """

    values: Tensor
    descale: float | Tensor = 1.0
    mask: Tensor | None = None
    axis: int = 1


@dataclass(frozen=True, kw_only=True)
class Codes:
    """Codes (uint8, [n, k], contraction last), scales [n, k / block], and the tensor's scale.

    Scales are bytes (uint8; E8M0, or E4M3 for NVFP4), fp32 for scales per row or 128-block, or empty ([n, 0])
    if the tensor's scale is the only one. Square tiles have one row of scales per row of tiles.
    ``descale`` and ``mask`` are those of ``Quantized``.
    """

    codes: Tensor
    scales: Tensor
    tensor_scale: float = 1.0
    descale: float = 1.0
    mask: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class OnGrid:
    """An operand before rounding to its element grid, and the scales that have divided it.

    ``rotated`` and ``scaled`` are fp32 [n, k], contraction last. ``scaled`` is ``rotated`` divided by its
    scale and times its prescale: values above the element's largest one clip. ``scales``: fp32, one per block
    of ``block`` (rows, columns). ``element``: the grid. ``ideal``: ``rotated`` after rounding to the grid as
    the policy says, but under each block's exact scale, its largest magnitude over the grid's largest value.
    """

    rotated: Tensor
    scaled: Tensor
    ideal: Tensor
    scales: Tensor
    block: tuple[int, int]
    element: Element


def turned(matrix: Tensor, axis: int) -> Tensor:
    """Turn a stored matrix to [n, k], its contraction axis last, or such a matrix back: a view."""
    return matrix if axis % 2 else matrix.t()


def check_operand(x: Tensor, policy: OperandPolicy, axis: int, key: Key | None) -> None:
    """Raise ``ValueError`` if this tensor cannot take this policy along this axis."""
    if x.dtype not in _INPUT_DTYPES:
        raise ValueError(
            f"cannot quantise {x.dtype} to {policy.format}: expected bfloat16, float16 or float32"
        )
    if x.dim() != 2 or axis not in (0, 1, -1, -2):
        raise ValueError(f"expected a matrix and axis 0 or 1, got shape {tuple(x.shape)} and axis {axis}")
    group = group_size(policy)
    if x.shape[axis] % group:
        raise ValueError(f"the group of {group} does not divide {x.shape[axis]}, the contraction dimension")
    rows = block_shape(policy)[0]
    other = x.shape[1 - axis % 2]
    if other % rows:
        raise ValueError(f"the {rows} rows of a square tile do not divide {other}, the other dimension")
    if key is None and (policy.draws_anew or policy.signs == "layer"):
        raise ValueError(
            f"a key is needed for rounding '{policy.rounding}', signs '{policy.signs}' "
            f"and scale '{policy.scale}'"
        )


def round_operand(
    x: Tensor, policy: OperandPolicy, *, axis: int, key: Key | None = None, amax: float | None = None
) -> Quantized:
    """Quantise and dequantise a matrix by ``policy`` along ``axis``, its contraction axis.

    Args:
        x: [rows, columns] in bf16, fp16 or fp32, of any strides.
        policy: the operand's policy.
        axis: the contraction axis: blocks and Hadamard groups lie along it.
        key: names the random stream; required for stochastic rounding and for random signs.
        amax: the largest magnitude for a delayed scale; by default this tensor's.

    Raises:
        ValueError: a dtype, shape or missing key that the policy cannot take.
    """
    if not policy.is_high_precision:
        return _Rounded(x, policy, axis=axis, key=key, amax=amax).dequantised()
    check_operand(x, policy, axis, key)
    if policy.hadamard:
        x = turned(_rotated(x, policy, axis, key), axis)
    return Quantized(values=x.to(torch.float16 if policy.format == "fp16" else torch.bfloat16), axis=axis % 2)


def _rotated(x: Tensor, policy: OperandPolicy, axis: int, key: Key | None) -> Tensor:
    """Return a matrix in fp32, contraction last, contiguous and rotated."""
    return rotate(turned(x, axis).to(torch.float32).contiguous(), policy, key)


class _Rounded:
    """One operand in blocks [number, rows, columns], rounded to its element's grid.

    ``v``: its rotated values, fp32 [n, k], contraction last. ``shape``: rows and columns of a block.
    ``up``: the blocks' scales [number, 1, 1]; None if the tensor's is the only one. ``outer``: a second fp32
    factor of each block, or None: the scale of its row or 128 neighbours, or 6/7 for IF4's whole numbers.
    ``decode``: the tensor's scale. ``scaled``: the values before rounding. ``mask``: of the stored matrix.
    """

    def __init__(
        self, x: Tensor, policy: OperandPolicy, *, axis: int, key: Key | None, amax: float | None
    ) -> None:
        check_operand(x, policy, axis, key)
        if policy.is_high_precision:
            raise ValueError(f"{policy.format} has no grid")
        self.policy, self.element, rule = policy, ELEMENTS[policy.format], policy.scale
        self._axis, self._key = axis % 2, key
        self.v = _rotated(x, policy, axis, key)
        n, k = self.v.shape
        self.shape = block_shape(policy)
        if rule in ("tensor", "delayed", "row", "searched"):
            self.shape = 1 if rule in ("row", "searched") else max(n, 1), max(k, 1)
        self.mask: Tensor | None = None
        self.up: Tensor | None = None
        self.outer: Tensor | None = None
        blocks, self.decode = to_blocks(self.v, self.shape), 1.0
        encode: float | Tensor = 1.0
        if policy.has_tensor_scale:
            amax = scales.amax_of(self.v[None]).item() if amax is None else amax
            encode, self.decode = scales.tensor_scale(amax, policy)
        self.descale = self.decode / policy.prescale
        if policy.format in TWO_LEVEL:
            self.descale = fp32(self.descale)
        if rule in ("tensor", "delayed"):
            self.scaled = blocks * encode
            return
        if rule in MS_EDEN:
            words = self._words()[:, ::16].reshape(-1)
            self.values, self.up = scales.eden(blocks, self.decode, policy, words)
            self.scaled = blocks / (self.up * self.decode)
            return
        if rule == "searched":
            self.up = scales.searched_scale(self.v, policy)[:, :, None]
            self.scaled = blocks / self.up
        elif rule.endswith("ue5m3"):
            self.up = scales.ue5m3_scale(blocks, self.decode)
            self.scaled = blocks / (self.up * self.decode)
        elif policy.format in TWO_LEVEL:
            largest: float | Tensor = amax or 0.0
            outer: float | Tensor = self.decode
            if rule.endswith("_row"):
                largest = scales.amax_of(self.v[:, None]).repeat_interleave(k // 16, 0)
                encode, outer = scales.fp32_scale(largest, policy)
            base, outer = scales.two_level_base(blocks, policy, encode, outer)
            self.outer = outer if isinstance(outer, Tensor) else None
            found = scales.nvfp4_scale(base, outer)
            if rule == "two_level_1x128":  # the kernel's own factor is infinite, and turns zeros into NaN
                found = found._replace(down=torch.where(found.up * outer == 0, 0.0, found.down))
            if rule.startswith("four_six"):
                found = scales.four_six(blocks, base, found, outer, largest, policy, self.elements)
            self.up, self.scaled = found.up, blocks * found.down
        elif policy.block == "none":
            down, self.up = scales.fp32_scale(scales.amax_of(blocks), policy)
            self.scaled = blocks * down
        else:
            down, self.up = scales.e8m0_scale(blocks, policy)
            self.scaled = blocks * down
        if policy.prescale != 1.0:
            self.scaled = self.scaled * policy.prescale
        if policy.mask:
            self.mask = turned(from_blocks(self.scaled.abs() < E2M1.max, self.v.shape), axis)
        if policy.format == "if4":
            up = self.up * (self.decode / policy.prescale)
            self.values, self.outer = scales.if4(blocks, self.scaled, up, self.elements)

    def _words(self) -> Tensor:
        """Draw each element's random word, [n, k], contraction last."""
        assert self._key is not None
        rows, columns = turned(self.v, self._axis).shape
        return turned(random_words(rows, columns, self._key, self.v.device), self._axis)

    @cached_property
    def values(self) -> Tensor:  # on first use: ``on_grid`` needs none, and random words take long
        """The scaled values, rounded to their grid."""
        return self.elements(self.scaled)

    def elements(self, scaled: Tensor, element: Element | None = None) -> Tensor:
        """Round blocks of scaled values to the element's grid, or to another's."""
        words, rounding = None, self.policy.rounding
        if self.policy.is_stochastic:
            words = self._words()
            if rounding == "stochastic_rocm":
                fours = words.reshape(words.shape[0], words.shape[1] // 4, 4)
                first = fours[..., :1].expand_as(fours)
                words = torch.cat((first[..., :2], first[..., 2:] >> 16), dim=-1).reshape(words.shape)
            words = to_blocks(words, self.shape)
        return formats.rounded(scaled, element or self.element, rounding, words)

    @property
    def block_factor(self) -> Tensor | None:
        """What multiplies each block's elements, [number, 1, 1], without the tensor's scale; or None."""
        return self.up if self.up is None or self.outer is None else self.up * self.outer

    def dequantised(self) -> Quantized:
        """Multiply the elements by their blocks' scales."""
        policy, factor = self.policy, self.block_factor
        values = from_blocks(self.values if factor is None else self.values * factor, self.v.shape)
        if not policy.is_fp32:
            values = values.to(torch.bfloat16)
        descale = self.descale
        if policy.undo == "operand":
            undo = fp32(1 / policy.prescale)
            values, descale = (values.to(torch.float32) * undo).to(torch.bfloat16), 1.0
        return Quantized(values=turned(values, self._axis), descale=descale, mask=self.mask, axis=self._axis)


def to_blocks(v: Tensor, shape: tuple[int, int]) -> Tensor:
    """Cut [n, k] into blocks [number, rows, columns], in row-major order."""
    rows, columns = shape
    n, k = v.shape
    return v.reshape(n // rows, rows, k // columns, columns).transpose(1, 2).reshape(-1, rows, columns)


def from_blocks(blocks: Tensor, shape: torch.Size) -> Tensor:
    """Undo ``to_blocks``: reassemble [n, k]."""
    _, rows, columns = blocks.shape
    n, k = shape
    return blocks.view(n // rows, k // columns, rows, columns).transpose(1, 2).reshape(n, k)


def fake_quantize(x: Tensor, policy: OperandPolicy, axis: int = -1, key: Key | None = None) -> Tensor:
    """Quantise ``x`` by ``policy`` along ``axis``, dequantise it and rotate it back.

    >>> import torch
    >>> from ablate.numerics import OperandPolicy, fake_quantize
    >>> fake_quantize(torch.arange(32.0), OperandPolicy(format="mxfp4"))[:8]
    tensor([0., 0., 2., 4., 4., 4., 6., 8.])

    Args:
        x: bf16, fp16 or fp32, of any shape with at least one dimension.
        policy: the operand's policy; a rotation is undone after quantising, so that ``x`` is comparable.
        axis: the contraction axis: blocks and Hadamard groups lie along it.
        key: names the random stream; required for stochastic rounding and for random signs.

    Returns:
        A tensor of x's shape and dtype; the last step rounds once to that dtype.

    Raises:
        ValueError: a dtype, shape or missing key that the policy cannot take.
    """
    if not x.dim():
        raise ValueError("expected at least one dimension, got a single number")
    matrix, along = x, axis % 2
    if x.dim() != 2:
        moved = x.movedim(axis, -1)
        matrix, along = torch.atleast_2d(moved).flatten(0, -2), 1  # type: ignore[no-untyped-call]
    done = round_operand(matrix, policy, axis=along, key=key)
    last = turned(done.values, along).to(torch.float32)
    values = unrotate(last * done.descale, policy, key).to(x.dtype)
    if x.dim() == 2:
        return turned(values, along).contiguous()
    return values.view(moved.shape).movedim(-1, axis).contiguous()


def quantize(
    x: Tensor, policy: OperandPolicy, axis: int = -1, key: Key | None = None, amax: float | None = None
) -> Codes:
    """Return the codes and scales of a matrix.

    With ``axis=0`` the result is that of the transposed matrix, as a GEMM needs it. A NaN has the NaN code of
    FP8; in a format without such a code the scale is NaN and the codes are 0.

    Arguments and errors as ``round_operand``; a policy in high precision is a ``ValueError`` too.
    """
    done = _Rounded(x, policy, axis=axis, key=key, amax=amax)
    nan_code = formats.encode_max(done.element) if policy.format.startswith("fp8_") else 0
    found, codes = done.up, formats.encode(done.values, done.element, nan_code)
    if policy.format == "if4":
        assert done.outer is not None
        whole = done.outer.ne(1)
        codes = torch.where(whole, formats.encode(done.values, INT4), codes)
    codes = from_blocks(codes, done.v.shape)
    grid = [len(codes) // done.shape[0], codes.shape[1] // done.shape[1]]
    if found is None:
        found, grid = done.v.new_empty(0), [len(codes), 0]
    elif policy.format in TWO_LEVEL:
        element = UE5M3 if policy.scale.endswith("ue5m3") else E4M3
        found = formats.encode(found, element, formats.encode_max(element))
        if policy.format == "if4":
            found = found | whole.to(torch.uint8) << 7
    elif policy.block != "none":
        found = (found.view(torch.int32) >> 23).to(torch.uint8)  # E8M0 is the exponent's field
    return Codes(
        codes=codes, scales=found.view(grid), tensor_scale=done.decode, descale=done.descale, mask=done.mask
    )  # fmt: skip


def on_grid(
    x: Tensor, policy: OperandPolicy, *, axis: int, key: Key | None = None, amax: float | None = None
) -> OnGrid:
    """Rotate and scale a matrix by ``policy``, but do not round it under its own scale.

    Arguments and errors as ``round_operand``; a policy in high precision is a ``ValueError`` too.
    """
    done = _Rounded(x, policy, axis=axis, key=key, amax=amax)
    factor = done.block_factor
    up = done.v.new_tensor([done.decode]) if factor is None else factor * done.decode
    blocks = to_blocks(done.v, done.shape)
    largest = scales.amax_of(blocks)
    largest = torch.where(largest == 0, 1.0, largest)
    # Divided first: the exact scale of tiny values is no normal number.
    ideal = done.elements(blocks / largest * done.element.max) / done.element.max * largest
    return OnGrid(
        rotated=done.v, scaled=from_blocks(done.scaled, done.v.shape), scales=up.flatten(),
        ideal=from_blocks(ideal, done.v.shape), block=done.shape, element=done.element,
    )  # fmt: skip
