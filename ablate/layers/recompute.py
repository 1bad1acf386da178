"""Count the forward passes of a model's layers, and repeat the position of a pass that is recomputed.

Activation checkpointing runs a region of a model again in the backward pass, perhaps after other forward
passes. A record of each region, which lives as long as torch's checkpoint of it, says at which positions each
layer ran there, in order. Torch has no public way to ask which region is recomputed, so the frames of
``torch.utils.checkpoint`` on the stack are looked up. That covers both of its modes, nested regions, and
several forward passes before their backward passes.

How it fails: a recomputation that torch's checkpoint does not run itself (inside of a compiled graph, by
another library) repeats the only pass without a backward pass; with several it is a ``RuntimeError``.
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import checkpoint

from ablate.layers.position import EVAL_CALL, Position

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator

_RECORD = "ablate_positions"
_MOST_OPEN = 64


@dataclass
class _Passes:
    """A layer's forward passes: in training within ``step``, in evaluation, and those not yet gone back.

    ``version``: of the weight in the newest pass; ``changes``: how often it changed within ``step`` after a
    backward pass (``trains``), as by an optimizer.
    """

    step: int = -1
    training: int = 0
    evaluation: int = 0
    open: set[Position] = field(default_factory=set)
    version: int | None = None
    changes: int = 0
    trains: bool = False


@dataclass
class _Region:
    """The positions of the layers in a checkpointed region, and how many of them each repetition used."""

    positions: dict[Hashable, list[Position]] = field(default_factory=dict)
    used: Counter[Hashable] = field(default_factory=Counter)

    def next(self, layer: Hashable, repetition: Hashable) -> Position | None:
        """Return the position of a layer's next pass in a repetition, or None if it never ran so often."""
        known, turn = self.positions.get(layer, []), self.used[layer, repetition]
        self.used[layer, repetition] += 1
        return known[turn] if turn < len(known) else None


class Calls:
    """The forward passes of a model's layers, by the layers' names."""

    def __init__(self) -> None:
        self._passes: dict[str, _Passes] = {}

    def next_in_training(self, layer: str, step: int, version: int | None) -> tuple[int, int]:
        """Return the number of a layer's next training pass within a step, and count it.

        ``version``: the weight's, None where it is not known. Also returned: how often an optimizer seems to
        have changed the weight within the step.
        """
        passes = self._passes.setdefault(layer, _Passes())
        if passes.step != step:
            passes.step, passes.training, passes.changes, passes.trains = step, 0, 0, False
            passes.open.clear()
        if version != passes.version:
            passes.changes += passes.trains
            passes.version, passes.trains = version, False
        passes.training += 1
        return passes.training - 1, passes.changes

    def next_in_evaluation(self, layer: str) -> int:
        """Return the number of a layer's next pass in evaluation, and count it."""
        passes = self._passes.setdefault(layer, _Passes())
        passes.evaluation += 1
        return passes.evaluation - 1

    def position(self, layer: str, new: Callable[[], Position], *, counts: bool) -> Position:
        """Return the position of the pass that this one repeats, or of a new one.

        ``counts``: ``new`` counts here, so that a pass that is recomputed must not call it.

        Raises:
            RuntimeError: a pass is recomputed, and it is not known which.
        """
        repeated, running = _regions()
        at = None if repeated is None else repeated[0].next((self, layer), repeated[1])
        if at is None and counts and torch._C._current_graph_task_id() != -1:  # noqa: SLF001  as torch's own
            at = self._only_open(layer)
        if at is None:
            at = new()
            # Evaluation computes no gradients, and so is never recomputed.
            if counts and at.call < EVAL_CALL and len(known := self._passes[layer].open) < _MOST_OPEN:
                known.add(at)
        for region in running:
            region.positions.setdefault((self, layer), []).append(at)
        return at

    def backward_done(self, layer: str, at: Position) -> None:
        """Note that the gradients of a pass were computed."""
        if layer in self._passes:
            self._passes[layer].open.discard(at)
            self._passes[layer].trains = True

    def _only_open(self, layer: str) -> Position:
        passes = self._passes.get(layer, _Passes()).open
        if len(passes) != 1:
            raise RuntimeError(
                f"layer {layer}: one of {len(passes)} forward passes is recomputed, and which is unknown, as "
                "is its noise (run each backward pass before the next forward pass, or recompute by "
                "torch.utils.checkpoint outside of a compiled graph)"
            )
        return next(iter(passes))

    def state_dict(self) -> dict[str, list[int]]:
        """Return the counts of each layer: its step, its passes in training there and in evaluation."""
        return {name: [one.step, one.training, one.evaluation] for name, one in self._passes.items()}

    def load_state_dict(self, counts: dict[str, list[int]]) -> None:
        """Restore the counts."""
        self._passes = {
            name: _Passes(step=step, training=training, evaluation=evaluation)
            for name, (step, training, evaluation) in counts.items()
        }


def _regions() -> tuple[tuple[_Region, Hashable] | None, list[_Region]]:
    """Return the innermost region that is recomputed, with the repetition's key, and those that run in it.

    Without one, all regions that run.
    """
    running: list[_Region] = []
    for name, values in _frames_of_checkpoint():
        if name == "unpack_hook" and "frame" in values:
            return (_record(values["frame"]), values["gid"]), running
        if name == "backward":
            return (_record(values["ctx"]), torch._C._current_graph_task_id()), running  # noqa: SLF001
        if name == "forward" and "ctx" in values:
            running.append(_record(values["ctx"]))
        elif name == "checkpoint" and (made := values.get("gen")) is not None and made.gi_frame is not None:
            running.append(_record(made.gi_frame.f_locals["new_frame"]))
    return None, running


def _frames_of_checkpoint() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield name and variables of the running functions of ``torch.utils.checkpoint``, innermost first."""
    frame = sys._getframe(1)  # noqa: SLF001  inspect.stack() reads source files
    while (outer := frame.f_back) is not None:
        frame = outer
        if frame.f_code.co_filename == checkpoint.__file__:
            yield frame.f_code.co_name, frame.f_locals


def _record(owner: Any) -> _Region:
    """Return what is known of a region, kept for as long as torch keeps its checkpoint."""
    if not hasattr(owner, _RECORD):
        setattr(owner, _RECORD, _Region())
    record: _Region = getattr(owner, _RECORD)
    return record
