"""Weight de-oscillation, held to the formula in numpy."""

import copy
import math

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from ablate.layers.apply import apply_recipe
from ablate.layers.deoscillation import Deoscillation
from ablate.numerics import fake_quantize

FP4 = {"gemms": ["fprop", "dgrad", "wgrad"]}


def mxfp4(w):
    """Quantise fp32 [N, K] as the forward pass does: bf16, then MXFP4 by 32 with OCP's scale rule."""
    blocks = w.astype(ml_dtypes.bfloat16).astype(np.float32).reshape(-1, 32)
    amax = np.abs(blocks).max(axis=1, keepdims=True)
    scale = np.exp2(np.floor(np.log2(np.where(amax > 0, amax, 1))) - 2)
    codes = np.clip(blocks / scale, -6, 6).astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
    return (codes * scale).astype(np.float32).reshape(w.shape)


class Reference:
    """The formula, a weight at a time in the order of the steps."""

    def __init__(self, window, threshold):
        self.window, self.threshold = window, np.float32(threshold)
        self.path = []

    def step(self, w):
        """Return the weights after a step, and how many were reset."""
        self.path.append(w.copy())
        if len(self.path) <= self.window:
            return w, 0
        path = np.array(self.path)
        grid = np.array([mxfp4(one) for one in path])
        moved, quantised_moved = (
            np.add.accumulate(np.abs(np.diff(one, axis=0)), axis=0, dtype=np.float32)[-1]
            for one in (path, grid)
        )
        with np.errstate(divide="ignore", invalid="ignore"):
            oscillates = (moved > 0) & (quantised_moved / moved >= self.threshold)
        w = np.where(oscillates, grid[-1], w)
        self.path = [w.copy()]
        return w, int(oscillates.sum())


def walk(model, layers, rng, size=0.02):
    """Move the weights as an optimizer would: a little to and fro, some not at all."""
    for layer in layers:
        weight = layer.weight
        change = rng.normal(0, size, weight.shape).astype(np.float32)
        change[rng.random(weight.shape) < 0.3] = 0
        with torch.no_grad():
            weight.add_(torch.from_numpy(change))


def make(recipe, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 32))
    return model, apply_recipe(model, recipe, **options)


@pytest.mark.parametrize(("window", "threshold"), [(1, 1.0), (3, 2.5), (4, 4.0)])
def test_weights_become_what_the_formula_says(window, threshold):
    model, state = make(FP4 | {"deoscillate": {"window": window, "threshold": threshold}})
    rng = np.random.default_rng(1)
    references = [Reference(window, threshold) for _ in model]
    frozen = model[0].weight[3].clone()
    deoscillation, state.deoscillation = state.deoscillation, None
    total, told = 0, []
    for index in range(4 * window + 2):
        walk(model, model, rng)
        with torch.no_grad():
            model[0].weight[3] = frozen  # these never move
        wanted = [
            one.step(layer.weight.detach().numpy().copy())
            for one, layer in zip(references, model, strict=True)
        ]
        state.advance()
        told.append(deoscillation.step())
        for layer, (weight, _) in zip(model, wanted, strict=True):
            assert np.array_equal(layer.weight.detach().numpy(), weight)
        count = sum(count for _, count in wanted)
        assert told[-1] == (count if index and index % window == 0 else None)
        total += count
    assert 0 < total < 4 * model[0].weight.numel()
    assert torch.equal(model[0].weight[3], frozen)


@pytest.mark.parametrize(
    "recipe",
    [
        FP4 | {"weight_block": "32x32", "scale": "even"},
        FP4 | {"format": "nvfp4"},
        {"gemms": ["fprop"], "fprop": {"x": {"rounding": "stochastic"}}},
        {"preset": "tetrajet"},
    ],
)
def test_weights_are_set_to_their_own_grid(recipe):
    model, state = make(recipe | {"deoscillate": {"window": 2, "threshold": 1e-9}})
    rng = np.random.default_rng(3)
    for _ in range(3):
        walk(model, model, rng, size=0.5)
        before = [layer.weight.detach().clone() for layer in model]
        state.advance()
    policy = state.recipe.fprop.right
    for layer, weight in zip(model, before, strict=True):
        grid = fake_quantize(weight.to(torch.bfloat16).float(), policy, axis=1)
        reset = layer.weight != weight
        assert reset.float().mean() > 0.5
        assert torch.equal(layer.weight[reset], grid[reset])


def test_it_starts_where_it_is_told_and_leaves_what_is_not_quantised_then():
    recipe = FP4 | {
        "layers": [{"match": "1", "recipe": "bf16"}],
        "deoscillate": {"window": 2, "threshold": 1e-9, "from_tokens": 300},
    }
    model, state = make(recipe)
    rng, changed = np.random.default_rng(4), []
    for _ in range(7):
        walk(model, model, rng, size=0.5)
        before = [layer.weight.detach().clone() for layer in model]
        state.advance(100)
        changed.append([not torch.equal(layer.weight, one) for layer, one in zip(model, before, strict=True)])
    # The first window begins with the weights after 300 tokens.
    assert changed == [[False, False]] * 4 + [[True, False], [False, False], [True, False]]


def test_a_window_begins_anew_where_a_phase_changes_the_grid():
    recipe = FP4 | {
        "phases": [
            {"from_tokens": 200, "recipe": "bf16"},
            {"from_tokens": 400, "recipe": FP4 | {"scale": "even"}},
        ],
        "deoscillate": {"window": 2, "threshold": 1e-9},
    }
    model, state = make(recipe)
    rng, changed = np.random.default_rng(5), []
    for _ in range(7):
        walk(model, model, rng, size=0.5)
        before = model[0].weight.detach().clone()
        state.advance(100)
        changed.append(not torch.equal(model[0].weight, before))
    assert changed == [False] * 5 + [True, False]


def test_the_start_may_be_a_fraction_of_the_budget():
    asked = FP4 | {"deoscillate": {"from_fraction": 0.5}}
    _, state = make(asked, total_tokens=1000)
    state.advance(499)
    assert state.deoscillation.tensors() == {}
    state.advance(1)
    assert set(state.deoscillation.tensors()) == {
        f"{n}.{key}" for n in "01" for key in ("moved", "quantised_moved")
    }
    _, state = make(asked)
    with pytest.raises(ValueError, match="total_tokens"):
        state.advance(1)


def test_odd_weights_are_left_alone():
    model, state = make(FP4 | {"deoscillate": {"window": 1, "threshold": 1.0}})
    weight = model[0].weight
    with torch.no_grad():
        weight[0], weight[1, 0], weight[2] = 0.0, math.nan, -0.0
    state.advance()
    with torch.no_grad():
        weight[0, 0] = 1e-45
    before = weight.detach().clone()
    state.advance()
    assert torch.equal(weight.nan_to_num(7), before.nan_to_num(7))


def test_a_restored_window_goes_on_to_the_same_bits():
    asked = FP4 | {"deoscillate": {"window": 4, "threshold": 1.5}}
    rng = np.random.default_rng(6)
    model, state = make(asked)
    for _ in range(7):
        walk(model, model, rng)
        state.advance(10)
    other, again = make(asked)
    other.load_state_dict(model.state_dict())
    saved = copy.deepcopy(state.state_dict())
    again.load_state_dict(saved)
    kept = saved["deoscillation"]
    assert kept["steps"] == 2
    moves = rng.bit_generator.state
    for one, its in ((model, state), (other, again)):
        rng.bit_generator.state = moves
        for _ in range(5):
            walk(one, one, rng)
            its.advance(10)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    smaller = apply_recipe(nn.Sequential(nn.Linear(64, 32)), asked)
    smaller.tokens = 70
    with pytest.raises(ValueError, match=r"of other weights: 1\.moved is in one of them alone"):
        smaller.deoscillation.load_state_dict(kept)


def test_a_weight_that_two_layers_share_is_followed_once_and_a_frozen_one_not_at_all():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64))
    model[1].weight = model[0].weight
    model[2].weight.requires_grad_(False)
    state = apply_recipe(model, FP4 | {"deoscillate": {}})
    state.advance()
    assert set(state.deoscillation.tensors()) == {"0.moved", "0.quantised_moved"}
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    model[1].weight = model[0].weight
    first_in_bf16 = {"layers": [{"match": "0", "recipe": "bf16"}], "deoscillate": {}}
    state = apply_recipe(model, FP4 | first_in_bf16)
    state.advance()
    assert set(state.deoscillation.tensors()) == {"1.moved", "1.quantised_moved"}


def test_a_weight_that_a_hook_computes_is_refused_where_it_would_be_reset():
    def hooked():
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        prune.l1_unstructured(model[1], "weight", amount=0.2)
        return model

    model = hooked()
    with pytest.raises(ValueError, match=r"deoscillate resets weights, but that of layer 1 is no parameter"):
        apply_recipe(model, FP4 | {"deoscillate": {}})
    assert type(model[0]) is nn.Linear
    apply_recipe(hooked(), FP4 | {"deoscillate": {}, "layers": [{"match": "1", "recipe": "bf16"}]})
    apply_recipe(hooked(), FP4)


def test_bf16_master_weights_are_set_to_the_grid_too():
    model = nn.Sequential(nn.Linear(64, 32)).to(torch.bfloat16)
    state = apply_recipe(model, FP4 | {"deoscillate": {"window": 1, "threshold": 1e-9}})
    assert isinstance(state.deoscillation, Deoscillation)
    state.advance()
    with torch.no_grad():
        model[0].weight.mul_(1.25)
    before = model[0].weight.detach().clone()
    state.advance()
    reset = model[0].weight != before
    assert reset.any()
    assert np.array_equal(
        model[0].weight.float().detach()[reset], mxfp4(before.float().numpy())[reset.numpy()]
    )
