"""Apply a recipe to any model: its linear layers become quantised ones, in place.

A layer can follow a recipe if it is a ``torch.nn.Linear``, or of a subclass that the user names, and
computes as that class does;
a hook may compute its weight (weight_norm, spectral_norm, pruning). Any other parameter with two dimensions
may enter a GEMM that no recipe reaches: it is named with the reason. Embeddings and norms enter no GEMM:
tables are looked up, and norms multiply element by element.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, finalize, ref

import torch
from torch import distributed, nn
from torch.nn import functional
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized
from torch.optim.optimizer import register_optimizer_step_post_hook

from ablate.backends.select import Selection
from ablate.base.errors import likely
from ablate.layers.beside import WatchedWeights
from ablate.layers.deoscillation import Deoscillation
from ablate.layers.experts import ExpertLinear, expert_parameters, take_over
from ablate.layers.linear import (
    QuantLinear,
    phases_that_fit,
    quantised_layers,
    weights_used_beside,
)
from ablate.layers.state import RecipeState
from ablate.recipes import Recipe, read_recipe
from ablate.recipes.coverage import WeightMatrix, coverage_faults, coverage_of, in_short
from ablate.recipes.place import LayerPlace, block_of, places, rule_faults

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

    from torch import Tensor
    from torch.optim import Optimizer

_HEADS = ("lm_head", "head", "output", "embed_out", "score", "classifier")
_ROOT = "model"
"""The name of a layer that is itself the model."""

_STEPS_WITHOUT_ADVANCE = 10
"""Optimizer steps after which a state should have advanced. An optimizer made of others counts some twice."""


def apply_recipe(
    model: nn.Module,
    recipe: Recipe | str | dict[str, Any],
    *,
    seed: int = 0,
    backend: str = "auto",
    total_tokens: int | None = None,
    skip: Collection[str] | str = (),
    allow: Collection[str] | str = (),
    reach: Collection[type[nn.Linear] | str] = (),
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
    stays in ``state.coverage``. Out of reach are subclasses of ``nn.Linear`` that ``reach`` does not name, the
    projections inside ``nn.MultiheadAttention``, and parameters with two dimensions that no linear layer
    holds; they are refused unless ``allow`` names them. When the state first advances, it warns of products
    with the weight of a layer beside the layer (see ``ablate.layers.beside``). Torch's own such path, that of
    ``nn.TransformerEncoderLayer`` in evaluation, is switched off.

    >>> import torch
    >>> from ablate.numerics import apply_recipe
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 32))
    >>> state = apply_recipe(model, {"gemms": ["fprop", "wgrad"], "stabiliser": "dht"})
    Fprop, Wgrad: 2 of 2 matrices in low precision, 100.0% of the FLOPs
    Dgrad: 0 of 2 matrices in low precision, 0.0% of the FLOPs
    >>> model(torch.randn(32, 64)).shape
    torch.Size([32, 32])

    Args:
        model: any module; every ``nn.Linear`` in it follows the recipe.
        recipe: a ``Recipe``, or a recipe as in a study file: a word or a mapping.
        seed: seed of stochastic rounding and random signs.
        backend: name of the back end that quantises and multiplies.
        total_tokens: the budget; required by phases that start at a fraction of it.
        skip: names of layers to leave unchanged, or shell patterns of them (``*.router``).
        allow: the same of what the recipe cannot reach and may leave in high precision; ``*`` for all of it.
        reach: subclasses of ``nn.Linear``, or their names, whose layers follow the recipe, too, if they compute
            as ``functional.linear`` does: output and gradients are compared to the bit on random input. Such a
            layer keeps its class's other methods.

    Raises:
        ValueError: no linear layer, one that follows a recipe already, a matrix out of reach that ``allow``
            does not name, a word, pattern or rule that names nothing, rules that leave every layer in high
            precision, or a recipe that contradicts itself. The model is then unchanged.
        TypeError: ``recipe`` is no recipe, word or mapping.
    """
    state = RecipeState(
        recipe=recipe if isinstance(recipe, Recipe) else read_recipe(recipe),
        backend=Selection(backend),
        seed=seed,
        call=None,
        total_tokens=total_tokens,
        replica=None,
    )
    if isinstance(skip, str):
        skip = (skip,)
    if isinstance(allow, str):
        allow = (allow,)
    quantise_layers(model, state, skip=skip, allow=allow, reach=reach)
    if state.deoscillates:
        state.deoscillation = Deoscillation(model, state)
    _expect_advance(state, quantised_layers(model).values())
    state.check = weights_used_beside
    if not distributed.is_initialized() or distributed.get_rank() == 0:
        print(state.coverage)
    return state


def _expect_advance(state: RecipeState, layers: Iterable[QuantLinear]) -> None:
    """Warn if optimizers train these layers and their state never advances; watch no longer than it lives."""
    steps = WeakKeyDictionary[QuantLinear, int]()
    for layer in layers:
        steps[layer] = 0
    state_ref = ref(state)  # a hook that held it would keep it

    def count_step(optimizer: Optimizer, *_: object) -> None:
        # a compiled step is not counted
        if torch.compiler.is_compiling():
            return
        state = state_ref()
        if state is None or state.step:
            return
        trained: set[int] = set()
        for group in optimizer.param_groups:
            trained.update(map(id, group["params"]))
        for layer in steps:
            steps[layer] += id(layer.weight) in trained
        fault = state.fault()
        if fault is not None and _STEPS_WITHOUT_ADVANCE in steps.values():
            state.warn_once(f"this loop {fault}")

    finalize(state, register_optimizer_step_post_hook(count_step).remove)


def quantise_layers(
    model: nn.Module,
    state: RecipeState,
    *,
    skip: Collection[str] = (),
    allow: Collection[str] = (),
    reach: Collection[type[nn.Linear] | str] = (),
    key: str = "allow=",
) -> None:
    """Make a model's layers follow ``state``, as ``apply_recipe`` does; ``key``: how users write allow."""
    recipe = state.recipe
    surveyed = survey(model, reach)
    for fault, hint in coverage_faults(
        recipe, surveyed.matrices, allow=allow, skip=skip, key=key
    ):
        raise ValueError(f"{fault} ({hint})")
    layer_places = dict(surveyed.places)
    for matrix in surveyed.matrices:
        if matrix.named_by(skip):
            layer_places.pop(matrix.name, None)
    if not layer_places:
        raise ValueError(f"no linear layer to replace in {type(model).__name__}")
    for _, fault, hint in rule_faults(recipe, layer_places):
        raise ValueError(f"{fault} ({hint})")
    linears: dict[str, nn.Linear] = {}
    grouped: dict[nn.Module, dict[str, dict[int, ExpertLinear]]] = {}
    for name, place in layer_places.items():
        if name in surveyed.linears:
            linears[name] = surveyed.linears[name]
            _check_phases(linears[name], name, state, place)
            continue
        module, parameter, index = surveyed.experts[name]
        expert = ExpertLinear(
            module, parameter, index, name=name, state=state, place=place
        )
        grouped.setdefault(module, {}).setdefault(parameter, {})[index] = expert
    notes = _leave_fast_paths(model, set(linears.values()))
    for name, linear in linears.items():
        QuantLinear.take_over(linear, name=name, state=state, place=layer_places[name])
    for module, experts in grouped.items():
        take_over(module, experts)
    WatchedWeights(model, state)
    state.coverage = coverage_of(
        recipe,
        surveyed.matrices,
        layer_places,
        skip=skip,
        notes=(*notes, *surveyed.notes),
    )


def _check_phases(
    layer: nn.Linear, name: str, state: RecipeState, place: LayerPlace
) -> None:
    """Raise ``ValueError`` where a layer cannot follow its recipe in one of the phases."""
    phases = phases_that_fit(layer, name, state, place)
    is_low = any(not recipe.fprop.right.is_high_precision for _, recipe in phases)
    is_computed = not isinstance(layer.weight, nn.Parameter)
    if is_low and is_computed and state.deoscillates:
        raise ValueError(
            f"deoscillate resets weights, but that of layer {name} is no parameter of its own "
            f"(give it a rule of its own: layers: [{{match: {name}, recipe: bf16}}])"
        )


def _leave_fast_paths(model: nn.Module, layers: set[nn.Linear]) -> list[str]:
    """Switch off torch's fused evaluation of encoder layers, which reads weights without calling the layers.

    Returns a note for the user, if there was anything to switch off.
    """
    encoder_layers = []
    for name, module in model.named_modules():
        if layers.isdisjoint(module.modules()):
            continue
        if isinstance(module, nn.TransformerEncoderLayer):
            # torch takes that path only for two activations
            module.activation_relu_or_gelu = 0
            encoder_layers.append(name or _ROOT)
        elif isinstance(module, nn.TransformerEncoder):
            # only that path computes with nested tensors
            module.use_nested_tensor = False
    if not encoder_layers:
        return []
    names = ", ".join(in_short(encoder_layers))
    return [
        f"torch's fast path in evaluation is off: it never calls the layers of {names}"
    ]


@dataclass(frozen=True, kw_only=True)
class Survey:
    """What ``survey`` found.

    ``linears``: the layers that can follow a recipe; ``experts``: module, parameter and number of each expert
    that can; ``places``: of both; ``matrices``: those layers and everything else that may enter a GEMM.
    ``notes``: more that the user should know, in words.
    """

    linears: dict[str, nn.Linear]
    experts: dict[str, tuple[nn.Module, str, int]]
    places: dict[str, LayerPlace]
    matrices: tuple[WeightMatrix, ...]
    notes: tuple[str, ...]


def survey(model: nn.Module, reach: Collection[type[nn.Linear] | str] = ()) -> Survey:
    """Find the matrices of a model, in the model's order. ``reach``: subclasses that may follow a recipe.

    Raises:
        ValueError: a layer follows a recipe already.
    """
    names: dict[nn.Module, list[str]] = {}  # at all places
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(name or _ROOT)
    known: set[type | str] = set()
    inside_linears: set[nn.Module] = set()
    for module, (name, *_) in names.items():
        if isinstance(module, QuantLinear):
            raise ValueError(  # noqa: TRY004  no wrong type, but done twice
                f"layer {name} follows a recipe already (apply_recipe takes each layer once)"
            )
        if isinstance(module, nn.Linear):
            known |= _class_names(type(module))
            inside_linears.update(module.modules())
    for wanted in reach:
        if wanted not in known:
            hint = likely(wanted, map(str, known), "expected the class of one")
            raise ValueError(f"reach: '{wanted}' names no linear layer ({hint})")
    outputs = _output_layers(names)
    linears: dict[str, nn.Linear] = {}
    experts: dict[str, tuple[nn.Module, str, int]] = {}
    matrices: list[WeightMatrix] = []
    tables = []
    for module, (name, *other_names) in names.items():
        if isinstance(module, nn.Linear):
            is_head = module in outputs
            if not outputs:
                is_head = name.rpartition(".")[2] in _HEADS and block_of(name) is None
            matrix = WeightMatrix(
                name=name,
                elements=module.in_features * module.out_features,
                is_head=is_head,
                also=tuple(other_names),
                out_of_reach=_why_not(module, reach),
            )
            matrices.append(matrix)
            if matrix.out_of_reach is None:
                linears[name] = module
        elif isinstance(module, nn.Embedding | nn.EmbeddingBag):
            tables.append(f"{name} ({_type_name(module)})")
        elif stacks := expert_parameters(module):
            for parameter_name, stack in stacks.items():
                count, height, width = stack.shape
                for index in range(count):
                    expert = f"{name}.{parameter_name}.{index}"
                    matrices.append(WeightMatrix(name=expert, elements=height * width))
                    experts[expert] = (module, parameter_name, index)
        elif module not in inside_linears and not isinstance(
            module, nn.LayerNorm | nn.RMSNorm
        ):
            prefix = "" if module is model else f"{name}."
            matrices += _unreached(module, prefix)
    heads = {matrix.name for matrix in matrices if matrix.is_head}
    notes: tuple[str, ...] = ()
    if tables:
        notes = (f"no product is assumed with: {', '.join(in_short(tables))}",)
    return Survey(
        linears=linears,
        experts=experts,
        places=places((*linears, *experts), heads=heads),
        matrices=tuple(matrices),
        notes=notes,
    )


def _output_layers(modules: Iterable[nn.Module]) -> set[object]:
    """Collect what the model or a part of it calls its output layer."""
    outputs: set[object] = set()
    for module in modules:
        find_output = getattr(module, "get_output_embeddings", None)
        if callable(find_output):
            try:
                outputs.add(find_output())
            except NotImplementedError:
                # transformers declares it for models without one, too
                continue
    outputs.discard(None)
    return outputs


def _unreached(module: nn.Module, prefix: str) -> Iterator[WeightMatrix]:
    """Yield the parameters with two dimensions that a module holds itself."""
    for name, parameter in module.named_parameters(
        recurse=False, remove_duplicate=False
    ):
        is_unknown = is_lazy(parameter)
        if is_unknown or sum(size > 1 for size in parameter.shape) >= 2:
            yield WeightMatrix(
                name=f"{prefix}{name}",
                elements=0 if is_unknown else parameter.numel(),
                out_of_reach=f"{_type_name(module)} holds it, which is no torch.nn.Linear",
            )


def _why_not(
    linear: nn.Linear, reach: Collection[type[nn.Linear] | str] = ()
) -> str | None:
    """Say why a linear layer cannot follow a recipe; None if it can."""
    kind = type(linear)
    if is_lazy(linear.weight):
        return "it has no weight yet: pass one batch through the model first"
    if is_parametrized(linear):
        return "it is parametrised (torch.nn.utils.parametrize)"
    if kind is NonDynamicallyQuantizableLinear:
        return "torch.nn.MultiheadAttention multiplies by its weight itself"
    if any(base.__name__ == "FSDPModule" for base in kind.__mro__):
        return (
            "fully_shard made it a layer of its own kind: apply the recipe before that"
        )
    if kind is not nn.Linear and _class_names(kind).isdisjoint(reach):
        return (
            f"a subclass of torch.nn.Linear ({_type_name(linear)}), which may compute something else (if not, "
            f"name it in a study by model.reach: [{kind.__qualname__}], in code by reach=[{kind.__qualname__}])"
        )
    if kind is not nn.Linear and (differs := _difference(linear)):
        return f"{_type_name(linear)} computes something else: {differs}"
    if "forward" in vars(linear):
        return "its forward was replaced"
    for attribute in sorted(QuantLinear.OWN_ATTRIBUTES | vars(QuantLinear).keys()):
        if hasattr(linear, attribute) and not hasattr(nn.Linear, attribute):
            return f"it has an attribute of its own, {attribute}, that a quantised layer needs"
    return None


def _class_names(kind: type) -> set[type | str]:
    return {kind, kind.__qualname__, f"{kind.__module__}.{kind.__qualname__}"}


def _difference(linear: nn.Linear) -> str | None:
    """Compare a layer of a subclass with ``functional.linear`` on random operands; None if equal to the bit.

    The layer itself, its hooks and its weights are left alone, which may be sharded.
    """
    device = "cpu" if linear.weight.is_meta else linear.weight.device
    shapes = {
        "x": (3, 5, linear.in_features),
        "weight": (linear.out_features, linear.in_features),
    }
    if "bias" in dict(linear.named_parameters()):
        shapes["bias"] = (linear.out_features,)
    for dtype in (torch.float32, torch.bfloat16):
        generator = torch.Generator(device).manual_seed(0)
        draw = partial(torch.randn, generator=generator, device=device, dtype=dtype)
        operands = {name: draw(shape) for name, shape in shapes.items()}
        dy = draw(3, 5, linear.out_features)
        try:
            results = _forward_and_back(partial(_forward_of, linear), operands, dy)
        except Exception as error:  # whatever its own code raises
            return f"{type(error).__name__}: {error}"
        plain = _forward_and_back(
            lambda tensors: functional.linear(
                tensors["x"], tensors["weight"], tensors.get("bias")
            ),
            operands,
            dy,
        )
        for name, expected in plain.items():
            result = results[name]
            same_type = result is not None and result.dtype == expected.dtype
            if not same_type or not torch.equal(result, expected):
                return f"its {name} differs from that of functional.linear in {dtype}"
    return None


def _forward_of(linear: nn.Linear, operands: Mapping[str, Tensor]) -> Any:
    """Call the forward of a layer's class on other weights."""
    twin = copy.copy(linear)
    vars(twin)["_parameters"] = {
        name: operands.get(name) for name in ("weight", "bias")
    }
    return type(linear).forward(twin, operands["x"])


def _forward_and_back(
    forward: Callable[[Mapping[str, Tensor]], Any],
    operands: Mapping[str, Tensor],
    dy: Tensor,
) -> dict[str, Any]:
    """Return y and the gradients of all operands, by name."""
    tensors = {
        name: operand.clone().requires_grad_() for name, operand in operands.items()
    }
    y = forward(tensors)
    y.backward(dy.to(y.dtype))
    return {"y": y, **{f"d{name}": tensor.grad for name, tensor in tensors.items()}}


def _type_name(module: nn.Module) -> str:
    kind = type(module)
    package = "torch.nn" if kind.__module__.startswith("torch.nn.") else kind.__module__
    return f"{package}.{kind.__qualname__}"


def convert_conv1d(model: nn.Module) -> list[str]:
    """Replace each ``Conv1D`` of transformers (GPT-2's) by an equal linear layer, in place; return names.

    The weights are new parameters, stored as [out, in]: call it before the optimizer is made, and load
    checkpoints of the original before it.
    """
    from transformers.pytorch_utils import Conv1D

    names = []
    for name, layer in list(model.named_modules()):
        if not isinstance(layer, Conv1D):
            continue
        names.append(name)
        inputs, outputs = layer.weight.shape
        linear = nn.Linear(inputs, outputs, device="meta")
        linear.weight = nn.Parameter(layer.weight.detach().t().contiguous())
        linear.bias = layer.bias
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, linear)
    return names
