"""A recomputed forward pass draws as the pass that it repeats, or is refused."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ablate.numerics import apply_recipe, recompute_contexts

SR = {"gemms": ["fprop", "dgrad", "wgrad"], "stabiliser": "sr+rht", "signs": "call"}
X = [torch.randn(32, 64, generator=torch.Generator().manual_seed(i)).to(torch.bfloat16) for i in range(3)]
TOLD = partial(checkpoint, use_reentrant=False, context_fn=recompute_contexts)
UNTOLD = partial(checkpoint, use_reentrant=False)
REENTRANT = partial(checkpoint, use_reentrant=True)


def plainly(function, x):
    return function(x)


def three(function, x):
    return function(function(function(x)))


def nested(function, x):
    return TOLD(lambda v: TOLD(function, function(TOLD(function, v))), x)


WAYS = {
    "told": (plainly, TOLD),
    "without the generator's state": (plainly, partial(TOLD, preserve_rng_state=False)),
    "without early stop": (plainly, partial(TOLD, early_stop=False)),
    "nested": (three, nested),
}


class Twice(nn.Module):
    """Uses one layer twice, another once."""

    def __init__(self):
        super().__init__()
        self.shared, self.single = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        return x + self.shared(torch.relu(self.single(torch.relu(self.shared(x)))))


class Once(nn.Sequential):
    """Uses each of its layers once."""

    def __init__(self):
        super().__init__(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))


def made(kind=Twice):
    torch.manual_seed(0)
    model = kind()  # in fp32 sums of gradients are exact in any order
    return model, apply_recipe(model, SR, seed=3, quiet=True)


def gradients(way, order):
    """Three forward passes, then their backward passes in an order; None: of their sum, in one."""
    model, state = made()
    inputs = [x.clone().requires_grad_() for x in X]
    losses = [way(model, x).square().mean() for x in inputs]
    state.advance()  # the trainer has moved on
    if order is None:
        sum(losses).backward()
    else:
        for index in order:
            losses[index].backward()
    return [p.grad for p in model.parameters()] + [x.grad for x in inputs]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), None], ids=str)
@pytest.mark.parametrize("name", WAYS)
def test_each_use_of_a_layer_is_recomputed_with_its_own_noise(name, order):
    plain, recomputed = WAYS[name]
    for ours, expected in zip(gradients(recomputed, order), gradients(plain, order), strict=True):
        assert torch.equal(ours, expected)


@pytest.mark.parametrize("training", [True, False])
def test_a_graph_that_is_kept_is_recomputed_alike_twice(training):
    model, _ = made()
    model.train(training)
    x = X[0].clone().requires_grad_()
    loss = TOLD(model, x).square().mean()
    first = torch.autograd.grad(loss, x, retain_graph=True)
    model(X[1])
    assert torch.equal(torch.autograd.grad(loss, x)[0], first[0])


class Library(torch.autograd.Function):
    """Checkpointing as another library has it."""

    @staticmethod
    def forward(ctx, function, x):
        ctx.function = function
        ctx.save_for_backward(x)
        with torch.no_grad():
            return function(x)

    @staticmethod
    def backward(ctx, dy):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            ctx.function(x).backward(dy)
        return None, x.grad


def compiled(function, x):
    return torch.compile(partial(UNTOLD, function), fullgraph=True, backend="aot_eager")(x)


UNTOLD_WAYS = {"untold": UNTOLD, "reentrant": REENTRANT, "a library": Library.apply, "compiled": compiled}


@pytest.mark.parametrize("name", [*UNTOLD_WAYS, "told"])
def test_step_by_step_the_only_open_pass_is_repeated_and_new_ones_draw_anew(name):
    torch._dynamo.reset()
    way = UNTOLD_WAYS.get(name, TOLD)

    def grads(way):
        model, _ = made(Once)
        for index, x in enumerate(X):
            loss = way(model, x.clone().requires_grad_()).square().mean()
            if index:  # a pass in evaluation is never one that is recomputed
                with torch.no_grad():
                    model.eval()(X[1])
                model.train()
            loss.backward()
        return [p.grad for p in model.parameters()] + [model(X[0])]

    for ours, expected in zip(grads(way), grads(plainly), strict=True):
        assert torch.equal(ours, expected)


@pytest.mark.parametrize("name", ["untold", "reentrant", "a library"])
@pytest.mark.parametrize(("kind", "passes"), [(Twice, 1), (Once, 2)])
def test_one_of_several_open_passes_is_refused_where_nothing_tells(name, kind, passes):
    model, _ = made(kind)
    losses = [UNTOLD_WAYS[name](model, x.clone().requires_grad_()).sum() for x in X[:passes]]
    with pytest.raises(RuntimeError, match=r"layer \w+: one of 2 forward .* context_fn=ablate.numerics.reco"):
        losses[0].backward()
