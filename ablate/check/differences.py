"""Where two quantised tensors differ, with the most likely cause.

Elements are compared in units of the definition's block scale. Causes, in the order in which they are tried:

- special: one of the two is NaN or Inf;
- sign of zero: both are zero;
- last bit: equal up to one rounding to bf16; codes and scales are the same;
- clip: the exact value is above the grid's largest one;
- tie: the exact value is midway between its neighbours, and the other neighbour was taken;
- other: none of these, such as another scale, or a neighbour that is not the nearest.

With stochastic rounding both neighbours are right, so that a value is wrong only if it is neither.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ablate.backends.testing.inputs import grid_of
from ablate.backends.testing.suite import unequal
from ablate.numerics.quantiser import from_blocks, on_grid, round_operand, turned

if TYPE_CHECKING:
    from ablate.numerics.philox import Key
    from ablate.recipes import OperandPolicy

HARMLESS = ("sign of zero", "last bit")
"""Causes that leave the codes and scales what the definition says."""
_LAST_BIT = 2.0**-7
"""The largest relative difference that one or two roundings to bf16 make."""


@dataclass(kw_only=True)
class Differences:
    """How many elements differ for one cause, and the first of them: element [row, column] of ``data``.

    ``exact`` is its value before rounding, ``expected`` the definition's and ``found`` the subject's.
    """

    cause: str
    count: int
    data: str
    row: int
    column: int
    exact: float
    expected: float
    found: float


def defined(stored: Tensor, policy: OperandPolicy, axis: int, key: Key) -> Tensor:
    """Quantise a stored matrix in plain torch: fp32 [n, k], contraction last and rotated."""
    done = round_operand(stored, policy, axis=axis, key=key)
    return turned(done.values, axis).to(torch.float32).contiguous() * done.descale


def compare(
    found: Tensor, stored: Tensor, policy: OperandPolicy, axis: int, key: Key, *, random: bool, data: str,
    counted: dict[str, Differences],
) -> int:  # fmt: skip
    """Add to ``counted``, by cause, how a subject's values (fp32 [n, k]) differ from the definition's.

    ``random``: both neighbours of a value are right. Returns the number of values.
    """
    expected, grid = defined(stored, policy, axis, key), on_grid(stored, policy, axis=axis, key=key)
    scales = (grid.scales / policy.prescale).view(-1, 1, 1).expand(-1, *grid.block)
    units = found / from_blocks(scales.contiguous(), grid.scaled.shape)
    # The grid's neighbours towards and away from zero; the same on the grid.
    levels, largest = grid_of(grid.element), grid.element.max
    magnitude = grid.scaled.abs().nan_to_num(nan=0.0, posinf=largest).clamp(max=largest)
    lower = levels[torch.searchsorted(levels, magnitude, right=True) - 1]
    upper = levels[torch.searchsorted(levels, magnitude)]
    near = (_near(units, torch.copysign(one, grid.scaled)) for one in (lower, upper))
    neighbour = torch.logical_or(*near) & found.isfinite()
    wrong = unequal(found, expected)
    signs = wrong & (found == expected)
    if random:
        wrong &= signs | ~neighbour
    for cause, of_elements in (
        ("special", ~(found.isfinite() & expected.isfinite())),
        ("sign of zero", signs),
        ("last bit", _near(found, expected)),
        ("clip", grid.scaled.abs() > largest),
        ("tie", (grid.scaled.abs() * 2 == lower + upper) & neighbour),
        ("other", torch.ones_like(wrong)),
    ):
        here = wrong & of_elements
        wrong = wrong & ~here
        if not (count := int(here.sum())):
            continue
        if cause in counted:
            counted[cause].count += count
            continue
        row, column = (int(one) for one in here.nonzero()[0])
        exact, theirs, ours = (float(one[row, column]) for one in (grid.rotated, expected, found))
        counted[cause] = Differences(
            cause=cause, count=count, data=data, row=row, column=column,
            exact=exact, expected=theirs, found=ours,
        )  # fmt: skip
    return found.numel()


def _near(a: Tensor, b: Tensor) -> Tensor:
    return (a - b).abs() <= _LAST_BIT * torch.maximum(a.abs(), b.abs())
