"""Experts against their definition written out, one token at a time."""

from dataclasses import replace

import pytest
import torch

from ablate.backends.select import Selection
from ablate.layers.state import RecipeState
from ablate.models.decoder import Decoder
from ablate.recipes import Recipe, read_recipe
from ablate.run.config import ModelConfig
from tests.curves import curve
from tests.numerics.strategies import normal
from tests.tensors import assert_same

SHAPE = ModelConfig(width=64, layers=2, heads=2, ffn=96, experts=4)
FP4 = read_recipe({"gemms": ["fprop", "dgrad", "wgrad"], "stabiliser": "sr"})
TOKENS = torch.arange(64).view(2, 32)


def model(recipe=None, seed=0, **changes):
    config = replace(SHAPE, **changes)
    state = RecipeState(
        recipe=recipe or Recipe(), backend=Selection("emulated"), seed=seed
    )
    decoder = Decoder(config, 64, 32, state)
    decoder.initialise(torch.Generator().manual_seed(0))
    return decoder


def experts_of(decoder):
    return decoder.mixtures[0]


@pytest.mark.parametrize("per_token", [1, 2, 4])
def test_the_output_is_the_weighted_sum_of_the_chosen(per_token):
    mixture = experts_of(model(experts_per_token=per_token))
    with torch.no_grad():
        mixture.router.mul_(50)  # initial weights alone choose next to nothing
        x = normal(2, 5, 64).bfloat16()
        out = mixture(x).view(-1, 64)
        for row, token in zip(out, x.view(-1, 64), strict=True):
            probabilities = torch.softmax(mixture.router @ token.float(), dim=-1)
            best = probabilities.topk(per_token)
            weights = best.values / best.values.sum()
            expected = torch.zeros(64)
            for weight, index in zip(weights, best.indices, strict=True):
                expected += weight * mixture.experts[index](token[None]).float()[0]
            torch.testing.assert_close(row.float(), expected, rtol=0.03, atol=2e-3)


def test_balance_is_one_for_an_even_spread_and_the_number_of_experts_for_none():
    mixture = experts_of(model(experts_per_token=1))
    x = torch.eye(64)[None, :4].to(torch.bfloat16)
    with torch.no_grad():
        mixture.router.zero_()
        mixture.router[range(4), range(4)] = 1000.0  # token i goes to expert i
        mixture(x)
        assert float(mixture.balance) == pytest.approx(1.0)
        mixture.router.zero_()
        mixture.router[0] = 1000.0
        mixture(x)
        assert float(mixture.balance) == pytest.approx(4.0)


def test_a_hash_gives_a_token_the_same_experts_in_a_layer_and_seed():
    decoder, other = model(routing="fixed"), model(routing="fixed", seed=1)
    ids, chosen = torch.arange(64).repeat(2), torch.empty(128, 2)
    first = decoder.choose(0, ids, chosen)
    second = decoder.choose(1, ids, chosen)
    third = other.choose(0, ids, chosen)
    assert torch.equal(first[:64], first[64:])
    assert bool((first[:, 0] != first[:, 1]).all())
    assert int(first[:64].flatten().bincount(minlength=4).min()) > 20  # of 32
    assert not torch.equal(first, second)
    assert not torch.equal(first, third)
    decoder(TOKENS)
    assert decoder.balance is None  # there is nothing to balance


def test_an_expert_without_tokens_has_a_gradient_of_nought():
    decoder = model(FP4)
    mixture = experts_of(decoder)
    with torch.no_grad():
        mixture.router.zero_()
    decoder(TOKENS).float().sum().backward()  # all ties go to the first two
    grads = [expert.down.weight.grad for expert in mixture.experts]
    assert all(grad is not None for grad in grads)
    assert [bool(grad.any()) for grad in grads].count(True) == 2


def test_filling_up_changes_no_gradient():
    recipe = read_recipe({"gemms": ["wgrad"], "stabiliser": "dht"})
    grads = []
    for multiple in (32, 128):
        decoder = model(recipe)
        for mixture in decoder.mixtures:
            assert mixture.rows_multiple == 32
            mixture.rows_multiple = multiple
        decoder(TOKENS).float().square().sum().backward()
        grads.append([parameter.grad for parameter in decoder.parameters()])
    assert_same(*grads)


def test_the_reported_loss_leaves_the_balance_out(make_config, tokens):
    def first_row(**shape):
        shape |= {"experts": 4}
        config = make_config(model=shape, tokens=512, eval_every_tokens=512)
        return curve(config, tokens)[1][0]

    plain, weighed = first_row(balance_loss=0.0), first_row(balance_loss=1.0)
    assert plain["loss"] == weighed["loss"]
    assert plain["grad_norm"] != weighed["grad_norm"]
