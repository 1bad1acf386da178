"""Where two quantised tensors differ, with the most likely cause; what became of a corner case, in words.

Elements are compared in units of the definition's block scale. Causes, in the order in which they are tried:

- special: one of the two is NaN or Inf;
- sign of zero: both are zero;
- last bit: equal up to one rounding to bf16; codes and scales are the same;
- scale: the whole block is what the neighbouring scale gives (E8M0: half or twice; E4M3: the next code);
- clip: the exact value lies above the grid's largest one;
- tie: the exact value lies in the middle of its neighbours, and the other neighbour was taken;
- other: none of these, such as a neighbour that is not the nearest.

With stochastic rounding both neighbours are right, so that a value is only wrong if it is neither.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from ablate.backends.testing.inputs import SPOT, grid_of
from ablate.backends.testing.suite import unequal
from ablate.numerics import formats
from ablate.numerics.quantiser import from_blocks, to_blocks

if TYPE_CHECKING:
    from ablate.numerics.quantiser import OnGrid
    from ablate.recipes import OperandPolicy

Cause = Literal["special", "sign of zero", "last bit", "scale", "clip", "tie", "other"]
CAUSES: tuple[Cause, ...] = ("special", "sign of zero", "last bit", "scale", "clip", "tie", "other")
HARMLESS: tuple[Cause, ...] = ("sign of zero", "last bit")
"""Causes that leave the codes and scales what the definition says."""
_LAST_BIT = 2.0**-7
"""Rounded to bf16 once, or twice on the way: at most so much of the value."""
_BLOCKS_AT_ONCE = 4096


@dataclass(frozen=True, kw_only=True)
class Example:
    """The first difference of a cause: place [row, column], exact value, the definition's, the subject's."""

    data: str
    row: int
    column: int
    exact: float
    expected: float
    found: float


@dataclass(frozen=True, kw_only=True)
class Differences:
    """How many elements of some data differ for one cause, and the first of them."""

    cause: Cause
    count: int
    first: Example


@dataclass(frozen=True, kw_only=True)
class Definition:
    """The definition's result on one tensor: values (fp32 [n, k]), and the exact ones before rounding.

    ``random``: whether both neighbours of a value are right.
    """

    data: str
    policy: OperandPolicy
    values: Tensor
    grid: OnGrid
    random: bool = False

    def fits(self, values: Tensor, exact: Tensor, scales: Tensor) -> Tensor:
        """Whether values may be what rounding under these scales gives, element by element."""
        scaled, units = exact / scales, values / scales
        lower, upper = neighbours(scaled, self.grid.element)
        if self.random:
            return _near(units, lower) | _near(units, upper)
        return _near(units, formats.round_nearest(scaled, self.grid.element))


def compare(found: Tensor, definition: Definition, counted: dict[Cause, Differences]) -> None:
    """Count the differences of a subject's values, fp32 [n, k], from the definition's under their causes."""
    expected, grid = definition.values, definition.grid
    units = found / spread(grid.scales / definition.policy.prescale, grid)
    lower, upper = neighbours(grid.scaled, grid.element)
    neighbour = (_near(units, lower) | _near(units, upper)) & found.isfinite()
    wrong = unequal(found, expected)
    signs = wrong & (found == expected)
    if definition.random:
        wrong &= signs | ~neighbour
    causes: dict[Cause, Tensor] = {
        "special": ~(found.isfinite() & expected.isfinite()),
        "sign of zero": signs,
        "last bit": _near(found, expected),
        "clip": grid.scaled.abs() > grid.element.max,
        "tie": (grid.scaled.abs() * 2 == lower.abs() + upper.abs()) & neighbour,
        "other": torch.ones_like(wrong),
    }
    left = wrong & ~causes["special"] & ~causes["sign of zero"] & ~causes["last bit"]
    causes["scale"] = _other_scale(found, definition, left) if bool(left.any()) else left
    for cause in CAUSES:
        here = wrong & causes[cause]
        wrong = wrong & ~here
        if not (count := int(here.sum())):
            continue
        if cause in counted:
            counted[cause] = replace(counted[cause], count=counted[cause].count + count)
            continue
        row, column = (int(one) for one in here.nonzero()[0])
        exact, theirs, ours = (float(one[row, column]) for one in (grid.rotated, expected, found))
        first = Example(
            data=definition.data, row=row, column=column, exact=exact, expected=theirs, found=ours
        )
        counted[cause] = Differences(cause=cause, count=count, first=first)


def spread(of_blocks: Tensor, grid: OnGrid) -> Tensor:
    """Return for each element what its block has, such as the scale."""
    rows, columns = grid.block
    return from_blocks(of_blocks.view(-1, 1, 1).expand(-1, rows, columns).contiguous(), grid.scaled.shape)


def neighbours(scaled: Tensor, element: formats.Element) -> tuple[Tensor, Tensor]:
    """Return the grid's neighbours towards and away from zero, with the value's sign."""
    magnitude = scaled.abs().nan_to_num(nan=0.0, posinf=element.max).clamp(max=element.max)
    values = grid_of(element)
    place = torch.searchsorted(values, magnitude, right=True) - 1
    lower = values[place]
    upper = torch.where(lower == magnitude, lower, values[(place + 1).clamp(max=len(values) - 1)])
    return torch.copysign(lower, scaled), torch.copysign(upper, scaled)


def _near(a: Tensor, b: Tensor) -> Tensor:
    return (a - b).abs() <= _LAST_BIT * torch.maximum(a.abs(), b.abs())


def _other_scale(found: Tensor, definition: Definition, wrong: Tensor) -> Tensor:
    """Return the wrong elements of blocks that are just what a neighbouring scale gives."""
    grid = definition.grid
    hit = to_blocks(wrong, grid.block).flatten(1).any(1).nonzero()[:, 0]
    explained = torch.zeros(len(grid.scales), dtype=torch.bool)
    ours, exact = (to_blocks(one, grid.block) for one in (found, grid.rotated))
    # The neighbouring scales over a scale: powers of two, E4M3's next codes, fp32's next numbers.
    factors = [1 - 2.0**-23, 1 + 2.0**-23]
    if definition.policy.format.startswith("mx"):
        factors = [0.5, 2.0]
    elif definition.policy.format in ("nvfp4", "nvint4", "if4"):
        factors = [one for m in range(8, 16) for one in ((m + 1) / m, m / (m + 1))]
    for some in torch.split(hit, _BLOCKS_AT_ONCE):
        scales = grid.scales[some].view(-1, 1, 1) / definition.policy.prescale
        for factor in factors:
            fits = definition.fits(ours[some], exact[some], scales * factor)
            explained[some] |= fits.flatten(1).all(1)
    return spread(explained, grid) & wrong


def in_words(name: str, found: Tensor, grid: OnGrid, policy: OperandPolicy) -> str:
    """Return what came out of a corner case; ``found``: fp32, ``grid``: before rounding."""
    if name == "ties":
        return "drawn" if policy.is_stochastic else _ties(found, grid)
    if name == "clipping":
        clipped = grid.scaled.abs() > grid.element.max
        largest = spread(grid.scales, grid)[clipped] * grid.element.max / policy.prescale
        held = bool((found.abs()[clipped] <= largest * (1 + 2.0**-7)).all())
        return f"{float(clipped.float().mean()):.2%} of Gaussian {'saturate' if held else 'do not saturate'}"
    if odd := int((~found.isfinite()).sum()):
        return f"{odd} read {'Inf' if bool(found.isinf().any()) else 'NaN'}"
    if name in ("NaN", "Inf"):
        return f"lost: reads {float(found[SPOT]):.3g}"
    if name == "−0" and not policy.hadamard:
        return "kept" if bool(found[:, 9].signbit().all()) else "becomes +0"
    if name == "1e38":
        return f"finite, {float(found[SPOT]):.3g}"
    if not bool(found.any()):
        return "zeros"
    error = float((found.double() - grid.rotated.double()).norm() / grid.rotated.double().norm())
    return f"relative error {error:.1%}"


def _ties(found: Tensor, grid: OnGrid) -> str:
    scaled = grid.scaled.abs()
    values = grid_of(grid.element)
    place = (torch.searchsorted(values, scaled, right=True) - 1).clamp(max=len(values) - 2)
    there = scaled * 2 == values[place] + values[place + 1]
    up = (found.abs() > grid.rotated.abs())[there]
    to_even, away = (up == (place % 2 == 1)[there]).float().mean(), up.float().mean()
    if to_even == 1:
        return "to even code"
    return f"{away:.0%} away from zero, {to_even:.0%} to even code"
