"""Tokens that a block, tile or Hadamard group does not divide: rows of zeros fill the last one."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from ablate.backends.select import Selection, load_backend
from ablate.layers.linear import QuantLinear
from ablate.layers.state import RecipeState
from ablate.numerics import apply_recipe
from ablate.recipes import GEMMS, PRESETS, RecipeSpec, resolve, token_group

ALL = list(GEMMS)
RECIPES = {
    **{name: dataclasses.replace(preset.recipe, rules=(), phases=()) for name, preset in PRESETS.items()
       if name != "llm-fp4-e3m0"},
    "tiles of x": resolve(RecipeSpec(gemms=["fprop"], fprop={"x": {"block": "32x32"}})),
    "tiles of dy": resolve(RecipeSpec(gemms=["dgrad"], dgrad={"dy": {"block": "32x32"}})),
    "groups of 256": resolve(RecipeSpec(gemms=["wgrad"], stabiliser="sr+rht", hadamard_size=256)),
    "double, over tiles": resolve(RecipeSpec(
        gemms=ALL, stabiliser="sr", fprop={"x": {"block": "32x32"}}, wgrad={"x": {"source": "forward"}})),
}  # fmt: skip
ROWS = (1, 40)


def run(recipe, x, dy, backend="emulated"):
    """Return y, dx and dw of a layer with 128 in-features and 256 out-features."""
    state = RecipeState(recipe=recipe, backend=Selection(backend), seed=3, step=5)
    weight = torch.randn(256, 128, generator=torch.Generator().manual_seed(1))
    layer = QuantLinear(128, 256, name="a", state=state, weight=torch.nn.Parameter(weight))
    x = x.clone().requires_grad_()
    y = layer(x)
    y.backward(dy)
    return y.detach(), x.grad, layer.weight.grad


def data(rows):
    generator = torch.Generator().manual_seed(0)
    x, dy = torch.randn(rows, 128, generator=generator), torch.randn(rows, 256, generator=generator)
    return x.to(torch.bfloat16), dy.to(torch.bfloat16)


@pytest.mark.parametrize(
    ("name", "backend"),
    [*((name, "emulated") for name in RECIPES), ("quartet", "reference"), ("tiles of x", "reference")],
)
def test_the_result_is_that_of_the_same_tokens_and_zeros(name, backend):
    recipe = RECIPES[name]
    for rows in ROWS:
        x, dy = data(rows)
        fill = (0, 0, 0, -rows % token_group(recipe))
        y, dx, dw = run(recipe, F.pad(x, fill), F.pad(dy, fill), backend)
        assert not y[rows:].any()
        assert not dx[rows:].any()
        for ours, filled in zip(run(recipe, x, dy, backend), (y[:rows], dx[:rows], dw), strict=True):
            assert torch.equal(ours, filled)


def test_only_what_needs_it_is_filled(monkeypatch):
    assert token_group(resolve(RecipeSpec())) == token_group(resolve(RecipeSpec(gemms=["fprop"]))) == 1
    assert token_group(resolve(RecipeSpec(gemms=["dgrad"]))) == 1
    assert token_group(resolve(RecipeSpec(gemms=["wgrad"]))) == 32
    assert token_group(RECIPES["deepseek-v3-fp8"]) == 128
    seen = []
    backend = load_backend("emulated")
    original = backend.quantize
    monkeypatch.setattr(
        backend, "quantize", lambda x, draw, *, axis: seen.append(len(x)) or original(x, draw, axis=axis)
    )
    run(resolve(RecipeSpec(gemms=["fprop", "dgrad"])), *data(40))
    assert set(seen) == {40, 256}  # tokens; the weight's rows


def test_no_tokens_give_zeros():
    for name in ("bf16", "tseng", "deepseek-v3-fp8"):
        recipe = RECIPES.get(name) or resolve(RecipeSpec())
        y, dx, dw = run(recipe, *data(0))
        assert y.shape == (0, 256)
        assert dx.shape == (0, 128)
        assert not dw.any()


@pytest.mark.parametrize(
    ("sizes", "recipe", "said"),
    [
        (
            (48, 64),
            {"gemms": ["fprop"]},
            "in-features 48 of layer 0 is not a multiple of 32, as Fprop needs it",
        ),
        (
            (64, 48),
            {"gemms": ["dgrad"]},
            "out-features 48 of layer 0 is not a multiple of 32, as Dgrad needs it",
        ),
        (
            (64, 96),
            "deepseek-v3-fp8",
            "in-features 64 of layer 0 is not a multiple of 128, as Fprop needs it",
        ),
        ((64, 48), {"gemms": ["fprop"], "fprop": {"w": {"block": "32x32"}}}, "out-features 48 of layer 0"),
        ((48, 64), {"phases": [{"from_tokens": 9, "recipe": "mxfp4"}]}, "in-features 48 of layer 0"),
    ],
)
def test_features_that_do_not_fit_are_refused_when_the_layer_is_made(sizes, recipe, said):
    model = torch.nn.Sequential(torch.nn.Linear(*sizes))
    with pytest.raises(ValueError, match=said):
        apply_recipe(model, recipe)
    apply_recipe(model, {"gemms": ["wgrad"]})
