"""Where two quantised tensors differ, with the most likely cause; what became of a corner case, in words.

Elements are compared in units of the definition's block scale. Causes, in the order in which they are tried:

- special: one of the two is NaN or Inf;
- sign of zero: both are zero;
- last bit: equal up to one rounding to bf16; codes and scales are the same;
- scale: a neighbouring scale explains the whole block (E8M0: half or twice; E4M3: the next code);
- clip: the exact value is above the grid's largest one;
- tie: the exact value is midway between its neighbours, and the other neighbour was taken;
- other: none of these, such as a neighbour that is not the nearest.

With stochastic rounding both neighbours are right, so that a value is wrong only if it is neither.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ablate.backends.testing.inputs import SPOT, grid_of
from ablate.backends.testing.suite import unequal
from ablate.numerics import formats
from ablate.numerics.quantiser import from_blocks, on_grid, round_operand, to_blocks

if TYPE_CHECKING:
    from ablate.numerics.philox import Key
    from ablate.numerics.quantiser import OnGrid
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


@dataclass(frozen=True, kw_only=True)
class Definition:
    """The definition's result on one tensor: values (fp32 [n, k]), and the exact ones before rounding.

    ``random``: whether both neighbours of a value are right.
    """

    policy: OperandPolicy
    values: Tensor
    grid: OnGrid
    random: bool

    def fits(self, values: Tensor, exact: Tensor, scales: Tensor) -> Tensor:
        """Whether each value may be the exact one rounded under these scales."""
        scaled, units = exact / scales, values / scales
        if self.random:
            lower, upper = neighbours(scaled, self.grid.element)
            return _near(units, lower) | _near(units, upper)
        return _near(units, formats.round_nearest(scaled, self.grid.element))


def defined(stored: Tensor, policy: OperandPolicy, axis: int, key: Key) -> Tensor:
    """Return the definition's values, fp32 [n, k], contraction last and rotated."""
    done = round_operand(stored, policy, axis=axis, key=key)
    return done.contraction_last.to(torch.float32).contiguous() * done.descale


def definition_of(stored: Tensor, policy: OperandPolicy, axis: int, key: Key, *, random: bool) -> Definition:
    """Quantise a stored matrix by a policy in plain torch; ``random`` accepts both neighbours of a value."""
    return Definition(
        policy=policy, values=defined(stored, policy, axis, key),
        grid=on_grid(stored, policy, axis=axis, key=key), random=random,
    )  # fmt: skip


def compare(found: Tensor, definition: Definition, data: str, counted: dict[str, Differences]) -> None:
    """Add to ``counted``, by cause, how a subject's values (fp32 [n, k]) differ from the definition's."""
    expected, grid = definition.values, definition.grid
    units = found / _spread(grid.scales / definition.policy.prescale, grid)
    lower, upper = neighbours(grid.scaled, grid.element)
    neighbour = (_near(units, lower) | _near(units, upper)) & found.isfinite()
    wrong = unequal(found, expected)
    signs = wrong & (found == expected)
    if definition.random:
        wrong &= signs | ~neighbour
    special, last_bit = ~(found.isfinite() & expected.isfinite()), _near(found, expected)
    for cause, of_elements in (
        ("special", special),
        ("sign of zero", signs),
        ("last bit", last_bit),
        ("scale", _other_scale(found, definition, wrong & ~special & ~signs & ~last_bit)),
        ("clip", grid.scaled.abs() > grid.element.max),
        ("tie", (grid.scaled.abs() * 2 == lower.abs() + upper.abs()) & neighbour),
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


def _spread(of_blocks: Tensor, grid: OnGrid) -> Tensor:
    """Repeat a value per block, such as the scale, for each element: [n, k]."""
    rows, columns = grid.block
    return from_blocks(of_blocks.view(-1, 1, 1).expand(-1, rows, columns).contiguous(), grid.scaled.shape)


def neighbours(scaled: Tensor, element: formats.Element) -> tuple[Tensor, Tensor]:
    """Find the grid's neighbours towards and away from zero, with the value's sign; the same on the grid."""
    magnitude = scaled.abs().nan_to_num(nan=0.0, posinf=element.max).clamp(max=element.max)
    values = grid_of(element)
    lower = values[torch.searchsorted(values, magnitude, right=True) - 1]
    upper = values[torch.searchsorted(values, magnitude)]
    return torch.copysign(lower, scaled), torch.copysign(upper, scaled)


def _near(a: Tensor, b: Tensor) -> Tensor:
    return (a - b).abs() <= _LAST_BIT * torch.maximum(a.abs(), b.abs())


def _other_scale(found: Tensor, definition: Definition, wrong: Tensor) -> Tensor:
    """Find the wrong elements in blocks that a neighbouring scale explains as a whole."""
    grid = definition.grid
    hit = to_blocks(wrong, grid.block).flatten(1).any(1)
    ours, exact = (to_blocks(one, grid.block)[hit] for one in (found, grid.rotated))
    scales = grid.scales[hit].view(-1, 1, 1) / definition.policy.prescale
    # The neighbouring scales over a scale: powers of two, E4M3's next codes, fp32's next numbers.
    factors = [1 - 2.0**-23, 1 + 2.0**-23]
    if definition.policy.format.startswith("mx"):
        factors = [0.5, 2.0]
    elif definition.policy.format in ("nvfp4", "nvint4", "if4"):
        factors = [one for m in range(8, 16) for one in ((m + 1) / m, m / (m + 1))]
    explained = torch.zeros_like(hit)
    for factor in factors:
        explained[hit] |= definition.fits(ours, exact, scales * factor).flatten(1).all(1)
    return _spread(explained, grid) & wrong


def in_words(name: str, found: Tensor, grid: OnGrid, policy: OperandPolicy) -> str:
    """Say what became of a corner case; ``found``: fp32, ``grid``: before rounding."""
    scaled = grid.scaled.abs()
    if name == "ties":
        values = grid_of(grid.element)
        place = (torch.searchsorted(values, scaled, right=True) - 1).clamp(max=len(values) - 2)
        there = scaled * 2 == values[place] + values[place + 1]
        up = (found.abs() > grid.rotated.abs())[there]
        to_even = (up == (place % 2 == 1)[there]).float().mean()
        return f"{up.float().mean():.0%} away from zero, {to_even:.0%} to even code"
    if name == "clipping":
        clipped = scaled > grid.element.max
        largest = _spread(grid.scales, grid)[clipped] * grid.element.max / policy.prescale
        held = bool((found.abs()[clipped] <= largest * (1 + 2.0**-7)).all())
        return f"{float(clipped.float().mean()):.2%} of Gaussian {'saturate' if held else 'do not saturate'}"
    if not bool(found.isfinite().all()):
        return f"{int(found.isnan().sum())} read NaN, {int(found.isinf().sum())} Inf"
    if name in ("NaN", "Inf", "1e38"):
        return f"finite, {float(found[SPOT]):.3g}"
    if name == "−0":
        return f"{found[:, 9].signbit().float().mean():.0%} negative"
    error = float((found.double() - grid.rotated.double()).norm() / grid.rotated.double().norm())
    return f"relative error {error:.1%}" if bool(found.any()) else "zeros"
