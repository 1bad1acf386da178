"""The devices that train one run together, and the values they must share: decisions, losses, messages.

Each is a process in torch's default process group. These values go through gloo, whatever carries the
gradients. Sums are taken in the order of the micro-batches, so that they equal those of one
process.

How it fails: after a process dies, the others wait in a collective call until the group's timeout, or until
their parent ends them.
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
    """This process's rank among ``size``. A single process is a group of one, which exchanges nothing."""

    rank: int = 0
    size: int = 1
    mesh: DeviceMesh | None = None
    channel: Any = None

    def any(self, flag: bool) -> bool:
        """Whether the flag is set in any process."""
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
        """Return the figures 0 to ``count`` - 1; each process has some of them."""
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
    """The layout of a run on its devices: the processes that train it, and the activations they keep.

    ``checkpoint_activations``: keep only each block's input, and recompute the rest, to the same bits.
    """

    group: Group = ALONE
    checkpoint_activations: bool = False


ONE_DEVICE = Layout()


def join_group(device: str) -> Group:
    """Return the group of torch's process group.

    Raises:
        ValueError: torch has no process group.
    """
    from torch.distributed.device_mesh import init_device_mesh

    rank, size = distributed.get_rank(), distributed.get_world_size()
    if size == 1:
        return ALONE
    mesh = init_device_mesh(torch.device(device).type, (size,))
    return Group(rank, size, mesh, distributed.new_group(backend="gloo"))
