"""A step as a CUDA graph, on a CPU: a stand-in for torch's graphs records what a step asks of the device.

As on a GPU, a capture changes nothing, a replay repeats the operators on the memory that they had, numbers of
Python included, and a number that is read on the way ends the capture.
"""

import math
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ablate.backends import select
from ablate.backends.device import Device
from ablate.backends.emulated import EmulatedBackend
from ablate.backends.protocol import dequantised
from ablate.layers import linear
from ablate.layers import state as state_of_layers
from ablate.layers.state import RecipeState
from ablate.models.custom_models import build_network
from ablate.models.decoder import Decoder
from ablate.numerics.quantiser import Quantized, round_operand
from ablate.train import graphed, loop, step
from ablate.train.graphed import WholeSteps, why_eager
from ablate.train.group import ONE_DEVICE, Layout
from ablate.train.step import assemble, set_optimizer, take_whole_step
from tests.curves import Kept, after, curve, forked
from tests.layers.test_waits import FromTheCpu
from tests.tensors import assert_same

SR_RHT = {"gemms": ["wgrad"], "stabiliser": "sr+rht"}
ALL_SR_RHT = {"gemms": ["fprop", "dgrad", "wgrad"], "stabiliser": "sr+rht"}
STEP = 64 * 4
BODIES = {
    torch.ops.ablate.fprop.default: linear._fprop._init_fn,
    torch.ops.ablate.gradients.default: linear._gradients._init_fn,
}
draws = []


@torch.library.custom_op("ablate_tests::quantise", mutates_args=())
def quantise(x: Tensor, position: Tensor, amax: Tensor | None, number: int) -> Tensor:
    """Quantise as Triton's kernel does: step and call come from the device, all else is compiled in."""
    policy, key, axis = draws[number]
    if key is not None:
        at_step, call = position.tolist()
        key = replace(key, step=at_step, call=call)
        if (at_step, key.layer, key.gemm, key.operand) == quantise.breaks:
            x = x * math.nan
    magnitude = None if amax is None else amax.item()
    quantised = round_operand(x, policy, axis=axis, key=key, amax=magnitude)
    return dequantised(quantised).to(torch.bfloat16, copy=True)


class Graph(TorchDispatchMode):
    """A stand-in for torch.cuda.CUDAGraph."""

    captured = 0

    @classmethod
    def ignore_compile_internals(cls):  # else torch would run what it compiled eager
        return True

    def __init__(self):
        super().__init__()
        self.calls, self.before = [], []

    def __torch_dispatch__(self, func, _types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in BODIES:
            with self:
                return BODIES[func](*args, **kwargs)
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing")
        names = [argument.name for argument in func._schema.arguments]
        given = dict(zip(names, args, strict=False)) | kwargs
        for argument in func._schema.arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                written = tree_leaves(given[argument.name])
                self.before += [(tensor, tensor.clone()) for tensor in written]
        out = func(*args, **kwargs)
        self.calls.append((func, args, kwargs, out))
        return out

    @torch.no_grad()
    def replay(self):
        for func, args, kwargs, out in self.calls:
            used = {memory_of(tensor) for tensor in tensors_of((args, kwargs))}
            new = func(*args, **kwargs)
            for held, values in zip(tensors_of(out), tensors_of(new), strict=True):
                if memory_of(held) not in used:
                    held.copy_(values)


@contextmanager
def capture(graph, **_):
    """Record into a graph; as nothing has run on a GPU, all memory is again as before."""
    Graph.captured += 1
    try:
        with graph:
            yield
    finally:
        for tensor, values in reversed(graph.before):
            tensor.data.copy_(values)


def tensors_of(tree):
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def memory_of(tensor):
    return tensor.untyped_storage().data_ptr()


@pytest.fixture
def graphs(monkeypatch):
    """This CPU as a device with graphs, which proves all."""

    def quantize(_, x, draw, *, axis):
        if draw.policy.is_untouched:
            return Quantized(values=x.to(torch.bfloat16), axis=axis)
        draws.append((draw.policy, draw.key, axis))
        values = torch.ops.ablate_tests.quantise(
            x, draw.position, draw.amax, len(draws) - 1
        )
        return Quantized(values=values, axis=axis)

    monkeypatch.setattr(EmulatedBackend, "quantize", quantize)
    monkeypatch.setattr(quantise, "breaks", None, raising=False)
    monkeypatch.setattr(state_of_layers, "_PLACED_ON", ("cpu",))
    monkeypatch.setattr(step, "_GRAPHS_ON", ("cpu",))
    monkeypatch.setattr(loop, "unproven", lambda *_: None)
    stream = SimpleNamespace(wait_stream=lambda _: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream)
    monkeypatch.setattr(Graph, "captured", 0)
    draws.clear()


@pytest.fixture
def config(make_config):
    def make(recipe=SR_RHT, **training):
        settings = {
            "tokens": 16 * STEP, "seq_len": 64, "batch_size": 4, "micro_batch_size": 2,
            "eval_every_tokens": 8 * STEP, "eval_tokens": 5 * 64, "schedule": "cosine",
        } | training  # fmt: skip
        return make_config(recipe, model={"layers": 1}, **settings)

    return make


def eager_curve(monkeypatch, config, tokens, **options):
    with monkeypatch.context() as patch:
        patch.setattr(loop, "why_eager", lambda *_, **__: "it is compared with")
        return curve(config, tokens, **options)


@pytest.mark.usefixtures("graphs")
@pytest.mark.parametrize(
    ("kind", "captures"),
    [
        ("a phase", 4),
        ("a fork", 4),
        ("delayed scales", 3),
        ("compiled", 3),
        ("bf16 beside", 5),
    ],
)
def test_a_run_of_graphs_has_the_rows_and_weights_of_an_eager_one_also_resumed(
    config, tokens, monkeypatch, kind, captures
):
    run = config(ALL_SR_RHT)
    if kind == "a phase":
        run = config(SR_RHT | {"phases": [{"from_fraction": 0.5, "recipe": "bf16"}]})
    elif kind == "a fork":
        run = forked(run, config("bf16", beta2=0.9), 8 * STEP)
    elif kind == "delayed scales":
        run = config("te-hybrid-fp8-delayed")
    elif kind == "compiled":  # to operators, which the stand-in can record
        to_operators = partial(torch.compile, backend="aot_eager")
        monkeypatch.setattr(torch, "compile", to_operators)
        run = config(ALL_SR_RHT, compile=True)
    else:
        run = config(ALL_SR_RHT, evaluate_in="both")
    eager, whole, parts = (Kept([15 * STEP]) for _ in range(3))
    reasons = []
    expected = eager_curve(monkeypatch, run, tokens, checkpoints=eager)
    assert Graph.captured == 0
    layout = Layout(on_eager=reasons.append)
    assert curve(run, tokens, checkpoints=whole, layout=layout) == expected
    assert (Graph.captured, reasons) == (captures, [])
    assert_same(whole.last.tensors, eager.last.tensors)
    rows_of_parts = []
    for steps in (6, 5, 0):
        end, rows = curve(run, tokens, checkpoints=parts, should_stop=after(steps))
        rows_of_parts += rows
    assert (end, rows_of_parts) == expected
    assert_same(parts.last.tensors, eager.last.tensors)


@pytest.mark.usefixtures("graphs")
def test_a_replay_that_diverges_is_noticed_and_leaves_the_weights(
    config, tokens, monkeypatch
):
    monkeypatch.setattr(quantise, "breaks", (9, "blocks.0.ffn.down", "wgrad", "dy"))
    run = config(eval_every_tokens=16 * STEP, tokens=40 * STEP)
    result, rows = curve(run, tokens)
    assert (result.state, result.step) == ("diverged", 10)
    assert result.message.endswith("first in Wgrad's dy of blocks.0.ffn.down")
    assert (result, rows) == eager_curve(monkeypatch, run, tokens)

    steps = WholeSteps(trainee := assemble(run, "cpu"), None)
    weights = []
    for number in range(12):
        trainee.state.step = number
        steps.take(trainee, torch.full((4, 65), number))
        weights.append(trainee.module.embedding.detach().clone())
    moved = [not torch.equal(old, new) for old, new in pairwise(weights)]
    assert moved == [True] * 8 + [False] * 3


def baked_tokens(trainee, sequences):
    return take_whole_step(trainee, torch.tensor(sequences.tolist()))


def baked_rate(optimizer, settings, rate):
    set_optimizer(optimizer, settings, rate)
    for group in optimizer.param_groups:
        group["lr"] = rate


def baked_position(_, position, device):
    return torch.tensor((position.stream_step, position.call), device=device)


def reading(optimizer, figures):
    optimizer.found_inf = torch.tensor(float(not math.isfinite(figures[-1])))


OTHER_BITS = "graphed steps have other bits here than eager ones"
FAULTS = {
    "none": ((), None),
    "tokens": ((graphed, "take_whole_step", baked_tokens), OTHER_BITS),
    "rate": ((graphed, "set_optimizer", baked_rate), OTHER_BITS),
    "position": ((RecipeState, "placed", baked_position), OTHER_BITS),
    "read": (
        (step, "skip_if_diverged", reading),
        "the capture failed: RuntimeError: operation not permitted when stream is capturing",
    ),
}


@pytest.mark.usefixtures("graphs")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_proof_finds_a_number_of_python_in_a_graph(config, monkeypatch, fault):
    change, expected = FAULTS[fault]
    if change:
        monkeypatch.setattr(*change)
    monkeypatch.setattr(graphed, "known_or_tested", lambda *given: given[-1]())
    assert graphed.unproven(config(ALL_SR_RHT), "cpu", ONE_DEVICE) == expected
    assert Graph.captured == (2 if expected in (None, OTHER_BITS) else 1)


@pytest.mark.usefixtures("graphs")
@pytest.mark.parametrize(
    "fault", ["not proved", "the capture failed: OutOfMemoryError: no memory"]
)
def test_a_run_without_graphs_is_eager_and_says_why(config, tokens, monkeypatch, fault):
    run, reasons = config(tokens=5 * STEP, eval_every_tokens=5 * STEP), []
    expected = eager_curve(monkeypatch, run, tokens)

    def no_memory(_, **__):
        raise torch.OutOfMemoryError("no memory")

    if fault == "not proved":
        monkeypatch.setattr(loop, "unproven", lambda *_: fault)
    monkeypatch.setattr(torch.cuda, "graph", no_memory)
    assert curve(run, tokens, layout=Layout(on_eager=reasons.append)) == expected
    assert reasons == [fault]


def test_nothing_of_a_whole_step_comes_from_the_cpu_or_waits_for_the_device(
    config, monkeypatch
):
    run = config()

    # there is none without a GPU; a layer's own is in tests/layers/test_waits.py
    def backward(_):
        for parameter in trainee.module.parameters():
            parameter.grad = torch.empty_like(parameter)

    def update(*lists, **numbers):  # it has no version for tensors without values
        used = [*tensors_of(lists), numbers["lr"], numbers["found_inf"]]
        assert {tensor.device.type for tensor in used} == {"cuda"}

    def build_there(*given, **named):
        with torch.device("cuda"):
            return build_network(*given, **named)

    device = Device(kind="cuda", arch="sm_90", name="made up")
    monkeypatch.setattr(linear, "_sites", {})  # other tests' layers, which have values
    monkeypatch.setattr(select, "device_of", lambda _: device)
    monkeypatch.setattr(Tensor, "backward", backward)
    monkeypatch.setattr(torch, "_fused_adamw_", update)
    monkeypatch.setattr(Decoder, "initialise", lambda *_: None)
    monkeypatch.setattr(Decoder, "to", lambda *_: None)
    monkeypatch.setattr(step, "build_network", build_there)
    with FakeTensorMode():
        trainee = assemble(run, "cuda")
        sequences = torch.zeros(4, 65, dtype=torch.int64, device="cuda")
        take_whole_step(trainee, sequences)  # gives the optimizer its state
        with FromTheCpu() as seen:
            figures = take_whole_step(trainee, sequences)
    assert (figures.device.type, figures.shape) == ("cuda", (3,))
    # A layer's operator returns its position, which stays on the CPU.
    assert [name for name in seen.found if not name.startswith("ablate::")] == []


def test_why_a_step_is_eager(config):
    def why(recipe=SR_RHT, device="cuda", backend="auto", **options):
        return why_eager(replace(config(recipe), backend=backend), device, **options)

    experts = replace(config(), model=replace(config().model, experts=4))
    oscillates = {"gemms": ["fprop"], "deoscillate": {"window": 3}}
    assert why() is None
    assert why(device="cpu") == "there is no GPU"
    assert why(devices=2) == "several devices train the run"
    assert why(observed=True) == "diagnostics observe the steps"
    assert why(backend="reference") == "back end 'reference' may wait for the host"
    assert why(oscillates) == "de-oscillation resets weights"
    assert why_eager(experts, "cuda") == "the routes of experts depend on the data"
