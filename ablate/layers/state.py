"""The state that the layers of one model share: recipe, back end, and the position of the random streams.

A layer reads the position (step, call, tokens) in its forward pass and saves it as a small tensor. So the
backward pass draws from its own forward's streams, even if the trainer has moved on.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ablate.recipes.place import LayerPlace, phases_of
from ablate.run.schedule import plan_steps

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from ablate.backends.protocol import Operand
    from ablate.backends.select import Selection
    from ablate.recipes import Gemm, LayerRecipe, Recipe
    from ablate.run.config import Fork

EVAL_CALL = 1 << 31
"""First call number of forward passes in evaluation, distinct from all calls in training."""
_REDRAW_STEP = 1 << 31
_REDRAWS = 1 << 10


@dataclass(frozen=True, kw_only=True)
class Position:
    """Optimizer step, forward pass within it (gradient accumulation), and training tokens seen before it.

    ``redraw`` n > 0 is the n-th draw of diagnostics. Values that training draws anew per step or pass then
    come from streams that training never reads; values that it draws once stay the same.
    """

    step: int
    call: int
    tokens: int
    redraw: int = 0

    @property
    def stream_step(self) -> int:
        """The step number used by the random streams."""
        if not self.redraw:
            return self.step
        assert self.redraw < _REDRAWS
        return _REDRAW_STEP + (self.step * _REDRAWS + self.redraw) % _REDRAW_STEP

    def redrawn(self, redraw: int) -> Position:
        """Return this position with a draw of diagnostics; delayed scales ignore it."""
        return Position(step=self.step, call=EVAL_CALL, tokens=self.tokens, redraw=redraw)


@dataclass(kw_only=True)
class RecipeState:
    """State shared by the layers of one model and advanced by its trainer.

    ``call`` is the forward pass within a step; with None every layer counts its own. ``total_tokens`` is the
    budget, required by phases that start at a fraction of it. ``fork``: the recipe of the tokens before it
    and the budget that belongs to that recipe. ``watch``, if set, sees every quantised operand: (layer's
    name, GEMM, operand's name, the operand). ``tap``, if set, sees the tensors of each backward pass:
    (layer's name, its forward's position, dy [M, N] bf16, x [M, K] bf16, the weight [N, K]); it must change
    nothing.
    """

    recipe: Recipe
    backend: Selection
    seed: int
    step: int = 0
    call: int | None = 0
    tokens: int = 0
    total_tokens: int | None = None
    fork: Fork | None = None
    watch: Callable[[str, Gemm, str, Operand], None] | None = field(default=None, repr=False)
    tap: Callable[[str, Position, Tensor, Tensor, Tensor], None] | None = field(default=None, repr=False)
    _warned: bool = field(default=False, repr=False)

    def advance(self, tokens: int = 0) -> None:
        """Advance by one optimizer step with this many training tokens."""
        self.step += 1
        self.tokens += tokens

    def phases(self, place: LayerPlace) -> tuple[tuple[int, LayerRecipe], ...]:
        """Return the (first token, recipe) pairs of a layer, newest first.

        Raises:
            ValueError: a phase starts at a fraction of the budget and the budget is unknown.
        """
        starts = _starts(self.recipe, place, self.total_tokens)
        if (fork := self.fork) is None:
            return starts
        before = _starts(fork.recipe, place, plan_steps(fork.training).tokens)
        now = next(recipe for start, recipe in starts if start <= fork.tokens)
        later = (one for one in starts if one[0] > fork.tokens)
        earlier = (one for one in before if one[0] < fork.tokens)
        return (*later, (fork.tokens, now), *earlier)

    def warn_if_it_should_move(self, forwards: int) -> None:
        """Warn once if the recipe depends on steps but ``advance`` is never called."""
        if self.step or self._warned:
            return
        recipe = self.recipe
        parts = [recipe, *(rule.recipe for rule in recipe.rules)]
        policies = [policy for part in parts for _, _, policy in part.operands()]
        moves = any(policy.signs == "step" or policy.scale == "delayed" for policy in policies)
        if not recipe.phases and not moves:
            return
        self._warned = True
        warnings.warn(
            f"{forwards} training passes without state.advance(): signs, phases and delayed scales of this "
            "recipe move on with it",
            stacklevel=2,
        )


def _starts(
    recipe: Recipe, place: LayerPlace, total_tokens: int | None
) -> tuple[tuple[int, LayerRecipe], ...]:
    starts = [(phase.start(total_tokens), phase.recipe) for phase in phases_of(recipe, place)]
    return tuple(sorted(starts, key=lambda start: start[0], reverse=True))
