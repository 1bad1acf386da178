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
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ablate.layers.linear import QuantLinear, compute

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ablate.layers.state import RecipeState
    from ablate.recipes.place import LayerPlace

_LAST_TWO = ((-2, -1), (-1, -2), (1, 2), (2, 1))
_MATMUL = (torch.matmul, Tensor.matmul, Tensor.__matmul__)
_CASTS = (
    Tensor.to,
    Tensor.bfloat16,
    Tensor.half,
    Tensor.float,
    Tensor.type_as,
    Tensor.contiguous,
)
_HARMLESS = (
    *(
        getattr(Tensor, name).__get__
        for name in ("shape", "dtype", "device", "ndim", "requires_grad")
    ),
    Tensor.size,
    Tensor.dim,
    Tensor.__len__,
    Tensor.numel,
)


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
        # no submodule: that would be a circle
        object.__setattr__(self, "_of", (holder, parameter))
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
    stacks: dict[str, Tensor] = {}
    others: set[str] = set()
    for name, parameter in module.named_parameters(recurse=False):
        if parameter.ndim == 3:
            stacks[name] = parameter.mT if is_transposed else parameter
        else:
            others.add(name)
    if others <= {f"{name}_bias" for name in stacks}:
        return stacks
    return {}


def take_over(
    module: nn.Module, layers: Mapping[str, Mapping[int, ExpertLinear]]
) -> None:
    """Make a module's experts follow a recipe. ``layers``: by its parameter and the expert's number."""
    experts = nn.ModuleList()
    for of_parameter in layers.values():
        experts.extend(of_parameter.values())
    module.add_module("ablate_experts", experts)
    module.__dict__["_experts"] = layers
    if hasattr(module, "config"):
        config: Any = copy.copy(module.config)
        config._experts_implementation = "eager"  # noqa: SLF001  transformers has no public key
        module.config = config
    module.__class__ = _quantised_class(type(module))  # type: ignore[arg-type]  # mypy takes no class for hashable


@cache
def _quantised_class(kind: type[nn.Module]) -> type[nn.Module]:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        layers: Mapping[str, Mapping[int, ExpertLinear]] = self.__dict__["_experts"]
        experts = {}
        for name, of_parameter in layers.items():
            experts[id(getattr(self, name))] = of_parameter
        with _Products(experts, is_transposed=getattr(self, "is_transposed", False)):
            return kind.forward(self, *args, **kwargs)

    return type(f"Quant{kind.__name__}", (kind,), {"forward": forward})


class _Weights(NamedTuple):
    """A tensor made of a parameter: of one expert (``number``), or of all.

    ``tensor`` is held so that its id stays its own; ``is_transposed``: whether it is [experts, in, out].
    """

    tensor: Tensor | None
    experts: Mapping[int, ExpertLinear]
    number: int | None
    is_transposed: bool


class _Products(TorchFunctionMode):
    """Takes over products with the experts' parameters, and follows their slices, casts and transposes."""

    def __init__(
        self, experts: Mapping[int, Mapping[int, ExpertLinear]], *, is_transposed: bool
    ) -> None:
        super().__init__()
        self._known = {
            parameter_id: _Weights(None, of_parameter, None, is_transposed)
            for parameter_id, of_parameter in experts.items()
        }

    def __torch_function__(
        self,
        func: Any,
        _types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        weights: _Weights | None = None
        for arg in (*args, *kwargs.values()):
            weights = weights or self._known.get(id(arg))
        if weights is None or func in _HARMLESS:
            return func(*args, **kwargs)
        _, experts, index, is_transposed = weights
        if not is_transposed:
            if func is functional.linear and index is not None and len(args) == 2:
                return _product(experts.get(index), *args)
        elif len(args) > 1 and id(args[1]) in self._known:
            if func in _MATMUL and index is not None:
                return _product(experts.get(index), args[0], args[1].mT)
            if func is torch._grouped_mm and index is None:  # noqa: SLF001
                return _grouped(experts, args[0], args[1].mT, kwargs["offs"])
        made = func(*args, **kwargs)
        if func is Tensor.__getitem__ and index is None:
            weights = weights._replace(number=int(args[1]))
        elif func is Tensor.transpose and index is None and args[1:] in _LAST_TWO:
            weights = weights._replace(is_transposed=not is_transposed)
        elif func not in _CASTS:
            raise RuntimeError(
                f"experts {next(iter(experts.values())).name}, …: {getattr(func, '__name__', func)} uses "
                "their weights, and no recipe reaches it (allow= leaves such a module in high precision)"
            )
        self._known[id(made)] = weights._replace(tensor=made)
        return made


def _product(expert: ExpertLinear | None, x: Tensor, weight: Tensor) -> Tensor:
    """Multiply by a recipe, or as before if the expert follows none."""
    if expert is None:
        return functional.linear(x, weight)
    return compute(expert, x, weight)


def _grouped(
    experts: Mapping[int, ExpertLinear], x: Tensor, weight: Tensor, ends: Tensor
) -> Tensor:
    """Multiply each expert's rows of x [tokens, in] by its matrix; ``ends``: of each expert's rows."""
    begin = 0
    parts = []
    for index, end in enumerate(ends.tolist()):
        if end > begin:
            parts.append(_product(experts.get(index), x[begin:end], weight[index]))
        begin = end
    # rows that no expert has
    return torch.cat([*parts, x.new_zeros(len(x) - begin, weight.shape[1])])
