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
    """Return what came out of a corner case; ``found``: fp32, ``grid``: before rounding."""
    scaled, exact = grid.scaled.abs(), grid.rotated
    if name == "ties":
        return "drawn" if policy.is_stochastic else _ties(scaled, found, grid)
    if name == "clipping":
        clipped = scaled > grid.element.max
        share = float(clipped.float().mean())
        largest = spread(grid.scales, grid)[clipped] * grid.element.max / policy.prescale
        if not share:
            return "never"
        if bool((found.abs()[clipped] <= largest * (1 + 2.0**-7)).all()):
            return f"{share:.2%} of Gaussian saturate"
        return f"{share:.2%} of Gaussian would clip, and do not"
    odd = ~found.isfinite()
    count, of_block = int(odd.sum()), grid.block[0] * grid.block[1]
    if name in ("NaN", "Inf"):
        if not count:
            return f"lost: reads {float(found[SPOT]):.3g}"
        where = "itself alone" if count == 1 else f"{count} elements"
        sizes = {of_block: f"its block of {of_block}", odd.numel(): "the whole tensor"}
        where = ({odd.shape[1]: "its row"} | sizes).get(count, where)
        return f"{where} reads {name if name == 'NaN' or bool(found.isinf().any()) else 'NaN'}"
    if count:
        return "NaN" if bool(found.isnan().any()) else "Inf"
    if name == "−0":
        if policy.hadamard:
            return "rotated away"
        return "kept" if bool(found[:, 9].signbit().all()) else "becomes +0"
    if name == "zeros":
        return "not zeros" if bool(found.any()) else "zeros"
    if name == "1e38":
        return f"finite, {float(found[SPOT]):.3g}"
    if not bool(found.any()):
        return "flushed to zero"
    error = float((found.double() - exact.double()).norm() / exact.double().norm())
    return f"kept, relative error {error:.1%}"


def _ties(scaled: Tensor, found: Tensor, grid: OnGrid) -> str:
    values = grid_of(grid.element)
    place = (torch.searchsorted(values, scaled, right=True) - 1).clamp(max=len(values) - 2)
    there = scaled * 2 == values[place] + values[place + 1]
    up = (found.abs() > grid.rotated.abs())[there]
    to_even, away = (up == (place % 2 == 1)[there]).float().mean(), up.float().mean()
    if not len(up):
        return "none met"
    if to_even == 1:
        return "to even code"
    if away in (0, 1):
        return "away from zero" if away else "toward zero"
    return f"mixed: {to_even:.0%} to even code, {away:.0%} away from zero"
