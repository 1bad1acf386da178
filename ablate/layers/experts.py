"""Experts that are stored as one parameter [experts, out, in]: each follows the recipe, with its own scales.

transformers' experts (Mixtral, Qwen-MoE) multiply by ``functional.linear`` with one expert's slice, those of
gpt-oss by ``@``, for their parameters are [experts, in, out]; torchtitan's by ``torch._grouped_mm`` with all.
All are taken over while the module's own forward runs, so its routing, its gate and its activation stay. The
fused implementations of transformers are switched off, because they never show one expert's product.

How it fails: another product with such a parameter is a ``RuntimeError``, not a GEMM in high precision.
"""

from __future__ import annotations

import copy
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ablate.layers.linear import QuantLinear, compute

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ablate.layers.state import RecipeState
    from ablate.recipes.place import LayerPlace

OWN_LIST = "ablate_experts"
_MATMUL = (torch.matmul, Tensor.matmul, Tensor.__matmul__)
_CASTS = (Tensor.to, Tensor.bfloat16, Tensor.half, Tensor.float, Tensor.type_as, Tensor.contiguous)
_HARMLESS = (
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "requires_grad")),
    Tensor.size, Tensor.dim, Tensor.__len__, Tensor.numel,
)  # fmt: skip


class ExpertLinear(QuantLinear):
    """One expert's product; its weight is a slice of the parameter of another module."""

    def __init__(
        self,
        holder: nn.Module,
        parameter: str,
        index: int,
        *,
        name: str,
        state: RecipeState,
        place: LayerPlace,
    ) -> None:
        nn.Module.__init__(self)
        self.index = index
        object.__setattr__(self, "_of", (holder, parameter))  # no submodule: that would be a circle
        self.out_features, self.in_features = self.weight.shape
        self.register_parameter("bias", None)
        self._follow(name, state, place)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The expert's matrix [out, in], a slice and no parameter."""
        holder, parameter = self.__dict__["_of"]
        return expert_parameters(holder)[parameter][self.index]


def expert_parameters(module: nn.Module) -> dict[str, Tensor]:
    """Find the parameters of a module whose products can be taken over, by name, as [experts, out, in]."""
    is_transposed = getattr(module, "is_transposed", None)
    if is_transposed is None and not hasattr(module, "_grouped_mm"):
        return {}
    own = dict(module.named_parameters(recurse=False))
    held = {name: one.mT if is_transposed else one for name, one in own.items() if one.ndim == 3}
    return held if own.keys() <= {*held, *(f"{name}_bias" for name in held)} else {}


def take_over(module: nn.Module, layers: Mapping[str, Mapping[int, ExpertLinear]]) -> None:
    """Make a module's experts follow a recipe. ``layers``: by its parameter and the expert's number."""
    module.add_module(OWN_LIST, nn.ModuleList(layer for own in layers.values() for layer in own.values()))
    module.__dict__["_experts"] = layers
    if hasattr(module, "config"):
        config: Any = copy.copy(module.config)
        config._experts_implementation = "eager"  # noqa: SLF001  transformers has no public key
        module.config = config
    module.__class__ = _made_of_both(type(module))  # type: ignore[arg-type]  # mypy takes no class for hashable


@cache
def _made_of_both(theirs: type[nn.Module]) -> type[nn.Module]:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        experts: Mapping[str, Mapping[int, ExpertLinear]] = self.__dict__["_experts"]
        known = {id(getattr(self, name)): own for name, own in experts.items()}
        with _Products(known, is_transposed=getattr(self, "is_transposed", False)):
            return theirs.forward(self, *args, **kwargs)

    return type(f"Quant{theirs.__name__}", (theirs,), {"forward": forward})


class _Products(TorchFunctionMode):
    """Takes over products with the experts' parameters, and follows their slices, casts and transposes."""

    def __init__(self, experts: Mapping[int, Mapping[int, ExpertLinear]], *, is_transposed: bool) -> None:
        super().__init__()
        # By id: the tensor, so that the id stays its own; its experts; which of them, None for all; whether
        # it is [experts, in, out].
        self._known: dict[int, tuple[Tensor | None, Mapping[int, ExpertLinear], int | None, bool]] = {
            one: (None, own, None, is_transposed) for one, own in experts.items()
        }

    def __torch_function__(
        self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        found = [known for one in (*args, *kwargs.values()) if (known := self._known.get(id(one)))]
        if not found or func in _HARMLESS:
            return func(*args, **kwargs)
        _, own, index, is_transposed = found[0]
        if func is functional.linear and index is not None and not is_transposed and len(args) == 2:
            return compute(own[index], *args) if index in own else func(*args)
        if func in _MATMUL and index is not None and is_transposed and id(args[1]) in self._known:
            return compute(own[index], args[0], args[1].mT) if index in own else func(*args)
        if func is torch._grouped_mm and index is None and is_transposed and id(args[1]) in self._known:  # noqa: SLF001
            return _grouped(own, args[0], args[1].transpose(-2, -1), kwargs["offs"])
        done = func(*args, **kwargs)
        if func is Tensor.__getitem__ and index is None:
            self._known[id(done)] = (done, own, int(args[1]), is_transposed)
        elif func in _CASTS:
            self._known[id(done)] = (done, own, index, is_transposed)
        elif func is Tensor.transpose and index is None and args[1:] in ((-2, -1), (-1, -2), (1, 2), (2, 1)):
            self._known[id(done)] = (done, own, index, not is_transposed)
        else:
            raise RuntimeError(
                f"experts {next(iter(own.values())).name}, …: {getattr(func, '__name__', func)} uses their "
                "weights, and no recipe reaches it (allow= leaves such a module in high precision)"
            )
        return done


def _grouped(own: Mapping[int, ExpertLinear], x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Multiply each expert's rows of x [tokens, in] by its matrix; ``ends``: of each expert's rows."""
    begin, parts = 0, []
    for index, end in enumerate(ends.tolist()):
        if end > begin:
            rows, matrix = x[begin:end], weight[index]
            parts.append(
                compute(own[index], rows, matrix) if index in own else functional.linear(rows, matrix)
            )
        begin = end
    return torch.cat([*parts, x.new_zeros(len(x) - begin, weight.shape[1])])  # rows that no expert has
