"""The devices that train one run together, and the values they must share: decisions, losses, messages.

Each is a process in torch's default process group. These values go through gloo, whatever carries the
gradients. Sums are taken in the order of the micro-batches, so that they equal those of one process.

A model's blocks are the members of the outermost lists of modules. They are recomputed, compiled and sharded
(FSDP2). A block's weights are gathered in bf16, because every product of a built-in model uses them in bf16.
The weights outside the blocks (embedding, last norm, head) are gathered in their own precision, because an
embedding that is also the head sums two gradients.

How it fails: after a process dies, the others wait in a collective call until the group's timeout, or until
their parent ends them.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import distributed, nn

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch.distributed.device_mesh import DeviceMesh

    from ablate.run.config import TrainingConfig

_Value = TypeVar("_Value")


@dataclass(frozen=True)
class Group:
    """This process's rank among ``size``. A single process is a group of one, which exchanges nothing."""

    rank: int = 0
    size: int = 1
    mesh: DeviceMesh | None = None
    channel: Any = None

    def first(self, value: _Value) -> _Value:
        """Return the first process's value to every process."""
        return self.gathered(value)[0]

    def total(self, figures_here: Mapping[int, float], count: int) -> float:
        """Sum the figures 0 to ``count`` - 1 in this order; each process has some of them."""
        figures: dict[int, float] = {}
        for of_process in self.gathered(figures_here):
            figures.update(of_process)
        total = 0.0
        # sum() would add in higher precision from Python 3.12 on
        for index in range(count):
            total += figures[index]
        return total

    def gathered(self, value: _Value) -> list[_Value]:
        """Collect every process's value, by rank."""
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
    ``on_eager``: called with the reason where steps are no CUDA graphs, at the start or when a capture fails.
    """

    group: Group = ALONE
    checkpoint_activations: bool = False
    on_eager: Callable[[str], None] = lambda _: None


ONE_DEVICE = Layout()


def join_group(device: str) -> Group:
    """Make the group of torch's default process group; ``ALONE`` for a single process.

    Raises:
        ValueError: torch has no process group.
    """
    from torch.distributed.device_mesh import init_device_mesh

    size = distributed.get_world_size()
    if size == 1:
        return ALONE
    mesh = init_device_mesh(torch.device(device).type, (size,))
    channel = distributed.new_group(backend="gloo")
    return Group(distributed.get_rank(), size, mesh, channel)


def blocks(module: nn.Module, needed_by: str | None = None) -> list[nn.Module]:
    """Find a model's blocks, in order; ``ValueError`` if there are none and a setting needs them."""
    if isinstance(module, nn.ModuleList):
        return [child for child in module if list(child.parameters())]
    inner = [block for child in module.children() for block in blocks(child)]
    if needed_by and not inner:
        raise ValueError(f"{needed_by} needs blocks: modules in a torch.nn.ModuleList")
    return inner


def shard(
    module: nn.Module, group: Group, settings: TrainingConfig, *, gather_bf16: bool
) -> None:
    """Share a model's weights, gradients and optimizer states evenly among the devices of a group.

    ``gather_bf16``: every use of a block's weight is in bf16. Gradients are summed, not averaged, because
    each process scales its losses by the whole batch.
    """
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    # The logits are a view, and nothing writes into it.
    warnings.filterwarnings(
        "ignore", message="FSDP2-wrapped module .* returned a view tensor"
    )
    reduce = torch.float32 if settings.reduction == "fp32" else torch.bfloat16
    whole = MixedPrecisionPolicy(reduce_dtype=reduce, cast_forward_inputs=False)
    block = whole
    if gather_bf16:
        block = replace(whole, param_dtype=torch.bfloat16)
    for unit in blocks(module):
        fully_shard(unit, mesh=group.mesh, mp_policy=block)
    fully_shard(module, mesh=group.mesh, mp_policy=whole)
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)
            # the only reduction of gloo
            part.set_force_sum_reduction_for_comms(enable=True)
