"""GPT-2's ``Conv1D`` of transformers, a linear layer with a transposed weight, as a linear layer."""

from __future__ import annotations

from torch import nn


def convert_conv1d(model: nn.Module) -> list[str]:
    """Replace each ``Conv1D`` by a linear layer with the same values, in place; return their names.

    The weights are new parameters, stored as [out, in]: call it before the optimizer is made, and load
    checkpoints of the original before it.
    """
    from transformers.pytorch_utils import Conv1D

    found = {name: layer for name, layer in model.named_modules() if isinstance(layer, Conv1D)}
    for name, layer in found.items():
        inputs, outputs = layer.weight.shape
        linear = nn.Linear(inputs, outputs, device="meta")
        linear.weight = nn.Parameter(layer.weight.detach().t().contiguous())
        linear.bias = layer.bias
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, linear)
    return list(found)
