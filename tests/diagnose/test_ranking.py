"""Predicted harm against the gradients of models built with that one GEMM quantised."""

import numpy as np
import pytest

from ablate.diagnose.ranking import layer_gemms, predict_harm
from ablate.train.step import assemble, gradients

ALL = ["fprop", "dgrad", "wgrad"]
WINDOW = np.random.default_rng(0).integers(0, 64, (4, 33))
DOWN = "blocks.1.ffn.down"


@pytest.fixture
def trainee_of(make_config):
    def make(recipe):
        return assemble(make_config(recipe, batch_size=4, seed=1), "cpu")

    return make


def gradient(trainee, step=0):
    trainee.state.step = step
    trainee.module.zero_grad(set_to_none=True)
    loss, _ = gradients(trainee, WINDOW)
    flat = [p.grad.double().flatten().numpy() for p in trainee.module.parameters()]
    return np.concatenate(flat), loss


@pytest.fixture
def harms(trainee_of):
    def find(recipe, names, draws=3):
        trainee = trainee_of(recipe)
        passes = []
        gemms = layer_gemms(trainee, names, draws=draws)
        ranked = predict_harm(trainee, WINDOW, gemms, done=passes.append)
        assert sum(passes) == 1 + sum(count for *_, count in gemms)
        return trainee, ranked

    return find


@pytest.mark.parametrize("gemm", ALL)
@pytest.mark.parametrize("stabiliser", ["none", "sr"])
def test_harm_is_what_a_model_with_that_gemm_alone_quantised_shows(
    harms, trainee_of, gemm, stabiliser
):
    _, ranked = harms({"gemms": ALL, "stabiliser": stabiliser}, [DOWN])
    harm = next(harm for harm in ranked if harm.gemm == gemm)
    exact, exact_loss = gradient(trainee_of({}))
    # one GEMM of one layer, by a rule
    rule = {"match": DOWN, "recipe": {"gemms": [gemm], "stabiliser": stabiliser}}
    alone = trainee_of({"gemms": [], "layers": [rule]})
    draws = 1 if stabiliser == "none" else 3
    measured = [gradient(alone, step) for step in range(draws)]
    errors = np.array([g - exact for g, _ in measured])
    total = (errors**2).sum(1).mean() / (exact**2).sum()
    variance = 0.0
    if draws > 1:
        variance = errors.var(0, ddof=1).sum() / (exact**2).sum()
    assert harm.draws == draws
    assert harm.random == pytest.approx(variance, rel=1e-3, abs=1e-9)
    assert harm.harm == pytest.approx(total - variance, rel=1e-3, abs=1e-6)
    mean_loss = np.mean([loss for _, loss in measured])
    assert harm.loss_change == pytest.approx(mean_loss - exact_loss, abs=1e-6)
    assert total > 1e-5
    assert (harm.loss_change != 0) == (gemm == "fprop")
    assert harm.diagnosis["gemm"] == gemm


def test_the_worst_comes_first_each_is_quantised_alone_and_nothing_is_left_behind(
    harms, trainee_of
):
    trainee, ranked = harms({"gemms": ALL}, ["blocks.0.attention.qkv", DOWN])
    assert len(ranked) == 6
    assert ranked == sorted(ranked, key=lambda harm: harm.harm, reverse=True)
    _, alone = harms({"gemms": ALL}, [DOWN])
    assert [harm for harm in ranked if harm.layer == DOWN] == alone
    assert trainee.state.tap is None
    assert trainee.module.training
    untouched = trainee_of({"gemms": ALL})
    assert np.array_equal(gradient(trainee)[0], gradient(untouched)[0])


@pytest.mark.parametrize("name", ["tetrajet", "te-hybrid-fp8-delayed"])
def test_double_quantisation_and_delayed_scales(harms, name):
    _, ranked = harms(name, [DOWN], draws=2)
    assert len(ranked) == 3
    for harm in ranked:
        assert harm.harm is not None
        assert 0.01 < harm.diagnosis["product"]["relative_error"] < 0.3
