"""Weight de-oscillation: weights that only go to and fro between two quantised values are set to one of them.

A weight near the edge between two cells of its grid changes its quantised value with every small step. For
each weight, over a window of P optimizer steps, with Q(w) the forward pass's quantised value of bf16(w),

    d_w = Σ |w_t − w_{t−1}|    and    d_Q = Σ |Q(w_t) − Q(w_{t−1})|    in fp32.

At the window's end, where d_w > 0 and d_Q / d_w ≥ τ, the master weight becomes Q(w_t), and the next window
begins with the new weights. This is OsciReset of TetraJet-v2 (2510.27527, ``oscillation_reset.py``) with the
ratio of distances, as in AMD's Primus (``weight_deosc.py``) and ALTO (``optimizer.py``). The first window
begins with the weights after the first step at or past the start, as in Primus. Q(w) is dequantised in fp32.

With ``snapshots: bf16`` w and Q are rounded to bf16 before the subtraction and the differences after it; the
sums stay in fp32 (AMD's Primus #1070, and ``weight_deosc_qdq`` of Primus-Turbo). It takes half the memory for
the last weights, and does not see a weight move by less than a place of bf16.

Only weights whose Fprop operand is quantised at that time take part. When a phase changes that, or the grid,
a new window begins. The optimizer's moments stay as they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ablate.backends.protocol import dequantised
from ablate.layers.linear import is_sharded, local_rows, quantised_layers
from ablate.layers.state import EVAL_CALL, Position
from ablate.run.schedule import plan_steps

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from ablate.layers.state import RecipeState
    from ablate.recipes import Deoscillate, OperandPolicy

    Followed = tuple[Deoscillate, dict[str, OperandPolicy]]
    """How weights are reset, and the grid of each layer's weight."""


class Deoscillation:
    """The weights of a model's quantised layers, followed from optimizer step to optimizer step.

    ``apply_recipe`` makes one where the recipe has ``deoscillate``, and ``state.advance`` calls it. Its
    ``state_dict`` is part of the state's.
    """

    def __init__(self, model: nn.Module, state: RecipeState) -> None:
        layers = quantised_layers(model)
        self._layers = {
            name: layer for name, layer in layers.items() if layer.weight.requires_grad
        }
        self._state = state
        self.followed: Followed | None = None  # at present
        self._before: dict[str, tuple[Tensor, Tensor]] = {}
        """This process's rows of each weight after the last step, and the same rows quantised."""
        self.sums: dict[str, Tensor] = {}
        """The sums of the present window by name; sharded as the weights are."""
        self.steps = 0
        """Steps of the present window so far."""

    @torch.no_grad()
    def step(self) -> int | None:
        """Follow the weights after an optimizer step; the state's tokens must include that step.

        Returns how many of this process's weights were reset, or None if no window ended.
        """
        followed = self._followed_now()
        if followed is None or followed != self.followed:
            self._begin(followed)
            return None
        settings, _ = followed
        self.steps += 1
        reset = 0
        dtype = torch.bfloat16 if settings.snapshots == "bf16" else torch.float32
        for name, (before, quantised_before) in self._before.items():
            weight, quantised = self._rows(name)
            quantised = quantised.to(dtype)
            moved_key, quantised_key = _keys(name)
            moved, _ = local_rows(self.sums[moved_key])
            quantised_moved, _ = local_rows(self.sums[quantised_key])
            moved.add_((weight.to(dtype) - before.to(dtype)).abs_())
            quantised_moved.add_((quantised - quantised_before).abs_())
            before.copy_(weight)
            quantised_before.copy_(quantised)
            if self.steps == settings.window:
                oscillates = (moved > 0) & (
                    quantised_moved / moved >= settings.threshold
                )
                weight.copy_(
                    torch.where(oscillates, quantised.to(weight.dtype), weight)
                )
                reset += int(oscillates.sum())
        if self.steps < settings.window:
            return None
        self._begin(followed)
        return reset

    @torch.no_grad()
    def resume(self, steps: int) -> dict[str, Tensor]:
        """Continue a window after ``steps`` of its steps; return its sums, which the caller fills.

        The weights and the state's tokens must be those of that moment.
        """
        self._begin(self._followed_now())
        self.steps = steps
        return self.sums

    def state_dict(self) -> dict[str, Any]:
        """Return the sums of the present window, and its number of steps so far (``steps``)."""
        return {"steps": self.steps, **self.sums}

    @torch.no_grad()
    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore what ``state_dict`` returned; restore the weights and the state's step and tokens first.

        Raises:
            ValueError: it belongs to other weights.
        """
        if saved.keys() == {"steps"}:  # no window had begun
            return
        sums = self.resume(saved["steps"])
        unmatched = sorted(sums.keys() ^ (saved.keys() - {"steps"}))
        if unmatched:
            raise ValueError(
                f"de-oscillation of other weights: {unmatched[0]} is in one of them alone"
            )
        for name, tensor in sums.items():
            tensor.copy_(saved[name])

    def _followed_now(self) -> Followed | None:
        """Find what the recipe follows at the state's tokens; None for nothing, or before the start."""
        state = self._state
        recipe = state.recipe
        total = state.total_tokens
        if state.fork is not None and state.tokens < state.fork.tokens:
            recipe = state.fork.recipe
            total = plan_steps(state.fork.training).tokens
        settings = recipe.deoscillate
        if settings is None or state.tokens < settings.start(total):
            return None
        grids: dict[str, OperandPolicy] = {}
        weights = set()  # one that layers share is followed once
        for name, layer in self._layers.items():
            grid = layer.recipe_at(state.tokens).fprop.right
            if grid.is_high_precision or layer.weight in weights:
                continue
            if isinstance(layer.weight, nn.Parameter):  # experts share none
                weights.add(layer.weight)
            grids[name] = grid
        return settings, grids

    def _begin(self, followed: Followed | None) -> None:
        """Begin a window with the present weights."""
        self.followed = followed
        self.steps = 0
        self._before = {}
        self.sums = {}
        if followed is None:
            return
        settings, grids = followed
        for name in grids:
            weight, quantised = self._rows(name)
            before = weight.clone()
            if settings.snapshots == "bf16":
                before = before.to(torch.bfloat16)
                quantised = quantised.to(torch.bfloat16)
            self._before[name] = (before, quantised)
            for key in _keys(name):
                layer_weight = self._layers[name].weight.detach()
                self.sums[key] = torch.zeros_like(layer_weight, dtype=torch.float32)

    def _rows(self, name: str) -> tuple[Tensor, Tensor]:
        """Return this process's rows of a weight, and the forward pass's quantised values of them in fp32."""
        layer = self._layers[name]
        state = self._state
        weight: Any = layer.weight.detach()
        local, rows = local_rows(weight)
        # tiles and scales cross the rows
        whole = weight.full_tensor() if is_sharded(weight) else weight
        position = Position(step=state.step, call=EVAL_CALL, tokens=state.tokens)
        planned = layer.plan(state.tokens, whole.device).operand("fprop", "w")
        quantised = layer.operand(whole.to(torch.bfloat16), planned, position)
        return local, dequantised(quantised)[rows].to(torch.float32)


def _keys(name: str) -> tuple[str, str]:
    """Name the two sums of a layer's weight: how far it moved, and how far its quantised value moved."""
    return f"{name}.moved", f"{name}.quantised_moved"
