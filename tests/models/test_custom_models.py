"""Models that are not built in, through the shared trainer: Hugging Face's, and those of users' functions."""

import dataclasses
import json
import math
import re
import sys
from pathlib import Path

import pytest
import torch

from ablate.base.errors import UserError
from ablate.layers.linear import QuantLinear
from ablate.models.custom_models import build, outline
from ablate.run.config import ModelConfig
from ablate.train import train
from ablate.train.probe import dry_run
from ablate.train.step import assemble
from tests.curves import Kept, after, curve, losses
from tests.exhaustive import rest_exhaustive

MINE = """
import torch
from torch import nn

from ablate.numerics import apply_recipe


class Tiny(nn.Module):
    def __init__(self, vocab_size, width=64, dropout=0.0):
        super().__init__()
        self.table = nn.Embedding(vocab_size, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.drop = nn.Dropout(dropout)
        self.lm_head = nn.Linear(width, vocab_size, bias=False)

    def forward(self, tokens):
        x = self.table(tokens)
        for layer in self.layers:
            x = x + self.drop(torch.relu(layer(x)))
        return self.lm_head(x)


class Past(Tiny):
    def forward(self, tokens):
        x, past = self.layers[0](self.table(tokens)), self.layers[1]
        return self.lm_head(nn.functional.linear(x, past.weight, past.bias))


class Beside(Tiny):
    def forward(self, tokens):
        x = self.layers[0](self.layers[1](self.table(tokens)))
        return self.lm_head(x + x @ self.layers[1].weight.t())


class PlainSub(nn.Linear):
    pass


class Half(nn.Linear):
    def forward(self, x):
        return super().forward(x) / 2


def beside(*, vocab_size, seq_len):
    return Beside(vocab_size)


def subclasses(*, vocab_size, seq_len, half=False):
    model = Tiny(vocab_size)
    model.layers[0] = PlainSub(64, 64)
    if half:
        model.layers[1] = Half(64, 64)
    return model


def build(*, vocab_size, seq_len, width=64, dropout=0.0):
    return Tiny(vocab_size, width, dropout)


def past(*, vocab_size, seq_len):
    return Past(vocab_size)


def with_loss(*, vocab_size, seq_len):
    def loss(module, inputs, targets):
        logits = module(inputs).float()
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    return Tiny(vocab_size), loss


def raises(*, vocab_size, seq_len):
    raise KeyError("a bug of the user's")


def no_module(*, vocab_size, seq_len):
    return "a string"


def no_linear(*, vocab_size, seq_len):
    return nn.Embedding(vocab_size, vocab_size)


def hidden(*, vocab_size, seq_len):
    model = Tiny(vocab_size)
    model.mixing = nn.Parameter(torch.zeros(64, 64))
    return model


def lazy(*, vocab_size, seq_len):
    model = Tiny(vocab_size)
    model.layers[0] = nn.LazyLinear(64)
    return model


def applied(*, vocab_size, seq_len):
    model = Tiny(vocab_size)
    apply_recipe(model, "mxfp4")
    return model


def of(forward, loss=None, **more):
    def build(*, vocab_size, seq_len):
        model = Tiny(vocab_size)
        whole = model.forward
        model.forward = lambda tokens: forward(whole(tokens))
        for name, module in more.items():
            setattr(model, name, module)
        return model if loss is None else (model, loss)

    return build


def two_arguments(*, vocab_size, seq_len):
    model = Tiny(vocab_size)
    model.forward = lambda tokens, mask: tokens
    return model


def bug(logits):
    raise RuntimeError("my bug\\nwith a second line")


small = of(lambda y: y[..., :9])
padded = of(lambda y: nn.functional.pad(y, (0, 3)))
flat = of(lambda y: y.flatten(0, 1))
pair = of(lambda y: (y, None))
raises_within = of(bug)
detached = of(lambda y: y.detach())
number = of(lambda y: y, lambda module, inputs, targets: 1.0)
each = of(lambda y: y, lambda module, inputs, targets: module(inputs).logsumexp(-1))
two = of(lambda y: y, lambda module, inputs: None)
idle = of(lambda y: y, idle=nn.Linear(64, 64))
frozen = of(lambda y: y, frozen=nn.Linear(64, 64).requires_grad_(False))
"""
ALL = {"gemms": ["fprop", "dgrad", "wgrad"], "stabiliser": "dht"}
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
CONFIGS = {
    "llama": SMALL,
    "qwen3": SMALL | {"num_key_value_heads": 2, "head_dim": 32},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 64},
}


@pytest.fixture
def hf(tmp_path):
    pytest.importorskip("transformers")

    def make(kind, **changes):
        folder = tmp_path / kind
        folder.mkdir(exist_ok=True)
        content = {"model_type": kind, "vocab_size": 64} | CONFIGS.get(kind, SMALL)
        content |= changes
        (folder / "config.json").write_text(json.dumps(content))
        return str(folder)

    return make


@pytest.fixture
def function(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    return lambda name: f"{tmp_path / 'mine.py'}:{name}"


@pytest.fixture
def config(make_config, function):
    """Make a run of a user's function (by its name) or of another model."""

    def make(model, recipe=ALL, *, options=None, **settings):
        if not isinstance(model, dict):
            model = {"function": function(model)}
        model = ModelConfig(**model, options=options or {})
        return dataclasses.replace(make_config(recipe, **settings), model=model)

    return make


@pytest.mark.parametrize("kind", rest_exhaustive(CONFIGS, lambda kind: kind == "qwen3"))
def test_a_hugging_face_configuration_trains_with_its_layers_quantised(
    config, tokens, hf, kind
):
    run = config({"hf": hf(kind)}, tokens=8192, eval_every_tokens=2048)
    module = assemble(run, "cpu").module
    layers = [part for part in module.modules() if isinstance(part, torch.nn.Linear)]
    assert all(isinstance(layer, QuantLinear) for layer in layers)
    assert (
        len(layers)
        == dry_run(run).linear_layers
        == 2 * (4 if kind == "gpt2" else 7) + 1
    )
    assert {parameter.dtype for parameter in module.parameters()} == {torch.float32}
    result, rows = curve(run, tokens)
    assert result.state == "finished"
    assert losses(rows)[0] < 1.05 * math.log(64)
    assert losses(rows)[-1] < losses(rows)[0] - 0.3
    again = curve(run, tokens, should_stop=after(5))[1]
    assert again == rows[: len(again)]  # dropout and all
    assert losses(again) == losses(rows)[:1]
    other = dataclasses.replace(run, seed=1)
    assert curve(other, tokens, should_stop=after(5))[1] != again


def test_a_checkpoint_gives_its_weights_and_trains_with_dropout_from_its_first_step(
    config, hf, tmp_path
):
    transformers = pytest.importorskip("transformers")
    outline = transformers.AutoConfig.from_pretrained(hf("gpt2"))
    own = transformers.AutoModelForCausalLM.from_config(outline)
    own.save_pretrained(tmp_path / "saved")
    trained = {"hf": str(tmp_path / "saved"), "pretrained": True}
    module = assemble(config(trained), "cpu").module
    assert all(part.training for part in module.modules())
    for name, value in own.state_dict().items():
        is_conv1d = "c_" in name and value.dim() == 2
        assert torch.equal(module.state_dict()[name], value.t() if is_conv1d else value)
    with pytest.raises(UserError, match="has 64 tokens, but the data have 65"):
        build(ModelConfig(**trained), vocab_size=65, seq_len=32)


def test_weights_in_bf16_leave_the_rotary_frequencies_alone(config, hf):
    module = assemble(config({"hf": hf("llama")}, master_weights="bf16"), "cpu").module
    assert {parameter.dtype for parameter in module.parameters()} == {torch.bfloat16}
    for buffer in module.buffers():
        assert buffer.dtype == torch.float32 or not buffer.is_floating_point()


@pytest.mark.parametrize(
    ("kind", "changes", "options", "message"),
    [
        ("gpt2", {"n_positions": 16}, {}, r"has 16 positions, but seq_len is 32 \(lower training.seq_len"),
        ("llama", {"num_attention_heads": 5}, {}, "cannot be built"),
        ("llama", {"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}, {}, "cannot be built"),
        ("llama", {}, {"num_hidden_layer": 1}, r"LlamaConfig has no 'num_hidden_layer' \(did you mean"),
        ("bert", {}, {}, r"^model.hf .*depends on later ones \(an encoder needs"),
    ],
)  # fmt: skip
def test_a_configuration_that_does_not_fit_is_one_line(
    hf, kind, changes, options, message
):
    folder = hf(kind, **changes)
    # code that comes with a model is never run
    Path(folder, "own.py").write_text("raise SystemExit")
    with pytest.raises(UserError, match=message) as caught:
        build(ModelConfig(hf=folder, options=options), vocab_size=64, seq_len=32)
    assert "\n" not in str(caught.value)


def test_options_change_a_configuration_and_one_line_says_how_to_get_transformers(
    hf, monkeypatch
):
    sizes = {"vocab_size": 64, "seq_len": 32}
    build(ModelConfig(hf=hf("bert"), options={"is_decoder": True}), **sizes)
    model = ModelConfig(hf=hf("llama"), options={"num_hidden_layers": 1})
    outlined = outline(model, **sizes)
    assert len(outlined.layers) == 8
    linear = sum(layer.inputs * layer.outputs for layer in outlined.layers)
    assert outlined.size.flops_per_token == 6 * linear + 6 * 64 * 32
    monkeypatch.setitem(sys.modules, "transformers", None)
    said = r"needs a package that is not installed: transformers \(pip install"
    with pytest.raises(UserError, match=said):
        outline(model, **sizes)


def test_a_users_loss_is_the_one_that_is_trained_and_evaluated(config, tokens):
    _, plain = curve(config("build"), tokens)
    _, own = curve(config("with_loss"), tokens)
    assert losses(own) == pytest.approx(losses(plain), rel=1e-6)
    assert losses(own)[-1] < losses(own)[0] - 0.3


def test_a_resumed_run_with_dropout_goes_on_to_the_same_bits(config, tokens):
    run = config("build", options={"dropout": 0.2})
    _, whole = curve(run, tokens)
    snapshots = Kept()
    result, first = curve(run, tokens, checkpoints=snapshots, should_stop=after(10))
    assert result.state == "interrupted"
    torch.manual_seed(12345)  # another process's generator
    _, rest = curve(run, tokens, checkpoints=snapshots)
    assert first + rest == whole


def test_the_outline_names_layers_parameters_and_what_no_recipe_reaches(function, hf):
    def of(name, **model):
        model = model or {"function": function(name)}
        return outline(ModelConfig(**model), vocab_size=96, seq_len=32)

    outlined = of("build")
    assert [(layer.name, layer.inputs, layer.outputs, layer.is_head) for layer in outlined.layers] == [
        ("layers.0", 64, 64, False), ("layers.1", 64, 64, False), ("lm_head", 64, 96, True),
    ]  # fmt: skip
    assert outlined.size.parameters == 2 * 96 * 64 + 2 * (64 * 64 + 64)
    assert all(matrix.out_of_reach is None for matrix in outlined.matrices)
    assert [one.name for one in of("lazy").matrices if one.out_of_reach] == ["layers.0"]
    for name, message in (
        ("no_linear", "no linear layer"),
        ("applied", "layers.0 follows a recipe already"),
    ):
        with pytest.raises(UserError, match=message):
            of(name)
    of_experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    content = SMALL | {"num_key_value_heads": 2} | of_experts
    mixture, other = (of("", hf=hf(kind, **content)) for kind in ("mixtral", "gpt_oss"))
    reasons = {matrix.name: matrix.out_of_reach for matrix in mixture.matrices}
    assert "MixtralTopKRouter holds it" in reasons["model.layers.0.mlp.gate.weight"]
    assert reasons["model.layers.0.mlp.experts.gate_up_proj.3"] is None
    for model in (mixture, other):  # of which the other stores [in, out]
        layers = {layer.name: layer for layer in model.layers}
        first = layers["model.layers.0.mlp.experts.down_proj.0"]
        assert (first.inputs, first.outputs, first.token_share) == (96, 64, 2 / 4)


def test_what_no_recipe_reaches_is_refused_in_a_run_unless_allowed(config, function):
    said = r"does not reach 1 matrix .*mixing: .*model.allow: \['mixing'\]"
    with pytest.raises(ValueError, match=said):
        assemble(config("hidden"), "cpu")
    assemble(config("hidden", recipe={}), "cpu")
    allowed = config({"function": function("hidden"), "allow": ["mix*"]})
    coverage = assemble(allowed, "cpu").state.coverage
    assert (coverage.out_of_reach, coverage.count("wgrad")) == (("mixing",), 2)


@pytest.mark.parametrize(
    ("name", "code"), [("past", "past.weight"), ("beside", "weight.t()")]
)
def test_a_product_with_a_weight_beside_its_layer_ends_a_run_and_a_dry_run(
    config, tokens, name, code
):
    line = 1 + MINE.partition(code)[0].count("\n")
    said = rf"mine.py:{name}: \S*mine.py:{line} multiplies by the weight of layers.1 itself, in high"
    with pytest.raises(UserError, match=said):
        train(config(name), print, tokens=tokens)
    with pytest.raises(UserError, match=said):
        dry_run(config(name))
    high = ALL | {"layers": [{"match": "layers.1", "recipe": "bf16"}]}
    assert train(config(name, recipe=high), print, tokens=tokens).state == "finished"


def test_a_study_names_subclasses_of_linear_that_follow_the_recipe(config, function):
    def model(**keys):
        return {"function": function("subclasses"), **keys}

    said = r"by model.reach: \[PlainSub\], in code by reach=\[PlainSub\]"
    with pytest.raises(ValueError, match=said) as caught:
        assemble(config(model()), "cpu")
    for name in ("PlainSub", re.search(r"\((\S+)\), which may", str(caught.value))[1]):
        reached = config(model(reach=[name]))
        assert dry_run(reached).linear_layers == 3
        assert assemble(reached, "cpu").state.coverage.count("wgrad") == 2
        (layer, *_) = outline(reached.model, vocab_size=256, seq_len=32).layers
        assert layer.name == "layers.0"
    said = (
        r"model \S*mine.py:subclasses: reach: 'PlainSup' .* \(did you mean 'PlainSub'"
    )
    with pytest.raises(UserError, match=said):
        outline(ModelConfig(**model(reach=["PlainSup"])), vocab_size=256, seq_len=32)
    both = config(model(reach=["PlainSub", "Half"]), options={"half": True})
    with pytest.raises(ValueError, match="Half computes something else: its y differs"):
        assemble(both, "cpu")


SHAPE = r"returned logits \[{}\] \(expected \[sequences, positions, vocab_size\], here \[\d+, 32, 64\]\)"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("small", SHAPE.format(r"\d+, 32, 9")),
        ("flat", SHAPE.format(r"\d+, 64")),
        ("pair", r"returned a tuple \(expected logits .*\[\d+, 32, 64\]; what returns others needs"),
        ("two_arguments", r"raised TypeError: .*missing 1 required .*'mask' \(it is called as module"),
        ("raises_within", r"raised RuntimeError: my bug, at mine.py:\d+ \(it is"),
        ("detached", "raised RuntimeError: element 0 of tensors does not require grad"),
        ("number", r"its loss returned a float \(expected a tensor without dimensions: mean nats per token"),
        ("each", r"its loss returned a tensor \[\d+, 32\] \(expected a tensor without dimensions"),
        ("idle", "no gradient reaches its parameter idle.weight"),
        ("raises", "raised KeyError: .*, at mine.py:"),
        ("no_module", r"returned str \(expected a torch.nn.Module, or \(module, loss\)\)"),
    ],
)  # fmt: skip
def test_a_dry_run_says_in_a_line_what_is_wrong_with_a_users_model(
    config, name, message
):
    said = rf"^model.function .*mine.py:{name}.* {message}"
    with pytest.raises(UserError, match=said) as error:
        dry_run(config(name))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("name", "layers"), [("padded", 3), ("frozen", 4)])
def test_a_padded_vocabulary_and_frozen_layers_are_no_fault(config, name, layers):
    assert dry_run(config(name)).linear_layers == layers
