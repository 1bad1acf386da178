"""Predicted harm against the gradients of models built with that one GEMM quantised."""

import numpy as np
import pytest

from ablate.diagnose.ranking import layer_gemms, predict_harm
from ablate.layers.linear import quantised_layers
from ablate.recipes import PRESETS, RecipeSpec, resolve
from ablate.run.config import DataConfig, ModelConfig, RunConfig, TrainingConfig
from ablate.train.loop import assemble, gradients

ALL = ["fprop", "dgrad", "wgrad"]
WINDOW = np.random.default_rng(0).integers(0, 64, (4, 33))
DOWN = "blocks.1.ffn.down"


def trainee_of(recipe):
    config = RunConfig(
        model=ModelConfig(width=64, layers=2, heads=2, ffn=96), data=DataConfig(), data_digest="x",
        vocab_size=64, training=TrainingConfig(seq_len=32, batch_size=4),
        recipe=recipe if not isinstance(recipe, dict) else resolve(RecipeSpec(**recipe)),
        backend="emulated", seed=1,
    )  # fmt: skip
    return assemble(config, "cpu")


def gradient(trainee, step=0):
    trainee.state.step = step
    trainee.network.module.zero_grad(set_to_none=True)
    loss, _ = gradients(trainee, WINDOW, None)
    flat = [p.grad.double().flatten().numpy() for p in trainee.network.module.parameters()]
    return np.concatenate(flat), loss


def only(gemm, stabiliser):
    """Build the recipe that quantises one GEMM of one layer, by rules."""
    return {"layers": [{"match": DOWN, "recipe": {"gemms": [gemm], "stabiliser": stabiliser}}], "gemms": []}


def harms(recipe, names, draws=3):
    trainee = trainee_of(recipe)
    gemms = layer_gemms(trainee, names, draws=draws)
    passes = []
    found = predict_harm(trainee, WINDOW, gemms, draws=draws, done=passes.append)
    assert sum(passes) == 1 + sum(one.draws for one in gemms)
    return trainee, found


@pytest.mark.parametrize("gemm", ALL)
@pytest.mark.parametrize("stabiliser", ["none", "sr"])
def test_harm_is_what_a_model_with_that_gemm_alone_quantised_shows(gemm, stabiliser):
    _, found = harms({"gemms": ALL, "stabiliser": stabiliser}, [DOWN])
    one = next(one for one in found if one.gemm == gemm)
    exact, exact_loss = gradient(trainee_of({}))
    alone = trainee_of(only(gemm, stabiliser))
    draws = 1 if stabiliser == "none" else 3
    measured = [gradient(alone, step) for step in range(draws)]
    errors = np.array([g - exact for g, _ in measured])
    total = (errors**2).sum(1).mean() / (exact**2).sum()
    variance = errors.var(0, ddof=1).sum() / (exact**2).sum() if draws > 1 else 0.0
    assert one.draws == draws
    assert one.random == pytest.approx(variance, rel=1e-3, abs=1e-9)
    assert one.harm == pytest.approx(total - variance, rel=1e-3, abs=1e-6)
    assert one.loss_change == pytest.approx(np.mean([loss for _, loss in measured]) - exact_loss, abs=1e-6)
    assert total > 1e-5
    assert (one.loss_change != 0) == (gemm == "fprop")
    assert one.diagnosis.gemm == gemm


def test_the_worst_comes_first_and_nothing_is_left_behind():
    trainee, found = harms({"gemms": ALL}, [DOWN, "blocks.0.attention.qkv"])
    assert len(found) == 6
    assert [one.harm for one in found] == sorted((one.harm for one in found), reverse=True)
    assert trainee.state.tap is None
    after, _ = gradient(trainee)
    trainee_again = trainee_of({"gemms": ALL})
    trainee_again.network.module.eval()
    before, _ = gradient(trainee_again)
    assert np.array_equal(before, after)


def test_a_layer_is_quantised_alone_whichever_came_before():
    _, found = harms({"gemms": ALL}, ["blocks.0.attention.qkv", DOWN])
    _, alone = harms({"gemms": ALL}, [DOWN])
    assert {one.gemm: one.harm for one in found if one.layer == DOWN} == {one.gemm: one.harm for one in alone}


def test_layers_that_stay_in_high_precision_have_no_cells():
    trainee = trainee_of({"gemms": ["wgrad"], "layers": [{"first": 1, "recipe": "bf16"}]})
    gemms = layer_gemms(trainee, list(quantised_layers(trainee.network.module)), draws=2)
    assert {one.layer.name.split(".")[1] for one in gemms} == {"1"}
    assert {one.gemm for one in gemms} == {"wgrad"}


@pytest.mark.parametrize("name", ["tetrajet", "te-hybrid-fp8-delayed"])
def test_double_quantisation_and_delayed_scales(name):
    _, found = harms(PRESETS[name].recipe, [DOWN], draws=2)
    assert len(found) == 3
    assert all(one.harm is not None and one.diagnosis.product.relative_error > 0.01 for one in found)
