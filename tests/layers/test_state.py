"""What a model's layers share: the seed, the replica, and where to go on."""

import io
import itertools

import numpy as np
import pytest
import torch
from torch import nn

from ablate.numerics import apply_recipe

SR = {"gemms": ["fprop", "dgrad", "wgrad"], "stabiliser": "sr+rht"}
X = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
DY = torch.randn(64, 96, generator=torch.Generator().manual_seed(2))
NO_NUMBERS = [3.0, np.float64(3), "3", None, True]


def made(recipe=SR, *, seed=3, replica=None, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64))
    state = apply_recipe(model, recipe, seed=seed, **options)
    state.replica = replica
    return model, state


def passed(model, x=X):
    """Return the output of a pass, and its gradients of x and of the weights."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    y = model(x)
    y.square().mean().backward()
    return [y.detach(), x.grad, *(p.grad.clone() for p in model.parameters())]


def assert_same(ours, expected):
    for a, b in zip(ours, expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("seed", [np.int64(3), np.uint8(3), torch.tensor(3)], ids=repr)
def test_a_seed_is_its_number_whatever_its_type(seed):
    assert_same(passed(made(seed=seed)[0]), passed(made(seed=3)[0]))
    assert type(made(seed=seed)[1].seed) is int


@pytest.mark.parametrize("what", NO_NUMBERS, ids=repr)
def test_what_is_no_whole_number_is_no_seed(what):
    with pytest.raises(ValueError, match=r"seed .* is no whole number \(expected an int, as seed=3\)"):
        made(seed=what)


def saved(*parts):
    """Save and load as a user does, without pickled code."""
    file = io.BytesIO()
    torch.save([part.state_dict() for part in parts], file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("recipe", ["te-hybrid-fp8-delayed", "tetrajet", "quartet", "quartet2", SR], ids=str)
@pytest.mark.parametrize("advances", [True, False])
def test_a_model_that_is_resumed_goes_on_to_the_same_bits(recipe, advances):
    def part(model, optimizer, state, steps):
        rows = []
        for step in steps:
            for micro in range(2):  # gradients of two micro-batches
                x = torch.randn(64, 64, generator=torch.Generator().manual_seed(10 * step + micro))
                model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if advances:
                state.advance(np.int64(128))
            model.eval()
            rows.append(model(X).detach())  # which draws too, where Fprop does
            model.train()
        return rows

    def start():
        model, state = made(recipe)
        return model, torch.optim.AdamW(model.parameters(), lr=0.05), state

    whole = part(*(everything := start()), range(6))
    parts = start()
    first = part(*parts, range(3))
    kept = saved(*parts)
    fresh = start()
    for target, content in zip(fresh, kept, strict=True):
        target.load_state_dict(content)
    assert_same([*first, *part(*fresh, range(3, 6))], whole)
    assert fresh[2].state_dict() == everything[2].state_dict()


def test_a_state_of_another_seed_or_no_state_is_refused():
    _, state = made()
    with pytest.raises(ValueError, match="saved with seed 4, but this one has 3"):
        state.load_state_dict(made(seed=4)[1].state_dict())
    with pytest.raises(ValueError, match="expected a state with seed, step, tokens, calls, got weight"):
        state.load_state_dict({"weight": 1})


def average_weight_gradient(step, replicas):
    """Return the mean of replicas' weight gradients on data with channel means, and the exact mean."""
    grads, exact = [], 0
    for index, replica in enumerate(replicas):
        generator = torch.Generator().manual_seed(index)
        x = (torch.randn(64, 64, generator=generator) + 3 * means()).to(torch.bfloat16)
        dy = (torch.randn(64, 32, generator=generator) + 3 * means()[:32]).to(torch.bfloat16)
        model = nn.Sequential(nn.Linear(64, 32, bias=False))
        state = apply_recipe(model, {"gemms": ["wgrad"], "stabiliser": "sr"}, seed=3)
        state.replica = replica
        state.step = step
        model(x).backward(dy)
        grads.append(model[0].weight.grad.double())
        exact = exact + dy.double().t() @ x.double()
    return torch.stack(grads).mean(0), exact / len(grads)


def means():
    return torch.randn(64, generator=torch.Generator().manual_seed(99))


def noise_power(replicas):
    errors = []
    for step in range(12):
        mean, exact = average_weight_gradient(step, replicas)
        errors.append((mean - exact).square().mean())
    return float(torch.stack(errors).mean())


@pytest.mark.exhaustive
def test_the_noise_of_replicas_averages_out_as_that_of_one_whole_batch():
    own, shared = noise_power(range(8)), noise_power([0] * 8)
    one = noise_power([0])
    assert shared > 1.7 * own
    assert 0.8 < one / (8 * own) < 1.25


@pytest.mark.parametrize("recipe", ["alto", {**SR, "signs": "call"}], ids=str)
def test_replicas_share_the_draws_that_one_pass_over_all_data_makes_once(recipe):
    seen = []
    for replica in range(3):
        model, state = made(recipe, replica=replica)
        drawn = {}

        def watch(_, gemm, operand, done, drawn=drawn):
            drawn[gemm, operand] = done.values.clone()

        state.watch = watch
        model[0](X.clone().requires_grad_()).backward(DY)
        seen.append(drawn)
    policies = {(gemm, name): policy for gemm, name, policy in state.recipe.operands()}
    own = {where for where, one in policies.items() if one.rounding != "nearest" and where[1] != "w"}
    assert ("wgrad", "dy") in own
    for where in seen[0]:
        for a, b in itertools.combinations(seen, 2):
            # The signs are shared: what is rounded to nearest is the same, rotated.
            assert torch.equal(a[where], b[where]) == (where not in own)


def test_the_first_replica_draws_as_a_process_alone():
    assert_same(passed(made(replica=0)[0]), passed(made()[0]))
    mine, other = passed(made(replica=1)[0]), passed(made()[0])
    assert not any(torch.equal(a, b) for a, b in zip(mine[:3], other[:3], strict=True))
