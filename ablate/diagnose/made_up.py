"""Made-up tensors on which quantisers are certified, of four kinds that training knows.

A tensor is [rows, columns] in bf16 as it is stored, with channels as columns: features of x, dy and w.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Generator, Tensor

OUTLIER_EVERY = 64
"""One channel in so many is an outlier."""
OUTLIER_SIZE = 30.0
"""Times the size of the others."""


def _gaussian(rows: int, columns: int, generator: Generator) -> Tensor:
    return torch.randn(rows, columns, generator=generator)


def _student(rows: int, columns: int, generator: Generator) -> Tensor:
    squares = torch.randn(3, rows, columns, generator=generator).square().sum(0)
    return _gaussian(rows, columns, generator) / (squares / 3).sqrt()


def _with_mean(rows: int, columns: int, generator: Generator) -> Tensor:
    return _gaussian(rows, columns, generator) + _gaussian(1, columns, generator)


def _with_outlier(rows: int, columns: int, generator: Generator) -> Tensor:
    found = _gaussian(rows, columns, generator)
    found[:, 5::OUTLIER_EVERY] *= OUTLIER_SIZE
    return found


KINDS: dict[str, Callable[[int, int, Generator], Tensor]] = {
    "Gaussian": _gaussian,
    "Student t": _student,
    "channel mean": _with_mean,
    "outlier": _with_outlier,
}
"""Gaussian; Student's t with 3 degrees of freedom; Gaussian with a mean for each channel, itself Gaussian;
and Gaussian with one channel in 64 that is 30 times larger."""


def made_up(kind: str, rows: int, columns: int, *, seed: int, number: int, name: str = "") -> Tensor:
    """Return tensor ``number`` of a kind, [rows, columns] in bf16; ``name``: of those of one number."""
    text = f"{kind}:{name}:{seed}:{number}"
    own = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
    generator = torch.Generator().manual_seed(own)
    return KINDS[kind](rows, columns, generator).to(torch.bfloat16)
