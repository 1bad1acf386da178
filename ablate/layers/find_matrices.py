"""The matrices of any torch model: which linear layers can follow a recipe, and why the others cannot.

A layer can follow a recipe if it is a ``torch.nn.Linear``, of no subclass, that computes as that class does;
a hook may compute its weight (weight_norm, spectral_norm, pruning). Whatever else has two dimensions may
enter a GEMM that no recipe reaches: it is named with the reason. Tables of embeddings are looked up, and
norms multiply element by element.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized

from ablate.layers.linear import QuantLinear
from ablate.recipes.coverage import Matrix, in_short
from ablate.recipes.place import LayerPlace, block_of, places

if TYPE_CHECKING:
    from collections.abc import Iterator

_HEADS = ("lm_head", "head", "output", "embed_out", "score", "classifier")
ROOT = "model"
"""The name of a layer that is itself the model."""

_Names = dict[nn.Module, list[str]]
"""The modules of a model in its order, each with its names at all places."""


@dataclass(frozen=True, kw_only=True)
class Survey:
    """What ``survey`` found.

    ``linears``: the layers that can follow a recipe, ``places`` their places; ``matrices``: those layers and
    all else that may enter a GEMM. ``notes``: what else is to be known, in words.
    """

    linears: dict[str, nn.Linear]
    places: dict[str, LayerPlace]
    matrices: tuple[Matrix, ...]
    notes: tuple[str, ...]


def survey(model: nn.Module) -> Survey:
    """Return the matrices of a model, in its order.

    Raises:
        ValueError: a layer follows a recipe already.
    """
    names: _Names = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(name)
    if done := [known[0] or ROOT for module, known in names.items() if isinstance(module, QuantLinear)]:
        raise ValueError(f"layer {done[0]} follows a recipe already (apply_recipe takes each layer once)")
    outputs = _outputs(names)
    parts = {part for module in names if isinstance(module, nn.Linear) for part in module.modules()}
    linears: dict[str, nn.Linear] = {}
    matrices: list[Matrix] = []
    tables = []
    for module, known in names.items():
        if isinstance(module, nn.Linear):
            matrices.append(_layer(module, known, outputs))
            if matrices[-1].out_of_reach is None:
                linears[matrices[-1].name] = module
        elif isinstance(module, nn.Embedding | nn.EmbeddingBag):
            tables.append(f"{known[0] or ROOT} ({_type_name(module)})")
        elif module not in parts and not isinstance(module, nn.LayerNorm | nn.RMSNorm):
            matrices += _held_by(module, known[0])
    where = places(linears, heads={matrix.name for matrix in matrices if matrix.is_head})
    return Survey(
        linears=linears,
        places=where,
        matrices=tuple(matrices),
        notes=(f"no product is assumed with: {', '.join(in_short(tables))}",) if tables else (),
    )


def _outputs(modules: _Names) -> set[object]:
    """Return the layers that the model, or a part of it, itself calls its output."""
    found: set[object] = set()
    for module in modules:
        find_output = getattr(module, "get_output_embeddings", None)
        try:
            found.add(find_output() if callable(find_output) else None)
        except NotImplementedError:  # transformers declares it for models without one, too
            continue
    return found - {None}


def _has_heads_name(name: str) -> bool:
    return name.rpartition(".")[2] in _HEADS


def _layer(linear: nn.Linear, names: list[str], outputs: set[object]) -> Matrix:
    name, *also = (each or ROOT for each in names)
    by_name = _has_heads_name(name) and block_of(name) is None
    return Matrix(
        name=name,
        elements=linear.in_features * linear.out_features,
        is_head=linear in outputs if outputs else by_name,
        also=tuple(also),
        out_of_reach=_why_not(linear),
    )


def _held_by(module: nn.Module, name: str) -> Iterator[Matrix]:
    """Yield the parameters with two dimensions or more that a module holds itself."""
    for own, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
        unknown = is_lazy(parameter)
        if unknown or sum(size > 1 for size in parameter.shape) >= 2:
            yield Matrix(
                name=f"{name}.{own}" if name else own,
                elements=0 if unknown else parameter.numel(),
                out_of_reach=f"{_type_name(module)} holds it, which is no torch.nn.Linear",
            )


def _why_not(linear: nn.Linear) -> str | None:
    """Say why a linear layer cannot follow a recipe; None if it can."""
    kind = type(linear)
    if is_lazy(linear.weight):
        return "it has no weight yet: pass one batch through the model first"
    if is_parametrized(linear):
        return "it is parametrised (torch.nn.utils.parametrize)"
    if kind is NonDynamicallyQuantizableLinear:
        return "torch.nn.MultiheadAttention multiplies by its weight itself"
    if any(base.__name__ == "FSDPModule" for base in kind.__mro__):
        return "fully_shard made it a layer of its own kind: apply the recipe before that"
    if kind is not nn.Linear:
        return f"a subclass of torch.nn.Linear ({_type_name(linear)}), which may compute something else"
    if "forward" in vars(linear):
        return "its forward was replaced"
    needed = QuantLinear.OWN_ATTRIBUTES | vars(QuantLinear).keys()
    taken = sorted(own for own in needed if hasattr(linear, own) and not hasattr(nn.Linear, own))
    return f"it has an attribute of its own, {taken[0]}, that a quantised layer needs" if taken else None


def _type_name(module: nn.Module) -> str:
    kind = type(module)
    if kind.__module__.startswith("torch.nn."):
        return f"torch.nn.{kind.__name__}"
    return f"{kind.__module__}.{kind.__qualname__}"
