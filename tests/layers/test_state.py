"""What a model's layers share: the seed, the replica, where to go on, and what a recomputed pass draws."""

import io
import itertools
from functools import partial
from operator import itemgetter

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ablate.numerics import apply_recipe, recompute_contexts
from tests.numerics.strategies import normal
from tests.tensors import assert_same

SR = {"gemms": ["fprop", "dgrad", "wgrad"], "stabiliser": "sr+rht", "signs": "call"}
RESET = {"gemms": ["fprop"], "deoscillate": {"window": 4, "threshold": 1.5}}
X = [normal(64, 64, seed=i).to(torch.bfloat16) for i in range(3)]


class Once(nn.Sequential):
    """Uses each of its layers once."""

    def __init__(self):
        super().__init__(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))


class Twice(nn.Module):
    """Uses one layer twice, another once."""

    def __init__(self):
        super().__init__()
        self.shared, self.single = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        return x + self.shared(torch.relu(self.single(torch.relu(self.shared(x)))))


def made(recipe=SR, *, kind=Once, seed=3, replica=None):
    torch.manual_seed(0)
    model = kind()  # in fp32 sums of gradients are exact in any order
    state = apply_recipe(model, recipe, seed=seed)
    state.replica = replica
    return model, state


def passed(model, x=X[0]):
    """Return the output of a pass, and its gradients of x and of the weights."""
    x = x.clone().requires_grad_()
    y = model(x)
    y.square().mean().backward()
    return [y.detach(), x.grad, *(p.grad for p in model.parameters())]


@pytest.mark.parametrize(
    "seed", [np.int64(3), torch.tensor(3), 3.0, "3", None, True], ids=repr
)
def test_a_seed_is_a_whole_number_of_any_type(seed):
    if isinstance(seed, np.int64 | torch.Tensor):
        model, state = made(seed=seed)
        assert_same(passed(model), passed(made()[0]))
        assert type(state.seed) is int
    else:
        with pytest.raises(ValueError, match=r"seed .* is no whole number"):
            made(seed=seed)


@pytest.mark.parametrize(
    "recipe", ["te-hybrid-fp8-delayed", "tetrajet", "quartet2", RESET, SR], ids=str
)
@pytest.mark.parametrize("advances", [True, False])
def test_a_model_that_is_resumed_goes_on_to_the_same_bits(recipe, advances):
    def train(parts, steps):
        (model, state, optimizer), rows = parts, []
        for step in steps:
            for x in X[:2]:  # gradients of two micro-batches
                model(x.float() / (step + 1)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if advances:
                state.advance(np.int64(128))
            # which draws too, where Fprop does
            rows.append(model.eval()(X[0]).detach())
            model.train()
        return rows

    def start():
        model, state = made(recipe)
        return model, state, torch.optim.AdamW(model.parameters(), lr=0.05)

    whole, parts, resumed = start(), start(), start()
    rows, first = train(whole, range(6)), train(parts, range(3))
    file = io.BytesIO()  # as a user does, without pickled code
    torch.save([part.state_dict() for part in parts], file)
    file.seek(0)
    for part, content in zip(resumed, torch.load(file, weights_only=True), strict=True):
        part.load_state_dict(content)
    assert_same([*first, *train(resumed, range(3, 6))], rows)
    resumed_state, expected = resumed[1].state_dict(), whole[1].state_dict()
    for name, sums in expected.pop("deoscillation", {}).items():
        assert torch.equal(
            torch.as_tensor(resumed_state["deoscillation"][name]), torch.as_tensor(sums)
        )
    assert resumed_state | expected == resumed_state


def test_a_state_of_another_seed_or_no_state_is_refused():
    _, state = made()
    with pytest.raises(ValueError, match="saved with seed 4, but this one has 3"):
        state.load_state_dict(made(seed=4)[1].state_dict())
    keys = "expected a state with seed, step, tokens, calls, got weight"
    with pytest.raises(ValueError, match=keys):
        state.load_state_dict({"weight": 1})
    _, state = made(RESET)
    state.advance()
    with pytest.raises(ValueError, match=r"0\.moved is in one of them alone"):
        state.deoscillation.load_state_dict({"steps": 1, "0.x": X[0]})


@pytest.mark.parametrize("recipe", ["alto", SR], ids=str)
def test_replicas_share_the_draws_that_one_pass_over_all_data_makes_once(recipe):
    seen = []
    for replica in (None, 0, 1, 2):
        model, state = made(recipe, replica=replica)
        drawn = {}

        def watch(_, gemm, operand, done, drawn=drawn):
            drawn[gemm, operand] = done.values.clone()

        state.watch = watch
        model[0](X[0].clone().requires_grad_()).backward(X[1])
        seen.append(drawn)
    alone, *replicas = seen
    own = {
        (gemm, name)
        for gemm, name, policy in state.recipe.operands()
        if policy.is_stochastic and name != "w"
    }
    assert ("wgrad", "dy") in own
    for operand in alone:
        assert torch.equal(alone[operand], replicas[0][operand])
        for a, b in itertools.combinations(replicas, 2):
            # The signs are shared: what is rounded to nearest is the same, rotated.
            assert torch.equal(a[operand], b[operand]) == (operand not in own)


TOLD = partial(checkpoint, use_reentrant=False, context_fn=recompute_contexts)


def plainly(function, x):
    return function(x)


def three(function, x):
    return function(function(function(x)))


def nested(function, x):
    return TOLD(lambda v: TOLD(function, function(TOLD(function, v))), x)


WAYS = {
    "told": (plainly, TOLD),
    "without early stop": (plainly, partial(TOLD, early_stop=False)),
    "nested": (three, nested),
}


@pytest.mark.parametrize("order", [(2, 0, 1), None], ids=str)
@pytest.mark.parametrize("name", WAYS)
def test_each_use_of_a_layer_is_recomputed_with_its_own_noise(name, order):
    """Three forward passes, then their backward passes in an order; None: of their sum, in one."""

    def gradients(way):
        model, state = made(kind=Twice)
        inputs = [x.clone().requires_grad_() for x in X]
        losses = [way(model, x).square().mean() for x in inputs]
        state.advance()  # the trainer has moved on
        for loss in itemgetter(*order)(losses) if order else [sum(losses)]:
            loss.backward()
        return [p.grad for p in model.parameters()] + [x.grad for x in inputs]

    plain, recomputed = WAYS[name]
    assert_same(gradients(recomputed), gradients(plain))


@pytest.mark.parametrize("training", [True, False])
def test_a_graph_that_is_kept_is_recomputed_alike_twice(training):
    model, _ = made(kind=Twice)
    model.train(training)
    x = X[0].clone().requires_grad_()
    loss = TOLD(model, x).square().mean()
    first = torch.autograd.grad(loss, x, retain_graph=True)
    model(X[1])
    assert_same(torch.autograd.grad(loss, x), first)


def compiled(function, x):
    way = partial(UNTOLD["untold"], function)
    return torch.compile(way, fullgraph=True, backend="aot_eager")(x)


UNTOLD = {
    "untold": partial(checkpoint, use_reentrant=False),
    "reentrant": partial(checkpoint, use_reentrant=True),
}
WAYS_OF_ONE = UNTOLD | {"compiled": compiled, "told": TOLD}


@pytest.mark.parametrize("way", WAYS_OF_ONE.values(), ids=WAYS_OF_ONE)
def test_step_by_step_the_only_open_pass_is_repeated_and_new_ones_draw_anew(way):
    torch._dynamo.reset()

    def grads(way):
        model, _ = made()
        for index, x in enumerate(X):
            loss = way(model, x.clone().requires_grad_()).square().mean()
            if index:  # a pass in evaluation is never one that is recomputed
                with torch.no_grad():
                    model.eval()(X[1])
                model.train()
            loss.backward()
        return [p.grad for p in model.parameters()] + [model(X[0])]

    assert_same(grads(way), grads(plainly))


@pytest.mark.parametrize("name", UNTOLD)
@pytest.mark.parametrize(("kind", "passes"), [(Twice, 1), (Once, 2)])
def test_one_of_several_open_passes_is_refused_where_nothing_tells(name, kind, passes):
    model, _ = made(kind=kind)
    losses = [UNTOLD[name](model, x.clone().requires_grad_()).sum() for x in X[:passes]]
    refused = "recomputes one of 2 forward .* context_fn=ablate.numerics.reco"
    with pytest.raises(RuntimeError, match=refused):
        losses[0].backward()
