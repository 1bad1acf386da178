"""The linear layer against a float64 reference that quantises by the book and places each operand by hand."""

import dataclasses
import re

import pytest
import torch
import torch.nn.functional as F

from ablate.backends.select import Selection
from ablate.layers.linear import QuantLinear
from ablate.layers.state import RecipeState
from ablate.numerics import Key, round_operand
from ablate.numerics.formats import ELEMENTS
from ablate.numerics.rotate import unrotate
from ablate.recipes import (
    GEMMS,
    PRESETS,
    RecipeSpec,
    resolve,
    token_group,
)
from ablate.recipes.place import places
from tests.numerics.strategies import normal
from tests.tensors import assert_same

ALL = list(GEMMS)
NAME = "blocks.0.ffn.down"
TILES = {"x": {"block": "32x32"}}


SPECS = {
    "bf16": {},
    "fp8": {"rest": "fp8"},
    "fp8 rows": {"rest": "fp8-rowwise"},
    **{f"{gemm} alone": {"gemms": [gemm], "rest": "fp8"} for gemm in ALL},
    **{s: {"gemms": ALL, "stabiliser": s} for s in ("none", "sr", "rht", "dht", "sr+rht", "sr+dht")},
    "dht 32": {"gemms": ALL, "stabiliser": "dht", "hadamard_size": 32},
    "tiles of x": {"gemms": ["fprop"], "fprop": TILES},
    "tiles of dy": {"gemms": ["dgrad"], "dgrad": {"dy": {"block": "32x32"}}},
    "groups of 256": {"gemms": ["wgrad"], "stabiliser": "sr+rht", "hadamard_size": 256},
    "double, over tiles": {
        "gemms": ALL, "stabiliser": "sr", "fprop": TILES, "wgrad": {"x": {"source": "forward"}},
    },
    "forward": {
        "gemms": ["fprop"], "format": "nvfp4", "scale": "four_six_mae", "rest": "bf16-dequantised",
        "fprop": {"x": {"scale": "four_six_mae_row"}},
    },
    "forward, rotated": {
        "gemms": ["fprop"], "format": "nvfp4", "stabiliser": "dht", "hadamard_size": 32,
        "rest": "bf16-dequantised",
    },
}  # fmt: skip
RECIPES = {name: resolve(RecipeSpec(**spec)) for name, spec in SPECS.items()}
for preset in PRESETS.values():
    RECIPES[preset.name] = dataclasses.replace(preset.recipe, rules=(), phases=())


def made(name, backend="emulated", **position):
    state = RecipeState(
        recipe=RECIPES[name], backend=Selection(backend), seed=3, **position
    )
    linear = torch.nn.Linear(256, 384, bias=False, device="meta")
    linear.weight = torch.nn.Parameter(normal(384, 256, seed=1))
    return QuantLinear.take_over(
        linear, name=NAME, state=state, place=places([NAME])[NAME]
    )


def data(rows):
    return normal(rows, 256).bfloat16(), normal(rows, 384, seed=2).bfloat16()


def passed(layer, x, dy):
    """Return y, dx and dw."""
    x = x.clone().requires_grad_()
    layer.weight.grad = None
    y = layer(x)
    y.backward(dy)
    return y.detach(), x.grad, layer.weight.grad


def by_the_book(layer, x, dy):
    """Each operand quantised along its own contraction, products and descaling in float64."""
    w = layer.weight.detach().to(torch.bfloat16)
    policies = {
        (gemm, name): policy for gemm, name, policy in layer.recipe_at(0).operands()
    }
    axes = {("fprop", "x"): 1, ("fprop", "w"): 1, ("dgrad", "dy"): 1, ("dgrad", "w"): 0}
    axes |= {("wgrad", "dy"): 0, ("wgrad", "x"): 0}

    def key(gemm, name):
        return Key(seed=3, layer=NAME, gemm=gemm, operand=name, step=11, call=2)

    def rounded(gemm, name, tensor):
        policy = policies[gemm, name]
        # a scale of 1, the first
        amax = ELEMENTS[policy.format].max if policy.scale == "delayed" else None
        return round_operand(
            tensor, policy, axis=axes[gemm, name], key=key(gemm, name), amax=amax
        )

    def value(gemm, name, tensor):
        source = policies[gemm, name].source
        if source != "high_precision":
            tensor = value("fprop", name, tensor).float()
            tensor = tensor.to(torch.bfloat16) if source == "forward_bf16" else tensor
        quantised = rounded(gemm, name, tensor)
        return quantised.values.double() * quantised.descale

    def back(gemm, name, grad, mask):
        """Mask and rotate back what is in the forward's rotated in-features."""
        grad = grad if mask is None else grad * mask
        if policies[gemm, name].source == "high_precision":
            return grad
        policy = policies["fprop", name]
        return unrotate(grad.float(), policy, key("fprop", name)).double()

    y = value("fprop", "x", x) @ value("fprop", "w", w).T
    dx = value("dgrad", "dy", dy) @ value("dgrad", "w", w)
    dw = value("wgrad", "dy", dy).T @ value("wgrad", "x", x)
    dx = back("dgrad", "w", dx, rounded("fprop", "x", x).mask)
    return y, dx, back("wgrad", "x", dw, rounded("fprop", "w", w).mask)


@pytest.mark.parametrize("backend", ["reference", "emulated"])
@pytest.mark.parametrize("name", RECIPES)
def test_three_gemms_by_the_book(name, backend):
    layer, (x, dy) = made(name, backend, step=11, call=2), data(256)
    # not contiguous, three dimensions
    outputs = passed(layer, x.t().contiguous().t()[None], dy[None])
    w = layer.weight.detach().double()
    exact = (x.double() @ w.T, dy.double() @ w, dy.double().T @ x.double())
    for gemm, output, book, reference in zip(
        GEMMS, outputs, by_the_book(layer, x, dy), exact, strict=True
    ):
        rotated_back = layer.recipe_at(0).gemm(gemm).right.source != "high_precision"
        # Where a gradient is rotated back, it was rounded to bf16 before.
        atol = (2**-7 if rotated_back else 1e-5) * book.abs().max()
        product = output.double().view(book.shape)
        assert torch.allclose(product, book, rtol=2**-8, atol=atol), gemm
        # A rotation on one operand alone, a wrong axis or a forgotten factor would give errors near one.
        assert (product - reference).norm() < 0.45 * reference.norm(), gemm
        # truncates; QuEST clips
        low = 0.80 if name.startswith(("rocm", "quartet")) else 0.93
        assert low < (product * reference).sum() / reference.square().sum() < 1.03, gemm


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        *((name, "emulated") for name in RECIPES if name != "llm-fp4-e3m0"),
        *((name, "reference") for name in ("quartet", "tiles of x")),
    ],
)
def test_tokens_that_blocks_do_not_divide_are_filled_up_with_zeros(name, backend):
    layer = made(name, backend, step=5)
    for rows in (1, 40):
        x, dy = data(rows)
        fill = (0, 0, 0, -rows % token_group(RECIPES[name]))
        y, dx, dw = passed(layer, F.pad(x, fill), F.pad(dy, fill))
        assert not y[rows:].any()
        assert not dx[rows:].any()
        layer.forget_amax()
        assert_same(passed(layer, x, dy), (y[:rows], dx[:rows], dw))
    groups = [token_group(RECIPES[f"{gemm} alone"]) for gemm in ("dgrad", "wgrad")]
    assert groups == [1, 32]
    y, dx, dw = passed(layer, *data(0))
    assert (y.shape, dx.shape) == ((0, 384), (0, 256))
    assert not dw.any()


@pytest.mark.parametrize(
    "name", ["deepseek-v3-fp8", "quartet"]
)  # products in fp32, and in bf16
def test_autocast_changes_no_bit(name):
    layer, (x, dy) = made(name), data(128)
    expected = passed(layer, x, dy)
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            assert_same(passed(layer, x, dy), expected)
            assert torch.equal(layer(x.float()), expected[0])
            y = layer(1e5 * x)  # more than fp16 holds
        assert y.dtype == torch.bfloat16
        assert 1e6 < y.abs().max() < torch.inf
    assert torch.equal(layer(x.float()), expected[0].float())
    layer.bias = torch.nn.Parameter(torch.ones(384))
    assert torch.equal(layer(x), expected[0] + layer.bias.to(torch.bfloat16))


def test_backward_uses_the_streams_of_its_own_forward():
    layer, (x, dy) = made("sr"), data(64)
    expected = passed(layer, x, dy)
    layer.weight.grad = None
    y = layer(x)
    layer.state.step, layer.state.call = 99, 7  # the trainer has moved on
    y.backward(dy)
    assert torch.equal(layer.weight.grad, expected[2])


@pytest.mark.parametrize("transform", [torch.func.grad, torch.vmap])
def test_a_transform_of_functions_is_refused_by_name(transform):
    layer, (x, _) = made("none"), data(32)
    refused = "layer blocks.0.ffn.down .* torch.func .* use torch.autograd.grad"
    with pytest.raises(RuntimeError, match=refused):
        transform(lambda v: layer(v).float().sum())(x[None])
    with pytest.raises(RuntimeError, match=refused):
        torch.func.jvp(layer, (x,), (x,))


@pytest.mark.parametrize(
    "x",
    [torch.ones(32, 256).to(torch.int64), torch.ones(2, 32, 48), torch.tensor(1.0)],
    ids=["whole numbers", "width", "scalar"],
)
def test_an_input_that_does_not_fit_is_refused_by_name(x):
    got = f"{x.dtype} {list(x.shape)}".removeprefix("torch.")
    said = f"layer {NAME}: expected x […, 256] of floating point, got {got}"
    with pytest.raises(ValueError, match=re.escape(said)):
        made("none")(x)


@pytest.mark.parametrize(("name", "frozen"), [("none", True), ("quartet", False)])
def test_what_a_backward_pass_quantises(name, frozen):
    """No Wgrad of a frozen weight. Quartet needs w for Dgrad and for the mask of dw: once, and x as well."""
    layer, (x, dy) = made(name), data(64)
    layer.weight.requires_grad_(not frozen)
    y, seen = layer(x.requires_grad_()), []
    layer.state.watch = lambda _layer, gemm, operand, _done: seen.append(
        f"{gemm} {operand}"
    )
    y.backward(dy)
    of_both = ["dgrad dy", "dgrad w", "fprop w", "fprop x", "wgrad dy", "wgrad x"]
    assert sorted(seen) == (of_both[:2] if frozen else of_both)
