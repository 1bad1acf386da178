"""How a model is laid out on its devices: which parts are computed twice, compiled, and sharded (FSDP2).

The units are the blocks: the members of the outermost lists of modules. What lies outside of them (embedding,
last norm, head) is gathered in its own precision, because an embedding that is also the head sums two
gradients; a block's weights are gathered in bf16, in which every product of a built-in model takes them
anyway.

How it fails: ``ValueError`` for a model without blocks where blocks are asked for.
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
    """Keep of each block its input alone, and compute the rest again in the backward pass.

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

    ``gather_bf16``: every weight of a block is taken in bf16 by what uses it. Gradients are summed, not
    averaged: each process scales its losses by the whole batch.
    """
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    # The logits are a view, which nothing writes into.
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
            part.set_force_sum_reduction_for_comms(enable=True)  # gloo knows no other


def _units(module: nn.Module, asked_by: str) -> list[nn.Module]:
    found = units(module)
    if not found:
        raise ValueError(f"{asked_by} needs blocks: modules in a torch.nn.ModuleList")
    return found
