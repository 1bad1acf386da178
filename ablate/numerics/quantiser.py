"""Quantise one operand by its policy in plain torch: the rules of every back end, written once.

Back ends reproduce ``round_operand`` bit for bit. It returns values and a factor, ``descale``, which must
multiply the GEMM's fp32 accumulator (a tensor scale, or the 4/3 that undoes a 3/4 prescale).
``fake_quantize`` is for users and returns the dequantised tensor. A NaN or an Inf turns all values with the
same scale into NaN, so that errors stay visible.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ablate.numerics import formats, scales
from ablate.numerics.formats import ELEMENTS, FLOAT32_MAX, Element
from ablate.numerics.philox import Key, random_words
from ablate.numerics.rotate import rotate, signs_of, unrotate
from ablate.numerics.scales import Scale, fp32, nvfp4_tensor_scale
from ablate.recipes import OperandPolicy, block_shape, group_size

__all__ = [
    "Codes", "OnGrid", "Quantized", "check_operand", "fake_quantize", "fp8_descale", "fp8_scale",
    "nvfp4_tensor_scale", "on_grid", "quantize", "round_operand", "signs_of",
]  # fmt: skip

_INPUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_HIGH_PRECISION = {"bf16": torch.bfloat16, "fp16": torch.float16}
_KEYED_SIGNS = ("layer", "step", "call")


@dataclass(frozen=True, kw_only=True)
class Quantized:
    """An operand after rounding, in the input's shape, and the factor still to apply to the accumulator.

    ``values`` are exact in bf16 (fp16 for that format), or fp32 if several fp32 scales within the tensor make
    them inexact in bf16. ``descale`` is a number, or an fp32 tensor of one element that stays on its device.
    ``mask`` is true where a value did not clip, if the policy asks for it. ``axis`` is the contraction axis.
    """

    values: Tensor
    descale: float | Tensor = 1.0
    mask: Tensor | None = None
    axis: int = 1

    @property
    def contraction_last(self) -> Tensor:
        """The values as [n, k], contraction last: a view."""
        return self.values if self.axis == 1 else self.values.t()


@dataclass(frozen=True, kw_only=True)
class Codes:
    """Codes (uint8, [n, k], contraction last), scales [n, k / block], and the tensor's scale.

    Scales are bytes (uint8; E8M0, or E4M3 for NVFP4), fp32 for scales per row or 128-block, or empty ([n, 0])
    if the tensor's scale is the only one. Square tiles have one row of scales per row of tiles.
    """

    codes: Tensor
    scales: Tensor
    tensor_scale: float = 1.0


@dataclass(frozen=True, kw_only=True)
class OnGrid:
    """An operand before rounding to its element grid, and the scales that divided it.

    ``rotated`` and ``scaled`` are fp32 [n, k], contraction last: the operand after its rotation, and that
    divided by its scale and times its prescale, so that values above the element's largest value clip.
    ``scales``: fp32, one per block of ``block`` (rows, columns). ``element``: the grid.
    """

    rotated: Tensor
    scaled: Tensor
    scales: Tensor
    block: tuple[int, int]
    element: Element


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
    random = policy.rounding != "nearest" or policy.signs in _KEYED_SIGNS or policy.scale == "ms_eden"
    if key is None and random:
        raise ValueError(
            f"a key is needed for rounding '{policy.rounding}', signs '{policy.signs}' "
            f"and scale '{policy.scale}'"
        )


def fp8_scale(amax: float, fmt: str) -> float:
    """Return the scale max / amax of a tensor in fp32; 1 for an all-zero tensor, NaN for NaN or Inf.

    As TransformerEngine's current scaling: it multiplies the values and divides the accumulator.
    """
    if amax == 0.0:
        return 1.0
    if not math.isfinite(amax):
        return math.nan
    # A tensor of subnormals would overflow the scale; the largest finite scale keeps it on the grid.
    return min(fp32(ELEMENTS[fmt].max / amax), FLOAT32_MAX)


def fp8_descale(scale: float) -> float:
    """Return 1 / scale rounded to fp32, the factor for FP8 hardware."""
    return fp32(1.0 / scale)


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
    check_operand(x, policy, axis, key)
    along_rows = axis % 2 == 0
    if policy.is_high_precision and not policy.hadamard:
        return Quantized(values=x.to(_HIGH_PRECISION[policy.format]), axis=axis % 2)
    v = rotate((x.t() if along_rows else x).to(torch.float32).contiguous(), policy, key)
    if policy.is_high_precision:
        done = Quantized(values=v.to(_HIGH_PRECISION[policy.format]))
    else:
        done = _Rounder(x, policy, along_rows=along_rows, key=key).round(v, amax)
    if not along_rows:
        return done
    mask = None if done.mask is None else done.mask.t()
    return Quantized(values=done.values.t(), descale=done.descale, mask=mask, axis=0)


class _Rounder:
    """Rounds the rotated values of one operand, [n, k] with the contraction axis last."""

    def __init__(self, x: Tensor, policy: OperandPolicy, *, along_rows: bool, key: Key | None) -> None:
        self.policy = policy
        self.element: Element = ELEMENTS[policy.format]
        self._stored_shape, self._device = x.shape, x.device
        self._along_rows, self._key = along_rows, key

    def words(self) -> Tensor:
        """Return each element's random word, [n, k] with the contraction axis last."""
        assert self._key is not None
        rows, columns = self._stored_shape
        words = random_words(rows, columns, self._key, self._device)
        return words.t() if self._along_rows else words

    def elements(self, scaled: Tensor, shape: tuple[int, int]) -> Tensor:
        """Round blocks [n, rows, columns] of scaled values to the element's grid."""
        if self.policy.rounding == "nearest":
            return formats.round_nearest(scaled, self.element)
        words = self.words()
        if self.policy.rounding == "stochastic":
            return formats.round_stochastic(scaled, self.element, to_blocks(words, shape))
        fours = words.reshape(words.shape[0], -1, 4)
        first = fours[..., :1].expand_as(fours)
        shared = torch.cat((first[..., :2], first[..., 2:] >> 16), dim=-1).reshape(words.shape)
        return formats.round_stochastic_rocm(scaled, self.element, to_blocks(shared, shape))

    def round(self, v: Tensor, amax: float | None) -> Quantized:
        """Quantise and dequantise."""
        policy = self.policy
        if policy.scale in ("tensor", "delayed"):
            scale = fp8_scale(scales.tensor_amax(v) if amax is None else amax, policy.format)
            values = self.elements((v * scale)[None], (v.shape[0], v.shape[1]))[0]
            return Quantized(values=values.to(torch.bfloat16), descale=fp8_descale(scale))
        if policy.scale in ("row", "1x128", "128x128", "searched"):
            values, up = self.fp32_blockwise(v)
            return Quantized(values=from_blocks(values * up, v.shape))
        if policy.scale == "ms_eden":
            values, up, decode = self.eden(v)
            return Quantized(values=from_blocks(values * up, v.shape).to(torch.bfloat16), descale=decode)
        values, scale_, decode, mask = self.blockwise(v)
        done = from_blocks(values * scale_.up, v.shape).to(torch.bfloat16)
        descale = decode / policy.prescale
        if policy.format == "nvfp4":
            descale = fp32(descale) if math.isfinite(descale) else math.nan
        if policy.undo == "operand":
            undo = fp32(1 / policy.prescale)
            done, descale = (done.to(torch.float32) * undo).to(torch.bfloat16), 1.0
        return Quantized(values=done, descale=descale, mask=mask)

    def eden(self, v: Tensor) -> tuple[Tensor, Tensor, float]:
        """Return MS-EDEN's elements and block scales, as blocks, and the tensor's scale."""
        words = self.words()[:, ::16].reshape(-1)
        return scales.eden(to_blocks(v, (1, 16)), scales.tensor_amax(v), self.policy.hadamard, words)

    def blockwise(self, v: Tensor) -> tuple[Tensor, Scale, float, Tensor | None]:
        """Return the elements' values and the scales as blocks, the tensor's scale, and the mask."""
        shape = block_shape(self.policy)
        blocks, scale, decode = self._block_scales(v)
        scaled = self._scaled(blocks, scale)
        mask = from_blocks(scaled.abs() < formats.E2M1.max, v.shape) if self.policy.mask else None
        return self.elements(scaled, shape), scale, decode, mask

    def scaled_blocks(self, v: Tensor) -> tuple[float, Scale, Tensor]:
        """Return the tensor's scale, the blocks' scales, and the values to round, [n, k]."""
        blocks, scale, decode = self._block_scales(v)
        return decode, scale, from_blocks(self._scaled(blocks, scale), v.shape)

    def _block_scales(self, v: Tensor) -> tuple[Tensor, Scale, float]:
        """Return the blocks, their scales, and the tensor's scale."""
        policy, shape = self.policy, block_shape(self.policy)
        blocks = to_blocks(v, shape)
        decode = 1.0
        if policy.format == "nvfp4":
            encode, decode = nvfp4_tensor_scale(scales.tensor_amax(v), policy.scale)
            if policy.scale == "four_six":
                scale = scales.four_six(
                    blocks, encode, decode, lambda s: self.elements(self._scaled(blocks, s), shape)
                )
            else:
                scale = scales.nvfp4_scale(scales.nvfp4_base(blocks, encode), decode)
        else:
            scale = scales.e8m0_scale(scales.e8m0_bytes(blocks, policy))
        return blocks, scale, decode

    def _scaled(self, blocks: Tensor, scale: Scale) -> Tensor:
        scaled = blocks * scale.down
        return scaled if self.policy.prescale == 1.0 else scaled * self.policy.prescale

    def fp32_blockwise(self, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return blocks of elements and their fp32 scales, per row, 1×128 block or 128×128 tile."""
        shape = self.fp32_shape(v)
        blocks = to_blocks(v, shape)
        if self.policy.scale == "searched":
            clip = scales.searched_clip(v, self.element)[:, :, None]
            clip = torch.where(scales.amax_bits(blocks) >= 0x7F800000, math.nan, clip)
            up = torch.where(clip == 0, 1.0, clip / self.element.max)
            return self.elements(blocks / up, shape), up
        amax = scales.amax_bits(blocks).view(torch.float32)
        down = (self.element.max / amax).clamp(max=FLOAT32_MAX)
        down = torch.where(amax == 0, 1.0, torch.where(amax.isfinite(), down, math.nan))
        return self.elements(blocks * down, shape), 1 / down

    def fp32_shape(self, v: Tensor) -> tuple[int, int]:
        """Return the shape of the block that shares an fp32 scale."""
        if self.policy.scale in ("row", "searched"):
            return 1, max(v.shape[1], 1)
        return block_shape(self.policy)


def to_blocks(v: Tensor, shape: tuple[int, int]) -> Tensor:
    """Cut [n, k] into blocks [number, rows, columns], in row-major order."""
    rows, columns = shape
    n, k = v.shape
    cut = v.reshape(n // max(rows, 1), rows, k // columns, columns) if v.numel() else v.view(0, 1, 1, 1)
    return cut.transpose(1, 2).reshape(-1, rows, columns) if v.numel() else v.new_zeros(0, rows, columns)


def from_blocks(blocks: Tensor, shape: torch.Size) -> Tensor:
    """Reassemble [n, k] from blocks."""
    _, rows, columns = blocks.shape
    n, k = shape
    if not blocks.numel():
        return blocks.new_zeros(shape)
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
    if x.dim() == 2:
        matrix, along = x, axis
    else:
        matrix, along = x.movedim(axis, -1), 1
        moved_shape = matrix.shape
        matrix = matrix.reshape(-1, matrix.shape[-1]) if x.numel() else matrix.reshape(0, matrix.shape[-1])
    done = round_operand(matrix, policy, axis=along, key=key)
    values = done.values.to(torch.float32) * done.descale
    if policy.hadamard:
        last = values.t().contiguous() if along % 2 == 0 else values.contiguous()
        last = unrotate(last, policy, key)
        values = last.t() if along % 2 == 0 else last
    values = values.to(x.dtype)
    return values.contiguous() if x.dim() == 2 else values.reshape(moved_shape).movedim(-1, axis).contiguous()


def quantize(
    x: Tensor, policy: OperandPolicy, axis: int = -1, key: Key | None = None, amax: float | None = None
) -> Codes:
    """Return the codes and scales of a matrix.

    With ``axis=0`` the result is that of the transposed matrix, as a GEMM needs it. A NaN has the NaN code of
    FP8; in a format without such a code the scale is NaN and the codes are 0.

    Args:
        x: [rows, columns] in bf16, fp16 or fp32, of any strides.
        policy: any but bf16 and fp16.
        axis: the contraction axis.
        key: names the random stream.
        amax: for delayed scales, as in ``round_operand``.

    Raises:
        ValueError: as ``fake_quantize``, or a policy in high precision.
    """
    check_operand(x, policy, axis, key)
    if policy.is_high_precision:
        raise ValueError(f"{policy.format} has no codes")
    along_rows = axis % 2 == 0
    v = rotate((x.t() if along_rows else x).to(torch.float32).contiguous(), policy, key)
    rounder = _Rounder(x, policy, along_rows=along_rows, key=key)
    element, shape, tensor_scale = rounder.element, block_shape(policy), 1.0
    if policy.scale in ("tensor", "delayed"):
        scale = fp8_scale(scales.tensor_amax(v) if amax is None else amax, policy.format)
        values = rounder.elements((v * scale)[None], (v.shape[0], v.shape[1]))
        return Codes(
            codes=_codes(values, element, policy.format).view(v.shape),
            scales=v.new_empty(v.shape[0], 0),
            tensor_scale=fp8_descale(scale),
        )
    if policy.scale in ("row", "1x128", "128x128", "searched"):
        values, found = rounder.fp32_blockwise(v)
        shape = rounder.fp32_shape(v)
    elif policy.scale == "ms_eden":
        values, up, tensor_scale = rounder.eden(v)
        found = _codes(up, formats.E4M3, "fp8_e4m3")
    else:
        values, block_scale, tensor_scale, _ = rounder.blockwise(v)
        found = (
            _codes(block_scale.up, formats.E4M3, "fp8_e4m3")
            if policy.format == "nvfp4"
            else scales.e8m0_bytes(to_blocks(v, shape), policy).to(torch.uint8)
        )
    codes = from_blocks(_codes(values, element, policy.format), v.shape)
    grid = (v.shape[0] // shape[0], v.shape[1] // max(shape[1], 1))
    return Codes(codes=codes, scales=found.view(grid), tensor_scale=tensor_scale)


def on_grid(
    x: Tensor, policy: OperandPolicy, *, axis: int, key: Key | None = None, amax: float | None = None
) -> OnGrid:
    """Return a matrix before rounding to the element grid of ``policy``; arguments as ``round_operand``.

    Raises:
        ValueError: as ``round_operand``, or a policy in high precision.
    """
    check_operand(x, policy, axis, key)
    if policy.is_high_precision:
        raise ValueError(f"{policy.format} has no grid")
    along_rows = axis % 2 == 0
    v = rotate((x.t() if along_rows else x).to(torch.float32).contiguous(), policy, key)
    rounder = _Rounder(x, policy, along_rows=along_rows, key=key)
    shape = block_shape(policy)
    if policy.scale in ("tensor", "delayed"):
        scale = fp8_scale(scales.tensor_amax(v) if amax is None else amax, policy.format)
        found, scaled, shape = v.new_tensor([fp8_descale(scale)]), v * scale, (v.shape[0], v.shape[1])
    elif policy.scale in ("row", "1x128", "128x128", "searched"):
        shape = rounder.fp32_shape(v)
        _, up = rounder.fp32_blockwise(v)
        found, scaled = up.flatten(), from_blocks(to_blocks(v, shape) / up, v.shape)
    elif policy.scale == "ms_eden":
        _, up, decode = rounder.eden(v)
        found = (up * decode).flatten()
        scaled = from_blocks(to_blocks(v, shape) / (up * decode), v.shape)
    else:
        decode, scale_, scaled = rounder.scaled_blocks(v)
        found = (scale_.up * decode).flatten()
    return OnGrid(rotated=v, scaled=scaled, scales=found, block=shape, element=rounder.element)


def _codes(values: Tensor, element: Element, fmt: str) -> Tensor:
    """Encode values on the grid; NaN becomes FP8's NaN code, else 0, without its device-dependent sign."""
    nan_code = formats.encode_max(element) if fmt.startswith("fp8_") else 0
    codes = formats.encode(values, element)
    return torch.where(values.isnan(), nan_code, codes.to(torch.int32)).to(torch.uint8)
