"""Save and restore everything that a run's future depends on, as named tensors and plain numbers.

The random streams are counted from the seed, the step and the call, and the data order from the seed and the
step, so the step describes them completely. The rest: weights, buffers (the largest magnitudes for delayed
scales), the optimizer's moments, the sums of de-oscillation, and the trainer's own counters.

With several devices each process saves and restores its own rows; their number may have changed.

How it fails: a snapshot of another model raises a ``ValueError`` that names the mismatch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ablate.layers.linear import is_sharded, local_rows

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from torch import Tensor, nn

    from ablate.layers.deoscillation import Deoscillation

_MODEL, _SUMS = "model.", "deoscillation."


class Rows(Protocol):
    """A tensor of a snapshot that is not loaded yet."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor."""

    def read(self, rows: slice) -> Tensor:
        """Return the given rows, or the whole tensor if it has no dimensions."""


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A trainer's state after ``step`` optimizer steps.

    ``sharded``: names of tensors of which this snapshot only holds one process's rows.
    """

    step: int
    tensors: Mapping[str, Tensor | Rows]
    numbers: dict[str, Any]
    sharded: frozenset[str] = field(default=frozenset())

    def whole(self, prefix: str = "") -> dict[str, Tensor]:
        """Return the whole tensors whose names begin so, by the rest of their names, in CPU memory."""
        return {
            name.removeprefix(prefix): _read(tensor, slice(None))
            for name, tensor in self.tensors.items()
            if name.startswith(prefix)
        }


class Checkpoints(Protocol):
    """Where a trainer's snapshots are saved and loaded."""

    def load(self) -> Snapshot | None:
        """Return the snapshot to resume from, with whole tensors, or None."""

    def due(self, tokens: int) -> bool:
        """Whether a snapshot is due."""

    def save(self, snapshot: Snapshot) -> None:
        """Save a snapshot; every earlier row of metrics has already been passed on."""


def take_snapshot(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    deoscillation: Deoscillation | None = None,
    *,
    step: int,
    numbers: dict[str, Any],
) -> Snapshot:
    """Return the current state; its tensors are in use and must be written before the next step."""
    tensors = {f"{_MODEL}{name}": tensor for name, tensor in model_tensors(model)}
    if deoscillation is not None and deoscillation.followed is not None:
        tensors |= {f"{_SUMS}{name}": sums for name, sums in deoscillation.sums.items()}
        numbers = {**numbers, "deoscillation_steps": deoscillation.steps}
    for index, state in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{index}.{key}": value for key, value in state.items()}
    return Snapshot(
        step=step,
        tensors={name: local_rows(tensor.detach())[0] for name, tensor in tensors.items()},
        numbers=numbers,
        sharded=frozenset(name for name, tensor in tensors.items() if is_sharded(tensor)),
    )


def restore_snapshot(
    snapshot: Snapshot,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    deoscillation: Deoscillation | None = None,
) -> None:
    """Restore a model, its optimizer and its window of de-oscillation, once the state has its tokens.

    Raises:
        ValueError: the snapshot belongs to another model or another recipe.
    """
    restore_model(snapshot, model)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state: dict[int, dict[str, Tensor]] = {}
    for name, source in snapshot.tensors.items():
        if name.startswith("optimizer."):
            _, index, key = name.split(".", 2)
            target = parameters[int(index)].detach()
            if tuple(source.shape) == tuple(target.shape) and is_sharded(target):
                restored = torch.empty_like(target)
                _copy(source, restored, name)
            else:
                restored = _read(source, slice(None))
            state.setdefault(int(index), {})[key] = restored
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    steps = snapshot.numbers.get("deoscillation_steps", 0)
    sums = {} if deoscillation is None else deoscillation.resume(steps)
    _fill(snapshot, _SUMS, sums.items(), of="recipe")


def restore_model(snapshot: Snapshot, model: nn.Module) -> None:
    """Restore a model's weights and buffers alone; raises as ``restore_snapshot``."""
    _fill(snapshot, _MODEL, model_tensors(model), of="model")


@torch.no_grad()
def _fill(snapshot: Snapshot, prefix: str, targets: Iterable[tuple[str, Tensor]], *, of: str) -> None:
    own = {f"{prefix}{name}": tensor for name, tensor in targets}
    if odd := sorted(own.keys() ^ {name for name in snapshot.tensors if name.startswith(prefix)}):
        raise ValueError(f"a snapshot of another {of}: {odd[0]} is in one of them alone")
    for name, tensor in own.items():
        if tuple(tensor.shape) != tuple(snapshot.tensors[name].shape):
            raise ValueError(f"a snapshot of another {of}: {name} differs in shape")
        _copy(snapshot.tensors[name], tensor, name)


def _copy(source: Tensor | Rows, target: Tensor, name: str) -> None:
    local, rows = local_rows(target)
    values = _read(source, rows)
    if values.dtype != local.dtype:
        raise ValueError(f"a snapshot of another model: {name} differs in type")
    local.copy_(values)


def _read(source: Tensor | Rows, rows: slice) -> Tensor:
    if isinstance(source, torch.Tensor):
        return source[rows] if source.dim() else source
    return source.read(rows)


def model_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and persistent buffers, shared memory once (a tied head shares the embedding's)."""
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        memory = local_rows(tensor)[0].data_ptr()
        if memory not in seen or not tensor.numel():
            seen.add(memory)
            yield name, tensor
