"""The diagnosis of a real layer: what is exact, bias and variance, and which streams it draws from."""

import dataclasses
import math

import pytest
import torch
from torch import nn

from ablate.backends.protocol import dequantised
from ablate.diagnose.recorder import Tapped, diagnose_layer
from ablate.layers.linear import AMAX_HISTORY, QuantLinear, product
from ablate.layers.state import EVAL_CALL, Position
from ablate.numerics import apply_recipe
from ablate.recipes import PRESETS, GemmPolicy, OperandPolicy, Recipe

AT = Position(step=3, call=0, tokens=0)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def layer_of(recipe, inputs=64, outputs=96):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(inputs, outputs, bias=False))
    apply_recipe(model, recipe, seed=5, quiet=True)
    assert isinstance(model[0], QuantLinear)
    return model[0]


def tapped_of(layer, tokens=128, sequences=4, at=AT):
    x, dy = normal(tokens, layer.in_features), normal(tokens, layer.out_features, seed=1)
    return Tapped(layer=layer, at=at, dy=dy, x=x, weight=layer.weight.detach().to(torch.bfloat16),
                  sequences=sequences)  # fmt: skip


def diagnosed(recipe, draws=4, **options):
    layer = layer_of(recipe)
    return {one.gemm: one for one in diagnose_layer(tapped_of(layer, **options), draws=draws)}


ALL = ["fprop", "dgrad", "wgrad"]


def test_the_exact_products_are_those_of_the_same_bf16_tensors():
    layer = layer_of({"gemms": ALL})
    tapped = tapped_of(layer)
    x, dy, w = (t.double() for t in (tapped.x, tapped.dy, tapped.weight))
    exact = {"fprop": x @ w.t(), "dgrad": dy @ w, "wgrad": dy.t() @ x}
    for one in diagnose_layer(tapped, draws=2):
        output = product(layer, one.gemm, AT, dy=tapped.dy, x=tapped.x, weight=tapped.weight).double()
        error = output - exact[one.gemm]
        relative = (error.norm() / exact[one.gemm].norm()).item()
        assert one.product.relative_error == pytest.approx(relative, rel=1e-3)
        assert 0.1 < relative < 0.3
        assert one.product.exact_energy == pytest.approx(exact[one.gemm].square().sum().item(), rel=1e-4)


def test_without_randomness_one_draw_and_all_of_the_error_is_bias():
    for recipe in ({"gemms": ALL}, {"gemms": ALL, "stabiliser": "dht"}):
        for one in diagnosed(recipe).values():
            assert (one.product.draws, one.product.bias_share) == (1, 1.0)


def test_stochastic_rounding_that_never_clips_has_next_to_no_bias():
    found = diagnosed({"gemms": ALL, "stabiliser": "sr"}, draws=16)
    for one in found.values():
        assert one.product.draws == 16
        assert abs(one.product.bias_share) < 0.02
        assert one.product.gain == pytest.approx(1, abs=0.01)
        assert all(figures.clipped == 0 for figures in one.operands.values())


def test_stochastic_rounding_of_one_operand_leaves_the_others_bias():
    """NVIDIA's recipe rounds dy alone stochastically: the error of x in Wgrad stays in every draw."""
    recipe = dataclasses.replace(PRESETS["nvidia-nvfp4"].recipe, rules=(), phases=())
    wgrad = diagnosed(recipe, draws=16)["wgrad"]
    # Half of the error's energy is x's, rounded to nearest, and a little more is dy's.
    assert 0.2 < wgrad.product.bias_share < 0.6


def test_signs_that_training_draws_once_count_as_bias_and_those_of_a_step_do_not():
    recipe = {"gemms": ["wgrad"], "stabiliser": "rht"}
    once = diagnosed({**recipe, "signs": "layer"})["wgrad"]
    anew = diagnosed({**recipe, "signs": "step"}, draws=8)["wgrad"]
    assert (once.product.draws, once.product.bias_share) == (1, 1.0)
    assert anew.product.draws == 8
    assert anew.product.bias_share < 0.5


def test_rows_that_the_blocks_do_not_divide_are_filled_up_with_zeros():
    whole = tapped_of(layer_of({"gemms": ALL}), tokens=64, sequences=None)
    part = dataclasses.replace(whole, dy=whole.dy[:50], x=whole.x[:50], layer=layer_of({"gemms": ALL}))
    zeroed = dataclasses.replace(whole, dy=whole.dy.clone(), x=whole.x.clone())
    zeroed.dy[50:], zeroed.x[50:] = 0, 0
    for one, other in zip(diagnose_layer(part, draws=2), diagnose_layer(zeroed, draws=2), strict=True):
        # Products of other sizes are summed in another order on some CPUs.
        assert one.product.relative_error == pytest.approx(other.product.relative_error, rel=1e-6)
        assert one.product.gain == pytest.approx(other.product.gain, rel=1e-6)


def test_of_an_operand_from_the_forward_pass_the_second_quantisation_is_measured():
    plain = OperandPolicy(format="nvfp4")
    rotated = dataclasses.replace(plain, hadamard=16)

    def wgrad_of(source):
        right = dataclasses.replace(rotated, source=source)
        fprop = GemmPolicy(left=plain, right=plain)
        return layer_of(Recipe(fprop=fprop, wgrad=GemmPolicy(left=rotated, right=right)))

    twice = tapped_of(wgrad_of("forward_bf16"))
    forward = dequantised(twice.layer.operand(twice.x, "fprop", "x", AT)).to(torch.bfloat16)
    once = dataclasses.replace(twice, layer=wgrad_of("high_precision"), x=forward)
    found, expected = (
        [one.operands["x"] for one in diagnose_layer(each, draws=2)][-1] for each in (twice, once)
    )
    assert found == expected


def test_gemms_in_high_precision_are_left_out():
    assert list(diagnosed({"gemms": ["wgrad"]})) == ["wgrad"]
    assert diagnosed("bf16") == {}
    assert list(diagnosed({"gemms": [], "rest": "fp8"})) == ALL


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_published_recipe_can_be_diagnosed(name):
    recipe = dataclasses.replace(PRESETS[name].recipe, rules=(), phases=())
    layer = layer_of(recipe, inputs=256, outputs=256)
    for one in diagnose_layer(tapped_of(layer, tokens=256), draws=2):
        assert 0 < one.product.relative_error < 0.6, one
        assert abs(one.product.gain - 1) < 0.2
        for figures in one.operands.values():
            assert figures.relative_error < 0.4
            assert figures.gain == pytest.approx(1, abs=0.15)


def test_draws_of_diagnostics_are_not_trainings():
    layer = layer_of({"gemms": ALL, "stabiliser": "sr+rht"})
    tapped = tapped_of(layer)
    policy = layer.recipe_at(0).wgrad.left
    steps = set()
    for step in (0, 1, 7, 1_000_000):
        for redraw in (1, 2, 1023):
            at = Position(step=step, call=0, tokens=0).redrawn(redraw)
            key = layer.key("wgrad", "dy", policy, at)
            assert key.step >= 1 << 31
            assert key.call == EVAL_CALL
            steps.add(key.step)
    assert len(steps) == 12
    outputs = [
        product(layer, "wgrad", at, dy=tapped.dy, x=tapped.x, weight=tapped.weight)
        for at in (AT, AT.redrawn(1), AT.redrawn(2), AT.redrawn(1))
    ]
    assert torch.equal(outputs[1], outputs[3])
    assert not torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[1], outputs[2])


def test_nothing_is_changed_by_looking_neither_delayed_scales_nor_torchs_generator():
    layer = layer_of("te-hybrid-fp8-delayed")
    layer.get_buffer("amax_history")[:, 2] = 3.0
    layer.get_buffer("amax_step")[:, 2] = 2
    before = {name: buffer.clone() for name, buffer in layer.named_buffers()}
    torch.manual_seed(11)
    state = torch.get_rng_state()
    found = list(diagnose_layer(tapped_of(layer), draws=3))
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(buffer, before[name]) for name, buffer in layer.named_buffers())
    assert before["amax_history"].shape[1] == AMAX_HISTORY + 1
    # The past's largest magnitude, 3, was used: the tensors' own largest values clip.
    assert found[0].operands["x"].clipped > 0


def test_the_noise_of_the_data_is_that_of_the_exact_weight_gradient():
    tapped = tapped_of(layer_of({"gemms": ["wgrad"]}), tokens=256, sequences=8)
    (wgrad,) = diagnose_layer(tapped, draws=2)
    noise = wgrad.data_noise
    dy, x = tapped.dy.double(), tapped.x.double()
    parts = [a.t() @ b for a, b in zip(dy.chunk(4), x.chunk(4), strict=True)]
    energy = sum(parts).square().sum().item()
    assert (noise.sequences, noise.gradient_energy) == (8, pytest.approx(energy, rel=1e-4))
    expected = (4 * sum(part.square().sum().item() for part in parts) - energy) / 3
    assert noise.noise_energy == pytest.approx(expected, rel=1e-4)
    # Random tensors have no signal: nearly all of the gradient is noise.
    assert noise.noise_energy == pytest.approx(energy, rel=0.1)


@pytest.mark.parametrize("sequences", [None, 1, 3])
def test_odd_numbers_of_sequences_give_no_noise_scale(sequences):
    tapped = tapped_of(layer_of({"gemms": ["wgrad"]}), tokens=96, sequences=sequences)
    (wgrad,) = diagnose_layer(tapped, draws=2)
    assert wgrad.data_noise is None


@pytest.mark.parametrize("odd", [0.0, math.nan, math.inf])
def test_odd_tensors_give_figures_that_are_none(odd):
    layer = layer_of({"gemms": ALL, "stabiliser": "sr"})
    tapped = tapped_of(layer)
    tapped.dy.fill_(odd)
    found = {one.gemm: one for one in diagnose_layer(tapped, draws=2)}
    assert found["fprop"].product.relative_error > 0
    assert found["wgrad"].product.relative_error is None
    assert found["wgrad"].product.bias_share is None


def test_a_channel_is_a_feature_in_whichever_gemm_it_stands():
    tapped = tapped_of(layer_of({"gemms": ALL}))
    tapped.x[:, 5] *= 30
    tapped.dy[:, 7] *= 30
    found = {one.gemm: one.operands for one in diagnose_layer(tapped, draws=2)}
    for name, gemms in (("x", ("fprop", "wgrad")), ("dy", ("dgrad", "wgrad"))):
        shares = [found[gemm][name].before for gemm in gemms]
        features = tapped.x.shape[1] if name == "x" else tapped.dy.shape[1]
        assert [one.outlier_share for one in shares] == [pytest.approx(1 / features)] * 2
        assert shares[0].mean_share == pytest.approx(shares[1].mean_share, rel=1e-4)
    assert found["dgrad"]["w"].before.outlier_share == 0
