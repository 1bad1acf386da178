"""A recomputed forward pass draws as the pass that it repeats, however torch's checkpoint comes to run it."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from ablate.numerics import apply_recipe

SR = {"gemms": ["fprop", "dgrad", "wgrad"], "stabiliser": "sr+rht", "signs": "call"}
X = [torch.randn(32, 64, generator=torch.Generator().manual_seed(i)).to(torch.bfloat16) for i in range(3)]


def plainly(function, x):
    return function(x)


def once(reentrant):
    return lambda function, x: checkpoint(function, x, use_reentrant=reentrant)


def without_rng(function, x):
    return checkpoint(function, x, use_reentrant=False, preserve_rng_state=False)


def without_early_stop(function, x):
    return checkpoint(function, x, use_reentrant=False, early_stop=False)


def both(outer, inner):
    def nested(function, x):
        whole = lambda v: once(inner)(function, function(once(inner)(function, v)))  # noqa: E731
        return checkpoint(whole, x, use_reentrant=outer)

    return nested


def sequence(function, x):
    return checkpoint_sequential([function, function, function], 2, x, use_reentrant=False)


def three(function, x):
    return function(function(function(x)))


WAYS = {
    "not reentrant": (plainly, once(False)),
    "reentrant": (plainly, once(True)),
    "without the generator's state": (plainly, without_rng),
    "without early stop": (plainly, without_early_stop),
    "nested": (three, both(False, False)),
    "nested reentrant": (three, both(True, True)),
    "reentrant in the other": (three, both(False, True)),
    "the other in reentrant": (three, both(True, False)),
    "a sequence": (three, sequence),
}


class Twice(nn.Module):
    """Uses one layer twice, another once."""

    def __init__(self):
        super().__init__()
        self.shared, self.single = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        return x + self.shared(torch.relu(self.single(torch.relu(self.shared(x)))))


def made():
    torch.manual_seed(0)
    model = Twice()  # in fp32 sums of gradients are exact in any order
    return model, apply_recipe(model, SR, seed=3)


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
    loss = once(False)(model, x).square().mean()
    first = torch.autograd.grad(loss, x, retain_graph=True)
    model(X[1])
    assert torch.equal(torch.autograd.grad(loss, x)[0], first[0])


def test_new_passes_after_a_recomputation_draw_anew():
    (model, _), (other, _) = made(), made()
    for x in X:
        once(False)(model, x.clone().requires_grad_()).sum().backward()
        other(x.clone().requires_grad_()).sum().backward()
    assert torch.equal(model(X[0]), other(X[0]))


def test_a_trainer_that_numbers_the_passes_itself_may_go_back_later():
    def run(way):
        model, state = made()
        losses = []
        for state.call, x in enumerate(X):
            losses.append(way(model, x.clone().requires_grad_()).square().mean())
        sum(losses).backward()
        return [p.grad for p in model.parameters()]

    for ours, expected in zip(run(once(False)), run(plainly), strict=True):
        assert torch.equal(ours, expected)


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


def test_what_another_library_recomputes_is_the_only_open_pass_or_refused():
    def grads(way):
        torch.manual_seed(0)
        model = nn.Linear(64, 64).to(torch.bfloat16)
        model = nn.Sequential(model, nn.ReLU())
        apply_recipe(model, SR, seed=3)
        for x in X:
            way(model, x.clone().requires_grad_()).square().mean().backward()
        return [p.grad for p in model.parameters()]

    for ours, expected in zip(grads(Library.apply), grads(plainly), strict=True):
        assert torch.equal(ours, expected)
    model, _ = made()
    loss = Library.apply(model, X[0].clone().requires_grad_()).sum()
    with pytest.raises(RuntimeError, match=r"layer shared: one of 2 forward passes is recomputed"):
        loss.backward()


def test_a_pass_in_evaluation_is_never_one_that_is_recomputed():
    def gradient(evaluates):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64).to(torch.bfloat16))
        apply_recipe(model, SR, seed=3)
        loss = Library.apply(model, X[0].clone().requires_grad_()).square().mean()
        if evaluates:
            with torch.no_grad():
                model.eval()(X[1])
            model.train()
        loss.backward()
        return model[0].weight.grad

    assert torch.equal(gradient(evaluates=True), gradient(evaluates=False))


def test_in_a_compiled_graph_the_only_open_pass_is_repeated():
    torch._dynamo.reset()

    def grads(way):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).to(torch.bfloat16)
        apply_recipe(model, SR, seed=3)
        run = way(model)
        for x in X:
            run(x.clone().requires_grad_()).square().mean().backward()
        return [p.grad for p in model.parameters()]

    def compiled(model):
        return torch.compile(lambda x: once(False)(model, x), fullgraph=True, backend="aot_eager")

    for ours, expected in zip(grads(compiled), grads(lambda model: model), strict=True):
        assert torch.equal(ours, expected)
