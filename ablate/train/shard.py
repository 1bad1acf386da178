"""The layout of a model on its devices: which parts are recomputed, compiled, and sharded (FSDP2).

The units are the blocks: the members of the outermost lists of modules. A block's weights are gathered in
bf16, because every product of a built-in model uses them in bf16. The weights outside the blocks (embedding,
last norm, head) are gathered in their own precision, because an embedding that is also the head sums two
gradients.

How it fails: ``ValueError`` if blocks are required and the model has none.
"""

from __future__ import annotations

import warnings
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from ablate.run.config import TrainingConfig
    from ablate.train.group import Group


def units(module: nn.Module) -> list[nn.Module]:
    """Return a model's blocks, in order."""
    if isinstance(module, nn.ModuleList):
        return [child for child in module if any(True for _ in child.parameters())]
    return [unit for child in module.children() for unit in units(child)]


def compute_twice(module: nn.Module) -> None:
    """Keep only the input of each block, and recompute the rest in the backward pass.

    Raises:
        ValueError: the model has no blocks.
    """
    for unit in _units(module, "resources.activation_checkpointing"):
        unit.forward = partial(checkpoint, unit.forward, use_reentrant=False)


def compile_blocks(module: nn.Module) -> None:
    """Compile each block by ``torch.compile``.

    Raises:
        ValueError: the model has no blocks.
    """
    for unit in _units(module, "training.compile"):
        unit.compile()


def shard(module: nn.Module, group: Group, settings: TrainingConfig, *, gather_bf16: bool) -> None:
    """Share a model's weights, gradients and optimizer states evenly among the devices of a group.

    ``gather_bf16``: every use of a block's weight is in bf16. Gradients are summed, not averaged, because
    each process scales its losses by the whole batch.
    """
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    # The logits are a view, and nothing writes into it.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    reduce = torch.float32 if settings.reduction == "fp32" else torch.bfloat16
    whole = MixedPrecisionPolicy(reduce_dtype=reduce, cast_forward_inputs=False)
    block = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if gather_bf16 else None, reduce_dtype=reduce, cast_forward_inputs=False
    )
    for unit in units(module):
        fully_shard(unit, mesh=group.mesh, mp_policy=block)
    fully_shard(module, mesh=group.mesh, mp_policy=whole)
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(enable=True)  # the only reduction of gloo


def _units(module: nn.Module, asked_by: str) -> list[nn.Module]:
    found = units(module)
    if not found:
        raise ValueError(f"{asked_by} needs blocks: modules in a torch.nn.ModuleList")
    return found
