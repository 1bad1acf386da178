"""The devices that train one run together, and what they must agree on: decisions, losses, the first's word.

Each is a process of its own in torch's default process group. What is exchanged here goes through gloo,
whatever carries the gradients. Sums are taken in the order of the micro-batches, so that they are one
process's own.

How it fails: a process that dies leaves the others in a collective call, which ends with the group's timeout
or when whoever started them ends them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import distributed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.distributed.device_mesh import DeviceMesh

_Value = TypeVar("_Value")


@dataclass(frozen=True)
class Group:
    """This process's place among ``size``. By itself it is a group of one, in which nothing is exchanged."""

    rank: int = 0
    size: int = 1
    mesh: DeviceMesh | None = None
    channel: Any = None

    def any(self, flag: bool) -> bool:
        """Tell whether the flag is set in any process."""
        return any(self.gathered(flag))

    def first(self, value: _Value) -> _Value:
        """Return the first process's value."""
        if self.size == 1:
            return value
        values = [value]
        distributed.broadcast_object_list(values, src=0, group=self.channel)
        return values[0]

    def first_said(self, text: str) -> str:
        """Return the text of the first process that has one."""
        return next((said for said in self.gathered(text) if said), "")

    def in_order(self, own: Mapping[int, float], count: int) -> list[float]:
        """Return the figures 0 to ``count`` - 1, each of which one process has."""
        everyones: dict[int, float] = {}
        for figures in self.gathered(dict(own)):
            everyones |= figures
        return [everyones[index] for index in range(count)]

    def gathered(self, value: _Value) -> list[_Value]:
        """Return every process's value, in order."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        distributed.all_gather_object(values, value, group=self.channel)
        return values


ALONE = Group()


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a run lies on its devices: the processes that train it, and what they keep of the forward pass.

    ``checkpoint_activations``: of each block its input alone; the rest is computed again, to the same bits.
    """

    group: Group = ALONE
    checkpoint_activations: bool = False


ONE_DEVICE = Layout()


def join_group(device: str) -> Group:
    """Return the group of the process group that torch has been given.

    Raises:
        ValueError: torch has none.
    """
    from torch.distributed.device_mesh import init_device_mesh

    rank, size = distributed.get_rank(), distributed.get_world_size()
    if size == 1:
        return ALONE
    mesh = init_device_mesh(torch.device(device).type, (size,))
    return Group(rank, size, mesh, distributed.new_group(backend="gloo"))
