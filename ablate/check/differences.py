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
    rounded = round_operand(stored, policy, axis=axis, key=key)
    return turned(rounded.values, axis).to(torch.float32).contiguous() * rounded.descale


class DrawComparison:
    """Counts by cause, over many tensors, how a subject's values differ from the definition's.

    ``random``: both neighbours of a value are right.
    """

    def __init__(self, *, random: bool) -> None:
        self.random = random
        self.num_values = 0
        self.by_cause: dict[str, Differences] = {}

    def add(
        self,
        values: Tensor,
        stored: Tensor,
        policy: OperandPolicy,
        axis: int,
        key: Key,
        *,
        data: str,
    ) -> None:
        """Compare the subject's values of a stored matrix (fp32 [n, k]); ``data``: the tensor's name."""
        expected = defined(stored, policy, axis, key)
        grid = on_grid(stored, policy, axis=axis, key=key)
        scales = (grid.scales / policy.prescale).view(-1, 1, 1).expand(-1, *grid.block)
        units = values / from_blocks(scales.contiguous(), grid.scaled.shape)
        # The grid's neighbours towards and away from zero; the same on the grid.
        levels = grid_of(grid.element)
        largest = grid.element.max
        magnitude = (
            grid.scaled.abs().nan_to_num(nan=0.0, posinf=largest).clamp(max=largest)
        )
        lower = levels[torch.searchsorted(levels, magnitude, right=True) - 1]
        upper = levels[torch.searchsorted(levels, magnitude)]
        is_lower = _near(units, torch.copysign(lower, grid.scaled))
        is_upper = _near(units, torch.copysign(upper, grid.scaled))
        is_neighbour = (is_lower | is_upper) & values.isfinite()
        is_wrong = unequal(values, expected)
        only_signs = is_wrong & (values == expected)
        if self.random:
            is_wrong &= only_signs | ~is_neighbour
        causes = {
            "special": ~(values.isfinite() & expected.isfinite()),
            "sign of zero": only_signs,
            "last bit": _near(values, expected),
            "clip": grid.scaled.abs() > largest,
            "tie": (grid.scaled.abs() * 2 == lower + upper) & is_neighbour,
            "other": torch.ones_like(is_wrong),
        }
        for cause, has_cause in causes.items():
            here = is_wrong & has_cause
            is_wrong = is_wrong & ~here
            count = int(here.sum())
            if not count:
                continue
            if cause in self.by_cause:
                self.by_cause[cause].count += count
                continue
            row, column = here.nonzero()[0].tolist()
            self.by_cause[cause] = Differences(
                cause=cause,
                count=count,
                data=data,
                row=row,
                column=column,
                exact=float(grid.rotated[row, column]),
                expected=float(expected[row, column]),
                found=float(values[row, column]),
            )
        self.num_values += values.numel()


def _near(a: Tensor, b: Tensor) -> Tensor:
    return (a - b).abs() <= _LAST_BIT * torch.maximum(a.abs(), b.abs())
