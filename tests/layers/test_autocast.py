"""Autocast around a quantised layer changes nothing inside of it."""

import dataclasses

import pytest
import torch

from ablate.backends.select import Selection
from ablate.layers.linear import QuantLinear
from ablate.layers.state import RecipeState
from ablate.recipes import PRESETS, RecipeSpec, resolve

RECIPES = {
    "fp8-rowwise": RecipeSpec(rest="fp8-rowwise"),
    **{name: dataclasses.replace(PRESETS[name].recipe, rules=(), phases=()) for name in
       ("deepseek-v3-fp8", "llm-fp4", "nvidia-nvfp4", "quartet", "tseng")},
}  # fmt: skip


def run(recipe, backend, *, dtype=None, backward_too=True, size=1.0):
    generator = torch.Generator().manual_seed(0)
    state = RecipeState(recipe=recipe, backend=Selection(backend), seed=3)
    weight = torch.nn.Parameter(torch.randn(128, 256, generator=generator))
    layer = QuantLinear(256, 128, name="a", state=state, weight=weight)
    x = (torch.randn(128, 256, generator=generator) * size).to(torch.bfloat16).requires_grad_()
    dy = torch.randn(128, 128, generator=generator).to(torch.bfloat16)
    with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
        y = layer(x)
        if backward_too:
            y.backward(dy)
    if not backward_too:
        y.backward(dy)
    return y.detach(), x.grad, layer.weight.grad


@pytest.mark.parametrize("backward_too", [True, False])
@pytest.mark.parametrize("backend", ["reference", "emulated"])
@pytest.mark.parametrize("name", RECIPES)
def test_autocast_changes_no_bit(name, backend, backward_too):
    recipe = RECIPES[name] if name in PRESETS else resolve(RECIPES[name])
    plain = run(recipe, backend)
    for dtype in (torch.bfloat16, torch.float16):
        for ours, expected in zip(
            run(recipe, backend, dtype=dtype, backward_too=backward_too), plain, strict=True
        ):
            assert ours.dtype == expected.dtype
            assert torch.equal(ours, expected)


def test_what_fp16_cannot_hold_stays_finite_under_its_autocast():
    y, _, _ = run(RECIPES["deepseek-v3-fp8"], "emulated", dtype=torch.float16, size=1e5)
    assert y.dtype == torch.bfloat16
    assert y.abs().max() > 1e6
    assert y.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_inputs_are_rounded_to_bf16_first_and_the_result_is_bf16_under_autocast(dtype):
    recipe = RECIPES["deepseek-v3-fp8"]
    state = RecipeState(recipe=recipe, backend=Selection("emulated"), seed=3)
    layer = QuantLinear(256, 128, name="a", state=state, weight=torch.nn.Parameter(torch.randn(128, 256)))
    x = torch.randn(128, 256).to(dtype)
    plain = layer(x.to(torch.bfloat16))
    assert torch.equal(layer(x), plain.to(dtype))
    for under in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", under):
            assert torch.equal(layer(x), plain)
