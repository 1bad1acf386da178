"""Apply a recipe to any model: its linear layers become quantised ones, in place.

A layer can follow a recipe if it is a ``torch.nn.Linear``, not a subclass, and computes as that class does;
a hook may compute its weight (weight_norm, spectral_norm, pruning). Any other parameter with two dimensions
may enter a GEMM that no recipe reaches: it is named with the reason. Embeddings and norms enter no GEMM:
tables are looked up, and norms multiply element by element.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed, nn
from torch.nn import functional
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized

from ablate.backends.select import Selection
from ablate.layers.deoscillation import Deoscillation
from ablate.layers.experts import ExpertLinear, expert_parameters, take_over
from ablate.layers.linear import QuantLinear, phases_that_fit, weights_used_alone
from ablate.layers.state import RecipeState
from ablate.recipes import Recipe, read_recipe
from ablate.recipes.coverage import Matrix, coverage_faults, coverage_of, in_short
from ablate.recipes.place import LayerPlace, block_of, places, rule_faults

if TYPE_CHECKING:
    from collections.abc import Collection

_HEADS = ("lm_head", "head", "output", "embed_out", "score", "classifier")
_ROOT = "model"
"""The name of a layer that is itself the model."""


def apply_recipe(
    model: nn.Module,
    recipe: Recipe | str | dict[str, Any],
    *,
    seed: int = 0,
    backend: str = "auto",
    total_tokens: int | None = None,
    skip: Collection[str] | str = (),
    allow: Collection[str] | str = (),
    reach: Collection[type[nn.Linear]] = (),
) -> RecipeState:
    """Make the linear layers of a model follow a recipe; return the state that the training loop advances.

    Layers and parameters stay the same objects, so hooks, optimizers, tied weights and wrappers (DDP,
    ``fully_shard``, ``torch.compile``) keep working, whether made before or after. Call
    ``state.advance(tokens)`` once after each optimizer step: signs per step, phases and
    de-oscillation depend on it. Forward passes within a step are counted automatically, and those of
    evaluation (``model.eval()``) separately. The head (what ``get_output_embeddings()`` returns, else
    ``lm_head`` and similar names outside the blocks) keeps high precision unless a rule of the recipe matches
    it.

    What the recipe reaches, and by name what it does not, is printed (by the first of several processes) and
    stays in ``state.coverage``. Out of reach are subclasses of ``nn.Linear``, the projections inside
    ``nn.MultiheadAttention``, and parameters with two dimensions that no linear layer holds; they are refused
    unless ``allow`` names them. A module that reads the weights of its layers itself, past the layers, is
    warned of when the state first advances, if such a layer never ran, gradients are still there, and the
    process is alone. Torch's own such path, that of ``nn.TransformerEncoderLayer`` in evaluation, is switched
    off.

    >>> import torch
    >>> from ablate.numerics import apply_recipe
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 32))
    >>> state = apply_recipe(model, {"gemms": ["fprop", "wgrad"], "stabiliser": "dht"})
    Fprop, Wgrad: 2 of 2 matrices in low precision, 100.0% of the FLOPs
    Dgrad: 0 of 2 matrices in low precision, 0.0% of the FLOPs
    >>> model(torch.randn(32, 64)).shape
    torch.Size([32, 32])

    Args:
        model: any module; every ``nn.Linear`` in it follows the recipe, but no subclass of it.
        recipe: a ``Recipe``, or a recipe as in a study file: a word or a mapping.
        seed: seed of stochastic rounding and random signs.
        backend: name of the back end that quantises and multiplies.
        total_tokens: the budget; required by phases that start at a fraction of it.
        skip: names of layers to leave unchanged, or shell patterns of them (``*.router``).
        allow: the same of what the recipe cannot reach and may leave in high precision; ``*`` for all of it.
        reach: subclasses of ``nn.Linear`` whose layers follow the recipe, too, if they compute as
            ``functional.linear`` does: output and gradients are compared to the bit on random input. Such a
            layer keeps its class's other methods.

    Raises:
        ValueError: no linear layer, one that follows a recipe already, a matrix out of reach that ``allow``
            does not name, a word, pattern or rule that names nothing, rules that leave every layer in high
            precision, or a recipe that contradicts itself. The model is then unchanged.
        TypeError: ``recipe`` is no recipe, word or mapping.
    """
    state = RecipeState(
        recipe=recipe if isinstance(recipe, Recipe) else read_recipe(recipe),
        backend=Selection(backend), seed=seed, call=None, total_tokens=total_tokens, replica=None,
    )  # fmt: skip
    skip, allow = ((names,) if isinstance(names, str) else names for names in (skip, allow))
    quantise_layers(model, state, skip=skip, allow=allow, reach=reach)
    if state.deoscillates:
        state.deoscillation = Deoscillation(model, state)
    if not distributed.is_initialized():  # an expert may run only in another process
        state.check = weights_used_alone
    if not (distributed.is_initialized() and distributed.get_rank()):
        print(state.coverage)
    return state


def quantise_layers(
    model: nn.Module,
    state: RecipeState,
    *,
    skip: Collection[str] = (),
    allow: Collection[str] = (),
    reach: Collection[type[nn.Linear]] = (),
    key: str = "allow=",
) -> None:
    """Make a model's layers follow ``state``, as ``apply_recipe`` does; ``key``: how users write allow."""
    found, recipe = survey(model, reach), state.recipe
    for what, hint in coverage_faults(recipe, found.matrices, allow=allow, skip=skip, key=key):
        raise ValueError(f"{what} ({hint})")
    unskipped = {matrix.name for matrix in found.matrices if not matrix.named_by(skip)}
    where = {name: place for name, place in found.places.items() if name in unskipped}
    if not where:
        raise ValueError(f"no linear layer to replace in {type(model).__name__}")
    for _, what, hint in rule_faults(recipe, where):
        raise ValueError(f"{what} ({hint})")
    grouped: dict[nn.Module, dict[str, dict[int, ExpertLinear]]] = {}
    for name, place in where.items():
        if name in found.experts:
            module, parameter, index = found.experts[name]
            expert = ExpertLinear(module, parameter, index, name=name, state=state, place=place)
            grouped.setdefault(module, {}).setdefault(parameter, {})[index] = expert
            layer: nn.Linear = expert
        else:
            layer = found.linears[name]
        phases = phases_that_fit(layer, name, state, place)
        is_low = any(not part.fprop.right.is_high_precision for _, part in phases)
        is_own = name in found.experts or isinstance(layer.weight, nn.Parameter)
        if state.deoscillates and is_low and not is_own:
            raise ValueError(
                f"deoscillate resets weights, but that of layer {name} is no parameter of its own "
                f"(give it a rule of its own: layers: [{{match: {name}, recipe: bf16}}])"
            )
    linears = {name: found.linears[name] for name in where if name in found.linears}
    notes = _leave_fast_paths(model, set(linears.values()))
    for name, linear in linears.items():
        QuantLinear.take_over(linear, name=name, state=state, place=where[name])
    for module, experts in grouped.items():
        take_over(module, experts)
    state.coverage = coverage_of(recipe, found.matrices, where, skip=skip, notes=(*notes, *found.notes))


def _leave_fast_paths(model: nn.Module, layers: set[nn.Linear]) -> list[str]:
    """Switch off torch's fused evaluation of encoder layers, which reads weights without calling the layers.

    Returns a note for the user, if there was anything to switch off.
    """
    left = []
    for name, module in model.named_modules():
        if isinstance(module, nn.TransformerEncoderLayer) and not layers.isdisjoint(module.modules()):
            module.activation_relu_or_gelu = 0  # torch takes that path only for these two activations
            left.append(name or _ROOT)
        elif isinstance(module, nn.TransformerEncoder) and not layers.isdisjoint(module.modules()):
            module.use_nested_tensor = False  # only that path computes with nested tensors
    said = f"torch's fast path in evaluation is off: it never calls the layers of {', '.join(in_short(left))}"
    return [said] if left else []


@dataclass(frozen=True, kw_only=True)
class Survey:
    """What ``survey`` found.

    ``linears``: the layers that can follow a recipe; ``experts``: module, parameter and number of each expert
    that can; ``places``: of both; ``matrices``: those layers and
    everything else that may enter a GEMM. ``notes``: more that the user should know, in words.
    """

    linears: dict[str, nn.Linear]
    experts: dict[str, tuple[nn.Module, str, int]]
    places: dict[str, LayerPlace]
    matrices: tuple[Matrix, ...]
    notes: tuple[str, ...]


def survey(model: nn.Module, reach: Collection[type[nn.Linear]] = ()) -> Survey:
    """Find the matrices of a model, in the model's order. ``reach``: subclasses that may follow a recipe.

    Raises:
        ValueError: a layer follows a recipe already.
    """
    names: dict[nn.Module, list[str]] = {}  # at all places
    outputs: set[object] = set()  # what the model or a part of it calls its output layer
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(name or _ROOT)
        if callable(find_output := getattr(module, "get_output_embeddings", None)):
            try:
                outputs.add(find_output())
            except NotImplementedError:  # transformers declares it for models without one, too
                continue
    outputs.discard(None)
    if done := [known[0] for module, known in names.items() if isinstance(module, QuantLinear)]:
        raise ValueError(f"layer {done[0]} follows a recipe already (apply_recipe takes each layer once)")
    parts = {part for module in names if isinstance(module, nn.Linear) for part in module.modules()}
    linears: dict[str, nn.Linear] = {}
    experts: dict[str, tuple[nn.Module, str, int]] = {}
    matrices: list[Matrix] = []
    tables = []
    for module, (name, *also) in names.items():
        if isinstance(module, nn.Linear):
            by_name = name.rpartition(".")[2] in _HEADS and block_of(name) is None
            matrix = Matrix(
                name=name,
                elements=module.in_features * module.out_features,
                is_head=module in outputs if outputs else by_name,
                also=tuple(also),
                out_of_reach=_why_not(module, reach),
            )
            matrices.append(matrix)
            if matrix.out_of_reach is None:
                linears[name] = module
        elif isinstance(module, nn.Embedding | nn.EmbeddingBag):
            tables.append(f"{name} ({_type_name(module)})")
        elif held := expert_parameters(module):
            for own, parameter in held.items():
                count, height, width = parameter.shape
                for index in range(count):
                    matrix = Matrix(name=f"{name}.{own}.{index}", elements=height * width)
                    matrices.append(matrix)
                    experts[matrix.name] = (module, own, index)
        elif module not in parts and not isinstance(module, nn.LayerNorm | nn.RMSNorm):
            for own, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
                unknown = is_lazy(parameter)
                if unknown or sum(size > 1 for size in parameter.shape) >= 2:
                    matrix = Matrix(
                        name=own if module is model else f"{name}.{own}",
                        elements=0 if unknown else parameter.numel(),
                        out_of_reach=f"{_type_name(module)} holds it, which is no torch.nn.Linear",
                    )
                    matrices.append(matrix)
    return Survey(
        linears=linears,
        experts=experts,
        places=places((*linears, *experts), heads={matrix.name for matrix in matrices if matrix.is_head}),
        matrices=tuple(matrices),
        notes=(f"no product is assumed with: {', '.join(in_short(tables))}",) if tables else (),
    )


def _why_not(linear: nn.Linear, reach: Collection[type[nn.Linear]] = ()) -> str | None:
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
    if kind is not nn.Linear and kind in reach:
        if differs := _difference(linear):
            return f"{_type_name(linear)} computes something else: {differs}"
    elif kind is not nn.Linear:
        return f"a subclass of torch.nn.Linear ({_type_name(linear)}), which may compute something else"
    if "forward" in vars(linear):
        return "its forward was replaced"
    needed = QuantLinear.OWN_ATTRIBUTES | vars(QuantLinear).keys()
    taken = sorted(own for own in needed if hasattr(linear, own) and not hasattr(nn.Linear, own))
    return f"it has an attribute of its own, {taken[0]}, that a quantised layer needs" if taken else None


def _difference(linear: nn.Linear) -> str | None:
    """Compare a layer of a subclass with ``functional.linear`` on random operands; None if equal to the bit.

    The layer itself, its hooks and its weights are left alone, which may be sharded.
    """
    device = "cpu" if linear.weight.is_meta else linear.weight.device
    for dtype in (torch.float32, torch.bfloat16):
        sizes = {"x": (3, 5, linear.in_features), "weight": (linear.out_features, linear.in_features)}
        if "bias" in dict(linear.named_parameters()):
            sizes["bias"] = (linear.out_features,)
        generator = torch.Generator(device).manual_seed(0)
        made = {
            name: torch.randn(size, generator=generator, device=device, dtype=dtype)
            for name, size in {**sizes, "dy": (3, 5, linear.out_features)}.items()
        }
        results = []
        for own in (True, False):
            operands = {name: made[name].clone().requires_grad_() for name in sizes}
            if own:
                twin = copy.copy(linear)
                vars(twin)["_parameters"] = {name: operands.get(name) for name in ("weight", "bias")}
                try:
                    y: Any = type(linear).forward(twin, operands["x"])
                except Exception as error:  # whatever its own code raises
                    return f"{type(error).__name__}: {error}"
            else:
                y = functional.linear(operands["x"], operands["weight"], operands.get("bias"))
            y.backward(made["dy"].to(y.dtype))
            results.append({"y": y, **{f"d{name}": operand.grad for name, operand in operands.items()}})
        for name, found in results[0].items():
            expected = results[1][name]
            if found is None or found.dtype != expected.dtype or not torch.equal(found, expected):
                return f"its {name} differs from that of functional.linear in {dtype}"
    return None


def _type_name(module: nn.Module) -> str:
    kind = type(module)
    where = "torch.nn" if kind.__module__.startswith("torch.nn.") else kind.__module__
    return f"{where}.{kind.__qualname__}"


def convert_conv1d(model: nn.Module) -> list[str]:
    """Replace each ``Conv1D`` of transformers (GPT-2's) by an equal linear layer, in place; return names.

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
