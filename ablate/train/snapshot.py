"""Everything that a run's future depends on, as named tensors and plain numbers, and back again.

The random streams are counted from the seed, the step and the call, and the data order from the seed and the
step, so that the step is all there is to say of them. What is left: weights, buffers (the largest magnitudes
that delayed scales look back on), the optimizer's moments, and the trainer's own counters.

How it fails: a snapshot of another model is a ``ValueError`` that names what does not fit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A trainer's state after ``step`` optimizer steps."""

    step: int
    tensors: dict[str, Tensor]
    numbers: dict[str, Any]


class Checkpoints(Protocol):
    """Where a trainer's snapshots go, and come from when a run goes on."""

    def load(self) -> Snapshot | None:
        """Return the snapshot to go on from, if there is one."""

    def due(self, tokens: int) -> bool:
        """Return whether it is time for a snapshot."""

    def save(self, snapshot: Snapshot) -> None:
        """Keep a snapshot; every row of metrics that came before it has been handed over."""


def take_snapshot(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, step: int, numbers: dict[str, Any]
) -> Snapshot:
    """Return the state as it is; the tensors are those in use, to be written before the next step."""
    tensors = dict(_model_tensors(model))
    for index, state in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{index}.{key}": value for key, value in state.items()}
    return Snapshot(
        step=step, tensors={name: tensor.detach() for name, tensor in tensors.items()}, numbers=numbers
    )


def restore_snapshot(model: nn.Module, optimizer: torch.optim.Optimizer, snapshot: Snapshot) -> None:
    """Put a snapshot into a model and its optimizer.

    Raises:
        ValueError: it is of another model.
    """
    own = dict(_model_tensors(model))
    given = {name: tensor for name, tensor in snapshot.tensors.items() if name.startswith("model.")}
    if odd := sorted(own.keys() ^ given.keys()):
        raise ValueError(f"a snapshot of another model: {odd[0]} is in one of them alone")
    with torch.no_grad():
        for name, tensor in own.items():
            if tensor.shape != given[name].shape or tensor.dtype != given[name].dtype:
                raise ValueError(f"a snapshot of another model: {name} differs in shape or type")
            tensor.copy_(given[name])
    state: dict[int, dict[str, Tensor]] = {}
    for name, tensor in snapshot.tensors.items():
        if name.startswith("optimizer."):
            _, index, key = name.split(".", 2)
            state.setdefault(int(index), {})[key] = tensor
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def _model_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and lasting buffers, each memory once (a tied head shares the embedding's)."""
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if tensor.data_ptr() not in seen or not tensor.numel():
            seen.add(tensor.data_ptr())
            yield f"model.{name}", tensor
