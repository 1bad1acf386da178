"""Quantise one operand by its policy in plain torch: the rules of every back end, written once.

Back ends reproduce ``round_operand`` bit for bit. It returns values, and a factor ``descale`` that must
multiply the GEMM's fp32 accumulator (a tensor scale, or the 4/3 that undoes a 3/4 prescale).
``fake_quantize`` is for users and returns the dequantised tensor. A NaN or an Inf turns all values with the
same scale into NaN, so that errors stay visible.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ablate.numerics import formats, scales
from ablate.numerics.formats import E2M1, E4M3, ELEMENTS, INT4, UE5M3, Element
from ablate.numerics.philox import Key, random_words
from ablate.numerics.rotate import rotate, unrotate
from ablate.numerics.scales import TWO_LEVEL, fp32
from ablate.recipes import OperandPolicy, block_shape, group_size

if TYPE_CHECKING:
    from collections.abc import Callable

    from ablate.recipes.scale_rules import Family

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
        raise ValueError(
            f"expected a matrix and axis 0 or 1, got shape {tuple(x.shape)} and axis {axis}"
        )
    group = group_size(policy)
    if x.shape[axis] % group:
        raise ValueError(
            f"the group of {group} does not divide {x.shape[axis]}, the contraction dimension"
        )
    rows = block_shape(policy)[0]
    other = x.shape[1 - axis % 2]
    if other % rows:
        raise ValueError(
            f"the {rows} rows of a square tile do not divide {other}, the other dimension"
        )
    if key is None and (policy.draws_anew or policy.signs == "layer"):
        raise ValueError(
            f"a key is needed for rounding '{policy.rounding}', signs '{policy.signs}' "
            f"and scale '{policy.scale}'"
        )


def round_operand(
    x: Tensor,
    policy: OperandPolicy,
    *,
    axis: int,
    key: Key | None = None,
    amax: float | None = None,
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
    if policy.is_high_precision:
        if policy.hadamard:
            x = turned(_rotated(x, policy, axis, key), axis)
        dtype = torch.float16 if policy.format == "fp16" else torch.bfloat16
        return Quantized(values=x.to(dtype), axis=axis % 2)
    operand = _operand(x, policy, axis, key, amax)
    scaled = _scaled(operand)
    blocks = _values(operand, scaled)
    if scaled.factor is not None:
        blocks = blocks * scaled.factor
    values = operand.assembled(blocks)
    if not policy.is_fp32:
        values = values.to(torch.bfloat16)
    descale = operand.descale
    if policy.undo == "operand":
        undo = fp32(1 / policy.prescale)
        values = (values.to(torch.float32) * undo).to(torch.bfloat16)
        descale = operand.decode
    return Quantized(
        values=turned(values, axis),
        descale=descale,
        mask=_mask(operand, scaled),
        axis=operand.axis,
    )


def _rotated(x: Tensor, policy: OperandPolicy, axis: int, key: Key | None) -> Tensor:
    """Return a matrix in fp32, contraction last, contiguous and rotated."""
    return rotate(turned(x, axis).to(torch.float32).contiguous(), policy, key)


@dataclass(frozen=True, kw_only=True)
class _Operand:
    """A rotated operand, whole and in blocks, with the scale of its whole tensor.

    ``rotated``: fp32 [n, k], contraction last. ``blocks``: the same as [number, rows, columns]. ``amax``: the
    tensor's largest magnitude; ``encode`` and ``decode`` multiply values before and after rounding. Without a
    tensor scale they are 0, 1 and 1.
    """

    policy: OperandPolicy
    axis: int
    key: Key | None
    rotated: Tensor
    blocks: Tensor
    amax: float
    encode: float
    decode: float

    @property
    def element(self) -> Element:
        """The grid of the policy's format."""
        return ELEMENTS[self.policy.format]

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of a block."""
        _, rows, columns = self.blocks.shape
        return rows, columns

    @property
    def descale(self) -> float:
        """What is left to multiply the accumulator by."""
        descale = self.decode / self.policy.prescale
        if self.policy.format in TWO_LEVEL:
            return fp32(descale)
        return descale

    def assembled(self, blocks: Tensor) -> Tensor:
        """Return blocks as a matrix [n, k]."""
        return from_blocks(blocks, self.rotated.shape)

    def words(self) -> Tensor:
        """Draw each element's random word, [n, k], contraction last."""
        assert self.key is not None
        rows, columns = turned(self.rotated, self.axis).shape
        return turned(
            random_words(rows, columns, self.key, self.rotated.device), self.axis
        )

    def rounded(self, scaled: Tensor, element: Element | None = None) -> Tensor:
        """Round blocks of scaled values to the element's grid, or to another's."""
        words = None
        rounding = self.policy.rounding
        if self.policy.is_stochastic:
            words = self.words()
            if rounding == "stochastic_rocm":
                fours = words.reshape(words.shape[0], words.shape[1] // 4, 4)
                first = fours[..., :1].expand_as(fours)
                words = torch.cat(
                    (first[..., :2], first[..., 2:] >> 16), dim=-1
                ).reshape(words.shape)
            words = to_blocks(words, self.shape)
        return formats.rounded(scaled, element or self.element, rounding, words)


def _operand(
    x: Tensor, policy: OperandPolicy, axis: int, key: Key | None, amax: float | None
) -> _Operand:
    """Check, rotate and cut a matrix into blocks."""
    check_operand(x, policy, axis, key)
    if policy.is_high_precision:
        raise ValueError(f"{policy.format} has no grid")
    rotated = _rotated(x, policy, axis, key)
    n, k = rotated.shape
    rows, columns = block_shape(policy)
    if policy.block == "none" and policy.scale_rule.outer in ("tensor", "row"):
        rows = max(n, 1) if policy.has_tensor_scale else 1
        columns = max(k, 1)
    encode = decode = 1.0
    if policy.has_tensor_scale:
        if amax is None:
            amax = scales.amax_of(rotated[None]).item()
        encode, decode = scales.tensor_scale(amax, policy)
    return _Operand(
        policy=policy,
        axis=axis % 2,
        key=key,
        rotated=rotated,
        blocks=to_blocks(rotated, (rows, columns)),
        amax=amax or 0.0,
        encode=encode,
        decode=decode,
    )


@dataclass(frozen=True, kw_only=True)
class _Scaled:
    """The blocks of an operand in units of its elements, before rounding.

    ``up``: the blocks' scales [number, 1, 1]; None if the tensor's is the only one. ``outer``: a second fp32
    factor of each block, or None: the scale of its row or 128 neighbours, or 6/7 for IF4's whole numbers.
    ``values``: the blocks after rounding, where a rule or format chooses among several roundings.
    """

    blocks: Tensor
    up: Tensor | None = None
    outer: Tensor | None = None
    values: Tensor | None = None

    @property
    def factor(self) -> Tensor | None:
        """What multiplies each block's elements, without the tensor's scale; or None."""
        if self.up is None or self.outer is None:
            return self.up
        return self.up * self.outer


def _by_tensor(operand: _Operand) -> _Scaled:
    return _Scaled(blocks=operand.blocks * operand.encode)


def _by_groups(operand: _Operand) -> _Scaled:
    return _multiplied(
        operand, scales.fp32_scale(scales.amax_of(operand.blocks), operand.policy)
    )


def _by_search(operand: _Operand) -> _Scaled:
    up = scales.searched_scale(operand.rotated, operand.policy)[:, :, None]
    return _Scaled(blocks=operand.blocks / up, up=up)


def _by_e8m0(operand: _Operand) -> _Scaled:
    return _multiplied(operand, scales.e8m0_scale(operand.blocks, operand.policy))


def _by_quest(operand: _Operand) -> _Scaled:
    return _multiplied(operand, scales.quest_scale(operand.blocks))


def _by_two_level(operand: _Operand) -> _Scaled:
    if operand.policy.scale_rule.outer == "1x128":
        return _multiplied(operand, *scales.tetrajet_scale(operand.blocks))
    _, encode, decode = _outer_scale(operand)
    base = scales.two_level_base(operand.blocks, operand.policy, encode)
    return _multiplied(operand, scales.nvfp4_scale(base, decode), decode)


def _by_four_six(operand: _Operand) -> _Scaled:
    policy = operand.policy
    amax, encode, decode = _outer_scale(operand)
    base = scales.two_level_base(operand.blocks, policy, encode)
    scale = scales.four_six(operand.blocks, base, decode, amax, policy, operand.rounded)
    return _multiplied(operand, scale, decode)


def _multiplied(
    operand: _Operand, scale: scales.Scale, outer: float | Tensor = 1.0
) -> _Scaled:
    """Scale an operand; ``outer``: the fp32 scale over its blocks'; a number is the whole tensor's."""
    of_blocks = outer if isinstance(outer, Tensor) else None
    return _Scaled(blocks=operand.blocks * scale.down, up=scale.up, outer=of_blocks)


def _outer_scale(
    operand: _Operand,
) -> tuple[float | Tensor, float | Tensor, float | Tensor]:
    """Return amax, encode and decode of the tensor, or of each block's row [number, 1, 1]."""
    if operand.policy.scale_rule.outer == "tensor":
        return operand.amax, operand.encode, operand.decode
    blocks_per_row = operand.rotated.shape[1] // 16
    amax = scales.amax_of(operand.rotated[:, None]).repeat_interleave(blocks_per_row, 0)
    scale = scales.fp32_scale(amax, operand.policy)
    return amax, scale.down, scale.up


def _by_ue5m3(operand: _Operand) -> _Scaled:
    up = scales.ue5m3_scale(operand.blocks, operand.decode)
    return _Scaled(blocks=operand.blocks / (up * operand.decode), up=up)


def _by_ms_eden(operand: _Operand) -> _Scaled:
    words = operand.words()[:, ::16].reshape(-1)
    values, up = scales.eden(operand.blocks, operand.decode, operand.policy, words)
    return _Scaled(blocks=operand.blocks / (up * operand.decode), up=up, values=values)


FAMILIES: dict[Family, Callable[[_Operand], _Scaled]] = {
    "tensor": _by_tensor,
    "groups": _by_groups,
    "searched": _by_search,
    "e8m0": _by_e8m0,
    "quest": _by_quest,
    "two_level": _by_two_level,
    "four_six": _by_four_six,
    "ue5m3": _by_ue5m3,
    "ms_eden": _by_ms_eden,
}
"""The formula of each family of scale rules."""


def _scaled(operand: _Operand) -> _Scaled:
    """Scale the blocks by the policy's rule, then by its prescale; choose IF4's grids."""
    policy = operand.policy
    scaled = FAMILIES[policy.scale_rule.family](operand)
    if policy.prescale != 1.0:
        scaled = replace(scaled, blocks=scaled.blocks * policy.prescale)
    if policy.format == "if4":
        assert scaled.up is not None
        up = scaled.up * (operand.decode / policy.prescale)
        values, outer = scales.if4(operand.blocks, scaled.blocks, up, operand.rounded)
        scaled = replace(scaled, values=values, outer=outer)
    return scaled


def _values(operand: _Operand, scaled: _Scaled) -> Tensor:
    """Return the blocks after rounding to their grid."""
    if scaled.values is None:
        return operand.rounded(scaled.blocks)
    return scaled.values


def _mask(operand: _Operand, scaled: _Scaled) -> Tensor | None:
    """Return where the stored matrix's values do not clip, if the policy asks for it."""
    if not operand.policy.mask:
        return None
    return turned(operand.assembled(scaled.blocks.abs() < E2M1.max), operand.axis)


def to_blocks(v: Tensor, shape: tuple[int, int]) -> Tensor:
    """Cut [n, k] into blocks [number, rows, columns], in row-major order."""
    rows, columns = shape
    n, k = v.shape
    return (
        v.reshape(n // rows, rows, k // columns, columns)
        .transpose(1, 2)
        .reshape(-1, rows, columns)
    )


def from_blocks(blocks: Tensor, shape: torch.Size) -> Tensor:
    """Undo ``to_blocks``: reassemble [n, k]."""
    _, rows, columns = blocks.shape
    n, k = shape
    return (
        blocks.view(n // rows, k // columns, rows, columns)
        .transpose(1, 2)
        .reshape(n, k)
    )


def fake_quantize(
    x: Tensor, policy: OperandPolicy, axis: int = -1, key: Key | None = None
) -> Tensor:
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
    if x.dim() != 2:
        moved = x.movedim(axis, -1)
        matrix = torch.atleast_2d(moved).flatten(0, -2)  # type: ignore[no-untyped-call]
        values = fake_quantize(matrix, policy, axis=1, key=key)
        return values.view(moved.shape).movedim(-1, axis).contiguous()
    quantized = round_operand(x, policy, axis=axis, key=key)
    last = turned(quantized.values, axis).to(torch.float32)
    values = unrotate(last * quantized.descale, policy, key).to(x.dtype)
    return turned(values, axis).contiguous()


def quantize(
    x: Tensor,
    policy: OperandPolicy,
    axis: int = -1,
    key: Key | None = None,
    amax: float | None = None,
) -> Codes:
    """Return the codes and scales of a matrix.

    With ``axis=0`` the result is that of the transposed matrix, as a GEMM needs it. A NaN has the NaN code of
    FP8; in a format without such a code the scale is NaN and the codes are 0.

    Arguments and errors as ``round_operand``; a policy in high precision is a ``ValueError`` too.

    >>> import torch
    >>> from ablate.numerics import OperandPolicy, quantize
    >>> row = torch.tensor([[0.1, 0.7, -1.2, 5.0] + [0.0] * 28])
    >>> quantized = quantize(row, OperandPolicy(format="mxfp4"))
    >>> quantized.codes[0, :4], quantized.scales  # 5.0 becomes 4, code 6; the scale is 2 ** (127 - 127)
    (tensor([ 0,  1, 10,  6], dtype=torch.uint8), tensor([[127]], dtype=torch.uint8))
    """
    operand = _operand(x, policy, axis, key, amax)
    scaled = _scaled(operand)
    values = _values(operand, scaled)
    if policy.format.startswith("fp8_"):
        nan_code = formats.encode_max(operand.element)
    else:
        nan_code = 0
    codes = formats.encode(values, operand.element, nan_code)
    if policy.format == "if4":
        assert scaled.outer is not None
        codes = torch.where(scaled.outer == 1, codes, formats.encode(values, INT4))
    return Codes(
        codes=operand.assembled(codes),
        scales=_scale_codes(operand, scaled),
        tensor_scale=operand.decode,
        descale=operand.descale,
        mask=_mask(operand, scaled),
    )


def _scale_codes(operand: _Operand, scaled: _Scaled) -> Tensor:
    """Return the scales as ``Codes`` has them; a scale of IF4's whole numbers has its highest bit set."""
    n, k = operand.rotated.shape
    rows, columns = operand.shape
    if scaled.up is None:
        return operand.rotated.new_empty(n, 0)
    codes = scaled.up
    element = operand.policy.scale_rule.element
    if element == "e8m0":  # the exponent's field
        codes = (codes.view(torch.int32) >> 23).to(torch.uint8)
    elif element == "e4m3":
        codes = formats.encode(codes, E4M3, formats.encode_max(E4M3))
    elif element == "ue5m3":
        codes = formats.encode(codes, UE5M3, formats.encode_max(UE5M3))
    if operand.policy.format == "if4":
        assert scaled.outer is not None
        codes = codes | scaled.outer.ne(1).to(torch.uint8) << 7
    return codes.view(n // rows, k // columns)


def on_grid(
    x: Tensor,
    policy: OperandPolicy,
    *,
    axis: int,
    key: Key | None = None,
    amax: float | None = None,
) -> OnGrid:
    """Rotate and scale a matrix by ``policy``, but do not round it under its own scale.

    Arguments and errors as ``round_operand``; a policy in high precision is a ``ValueError`` too.
    """
    operand = _operand(x, policy, axis, key, amax)
    scaled = _scaled(operand)
    element = operand.element
    if scaled.factor is None:
        up = operand.rotated.new_tensor([operand.decode])
    else:
        up = scaled.factor * operand.decode
    largest = scales.amax_of(operand.blocks)
    largest = torch.where(largest == 0, 1.0, largest)
    # Divided first: the exact scale of tiny values is no normal number.
    ideal = (
        operand.rounded(operand.blocks / largest * element.max) / element.max * largest
    )
    return OnGrid(
        rotated=operand.rotated,
        scaled=operand.assembled(scaled.blocks),
        ideal=operand.assembled(ideal),
        scales=up.flatten(),
        block=operand.shape,
        element=element,
    )
