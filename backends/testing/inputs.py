"""The tensors on which every quantiser is checked: four kinds that training knows, and corner cases.

A made-up tensor is [rows, columns] in bf16 as it is stored, with channels as columns: features of x, dy, w.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import torch

from ablate.numerics.formats import ELEMENTS, decode, encode_max
from ablate.recipes import block_shape

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Generator, Tensor

    from ablate.numerics.formats import Element
    from ablate.recipes import OperandPolicy

SPOT = (5, 7)
"""Where a corner case has its odd value."""


def _with_outlier(rows: int, columns: int, generator: Generator) -> Tensor:
    found = torch.randn(rows, columns, generator=generator)
    found[:, 5::64] *= 30
    return found


def _student(rows: int, columns: int, generator: Generator) -> Tensor:
    squares = torch.randn(3, rows, columns, generator=generator).square().sum(0)
    return torch.randn(rows, columns, generator=generator) / (squares / 3).sqrt()


KINDS: dict[str, Callable[[int, int, Generator], Tensor]] = {
    "Gaussian": lambda rows, columns, g: torch.randn(rows, columns, generator=g),
    "Student t": _student,
    "channel mean": lambda rows, columns, g: (
        torch.randn(rows, columns, generator=g) + torch.randn(1, columns, generator=g)
    ),
    "outlier": _with_outlier,
}
"""Gaussian; Student's t with 3 degrees of freedom; Gaussian with a mean for each channel, itself Gaussian;
and Gaussian with one channel in 64 that is 30 times larger."""


def made_up(kind: str, rows: int, columns: int, *, seed: int, number: int = 0, name: str = "") -> Tensor:
    """Return tensor ``number`` of a kind, [rows, columns] in bf16; ``name``: of those of one number."""
    text = f"{kind}:{name}:{seed}:{number}"
    own = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
    generator = torch.Generator().manual_seed(own)
    return KINDS[kind](rows, columns, generator).to(torch.bfloat16)


def corners(policy: OperandPolicy, *, seed: int = 0, rows: int = 32) -> dict[str, Tensor]:
    """Return a policy's corner cases by name, bf16 [rows or more, 256], with blocks along the columns."""
    rows, columns = max(rows, policy.hadamard, block_shape(policy)[0]), 256
    plain = made_up("Gaussian", rows, columns, seed=seed, name="probe")
    nan, inf, zeros, large = (plain.clone() for _ in range(4))
    nan[SPOT], inf[SPOT], large[SPOT] = torch.nan, torch.inf, 1e38
    zeros[:, 9] = -0.0
    found = {
        "clipping": plain, "subnormals": plain * 2.0**-127, "1e38": large, "NaN": nan, "Inf": inf,
        "−0": zeros, "zeros": torch.zeros_like(plain),
    }  # fmt: skip
    if policy.is_high_precision:
        return found
    # The middle of two neighbours, where a block of largest value ``max`` has scale 1.
    element = ELEMENTS[policy.format]
    grid = grid_of(element)
    middles = (grid[1:] + grid[:-1]) / 2
    ties = torch.cat((middles, -middles)).repeat(rows * columns // (2 * len(middles)) + 1)
    ties = ties[: rows * columns].view(rows, columns).clone()
    ties[:, ::16] = element.max
    return {"ties": ties.to(torch.bfloat16)} | found


def grid_of(element: Element) -> Tensor:
    """Return the magnitudes of an element's grid in rising order, fp32; even places have even codes."""
    values = decode(torch.arange(encode_max(element) + 1), element)
    return values[values <= element.max]


def awkward(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Return values with wide exponents, zeros of both signs, subnormals, a NaN and an Inf."""
    generator = torch.Generator().manual_seed(rows * columns)
    x = torch.randn(rows, columns, generator=generator) * 2.0 ** torch.randint(
        -30, 30, (rows, 1), generator=generator
    )
    x[:, 7] = -0.0
    x[: rows // 4] = x[: rows // 4].sign() * 2.0**-130
    x[rows // 2, columns // 2] = float("nan")
    x[rows // 2 + 1, 3] = float("inf")
    return x.to(dtype)


def inputs(policy: OperandPolicy) -> Iterator[tuple[str, Tensor]]:
    """Yield what a policy's quantiser is compared on to the bit, by name: shapes, types, strides, corners."""
    one_scale = block_shape(policy)[1] == 1 or policy.format == "nvfp4"
    # Shapes that the policy's groups divide: whole strips of 64 columns, and others.
    shapes = [(32, 32), (96, 160), (160, 96)]
    if policy.hadamard > 32 or policy.scale in ("1x128", "128x128"):
        shapes = [(256, 256), (256, 384) if policy.hadamard <= 128 else (256, 512)]
    for shape in shapes:
        for dtype in (torch.bfloat16, torch.float32):
            x = awkward(*shape, dtype)
            if one_scale:  # a NaN would spread to the whole tensor
                x = torch.nan_to_num(x, nan=0.0, posinf=1.0)
            yield f"{list(shape)} {dtype}", x
    x = awkward(*shapes[-1], torch.bfloat16)
    if one_scale:
        yield from corners(policy).items()
    else:
        yield "transposed strides", x.t().contiguous().t()
        wide = torch.zeros(x.shape[0], x.shape[1] + 24, dtype=x.dtype)
        wide[:, : x.shape[1]] = x
        yield "rows with a gap", wide[:, : x.shape[1]]
        yield "corner cases", torch.cat([*corners(policy).values()])
