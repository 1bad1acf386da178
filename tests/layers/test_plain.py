"""A layer in which nothing is quantised: plain torch on a GPU, an operator on a CPU; the same results."""

import pytest
import torch
from torch import nn
from torch._dynamo.testing import EagerAndRecordGraphs
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from ablate.backends import select
from ablate.backends.device import Device
from ablate.layers import linear
from ablate.layers.linear import weights_used_beside
from ablate.numerics import apply_recipe
from ablate.recipes import LayerRecipe, read_recipe
from tests.numerics.strategies import normal
from tests.tensors import assert_same

HIGH_THEN_LOW = {"phases": [{"from_tokens": 99, "recipe": "mxfp4"}]}
X = normal(2, 32, 64, seed=1).to(torch.bfloat16)


class Seen(TorchDispatchMode):
    """Notes whether a custom operator runs."""

    operator = False

    def __torch_dispatch__(self, func, _types, args=(), kwargs=None):
        self.operator |= func.namespace == "ablate"
        return func(*args, **kwargs or {})


def made(recipe=None, *, bias=True, **options):
    torch.manual_seed(0)
    first, last = nn.Linear(64, 96, bias=bias), nn.Linear(96, 32, bias=bias)
    model = nn.Sequential(first, nn.ReLU(), last)
    return model, apply_recipe(model, recipe or {}, seed=3, **options)


def passed(model, x=X):
    """Return the output of a pass, its gradients, and whether a custom operator ran."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    with Seen() as seen:
        y = model(x)
        y.float().square().mean().backward()
    gradients = [x.grad, *(parameter.grad for parameter in model.parameters())]
    return [y.detach(), *gradients], seen.operator


@pytest.fixture
def on_a_cpu(monkeypatch):
    """What a GPU does, on this CPU."""
    monkeypatch.setattr(linear, "_PLAIN_ON", ("cpu",))


@pytest.mark.parametrize(
    ("device", "backend", "plain"),
    [("cpu", "auto", False), ("cuda", "auto", True), ("cuda", "reference", False)],
)
def test_it_is_plain_torch_on_a_gpu_alone(monkeypatch, device, backend, plain):
    monkeypatch.setattr(
        select, "device_of", lambda _: Device(kind="cuda", arch="sm_90", name="made up")
    )
    with FakeTensorMode():
        model = nn.Sequential(nn.Linear(64, 32, device=device))
        apply_recipe(model, {}, backend=backend)
        with Seen() as seen:
            assert model(torch.ones(2, 8, 64, device=device)).shape == (2, 8, 32)
    assert seen.operator is not plain


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16])
def test_results_and_gradients_are_the_operators(monkeypatch, bias, dtype, autocast):
    results = []
    for devices in ((), ("cpu",)):
        monkeypatch.setattr(linear, "_PLAIN_ON", devices)
        with torch.autocast("cpu", autocast, enabled=autocast is not None):
            results.append(passed(made(bias=bias)[0], X.to(dtype)))
    (operator, used), (plain, used_in_plain) = results
    assert (used, used_in_plain) == (True, False)
    assert_same(plain, operator)
    assert [tensor.dtype for tensor in plain] == [tensor.dtype for tensor in operator]


@pytest.mark.usefixtures("on_a_cpu")
def test_a_phase_an_override_and_whoever_observes_decide_at_each_pass():
    model, state = made(HIGH_THEN_LOW)
    assert not passed(model)[1]
    state.watch = lambda *_: None
    assert passed(model)[1]
    state.watch, state.tap = None, lambda *_: None
    assert passed(model)[1]
    state.tap = None
    model[0].override = read_recipe("mxfp4")
    assert passed(model)[1]
    model[0].override = LayerRecipe()
    assert not passed(model)[1]
    model[0].override = None
    state.tokens = 99
    assert passed(model)[1]
    assert made({"gemms": ["dgrad"]})[0](X).grad_fn.name() != "_PlainBackward"


@pytest.mark.usefixtures("on_a_cpu")
def test_it_counts_as_a_layer_that_ran_and_as_the_start_of_training():
    model, state = made(HIGH_THEN_LOW)
    passed(model)
    state.step += 1
    assert "phases of the recipe stayed as at the start" in state.fault()
    state.tokens = 99
    assert weights_used_beside(state) is None


@pytest.mark.usefixtures("on_a_cpu")
def test_no_copy_of_a_weight_waits_for_the_backward_pass():
    model, saved = made()[0], []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: (saved.append(t), t)[1], lambda t: t
    ):
        model(X[:, :8].clone().requires_grad_())
    weights = [tensor for tensor in saved if tensor.numel() in (64 * 96, 96 * 32)]
    assert list(map(id, weights)) == [id(model[0].weight), id(model[2].weight)]


@pytest.mark.usefixtures("on_a_cpu")
def test_a_frozen_weight_gets_no_gradient_and_a_recomputed_pass_is_the_same():
    model, _ = made()
    expected, _ = passed(model)
    recomputed, _ = passed(checkpointed(model))
    assert_same(recomputed, expected)
    model[2].weight.requires_grad_(requires_grad=False)
    frozen, _ = passed(model)
    assert frozen[4] is None
    assert_same(frozen[:4], expected[:4])


def checkpointed(model):
    """The model with its activations recomputed."""
    inner = model.forward
    model.forward = lambda x: checkpoint(inner, x, use_reentrant=False)
    return model


@pytest.mark.usefixtures("on_a_cpu")
@pytest.mark.parametrize(
    ("recipe", "operators"), [({}, 0), (HIGH_THEN_LOW, 2)], ids=["never", "later"]
)
def test_a_compiled_graph_is_plain_where_no_phase_ever_quantises(recipe, operators):
    torch._dynamo.reset()
    counted = EagerAndRecordGraphs()
    model, state = made(recipe)
    expected = model(X)
    compiled = torch.compile(model, backend=counted, fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for tokens in (0, 1, 50):  # that training goes on compiles nothing anew
            state.tokens, state.step = tokens, tokens
            assert torch.equal(compiled(X), expected)
    (graph,) = counted.graphs
    assert sum("fprop" in str(node.target) for node in graph.graph.nodes) == operators
