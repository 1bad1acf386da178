"""Weights that a model multiplies beside their layers, as in ``x @ layer.weight.t()``: no recipe reaches that.

The model's first forward pass with gradients is watched. A product
counts if one operand is the weight of a layer in low precision, or made of parameters alone with it (a cast,
a transpose, a part, a merged one), and another is not. So tables that are looked up, norms and penalties of
weights, optimizers, and products without gradients do not count.

How it fails: it sees neither the code of compiled modules and of kernels, nor what happens outside of the
model's own forward. There ``weights_used_beside`` still tells where such a layer never runs.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from ablate.layers.experts import ExpertLinear
from ablate.layers.linear import QuantLinear, compute, quantised_layers

if TYPE_CHECKING:
    from ablate.layers.state import RecipeState

_PRODUCT = re.compile(
    "(bi)?linear|(linalg_)?r?matmul|(scaled_|grouped_)?mm|b?addb?mm|bmm|(add)?mv|inner|einsum|tensordot|"
    "chain_matmul|linalg_multi_dot|conv[123]d|multi_head_attention_forward"
)
"""Functions of torch that multiply matrices, by name without underscores at its ends."""
_TORCH = str(Path(torch.__file__).parent)


class WatchedWeights(TorchFunctionMode):
    """Writes into ``state.beside`` where a model multiplies by the weights of its layers itself."""

    def __init__(self, model: nn.Module, state: RecipeState) -> None:
        super().__init__()
        self._places = state.beside
        self._layers: list[QuantLinear] = []
        # by id, and held, so that it stays the tensor's own
        self._made: dict[int, tuple[set[str], Tensor]] = {}
        self._before = model.register_forward_pre_hook(self._begin)
        model.register_forward_hook(self._end, always_call=True)

    def _begin(self, model: nn.Module, _args: object) -> None:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        self._before.remove()
        if any(map(_is_compiled, model.modules())):
            return  # it would be compiled for the watch, and once more without it
        for layer in quantised_layers(model).values():
            # products with slices of experts have a watch of their own
            if layer.is_low_now and not isinstance(layer, ExpertLinear):
                self._layers.append(layer)
        if self._layers:
            self.__enter__()  # type: ignore[no-untyped-call]

    def _end(self, *_: object) -> None:
        if self._layers:
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._layers.clear()
            self._made.clear()

    def __torch_function__(
        self, func: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            is_product = _PRODUCT.fullmatch(func.__name__.strip("_")) is not None
            self._note(_tensors((args, kwargs)), result, is_product=is_product)
        return result

    def _note(
        self, operands: list[Tensor], result: object, *, is_product: bool
    ) -> None:
        """Note a product of a weight and something else, or what is made of weights."""
        # anew each time: a hook may compute a weight, and FSDP2 gathers it
        for layer in self._layers:
            self._made[id(layer.weight)] = ({layer.name}, layer.weight)
        names: set[str] = set()
        others = []
        for operand in operands:
            if id(operand) in self._made:
                names |= self._made[id(operand)][0]
            elif not isinstance(operand, nn.Parameter):
                others.append(operand)
        if names and others and is_product:
            self._note_place(names)
        elif names and not others:
            for tensor in _tensors(result):
                self._made[id(tensor)] = (names, tensor)

    def _note_place(self, names: set[str]) -> None:
        frame: Any = sys._getframe(3)  # noqa: SLF001  reads no files, as traceback does
        while frame.f_code.co_filename.startswith(_TORCH):
            frame = frame.f_back
        file = frame.f_code.co_filename
        # the layer's own product, or that of one in high precision with the same weight
        if file != compute.__code__.co_filename:
            self._places[f"{file}:{frame.f_lineno}"].update(names)


def _is_compiled(module: nn.Module) -> bool:
    return (
        hasattr(module.forward, "_torchdynamo_orig_callable")
        or module._compiled_call_impl is not None  # noqa: SLF001  what Module.compile sets
    )


def _tensors(values: object) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]
