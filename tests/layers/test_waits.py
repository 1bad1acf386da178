"""Nothing of a layer's forward and backward pass waits for a GPU, or comes to it from the CPU.

The operators run on tensors without values that say they are on a GPU; Triton's kernels are launched as far
as the launch itself, which does nothing.
"""

import dataclasses
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import triton
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ablate.backends import select
from ablate.backends.device import Device
from ablate.backends.emulated import EmulatedBackend
from ablate.backends.triton import launch
from ablate.layers import linear
from ablate.layers import state as state_of_layers
from ablate.layers.plan import work_of_the_host
from ablate.numerics import apply_recipe
from ablate.recipes import GEMMS, PRESETS, RecipeSpec, resolve
from tests.numerics.strategies import normal
from tests.tensors import assert_same

RECIPES = {
    name: dataclasses.replace(preset.recipe, rules=(), phases=())
    for name, preset in PRESETS.items()
}
for stabiliser in ("none", "sr", "dht", "sr+rht"):
    RECIPES[stabiliser] = resolve(RecipeSpec(gemms=GEMMS, stabiliser=stabiliser))
RECIPES["bf16"] = resolve(RecipeSpec())
BY_PLAIN_TORCH = {
    "tseng-code", "alto-amdfp4", "quartet-code", "tetrajet2", "fouroversix-if4", "fouroversix-wgrad-nvint4",
}  # fmt: skip
"""Recipes with a policy that Triton's kernels refuse, or a way back through signs that are drawn."""


class FromTheCpu(TorchDispatchMode):
    """Notes operators that read a number from a GPU, move a tensor to or from it, or compute on the CPU."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, _types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        leaves = tree_leaves((args, kwargs, out))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        devices = {tensor.device.type for tensor in tensors}
        # the position, and constants of a policy
        are_small = all(tensor.numel() <= 3 for tensor in tensors)
        reads = func is torch.ops.aten._local_scalar_dense.default and "cuda" in devices
        if reads or ("cpu" in devices and not (are_small and devices == {"cpu"})):
            self.found.append(func.name())
        return out


@pytest.fixture
def gpu(monkeypatch):
    made_up = Device(kind="cuda", arch="sm_90", name="made up")
    for module in (select, launch):
        monkeypatch.setattr(module, "device_of", lambda _: made_up)
    monkeypatch.setattr(launch, "on_device", lambda _: nullcontext())
    monkeypatch.setattr(triton.JITFunction, "run", lambda *_given, **_named: None)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            marks=[pytest.mark.xfail(strict=True, reason="it waits")]
            * (name in BY_PLAIN_TORCH),
        )
        for name in RECIPES
    ],
)
def test_nothing_of_a_layers_pass_comes_from_the_cpu(name):
    with FakeTensorMode():
        model = nn.Sequential(nn.Linear(256, 256, bias=False, device="cuda"))
        state = apply_recipe(model, RECIPES[name], backend="emulated")
        layer, seen = model[0], FromTheCpu()
        state.step, state.call = 5, 0
        x, dy = (
            torch.ones(256, 256, dtype=torch.bfloat16, device="cuda") for _ in range(2)
        )
        with seen, torch.no_grad():
            y, position = linear._fprop._init_fn(x, layer.weight, layer.site)
            assert (position.device.type, position.shape) == ("cpu", (3,))
            # what is without values tells none
            position = SimpleNamespace(tolist=lambda: [5, 0, 0])
            dx, dw = linear._gradients._init_fn(
                dy, x, layer.weight, position, layer.site, True, True
            )
    assert [tensor.device.type for tensor in (y, dx, dw)] == ["cuda"] * 3
    assert seen.found == []


@pytest.mark.parametrize("name", RECIPES)
def test_what_needs_the_cpu_is_known_before_a_run(name):
    assert (work_of_the_host(RECIPES[name]) is not None) == (name in BY_PLAIN_TORCH)


@pytest.mark.parametrize("recipe", ["te-hybrid-fp8-delayed", "sr+rht"])
def test_step_and_call_on_a_device_are_those_of_each_draw(monkeypatch, recipe):
    quantize, draws = EmulatedBackend.quantize, []

    def note(self, x, draw, *, axis):
        draws.append((draw.key, draw.position.tolist()))
        return quantize(self, x, draw, axis=axis)

    def gradients():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        state, found = apply_recipe(model, RECIPES[recipe], seed=3), []
        for step in range(4):
            x = normal(64, 64, seed=step)
            first, second = model(x), model(2 * x)
            # the backward pass draws at the positions of its own forward pass
            state.advance(64)
            second.square().mean().backward()
            first.square().mean().backward()
            found += [parameter.grad.clone() for parameter in model.parameters()]
        return found

    expected = gradients()
    monkeypatch.setattr(EmulatedBackend, "quantize", note)
    monkeypatch.setattr(state_of_layers, "_PLACED_ON", ("cpu",))
    assert_same(gradients(), expected)
    keys = [(key, position) for key, position in draws if key is not None]
    assert all(position == [key.step, key.call] for key, position in keys)
    assert len(keys) == (80 if recipe == "sr+rht" else 0)  # no dx of the first layer
