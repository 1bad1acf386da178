"""Weight de-oscillation, held to the formula in numpy."""

import math

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from ablate.layers.apply import apply_recipe
from ablate.numerics import OperandPolicy, fake_quantize

FP4 = {"gemms": ["fprop", "dgrad", "wgrad"]}
ALWAYS = {"window": 2, "threshold": 1e-9}


def mxfp4(w):
    """Quantise fp32 [N, K] as the forward pass does: bf16, then MXFP4."""
    return fake_quantize(
        torch.from_numpy(w).bfloat16().float(), OperandPolicy(format="mxfp4")
    ).numpy()


class Reference:
    """The formula, a weight at a time in the order of the steps."""

    def __init__(self, window, threshold, kept):
        self.window, self.threshold, self.kept = window, np.float32(threshold), kept
        self.path = []

    def step(self, w):
        """Return the weights after a step, and how many were reset."""
        self.path.append(w.copy())
        if len(self.path) <= self.window:
            return w, 0
        path = np.array(self.path)
        grid = np.array([mxfp4(one) for one in path])
        moved, quantised_moved = (
            np.add.accumulate(
                np.abs(np.diff(one.astype(self.kept), axis=0)).astype(np.float32),
                axis=0,
                dtype=np.float32,
            )[-1]
            for one in (path, grid)
        )
        with np.errstate(divide="ignore", invalid="ignore"):
            oscillates = (moved > 0) & (quantised_moved / moved >= self.threshold)
        w = np.where(oscillates, grid[-1], w)
        self.path = [w.copy()]
        return w, int(oscillates.sum())


def make(recipe, *layers, **options):
    torch.manual_seed(0)
    model = nn.Sequential(*(layers or (nn.Linear(64, 96), nn.Linear(96, 32))))
    return model, apply_recipe(model, recipe, **options)


def walk(model, size=0.5):
    """Move the weights as an optimizer would: a little to and fro, some not at all; return them."""
    for layer in model:
        change = torch.randn(layer.weight.shape) * size
        with torch.no_grad():
            layer.weight.add_(torch.where(torch.rand(change.shape) < 0.3, 0, change))
    return [layer.weight.detach().clone() for layer in model]


@pytest.mark.parametrize("kept", ["fp32", "bf16"])
@pytest.mark.parametrize(("window", "threshold"), [(1, 1.0), (3, 2.5), (4, 4.0)])
def test_weights_become_what_the_formula_says(window, threshold, kept):
    asked = {"window": window, "threshold": threshold, "snapshots": kept}
    model, state = make(FP4 | {"deoscillate": asked})
    dtype = ml_dtypes.bfloat16 if kept == "bf16" else np.float32
    references = [Reference(window, threshold, dtype) for _ in model]
    deoscillation, state.deoscillation = state.deoscillation, None
    total = 0
    for index in range(4 * window + 2):
        weights = walk(model, size=0.02)
        state.advance()
        reset_count = deoscillation.step()
        count = 0
        for layer, before, reference in zip(model, weights, references, strict=True):
            expected, resets = reference.step(before.numpy())
            assert np.array_equal(layer.weight.detach().numpy(), expected)
            count += resets
        assert reset_count == (count if index and index % window == 0 else None)
        total += count
    assert 0 < total < 4 * model[0].weight.numel()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "recipe",
    [
        FP4 | {"weight_block": "32x32", "scale": "even"},
        FP4 | {"format": "nvfp4"},
        {"gemms": ["fprop"], "fprop": {"x": {"rounding": "stochastic"}}},
        {"preset": "tetrajet"},
    ],
)
def test_weights_are_set_to_their_own_grid(recipe, dtype):
    model, state = make(recipe | {"deoscillate": ALWAYS}, nn.Linear(64, 96).to(dtype))
    for _ in range(3):
        (before,) = walk(model)
        state.advance()
    grid = fake_quantize(before.bfloat16().float(), state.recipe.fprop.right)
    reset = model[0].weight != before
    assert reset.float().mean() > 0.5
    assert torch.equal(model[0].weight[reset], grid.to(dtype)[reset])


@pytest.mark.parametrize(
    ("more", "changed"),
    [
        # The first window begins with the weights after 300 tokens.
        (
            {"layers": [{"match": "1", "recipe": "bf16"}], "deoscillate": ALWAYS | {"from_tokens": 300}},
            ["", "", "", "", "0", "", "0"],
        ),
        ({"deoscillate": ALWAYS | {"from_fraction": 0.3}}, ["", "", "", "", "01", "", "01"]),
        (
            {"deoscillate": ALWAYS, "phases": [
                {"from_tokens": 200, "recipe": "bf16"},
                {"from_tokens": 400, "recipe": FP4 | {"scale": "even"}},
            ]},
            ["", "", "", "", "", "01", ""],
        ),
    ],
    ids=["tokens, and a layer in bf16", "a fraction", "a phase changes the grid"],
)  # fmt: skip
def test_windows_begin_where_they_are_told_and_anew_with_another_grid(more, changed):
    model, state = make(FP4 | more, total_tokens=1000)
    moved_layers = []
    for _ in changed:
        before = walk(model)
        state.advance(100)
        moved_layers.append("")
        for index, weight in enumerate(before):
            if not torch.equal(model[index].weight, weight):
                moved_layers[-1] += str(index)
    assert moved_layers == changed


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


def test_a_weight_that_two_layers_share_is_followed_once_and_a_frozen_one_not_at_all():
    for rules, followed in (([], "0"), ([{"match": "0", "recipe": "bf16"}], "1")):
        layers = [nn.Linear(64, 64) for _ in range(3)]
        layers[1].weight = layers[0].weight
        layers[2].weight.requires_grad_(False)
        _, state = make(FP4 | {"deoscillate": {}, "layers": rules}, *layers)
        state.advance()
        sums = {f"{followed}.moved", f"{followed}.quantised_moved"}
        assert state.deoscillation.sums.keys() == sums


def test_a_weight_that_a_hook_computes_is_refused_where_it_would_be_reset():
    def hooked(recipe):
        pruned = prune.l1_unstructured(nn.Linear(64, 64), "weight", amount=0.2)
        make(recipe, nn.Linear(64, 64), pruned)

    reset = FP4 | {"deoscillate": {}}
    with pytest.raises(ValueError, match="resets weights, but that of layer 1 is no"):
        hooked(reset)
    hooked(reset | {"layers": [{"match": "1", "recipe": "bf16"}]})
    hooked(FP4)
