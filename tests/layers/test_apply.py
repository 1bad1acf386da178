import copy
import doctest
import gc
import importlib
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from torch import nn
from torch.nn import functional

from ablate.layers.linear import QuantLinear, quantised_layers
from ablate.layers.plan import PlannedOperand
from ablate.layers.state import EVAL_CALL, Position
from ablate.numerics import apply_recipe
from ablate.numerics.scales import tensor_scale
from ablate.recipes import PRESETS
from tests.golden import check_answers
from tests.tensors import assert_same

SR_RHT = {"gemms": ["fprop", "dgrad", "wgrad"], "stabiliser": "sr+rht", "signs": "call"}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64, bias=False)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self, depth=3):
        super().__init__()
        self.embed = nn.Embedding(32, 64)
        self.layers = nn.ModuleList(Block() for _ in range(depth))
        self.lm_head = nn.Linear(64, 32, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x)


def make(recipe=SR_RHT, **fields):
    torch.manual_seed(0)
    model = Model(**fields).to(torch.bfloat16)
    return model, apply_recipe(model, recipe, seed=3)


TOKENS = torch.randint(0, 32, (4, 16), generator=torch.Generator().manual_seed(1))


def step(model):
    model.zero_grad(set_to_none=True)
    loss = nn.functional.cross_entropy(
        model(TOKENS).flatten(0, 1).float(), TOKENS.flatten()
    )
    loss.backward()
    return [loss, *(parameter.grad for parameter in model.parameters())]


def test_the_examples_of_the_docstrings():
    for name in (
        "ablate.layers.apply",
        "ablate.numerics.quantiser",
        "ablate.numerics.rotate",
        "ablate.results.cost",
        "ablate.results.intervals",
        "ablate.integrations",
        "ablate.run.schedule",
    ):
        result = doctest.testmod(importlib.import_module(name))
        assert result.attempted
        assert result.failed == 0


def test_phases_move_on_with_the_tokens():
    model, state = make(
        {"gemms": ["fprop"], "phases": [{"from_tokens": 100, "recipe": "bf16"}]}
    )
    plain = make("bf16")[0](TOKENS)
    for tokens, same in ((0, False), (99, False), (1, True)):
        state.advance(tokens)
        assert torch.equal(model(TOKENS), plain) == same


def test_every_pass_and_step_draws_anew_and_evaluation_apart(monkeypatch):
    keys, own = [], PlannedOperand.key
    monkeypatch.setattr(
        PlannedOperand, "key", lambda *args: keys.append(own(*args)) or keys[-1]
    )
    model, state = make()
    model(TOKENS)
    model(TOKENS)
    state.advance(64)
    model(TOKENS)
    model.eval()(TOKENS)
    calls = dict.fromkeys((key.step, key.call) for key in keys if key)
    assert list(calls) == [(0, 0), (0, 1), (1, 0), (1, EVAL_CALL)]


@pytest.mark.parametrize("name", ["bf16", "te-hybrid-fp8-delayed", "quartet"])
def test_compiled_whole_it_gives_the_bits_of_eager(name):
    model, _ = make(name)
    copied, _ = make(name)
    compiled = torch.compile(copied, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        assert_same(step(compiled), step(model))


def test_compiled_it_keeps_drawing_anew_without_compiling_anew():
    torch._dynamo.reset()
    model, state = make()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    sums = set()
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(4):
            sums.add(compiled(TOKENS).double().sum().item())
            state.advance(64)
    assert len(sums) == 4


def test_a_copy_is_a_model_of_its_own():
    model, _ = make("te-hybrid-fp8-delayed")
    twin = copy.deepcopy(model)
    step(model)
    assert model.layers[0].up.amax_step.max() == 0
    assert twin.layers[0].up.amax_step.max() == -1
    step(twin)
    assert twin.layers[0].up.amax_step.max() == 0


LARGEST = np.finfo(np.float32).max


class Theirs:
    """One tensor's history and scale, after ``kernel_bulk`` of TransformerEngine's delayed_scaling.cu."""

    def __init__(self, largest):
        self.largest = np.float32(largest)
        self.history = np.zeros(1024, np.float32)
        self.scale = np.float32(1)

    def quantised(self, values):
        self.history[0] = np.fmax.reduce(np.abs(values), initial=self.history[0])

    def rolled(self):
        if (last := self.history[0]) == 0:
            return
        self.history = np.append(self.history[1:], last)
        amax = np.fmax.reduce(self.history)
        self.history[0] = 0
        if np.isfinite(amax) and amax > 0:
            self.scale = np.minimum(self.largest / amax, LARGEST)


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
@pytest.mark.parametrize(
    ("gemm", "operand", "largest"), [("fprop", "x", 448), ("wgrad", "dy", 57344)]
)
def test_a_delayed_scale_is_transformer_engines_to_the_bit(gemm, operand, largest):
    layer = make("te-hybrid-fp8-delayed", depth=1)[0].layers[0].up
    reference = Theirs(largest)
    planned = layer.plan(0, torch.device("cpu")).operand(gemm, operand)
    rng = np.random.default_rng(0)

    def same(values, *, step, call=0):
        values = np.array(values, np.float32)
        at = Position(step=step, call=call, tokens=0)
        for _ in range(2):  # the second time it is recomputed
            draw = layer.draw(torch.from_numpy(values), planned, at)
            assert tensor_scale(draw.amax_number, draw.policy)[0] == reference.scale
        reference.quantised(values)

    awkward = [[np.nan, 3], [0.0, -0.0], [1e-45], [-np.inf, 1], [0], [np.nan], [7], []]
    # none of them, at the start, moves it from 1
    for step, values in enumerate([awkward[1], awkward[3], awkward[0]]):
        same(values, step=step)
        reference.rolled()
    for step in range(3, 600):
        for call in range(2):
            values = np.exp(rng.normal(size=3)) / step
            if call and step > 592:
                values = awkward[step % 8]
            same(values, step=step, call=call)
            reference.rolled()
    frozen = reference.scale
    # down to fp32's smallest, and until nothing else is known
    for step in range(600, 2800):
        same([2.0 ** -min((step - 600) // 7, 149)], step=step)
        reference.rolled()
        at = Position(step=step, call=EVAL_CALL, tokens=0)
        layer.draw(torch.ones(1) * 1e30, planned, at)  # evaluation leaves no trace
    assert frozen < reference.scale == LARGEST


def warned(loop):
    """Return the warnings, and after how many turns of the loop the first came."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        turns = [len(caught) for _ in loop]
    return [str(one.message) for one in caught], turns.count(0)


def loss_of(model):
    return model(TOKENS[:1]).square().mean()


@pytest.mark.parametrize(
    ("recipe", "still"),
    [
        ({"gemms": ["fprop"], "stabiliser": "rht"}, "signs"),
        ("te-hybrid-fp8-delayed", None),
        ({"phases": [{"from_tokens": 99, "recipe": "mxfp4"}]}, "phases"),
        (
            {"gemms": ["fprop"], "stabiliser": "sr"},
            None,
        ),  # the noise of each pass is its own
    ],
)
def test_a_state_that_does_not_advance_is_said_once_after_ten_steps(recipe, still):
    model, _ = make(recipe, depth=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def loop():
        for _ in range(12):
            loss_of(model).backward()
            optimizer.step()
            optimizer.zero_grad()
            yield

    said = (
        f"this loop never called state.advance(): {still} of the recipe stayed as at the start, which is "
        "another arm (after each optimizer step call state.advance(tokens), with the tokens of that step)"
    )
    assert warned(loop()) == (([], 12) if still is None else ([said], 9))


def test_no_hook_stays_at_the_optimizers_when_a_model_is_gone():
    optimizers = importlib.import_module("torch.optim.optimizer")
    hooks = optimizers._global_optimizer_post_hooks
    gc.collect()
    before = len(hooks)
    model, state = make({"gemms": ["fprop"], "stabiliser": "rht"}, depth=1)
    assert len(hooks) == before + 1
    del model, state
    gc.collect()
    assert len(hooks) == before


def test_many_passes_of_a_step_are_no_missing_advance():
    """Micro-batches, another model's optimizer."""
    model, state = make({"gemms": ["fprop"], "stabiliser": "rht"}, depth=1)
    optimizer = torch.optim.SGD(model.parameters())
    others = torch.optim.SGD(nn.Linear(2, 2).parameters())

    def loop():
        for _ in range(12):
            loss_of(model).backward()
            others.step()
        yield state.advance(64)
        for _ in range(12):
            optimizer.step()

    assert warned(loop())[0] == []


def test_weights_with_scales_of_a_later_step_are_said_unless_the_state_is_loaded_too():
    model, state = make("te-hybrid-fp8-delayed", depth=1)
    for _ in range(3):
        loss_of(model).backward()
        state.advance(64)

    def resumed(*, with_state=False, train=True):
        other, its = make("te-hybrid-fp8-delayed", depth=1)
        other.load_state_dict(model.state_dict())
        if with_state:
            its.load_state_dict(state.state_dict())
        yield loss_of(other.train(train))

    (said,), _ = warned(resumed())
    assert said.startswith(
        "delayed scales of step 2 came with the weights, but the state is at step 0"
    )
    assert warned(resumed(with_state=True))[0] == warned(resumed(train=False))[0] == []


def refusal(line):
    """Say why a recipe is refused by a model: one layer of these sizes, or the whole one."""
    options = yaml.safe_load(line)
    sizes = options.pop("sizes", None)
    model = nn.Sequential(nn.Linear(*sizes)) if sizes else Model()
    with pytest.raises(ValueError) as caught:  # noqa: PT011  the file has the message
        apply_recipe(model, **options)
    assert not quantised_layers(model)
    return str(caught.value).splitlines()


def test_what_cannot_be_applied_is_refused_and_changes_nothing():
    """Of each line of the file; ``REWRITE=1`` writes the messages anew."""
    check_answers(Path(__file__).with_name("refusals.txt"), refusal)
    with pytest.raises(ValueError, match="no linear layer"):
        apply_recipe(nn.ReLU(), "bf16")
    with pytest.raises(TypeError, match="a recipe cannot be 3"):
        apply_recipe(Model(), 3)


def test_what_is_reached_is_printed_and_kept(capsys):
    rules = [
        {"first": 1, "recipe": "bf16"},
        {"match": "*.down", "recipe": {"gemms": ["fprop"]}},
    ]
    state = apply_recipe(Model(), {**SR_RHT, "layers": rules}, skip="layers.1.up")
    # 2 × 64 × 128 a layer of a block, 2 × 64 × 32 the head: 6.25 layers' worth in all
    printed = """\
Fprop: 3 of 7 matrices in low precision, 48.0% of the FLOPs
Dgrad, Wgrad: 1 of 7 matrices in low precision, 16.0% of the FLOPs
  not layers.0.up, layers.0.down: a rule of the recipe keeps it in high precision
  not layers.1.up: skip names it
  not lm_head: the head keeps high precision unless a rule names it
  no product is assumed with: embed (torch.nn.Embedding)
"""
    assert capsys.readouterr().out == printed
    assert state.coverage.uncovered["layers.1.up"] == "skip names it"


def test_presets_with_rules_or_phases_run_on_a_deep_model_and_tied_weights_stay_tied():
    for preset in PRESETS.values():
        recipe = preset.recipe
        is_plain = not recipe.rules and not recipe.phases
        if is_plain or preset.name.endswith("-experts"):
            continue
        model = Model(depth=12).to(torch.bfloat16)
        model.lm_head.weight = model.embed.weight
        state = apply_recipe(model, recipe, total_tokens=1000)
        for state.tokens in (0, 999):
            assert all(torch.isfinite(tensor).all() for tensor in step(model))
        assert model.lm_head.weight is model.embed.weight


class Casting(nn.Linear):
    """As nanochat's: the weight takes the input's dtype."""

    def forward(self, x):
        return functional.linear(x, self.weight.to(x.dtype), self.bias)

    def hello(self):
        return "hello"


class Scaled(nn.Linear):
    """As a row-wise layer of tensor parallelism: its bias counts by parts."""

    parts = 2

    def forward(self, x):
        return functional.linear(x, self.weight, self.bias / self.parts)


class Signs(nn.Linear):
    """Its output is that of a linear layer, its gradient is not."""

    def forward(self, x):
        return functional.linear(
            x, self.weight + (self.weight - self.weight.detach()), self.bias
        )


def test_a_subclass_that_computes_as_linear_is_reached_on_request():
    def trained(kind, **options):
        torch.manual_seed(0)
        model = nn.Sequential(kind(64, 64), nn.ReLU(), kind(64, 32))
        apply_recipe(model, "mxfp4", **options)
        model(torch.ones(32, 64)).sum().backward()
        return model, model[0].weight.grad

    model, grad = trained(Casting, reach=[Casting])
    assert isinstance(model[0], QuantLinear)
    assert isinstance(model[0], Casting)
    assert model[0].hello() == "hello"
    assert torch.equal(grad, trained(nn.Linear)[1])
    assert isinstance(copy.deepcopy(model)[0], Casting)


def test_a_subclass_that_computes_something_else_is_refused():
    for kind, differs in ((Scaled, "y"), (Signs, "dweight")):
        with pytest.raises(ValueError, match=f"its {differs} differs from that of fun"):
            apply_recipe(nn.Sequential(kind(64, 64)), "mxfp4", reach=[kind])
    plain = Scaled(64, 64)
    plain.parts = 1
    apply_recipe(nn.Sequential(plain), "mxfp4", reach=[Scaled])
