"""The position of a forward pass in the random streams."""

from __future__ import annotations

from dataclasses import dataclass

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
