"""Apply a recipe to any model: its linear layers become quantised ones, in place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import distributed, nn

from ablate.backends.select import Selection
from ablate.layers.deoscillation import Deoscillation
from ablate.layers.find_matrices import ROOT, survey
from ablate.layers.linear import QuantLinear, phases_that_fit, weights_used_alone
from ablate.layers.state import RecipeState
from ablate.recipes import Recipe, read_recipe
from ablate.recipes.coverage import coverage_faults, coverage_of, in_short
from ablate.recipes.describe import describe_place
from ablate.recipes.place import idle_rules, never_runs

if TYPE_CHECKING:
    from collections.abc import Collection

    from ablate.recipes import LayerRecipe
    from ablate.recipes.place import LayerPlace


def apply_recipe(
    model: nn.Module,
    recipe: Recipe | str | dict[str, Any],
    *,
    seed: int = 0,
    backend: str = "auto",
    total_tokens: int | None = None,
    skip: Collection[str] | str = (),
    allow: Collection[str] | str = (),
    quiet: bool = False,
) -> RecipeState:
    """Make the linear layers of a model follow a recipe; return the state that the training loop advances.

    Layers and parameters stay the same objects, so hooks, optimizers, tied weights and wrappers (DDP,
    ``fully_shard``, ``torch.compile``) keep working, whether made before or after. Call
    ``state.advance(tokens)`` once after each optimizer step: signs per step, phases, delayed scales and
    de-oscillation depend on it. Forward passes within a step are counted automatically, and those of
    evaluation (``model.eval()``) separately. The head (what ``get_output_embeddings()`` returns, else
    ``lm_head`` and similar names outside the blocks) keeps high precision unless a rule of the recipe matches
    it.

    What the recipe reaches, and by name what it does not, is printed and stays in ``state.coverage``. Out of
    reach are subclasses of ``nn.Linear``, the projections inside ``nn.MultiheadAttention``, and parameters
    with two dimensions that no linear layer holds; they are refused unless ``allow`` names them. A module
    that reads the weights of its layers itself, past the layers, is warned of when the state first advances,
    if such a layer never ran, gradients are still there, and the process is alone. Torch's own such path,
    that of ``nn.TransformerEncoderLayer`` in evaluation, is switched off.

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
        quiet: print nothing. Of several processes only the first prints.

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
    quantise_layers(model, state, skip=_listed(skip), allow=_listed(allow))
    if state.deoscillates:
        state.deoscillation = Deoscillation(model, state)
    if not distributed.is_initialized():  # an expert may run in another process alone
        state.check = weights_used_alone
    if not (quiet or (distributed.is_initialized() and distributed.get_rank())):
        print(state.coverage)
    return state


def _listed(names: Collection[str] | str) -> Collection[str]:
    return (names,) if isinstance(names, str) else names


def quantise_layers(
    model: nn.Module,
    state: RecipeState,
    *,
    skip: Collection[str] = (),
    allow: Collection[str] = (),
    key: str = "allow=",
) -> None:
    """Make a model's layers follow ``state``, as ``apply_recipe``; ``key``: how users write ``allow``."""
    found = survey(model)
    for what, hint in coverage_faults(state.recipe, found.matrices, allow=allow, skip=skip, key=key):
        raise ValueError(f"{what} ({hint})")
    unskipped = {matrix.name for matrix in found.matrices if not matrix.named_by(skip)}
    where = {name: place for name, place in found.places.items() if name in unskipped}
    _check_rules(model, state, where)
    for name, place in where.items():
        phases = phases_that_fit(found.linears[name], name, state, place)
        if state.deoscillates and not isinstance(found.linears[name].weight, nn.Parameter):
            _check_no_reset(name, phases)
    notes = _leave_fast_paths(model, {found.linears[name] for name in where})
    for name, place in where.items():
        QuantLinear.take_over(found.linears[name], name=name, state=state, place=place)
    state.coverage = coverage_of(state.recipe, found.matrices, where, skip=skip, notes=(*notes, *found.notes))


def _check_rules(model: nn.Module, state: RecipeState, where: dict[str, LayerPlace]) -> None:
    """Raise ``ValueError`` for a recipe that does not fit these layers, before any of them is changed."""
    if not where:
        raise ValueError(f"no linear layer to replace in {type(model).__name__}")
    if idle := idle_rules(state.recipe, where.values()):
        named = "; ".join(describe_place(rule) for rule in idle)
        raise ValueError(f"a rule names no layer: {named} (the layers are {', '.join(list(where)[:4])}, …)")
    if never_runs(state.recipe, where.values()):
        raise ValueError(
            f"the recipe's rules keep all {len(where)} linear layers in high precision: give it rules for a "
            "model of this depth"
        )


def _check_no_reset(name: str, phases: tuple[tuple[int, LayerRecipe], ...]) -> None:
    """Raise ``ValueError`` where de-oscillation would reset a weight that is computed anew in each pass."""
    if any(not recipe.fprop.right.is_high_precision for _, recipe in phases):
        raise ValueError(
            f"deoscillate resets weights, but that of layer {name} is no parameter: a hook computes it anew "
            f"(give it a rule of its own: layers: [{{match: {name}, recipe: bf16}}])"
        )


def _leave_fast_paths(model: nn.Module, layers: set[nn.Linear]) -> list[str]:
    """Switch off torch's fused evaluation of encoder layers, which reads the weights past the layers."""
    left: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.TransformerEncoderLayer) and not layers.isdisjoint(module.children()):
            module.activation_relu_or_gelu = 0  # torch takes that path for these two activations alone
            left[name or ROOT] = module
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder) and not set(left.values()).isdisjoint(module.layers):
            module.use_nested_tensor = False  # only that path computes with nested tensors
    if not left:
        return []
    return [f"off is torch's fast path in evaluation, which passes layers by: {', '.join(in_short(left))}"]
