"""What every quantiser is checked on: policies of every kind, tensors as in training, corner cases.

A made-up tensor is [rows, columns] in bf16 as it is stored, with channels as columns: features of x, dy, w.
"""

from __future__ import annotations

import hashlib
from fractions import Fraction
from typing import TYPE_CHECKING, Any, get_args

import torch

from ablate.numerics.formats import ELEMENTS, decode, encode_max
from ablate.recipes import OperandPolicy, block_shape, group_size
from ablate.recipes.policy import Block, Rounding, Scale, Signs, Undo

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from ablate.numerics.formats import Element

_WORDS = {
    "scale": Scale,
    "block": Block,
    "rounding": Rounding,
    "undo": Undo,
    "signs": Signs,
}
_FLAGS = ("permute", "rotated_bf16", "mask")


def label(policy: OperandPolicy) -> str:
    """Describe a policy in a few words: its differences from the format's default."""
    default = OperandPolicy(format=policy.format)
    words: list[str] = [policy.format]
    for name in (
        "scale",
        "block",
        "rounding",
        "prescale",
        "undo",
        "hadamard",
        "signs",
        *_FLAGS,
    ):
        value = getattr(policy, name)
        if value == getattr(default, name):
            continue
        if name in _FLAGS:
            words.append(name)
        elif name == "hadamard":
            words.append(f"H{value}")
        else:
            words.append(str(value))
    return " ".join(words)


def policies_of(text: str) -> tuple[OperandPolicy, ...]:
    """Read policies, one per line, in the words of ``label``; a prescale may be a fraction."""
    field_of = {}
    for name, kind in _WORDS.items():
        for word in get_args(kind):
            field_of[word] = name
    policies = []
    for line in text.strip().splitlines():
        fmt, *words = line.split()
        fields: dict[str, Any] = {"format": fmt}
        for word in words:
            if word in _FLAGS:
                fields[word] = True
            elif word in field_of:
                fields[field_of[word]] = word
            elif word[0] == "H":
                fields["hadamard"] = int(word[1:])
            else:
                fields["prescale"] = float(Fraction(word))
        policies.append(OperandPolicy(**fields))
    return tuple(policies)


POLICIES = policies_of("""
bf16
bf16 H32
mxfp4
mxfp4 H16
mxfp4 H16 step
mxfp4 H32
mxfp4 H32 step
mxfp4 stochastic
mxfp4 stochastic H16
mxfp4 stochastic H16 step
mxfp4 stochastic H32
mxfp4 stochastic H32 step
mxfp4 stochastic 0.75
mxfp4 stochastic 0.75 H16
mxfp4 stochastic 0.75 H16 step
mxfp4 stochastic 0.75 H32
mxfp4 stochastic 0.75 H32 step
mxfp4 even
mxfp4 rceil
mxfp4 quest
mxfp8
mxfp8 stochastic
mxfp4 32x32
mxfp4 32x32 stochastic 0.75
mxfp4 even stochastic_rocm
mxfp4 stochastic_8bit 0.75 H16 step
mxfp4 32x32 stochastic_8bit
nvfp4 stochastic_8bit
mxfp8 stochastic_8bit
mxfp4 nearest_away
mxfp4 nearest_toward_zero
mxfp4 stochastic 0.75 operand
mxfp4 quest H32 mask
mxfp4 stochastic 0.75 H64 call rotated_bf16
mxfp4 stochastic 0.75 H128 layer
mxfp4 H128 layer
mxfp4 H16 call permute
mxfp4 H32 call permute
mxfp4 H64 call permute
mxfp4 H128 call permute
mxfp4 H256
mxfp4 H16 fixed
nvfp4
nvfp4 stochastic
nvfp4 stochastic 16/17
nvfp4 H16 fixed
nvfp4 16x16
nvfp4 ue5m3 16x16
nvfp4 two_level_ue5m3 stochastic 16/17
nvint4
nvint4 stochastic H16
nvfp4 four_six
nvfp4 four_six stochastic 16/17 H64
nvfp4 ms_eden H16 step
nvfp4 ms_eden H32 step
nvfp4 ms_eden H64 step
nvfp4 ms_eden H128 step
nvfp4 ms_eden_unscaled H16 step
nvfp4 ms_eden_unscaled H32 step
nvfp4 ms_eden_unscaled H64 step
nvfp4 ms_eden_unscaled H128 step
fp8_e4m3
fp8_e5m2
fp8_e4m3 stochastic H32
fp8_e4m3 row
fp4_e2m1
fp4_e3m0 row
fp8_e4m3 1x128
fp8_e4m3 128x128
fp4_e2m1 searched
""")
"""Policies of every kind, for both operands."""

QUICK = policies_of("""
mxfp4
mxfp4 stochastic 0.75 H16 step
mxfp4 32x32
mxfp8
nvfp4 H16 fixed
fp8_e4m3
""")
"""The policies of the short form."""

KINDS = ("Gaussian", "Student t", "channel mean", "outlier")
"""Gaussian; Student's t with 3 degrees of freedom; Gaussian with a mean for each channel, itself Gaussian;
and Gaussian with one channel in 64 that is 30 times larger."""


def made_up(
    kind: str, rows: int, columns: int, *, seed: int, number: int = 0, name: str = ""
) -> Tensor:
    """Draw tensor ``number`` of a kind, [rows, columns] in bf16; ``name`` tells apart those of one number."""
    text = f"{kind}:{name}:{seed}:{number}"
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    spread = torch.ones(1)
    if kind == "Student t":
        spread = (
            torch.randn(3, rows, columns, generator=generator).square().sum(0) / 3
        ).sqrt()
    x = torch.randn(rows, columns, generator=generator) / spread
    if kind == "channel mean":
        x += torch.randn(1, columns, generator=generator)
    elif kind == "outlier":
        x[:, 5::64] *= 30
    return x.to(torch.bfloat16)


def corners(
    policy: OperandPolicy, *, seed: int = 0, rows: int = 32
) -> dict[str, Tensor]:
    """Make a policy's corner cases by name, bf16 [rows or more, 256], for quantising along axis 1."""
    rows = max(rows, policy.hadamard, block_shape(policy)[0])
    columns = 256
    plain = made_up("Gaussian", rows, columns, seed=seed, name="probe")
    negative_zeros = plain.clone()
    negative_zeros[:, 9] = -0.0
    cases = {
        "clipping": plain,
        "subnormals": plain * 2.0**-127,
        "1e38": _with(plain, 1e38),
        "NaN": _with(plain, torch.nan),
        "Inf": _with(plain, torch.inf),
        "−0": negative_zeros,
        "zeros": torch.zeros_like(plain),
    }
    if policy.is_high_precision:
        return cases
    # Values midway between neighbours of the grid; ``max`` in each block makes its scale 1.
    element = ELEMENTS[policy.format]
    grid = grid_of(element)
    middles = (grid[1:] + grid[:-1]) / 2
    middles = torch.cat((middles, -middles))
    ties = middles[torch.arange(rows * columns) % len(middles)].view(rows, columns)
    ties[:, ::16] = element.max
    return {"ties": ties.to(torch.bfloat16)} | cases


def _with(x: Tensor, value: float) -> Tensor:
    x = x.clone()
    x[5, 7] = value
    return x


def grid_of(element: Element) -> Tensor:
    """Return the magnitudes of an element's grid in rising order, fp32; even places have even codes."""
    values = decode(torch.arange(encode_max(element) + 1), element)
    return values[values <= element.max]


def awkward(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Make values with wide exponents, zeros of both signs, subnormals, a NaN and an Inf."""
    generator = torch.Generator().manual_seed(rows * columns)
    x = torch.randn(rows, columns, generator=generator) * 2.0 ** torch.randint(
        -30,
        30,
        (rows, 1),
        generator=generator,
    )
    x[:, 7] = -0.0
    x[: rows // 4] = x[: rows // 4].sign() * 2.0**-130
    x[rows // 2, columns // 2] = float("nan")
    x[rows // 2 + 1, 3] = float("inf")
    return x.to(dtype)


def inputs(policy: OperandPolicy) -> Iterator[tuple[str, Tensor]]:
    """Yield named tensors for comparing a policy's bits: shapes, dtypes, strides, corner cases."""
    one_scale = block_shape(policy)[1] == 1 or policy.format == "nvfp4"
    # Shapes that the policy's groups divide: whole strips of 64 columns, and others.
    shapes = [(32, 32), (96, 160), (160, 96)]
    if group_size(policy) > 32:
        shapes = [(256, 256), (256, 384 if policy.hadamard <= 128 else 512)]
    for shape in shapes:
        for dtype in (torch.bfloat16, torch.float32):
            x = awkward(*shape, dtype)
            if one_scale:  # a NaN would spread to the whole tensor
                x = torch.nan_to_num(x, nan=0.0, posinf=1.0)
            yield f"{list(shape)} {dtype}", x
    x = awkward(*shapes[-1], torch.bfloat16)
    if one_scale:
        yield from corners(policy, rows=max(32, group_size(policy))).items()
    else:
        yield "transposed strides", x.t().contiguous().t()
        yield "rows with a gap", torch.nn.functional.pad(x, (0, 24))[:, : x.shape[1]]
        yield "corner cases", torch.cat([*corners(policy).values()])
