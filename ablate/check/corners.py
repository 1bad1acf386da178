"""What became of a corner case, in a few words."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ablate.backends.testing.inputs import SPOT, grid_of
from ablate.check.differences import spread

if TYPE_CHECKING:
    from torch import Tensor

    from ablate.numerics.quantiser import OnGrid
    from ablate.recipes import OperandPolicy


def in_words(name: str, found: Tensor, grid: OnGrid, policy: OperandPolicy) -> str:
    """Return what came out of a probe, in a few words; ``found``: fp32, ``grid``: before rounding."""
    if name == "ties":
        return _ties_in_words(found, grid, policy)
    if name == "clipping":
        return _clipping_in_words(found, grid, policy)
    if name in ("NaN", "Inf"):
        return _spread_in_words(name, found, grid)
    if not bool(found.isfinite().all()):
        return "NaN" if bool(found.isnan().any()) else "Inf"
    if name == "−0":
        if policy.hadamard:
            return "rotated away"
        return "kept" if bool(found[:, 9].signbit().all()) else "becomes +0"
    if name == "zeros":
        return "zeros" if not bool(found.any()) else "not zeros"
    if name == "1e38":
        return f"finite, {float(found[SPOT]):.3g}"
    exact = grid.rotated
    if not bool(found.any()):
        return "flushed to zero"
    error = float((found.double() - exact.double()).norm() / exact.double().norm())
    return f"kept, relative error {error:.1%}"


def _ties_in_words(found: Tensor, grid: OnGrid, policy: OperandPolicy) -> str:
    if policy.is_stochastic:
        return "drawn"
    values, magnitude = grid_of(grid.element), grid.scaled.abs()
    place = (torch.searchsorted(values, magnitude, right=True) - 1).clamp(max=len(values) - 2)
    lower, upper = values[place], values[place + 1]
    there = magnitude * 2 == lower + upper
    if not bool(there.any()):
        return "none met"
    middle = grid.rotated.abs()
    up, even_up = (found.abs() > middle)[there], (place % 2 == 1)[there]
    count = int(there.sum())
    to_even = int((up == even_up).sum())
    if to_even == count:
        return "to even code"
    if bool(up.all()):
        return "away from zero"
    if not bool(up.any()):
        return "toward zero"
    return f"mixed: {to_even / count:.0%} to even code, {float(up.float().mean()):.0%} away from zero"


def _clipping_in_words(found: Tensor, grid: OnGrid, policy: OperandPolicy) -> str:
    clipped = grid.scaled.abs() > grid.element.max
    share = float(clipped.float().mean())
    if not share:
        return "never"
    largest = spread(grid.scales, grid)[clipped] * grid.element.max / policy.prescale
    if bool((found.abs()[clipped] <= largest * (1 + 2.0**-7)).all()):
        return f"{share:.2%} of Gaussian saturate"
    return f"{share:.2%} of Gaussian would clip, and do not"


def _spread_in_words(name: str, found: Tensor, grid: OnGrid) -> str:
    odd = ~found.isfinite()
    count, block = int(odd.sum()), grid.block[0] * grid.block[1]
    if not count:
        return f"lost: reads {float(found[SPOT]):.3g}"
    if count == odd.numel():
        where = "the whole tensor"
    elif count == block:
        where = f"its block of {block}"
    elif count == odd.shape[1]:
        where = "its row"
    else:
        where = "itself alone" if count == 1 else f"{count} elements"
    kept = name if name == "NaN" or bool(found.isinf().any()) else "NaN"
    return f"{where} reads {kept}"
