"""Models that are not built in, through the shared trainer: Hugging Face's, and those of users' functions."""

import copy
import dataclasses
import itertools
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from pydantic import TypeAdapter

from ablate.base.errors import UserError
from ablate.layers.linear import QuantLinear
from ablate.models.custom_models import build, outline
from ablate.recipes import RecipeSpec
from ablate.run.config import ModelConfig
from ablate.train import train
from ablate.train.dry import dry_run
from ablate.train.loop import assemble
from tests.exhaustive import rest_exhaustive

ALL = {"gemms": ["fprop", "dgrad", "wgrad"], "stabiliser": "dht"}
FUNCTION = """
import torch
from torch import nn


class Tiny(nn.Module):
    def __init__(self, vocab_size, width, dropout):
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


def build(*, vocab_size, seq_len, width=64, dropout=0.0):
    return Tiny(vocab_size, width, dropout)


def with_loss(*, vocab_size, seq_len):
    def loss(module, inputs, targets):
        logits = module(inputs).float()
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    return Tiny(vocab_size, 64, 0.0), loss


def raises(*, vocab_size, seq_len):
    raise KeyError("a bug of the user's")


def no_module(*, vocab_size, seq_len):
    return "a string"


def no_linear(*, vocab_size, seq_len):
    return nn.Embedding(vocab_size, vocab_size)
"""
HIDDEN = """

def hidden(*, vocab_size, seq_len):
    model = Tiny(vocab_size, 64, 0.0)
    model.mixing = nn.Parameter(torch.zeros(64, 64))
    return model


def lazy(*, vocab_size, seq_len):
    model = Tiny(vocab_size, 64, 0.0)
    model.layers[0] = nn.LazyLinear(64)
    return model


def applied(*, vocab_size, seq_len):
    from ablate.numerics import apply_recipe

    model = Tiny(vocab_size, 64, 0.0)
    apply_recipe(model, "mxfp4", quiet=True)
    return model
"""
CONFIGS = {
    "llama": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2},
    "qwen3": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2,
              "num_key_value_heads": 2, "head_dim": 32},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 64},
}  # fmt: skip
BERT = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.fixture
def function(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(FUNCTION)
    return lambda name: f"{path}:{name}"


@pytest.fixture
def hf(tmp_path):
    pytest.importorskip("transformers")

    def make(kind, **changes):
        folder = tmp_path / kind
        folder.mkdir(exist_ok=True)
        content = {"model_type": kind, "vocab_size": 64, **CONFIGS.get(kind, BERT), **changes}
        (folder / "config.json").write_text(json.dumps(content))
        return str(folder)

    return make


def config_with(make_config, model, recipe=ALL, **settings):
    config = make_config(TypeAdapter(RecipeSpec).validate_python(recipe), **settings)
    return dataclasses.replace(config, model=ModelConfig(**model))


def curve(config, tokens, **options):
    rows = []
    result = train(config, rows.append, tokens=tokens, **options)
    return result, [{k: v for k, v in row.items() if k != "tokens_per_sec"} for row in rows]


def after(steps):
    """Stop a run after so many steps."""
    asked = itertools.count(1)
    return lambda: next(asked) >= steps


def losses(rows):
    return [row["val_loss"] for row in rows if row["kind"] == "eval"]


@pytest.mark.parametrize("kind", rest_exhaustive(CONFIGS, lambda kind: kind == "qwen3"))
def test_a_hugging_face_configuration_trains_with_its_layers_quantised(make_config, tokens, hf, kind):
    config = config_with(make_config, {"hf": hf(kind)}, tokens=8192, eval_every_tokens=2048)
    network = assemble(config, "cpu").network
    layers = [module for module in network.module.modules() if isinstance(module, QuantLinear)]
    assert len(layers) == 2 * {"gpt2": 4}.get(kind, 7) + 1
    assert not any(type(module) is torch.nn.Linear for module in network.module.modules())
    assert {parameter.dtype for parameter in network.module.parameters()} == {torch.float32}
    result, rows = curve(config, tokens)
    assert result.state == "finished"
    assert losses(rows)[0] < 1.05 * math.log(64)
    assert losses(rows)[-1] < losses(rows)[0] - 0.3
    again = curve(config, tokens, should_stop=after(5))[1]
    assert again == rows[: len(again)]  # dropout and all
    assert losses(again) == losses(rows)[:1]
    [other] = losses(curve(dataclasses.replace(config, seed=1), tokens, should_stop=after(5))[1])
    assert other != losses(rows)[0]


def test_a_checkpoint_gives_its_weights(make_config, tokens, hf, tmp_path):
    transformers = pytest.importorskip("transformers")
    folder = hf("llama")
    own = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder))
    saved = tmp_path / "saved"
    own.save_pretrained(saved)
    found = build(ModelConfig(hf=str(saved), pretrained=True), vocab_size=64, seq_len=32).module
    for name, value in own.state_dict().items():
        assert torch.equal(found.state_dict()[name], value)
    _, rows = curve(config_with(make_config, {"hf": str(saved), "pretrained": True}), tokens)
    assert losses(rows)[-1] < losses(rows)[0]


def test_a_checkpoint_trains_with_dropout_from_its_first_step(make_config, hf, tmp_path):
    transformers = pytest.importorskip("transformers")
    own = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(hf("gpt2")))
    own.save_pretrained(tmp_path / "saved")
    config = config_with(make_config, {"hf": str(tmp_path / "saved"), "pretrained": True})
    module = assemble(config, "cpu").network.module
    assert all(part.training for part in module.modules())


def test_weights_in_bf16_leave_the_rotary_frequencies_alone(make_config, hf):
    config = config_with(make_config, {"hf": hf("llama")}, master_weights="bf16")
    module = assemble(config, "cpu").network.module
    assert {parameter.dtype for parameter in module.parameters()} == {torch.bfloat16}
    buffers = {buffer.dtype for buffer in module.buffers() if buffer.is_floating_point()}
    assert buffers == {torch.float32}


def test_an_option_that_a_configuration_has_not_is_refused(hf):
    model = ModelConfig(hf=hf("llama"), options={"num_hidden_layer": 1})
    with pytest.raises(
        UserError, match=r"LlamaConfig has no 'num_hidden_layer' \(did you mean 'num_hidden_layers'"
    ):
        outline(model, vocab_size=64, seq_len=32)


def test_without_transformers_one_line_says_how_to_get_it(hf, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UserError, match=r"needs a package that is not installed: transformers \(pip install"):
        outline(ModelConfig(hf=hf("llama")), vocab_size=64, seq_len=32)


def test_options_change_a_configuration(hf):
    model = ModelConfig(hf=hf("llama"), options={"num_hidden_layers": 1})
    assert len(outline(model, vocab_size=64, seq_len=32).layers) == 8


@pytest.mark.parametrize(
    ("kind", "changes", "sizes", "said"),
    [
        ("gpt2", {}, (64, 128), "has 64 positions, but seq_len is 128 (lower training.seq_len"),
        ("llama", {"num_attention_heads": 5}, (64, 32), "cannot be built"),
        ("llama", {"model_type": "nothing-known"}, (64, 32), "cannot be built"),
        (
            "llama",
            {"model_type": "own", "auto_map": {"AutoConfig": "configuration_own.Own"}},
            (64, 32),
            "cannot be built",
        ),
    ],
)
def test_a_configuration_that_does_not_fit_is_one_line(hf, kind, changes, sizes, said):
    with pytest.raises(UserError) as caught:
        build(ModelConfig(hf=hf(kind, **changes)), vocab_size=sizes[0], seq_len=sizes[1])
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_checkpoint_has_too_small_a_vocabulary(hf, tmp_path):
    folder = hf("llama")
    (tmp_path / "llama" / "model.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match="has 64 tokens, but the data have 65"):
        build(ModelConfig(hf=folder, pretrained=True), vocab_size=65, seq_len=32)


def test_a_users_function_trains(make_config, tokens, function):
    config = config_with(make_config, {"function": function("build"), "options": {"dropout": 0.1}})
    result, rows = curve(config, tokens)
    assert result.state == "finished"
    assert losses(rows)[-1] < losses(rows)[0] - 0.3
    assert curve(config, tokens)[1] == rows


def test_a_users_loss_is_the_one_that_is_trained_and_evaluated(make_config, tokens, function):
    plain = curve(config_with(make_config, {"function": function("build")}), tokens)[1]
    own = curve(config_with(make_config, {"function": function("with_loss")}), tokens)[1]
    assert losses(own) == pytest.approx(losses(plain), rel=1e-6)


class Kept:
    """Keeps snapshots in memory."""

    def __init__(self, start=None):
        self.start, self.last = start, None

    def load(self):
        return self.start

    def due(self, _tokens):
        return False

    def save(self, snapshot):
        self.last = copy.deepcopy(snapshot)


def test_a_resumed_run_with_dropout_goes_on_to_the_same_bits(make_config, tokens, function):
    config = config_with(make_config, {"function": function("build"), "options": {"dropout": 0.2}})
    _, whole = curve(config, tokens)
    kept = Kept()
    stops = iter([False] * 9 + [True] * 99)
    result, first = curve(config, tokens, checkpoints=kept, should_stop=lambda: next(stops))
    assert result.state == "interrupted"
    torch.manual_seed(12345)  # another process's generator
    _, rest = curve(config, tokens, checkpoints=Kept(kept.last))
    assert first + rest == whole


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("raises", "raised KeyError: "),
        ("no_module", "returned str (expected a torch.nn.Module, or (module, loss))"),
    ],
)
def test_a_function_that_gives_no_model_is_one_line(function, name, said):
    with pytest.raises(UserError) as caught:
        build(ModelConfig(function=function(name)), vocab_size=64, seq_len=32)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_outline_names_layers_parameters_and_what_no_recipe_reaches(function, hf):
    found = outline(ModelConfig(function=function("build")), vocab_size=96, seq_len=32)
    assert [(layer.name, layer.inputs, layer.outputs, layer.is_head) for layer in found.layers] == [
        ("layers.0", 64, 64, False), ("layers.1", 64, 64, False), ("lm_head", 64, 96, True),
    ]  # fmt: skip
    assert found.parameters == 2 * 96 * 64 + 2 * (64 * 64 + 64)
    assert all(matrix.out_of_reach is None for matrix in found.matrices)
    with pytest.raises(UserError, match="no linear layer"):
        outline(ModelConfig(function=function("no_linear")), vocab_size=64, seq_len=32)
    llama = outline(ModelConfig(hf=hf("llama")), vocab_size=64, seq_len=32)
    assert llama.attention_flops_per_token == 6 * 2 * 64 * 32


def test_an_encoder_is_refused_unless_it_is_made_a_decoder(hf):
    options = {"hf": hf("bert")}
    with pytest.raises(UserError, match=r"^model.hf .*depends on later ones \(an encoder needs"):
        build(ModelConfig(**options), vocab_size=64, seq_len=32)
    build(ModelConfig(**options, options={"is_decoder": True}), vocab_size=64, seq_len=32)


@pytest.mark.exhaustive
def test_building_a_hugging_face_model_prints_nothing(hf):
    code = (
        "from ablate.models.custom_models import outline; from ablate.run.config import ModelConfig;"
        f"outline(ModelConfig(hf={hf('llama')!r}), vocab_size=64, seq_len=32)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout + done.stderr == ""


def test_a_mixture_whose_experts_are_no_linear_layers_says_so(tmp_path):
    pytest.importorskip("transformers")
    content = {
        "model_type": "mixtral", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 4,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(content))
    found = outline(ModelConfig(hf=str(tmp_path)), vocab_size=64, seq_len=32)
    [why] = [m.out_of_reach for m in found.matrices if m.name == "model.layers.0.mlp.experts.gate_up_proj"]
    assert "MixtralExperts holds it" in why


def test_an_outline_of_lazy_layers_and_of_a_model_with_a_recipe(function):
    own = Path(function("lazy").partition(":")[0])
    own.write_text(FUNCTION + HIDDEN)
    found = outline(ModelConfig(function=function("lazy")), vocab_size=64, seq_len=32)
    assert [one.name for one in found.matrices if one.out_of_reach] == ["layers.0"]
    with pytest.raises(UserError, match=r"layer layers.0 follows a recipe already .*applies each arm's"):
        outline(ModelConfig(function=function("applied")), vocab_size=64, seq_len=32)


def test_what_no_recipe_reaches_is_refused_in_a_run_unless_allowed(make_config, function, tmp_path):
    own = Path(function("hidden").partition(":")[0])
    own.write_text(FUNCTION + HIDDEN)
    with pytest.raises(ValueError, match=r"does not reach 1 matrix .*mixing: .*model.allow: \['mixing'\]"):
        assemble(config_with(make_config, {"function": function("hidden")}), "cpu")
    assemble(config_with(make_config, {"function": function("hidden")}, recipe={}), "cpu")
    allowed = config_with(make_config, {"function": function("hidden"), "allow": ["mix*"]})
    trainee = assemble(allowed, "cpu")
    assert trainee.state.coverage.out_of_reach == ("mixing",)
    assert trainee.state.coverage.count("wgrad") == 2


PAST = """

class Past(Tiny):
    def forward(self, tokens):
        x, past = self.layers[0](self.table(tokens)), self.layers[1]
        return self.lm_head(nn.functional.linear(x, past.weight, past.bias))


def past(*, vocab_size, seq_len):
    return Past(vocab_size, 64, 0.0)
"""


def test_a_weight_that_is_read_past_its_layer_ends_a_run_but_for_a_rule(make_config, function, tokens):
    name = function("past")
    Path(name.partition(":")[0]).write_text(FUNCTION + PAST)
    with pytest.raises(UserError, match=r"mine.py:past: layers.1 got a gradient and never ran"):
        train(config_with(make_config, {"function": name}), print, tokens=tokens)
    high = ALL | {"layers": [{"match": "layers.1", "recipe": "bf16"}]}
    done = train(config_with(make_config, {"function": name}, recipe=high), print, tokens=tokens)
    assert done.state == "finished"


def test_a_dry_run(make_config, function, hf):
    assert dry_run(config_with(make_config, {"function": function("build")})).linear_layers == 3
    for kind in CONFIGS:
        config = config_with(make_config, {"hf": hf(kind)})
        assert dry_run(config).linear_layers == 2 * {"gpt2": 4}.get(kind, 7) + 1


BROKEN = """

def of(forward, loss=None, **more):
    def build(*, vocab_size, seq_len):
        model = Tiny(vocab_size, 64, 0.0)
        whole = model.forward
        model.forward = lambda tokens: forward(whole(tokens))
        for name, module in more.items():
            setattr(model, name, module)
        return model if loss is None else (model, loss)

    return build


def two_arguments(*, vocab_size, seq_len):
    model = Tiny(vocab_size, 64, 0.0)
    model.forward = lambda tokens, mask: tokens
    return model


def bug(logits):
    raise RuntimeError("my bug\\nwith a second line")


small = of(lambda y: y[..., :9])
padded = of(lambda y: nn.functional.pad(y, (0, 3)))
flat = of(lambda y: y.flatten(0, 1))
last = of(lambda y: y[:, -1])
pair = of(lambda y: (y, None))
raises_within = of(bug)
detached = of(lambda y: y.detach())
number = of(lambda y: y, lambda module, inputs, targets: 1.0)
each = of(lambda y: y, lambda module, inputs, targets: module(inputs).logsumexp(-1))
two = of(lambda y: y, lambda module, inputs: None)
idle = of(lambda y: y, idle=nn.Linear(64, 64))
frozen = of(lambda y: y, frozen=nn.Linear(64, 64).requires_grad_(False))
"""
SHAPE = r"returned logits \[{}\] \(expected \[sequences, positions, vocab_size\], here \[\d+, 32, 64\]\)"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("small", SHAPE.format(r"\d+, 32, 9")),
        ("flat", SHAPE.format(r"\d+, 64")),
        ("last", SHAPE.format(r"\d+, 64")),
        (
            "pair",
            r"returned a tuple \(expected logits .*\[\d+, 32, 64\]; what returns others needs a loss of",
        ),
        (
            "two_arguments",
            r"raised TypeError: .*missing 1 required .*'mask' \(it is called as module\(tokens",
        ),
        ("raises_within", r"raised RuntimeError: my bug, at mine.py:\d+ \(it is"),
        ("detached", "raised RuntimeError: element 0 of tensors does not require grad"),
        ("number", r"its loss returned a float \(expected a tensor without dimensions: mean nats per token"),
        ("each", r"its loss returned a tensor \[\d+, 32\] \(expected a tensor without dimensions"),
        ("two", "raised TypeError: .*takes 2 positional arguments but 3 were given"),
        ("idle", "no gradient reaches its parameter idle.weight"),
        ("raises", "raised KeyError: .*, at mine.py:"),
    ],
)
def test_a_dry_run_says_in_a_line_what_is_wrong_with_a_users_model(make_config, function, name, said):
    own = Path(function("build").partition(":")[0])
    own.write_text(FUNCTION + BROKEN)
    with pytest.raises(UserError, match=rf"^model.function .*mine.py:{name}.* {said}") as error:
        dry_run(config_with(make_config, {"function": function(name)}))
    assert len(str(error.value).splitlines()) == 1


def test_a_dry_run_takes_logits_of_a_padded_vocabulary_and_frozen_parameters(make_config, function):
    own = Path(function("build").partition(":")[0])
    own.write_text(FUNCTION + BROKEN)
    for name, layers in (("padded", 3), ("frozen", 4)):
        assert dry_run(config_with(make_config, {"function": function(name)})).linear_layers == layers


def test_logits_of_another_shape_end_a_run_with_the_same_line(make_config, function, tokens):
    own = Path(function("build").partition(":")[0])
    own.write_text(FUNCTION + BROKEN)
    with pytest.raises(UserError, match=r"mine.py:small returned logits \["):
        train(config_with(make_config, {"function": function("small")}), print, tokens=tokens)
