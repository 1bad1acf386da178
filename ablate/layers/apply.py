"""Apply a recipe to any model: replace its linear layers in place by quantised ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter
from torch import nn

from ablate.backends.select import Selection
from ablate.layers.linear import QuantLinear
from ablate.layers.state import RecipeState
from ablate.recipes import Recipe, RecipeSpec, expand_word, resolve
from ablate.recipes.place import idle_rules, never_runs, places

if TYPE_CHECKING:
    from collections.abc import Collection

    from ablate.recipes.place import LayerPlace

_HEADS = ("lm_head", "head", "output", "embed_out", "score", "classifier")


def apply_recipe(
    model: nn.Module,
    recipe: Recipe | str | dict[str, Any],
    *,
    seed: int = 0,
    backend: str = "auto",
    total_tokens: int | None = None,
    skip: Collection[str] = (),
) -> RecipeState:
    """Replace the linear layers of a model in place, and return the state that the training loop advances.

    Parameters stay the same objects, so optimizers, tied weights and wrappers (DDP, ``fully_shard``,
    ``torch.compile``) keep working, whether made before or after. Call ``state.advance(tokens)`` once after
    each optimizer step: signs per step, phases and delayed scales depend on it. Forward passes within a step
    are counted automatically, and those of evaluation (``model.eval()``) separately. The head (``lm_head``
    and similar names) keeps high precision unless a rule of the recipe matches it.

    >>> import torch
    >>> from ablate.numerics import apply_recipe
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 32))
    >>> state = apply_recipe(model, {"gemms": ["fprop", "wgrad"], "stabiliser": "dht"})
    >>> model(torch.randn(32, 64)).shape
    torch.Size([32, 32])

    Args:
        model: any module; every ``nn.Linear`` in it is replaced, but no subclass of it.
        recipe: a ``Recipe``, or a recipe as in a study file: a word or a mapping.
        seed: seed of stochastic rounding and random signs.
        backend: name of the back end that quantises and multiplies.
        total_tokens: the budget; required by phases that start at a fraction of it.
        skip: names of layers to leave unchanged.

    Raises:
        ValueError: no linear layer to replace, a rule that matches none, rules that leave every layer in high
            precision, or a recipe that contradicts itself.
    """
    if not isinstance(recipe, Recipe):
        recipe = resolve(TypeAdapter(RecipeSpec).validate_python(expand_word(recipe)))
    state = RecipeState(
        recipe=recipe, backend=Selection(backend), seed=seed, call=None, total_tokens=total_tokens
    )
    quantise_layers(model, state, skip=skip)
    return state


def linear_places(model: nn.Module, skip: Collection[str] = ()) -> dict[str, LayerPlace]:
    """Return the linear layers of a model that can follow a recipe, with the head marked.

    Raises:
        ValueError: the model has no such layer.
    """
    linears = {
        name: module
        for name, module in model.named_modules()
        if type(module) is nn.Linear and name not in skip
    }
    if not linears:
        raise ValueError(f"no linear layer to replace in {type(model).__name__}")
    find_output = getattr(model, "get_output_embeddings", None)
    output = find_output() if callable(find_output) else None
    heads = [
        name for name, linear in linears.items() if linear is output or name.rsplit(".", 1)[-1] in _HEADS
    ]
    return places(linears, heads=heads)


def quantise_layers(model: nn.Module, state: RecipeState, *, skip: Collection[str] = ()) -> None:
    """Replace the linear layers of a model in place by layers that follow ``state``, as ``apply_recipe``."""
    where = linear_places(model, skip)
    if idle := idle_rules(state.recipe, where.values()):
        named = [f"'{rule.match}'" if rule.match else "the head" for rule in idle]
        raise ValueError(
            f"a rule names no layer: {', '.join(named)} (the layers are {', '.join(list(where)[:4])}, …)"
        )
    if never_runs(state.recipe, where.values()):
        raise ValueError(
            f"the recipe's rules keep all {len(where)} linear layers in high precision: give it rules for a "
            "model of this depth"
        )
    for name, place in where.items():
        linear = model.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        quantised = QuantLinear(
            linear.in_features, linear.out_features, name=name, state=state, place=place,
            weight=linear.weight, bias=linear.bias,
        )  # fmt: skip
        quantised.train(linear.training)
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, quantised)
