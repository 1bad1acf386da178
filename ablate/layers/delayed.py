"""Delayed scales: the scale of an operand follows from the largest magnitudes of the passes before it.

As TransformerEngine's ``delayed_scaling.cu``: the history rolls with each pass, unless the magnitude is zero,
and NaN counts as nothing. The scale begins at 1 (in diagnostics: with the tensor's own), and stays as it was
where the past has no magnitude, or one that is not finite. The history never leaves the layer's device.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from ablate.layers.state import EVAL_CALL

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ablate.layers.state import Position

AMAX_HISTORY = 1024
"""Passes whose largest magnitudes a delayed scale uses (TransformerEngine's DelayedScaling)."""

BUFFERS_OF_SCALES = ("amax_history", "amax_step", "amax_used")
"""Buffers that a layer with delayed scales has in addition to its weights."""


def keep_history(layer: nn.Linear, operands: int) -> None:
    """Give a layer an empty history for each of so many operands, on the device of its weight."""
    shape = (operands, AMAX_HISTORY + 1)  # the past, and this pass
    with layer.weight.device:
        layer.register_buffer("amax_history", torch.empty(shape, dtype=torch.float32))
        layer.register_buffer("amax_step", torch.empty(shape, dtype=torch.int64))
        layer.register_buffer("amax_used", torch.empty(shape[:1], dtype=torch.float32))
    clear_history(layer)


def clear_history(layer: nn.Module) -> None:
    """Forget the largest magnitudes of all passes."""
    layer.get_buffer("amax_history").zero_()
    layer.get_buffer("amax_step").fill_(-1)
    layer.get_buffer("amax_used").zero_()


def newest_step(layer: nn.Module, row: int) -> int:
    """Return the step of the newest pass in a history, -1 if there is none; it waits for the device."""
    return int(layer.get_buffer("amax_step")[row].max()) // EVAL_CALL


def delayed_amax(
    layer: nn.Module,
    row: int,
    tensor: Tensor,
    at: Position,
    position: Tensor | None,
    *,
    largest: float,
) -> Tensor:
    """Record this pass's largest magnitude; return that of the passes before it, fp32 [], on the device.

    Evaluation leaves no trace. ``row``: of the history. ``position``: step and call on a GPU, in place of
    those of ``at``. ``largest``: the largest value of the format.
    """
    history = layer.get_buffer("amax_history")[row]
    passes = layer.get_buffer("amax_step")[row]
    used = layer.get_buffer("amax_used")[row]
    amax_here = torch.zeros_like(used)
    if tensor.numel():
        amax_here = tensor.abs().nan_to_num(0.0, math.inf).amax().to(torch.float32)
    this: int | Tensor = at.step * EVAL_CALL + at.call  # in order
    if at.redraw:
        this = at.step * EVAL_CALL  # what is drawn again sees past steps
    elif position is not None:
        this = position[0] * EVAL_CALL + position[1]
    # else the oldest, which leaves
    slot = torch.where(passes == this, -2, passes).argmin(keepdim=True)
    is_earlier = ((passes >= 0) & (passes < this)).scatter(0, slot, value=False)
    known = torch.where(is_earlier, history, 0.0).amax()
    is_known = (known > 0) & (known < math.inf)
    first = amax_here if at.redraw else torch.full_like(used, largest)
    amax = torch.where(is_known, known, torch.where(used == 0, first, used))
    if at.call < EVAL_CALL:
        used.copy_(torch.where(is_known, known, used))
        # A pass that is recomputed, or whose layer runs twice, has its slot already.
        stored = history.gather(0, slot)
        stored_pass = passes.gather(0, slot)
        newest = torch.maximum(amax_here, torch.where(stored_pass == this, stored, 0.0))
        history.scatter_(0, slot, torch.where(amax_here > 0, newest, stored))
        passes.scatter_(0, slot, torch.where(amax_here > 0, this, stored_pass))
    return amax
