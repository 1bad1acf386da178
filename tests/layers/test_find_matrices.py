"""What ``apply_recipe`` finds in models that others build: nothing may stay out of it without a word."""

import copy
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import orthogonal

from ablate.layers.linear import QuantLinear, quantised_layers
from ablate.numerics import apply_recipe

FP4 = {"gemms": ["fprop", "dgrad", "wgrad"]}
X = torch.randn(32, 64, generator=torch.Generator().manual_seed(1))


def quantised(linear, x=X):
    """What the layer alone gives under the recipe."""
    alone = nn.Sequential(copy.deepcopy(linear))
    apply_recipe(alone, FP4, quiet=True)
    return alone(x)


def chain(*layers):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), *layers)


class Subclass(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class Owner(nn.Module):
    """Multiplies by a parameter of its own, which no module holds."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(64, 64)
        self.mixing = nn.Parameter(torch.randn(64, 64))
        self.token = nn.Parameter(torch.randn(1, 1, 64))  # one vector is no matrix

    def forward(self, x):
        return F.linear(self.fc(x), self.mixing) + self.token[0]


def seeded_linear():
    torch.manual_seed(5)
    return nn.Linear(64, 64)


def weight_norm(linear):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls it deprecated; people have it
        return torch.nn.utils.weight_norm(linear)


def pruned(linear):
    return prune.l1_unstructured(linear, "weight", 0.5)


def with_pruned_bias(linear):
    return prune.l1_unstructured(linear, "bias", 0.5)


def with_own_forward(linear):
    linear.forward = lambda x: F.linear(x, linear.weight)
    return linear


def with_own(name, value):
    linear = nn.Linear(64, 64)
    setattr(linear, name, value)
    return linear


HIDDEN = [
    (lambda: orthogonal(nn.Linear(64, 64)), "1", "it is parametrised"),
    (lambda: Subclass(64, 64), "1", f"a subclass of torch.nn.Linear ({__name__}.Subclass)"),
    (lambda: nn.LazyLinear(64), "1", "has no weight yet: pass one batch through the model first"),
    (lambda: with_own_forward(nn.Linear(64, 64)), "1", "its forward was replaced"),
    (lambda: with_own("name", "mine"), "1", "has an attribute of its own, name,"),
    (lambda: with_own("draw", 3), "1", "has an attribute of its own, draw,"),
    (lambda: with_own("state", nn.Identity()), "1", "has an attribute of its own, state,"),
    (lambda: nn.Bilinear(64, 64, 64), "1.weight", "torch.nn.Bilinear holds it"),
    (lambda: nn.Conv1d(64, 64, 1), "1.weight", "torch.nn.Conv1d holds it"),
    (lambda: nn.LSTM(64, 64, bias=False, num_layers=1), "1.weight_ih_l0", "torch.nn.LSTM holds it"),
    (Owner, "1.mixing", f"{__name__}.Owner holds it"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "name", "why"), HIDDEN)
def test_what_no_recipe_reaches_is_refused_by_name_unless_allowed(make, name, why):
    model = chain(make())
    before = {key: type(module) for key, module in model.named_modules()}
    with pytest.raises(ValueError, match="does not reach") as caught:
        apply_recipe(model, FP4, quiet=True)
    assert name in str(caught.value)
    assert why in str(caught.value)
    assert "allow=" in str(caught.value)
    assert {key: type(module) for key, module in model.named_modules()} == before, "nothing changed"
    state = apply_recipe(model, FP4, allow=["1*"], quiet=True)
    assert type(model[0]) is QuantLinear
    assert type(model[1]) is before["1"]
    assert why in state.coverage.uncovered[name]


@pytest.mark.parametrize("make", [weight_norm, torch.nn.utils.spectral_norm, pruned, with_pruned_bias])
def test_a_weight_that_a_hook_computes_is_the_one_that_is_quantised(make):
    model, other = (chain(nn.Tanh(), make(seeded_linear())) for _ in range(2))
    parameters = dict(model.named_parameters())
    apply_recipe(model, FP4, quiet=True)
    assert dict(model.named_parameters()).keys() == parameters.keys()
    y = model(X)
    y.square().sum().backward()
    other(X)  # its hooks compute the same weight, one power iteration on
    plain = nn.Linear(64, 64)
    plain.load_state_dict({"weight": other[2].weight.detach(), "bias": other[2].bias.detach()})
    expected = quantised(plain, torch.tanh(quantised(other[0])))
    assert torch.equal(y, expected)
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    assert all(parameter.grad.any() for parameter in model.parameters())
    with torch.no_grad():
        next(p for name, p in model.named_parameters() if name.startswith("2.weight")).mul_(2)
        assert make is torch.nn.utils.spectral_norm or not torch.equal(model(X), y), "computed anew each time"


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.second = nn.ModuleDict({"fc": self.first})
        self.unlisted = [self.first]

    def forward(self, x):
        return self.second["fc"](x)


def test_one_layer_at_two_places_is_quantised_at_both():
    model = Shared()
    expected = quantised(model.first)
    state = apply_recipe(model, FP4, quiet=True)
    assert type(model.second["fc"]) is QuantLinear
    assert model.first is model.second["fc"] is model.unlisted[0]
    assert torch.equal(model(X), expected)
    assert list(quantised_layers(model)) == ["first"]
    assert state.coverage.share("fprop") == 1
    model = Shared()
    model.other = nn.Linear(64, 64)
    state = apply_recipe(model, FP4, skip="second.fc", quiet=True)  # known by all its names
    assert type(model.first) is nn.Linear
    assert "first (= second.fc)" in str(state.coverage)
    assert state.coverage.share("wgrad") == pytest.approx(1 / 3), "two places, two products per token"


def test_the_root_may_itself_be_a_linear_layer():
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    keys = model.state_dict().keys()
    plain = copy.deepcopy(model)
    expected = quantised(model)
    apply_recipe(model, FP4, quiet=True)
    assert type(model) is QuantLinear
    assert model.state_dict().keys() == keys
    assert torch.equal(model(X), expected)
    assert not torch.equal(model(X), plain(X))


def encoder(**options):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 2, 128, dropout=0.0, batch_first=True, **options)
    return nn.TransformerEncoder(layer, 2)


IN_ATTENTION = ("*.in_proj_weight", "*.out_proj")


@pytest.mark.parametrize("padded", [False, True])
def test_torchs_fast_path_goes_through_the_recipe(padded):
    model = encoder()
    state = apply_recipe(model, FP4, allow=IN_ATTENTION, quiet=True)
    x = X.view(2, 16, 64)
    mask = torch.arange(16).expand(2, 16) >= 16 if padded else None
    seen = []
    state.watch = lambda layer, *_: seen.append(layer)
    with torch.no_grad():
        model.eval()(x, src_key_padding_mask=mask)
    assert list(dict.fromkeys(seen)) == list(quantised_layers(model)) == [
        "layers.0.linear1", "layers.0.linear2", "layers.1.linear1", "layers.1.linear2",
    ]  # fmt: skip
    assert "torch's fast path in evaluation, which passes layers by: layers.* (2)" in str(state.coverage)


def test_the_example_of_the_documents():
    model = nn.Module()
    model.layers = nn.ModuleList(nn.TransformerEncoderLayer(256, 4, 1024) for _ in range(2))
    model.head = nn.Linear(256, 1000)
    state = apply_recipe(model, {"gemms": ["fprop", "wgrad"]}, allow=IN_ATTENTION, quiet=True)
    page = Path(__file__).parents[2] / "docs" / "numerics.md"
    assert f"```\n{state.coverage}\n```" in page.read_text()


def test_the_matrices_of_attention_are_refused_unless_allowed():
    with pytest.raises(ValueError, match="does not reach 4 matrices") as caught:
        apply_recipe(encoder(), FP4, quiet=True)
    for name in ("layers.*.self_attn.in_proj_weight (2)", "layers.*.self_attn.out_proj (2)"):
        assert name in str(caught.value)
    assert "allow=['layers.*.self_attn.in_proj_weight', 'layers.*.self_attn.out_proj']" in str(caught.value)


class Bert(nn.Module):
    """Names like a head's within each block."""

    def __init__(self):
        super().__init__()
        self.layer = nn.ModuleList(
            nn.ModuleDict({"output": nn.Linear(64, 64), "score": nn.Linear(64, 64)}) for _ in range(2)
        )
        self.classifier = nn.Linear(64, 8)

    def forward(self, x):
        for block in self.layer:
            x = block["score"](block["output"](x))
        return self.classifier(x)


def test_a_name_like_a_heads_within_a_block_is_no_head():
    model = Bert()
    state = apply_recipe(model, FP4, quiet=True)
    heads = [name for name, layer in quantised_layers(model).items() if layer.place.is_head]
    assert heads == ["classifier"]
    assert state.coverage.uncovered == {"classifier": "the head keeps high precision unless a rule names it"}


def test_the_models_own_word_about_its_head_counts():
    model = Bert()
    model.classifier = nn.Linear(64, 32)  # no head then, and in FP4
    model.get_output_embeddings = lambda: model.layer[1]["score"]
    apply_recipe(nn.Sequential(model), FP4, quiet=True)  # inside of a wrapper, too
    heads = [name for name, layer in quantised_layers(model).items() if layer.place.is_head]
    assert heads == ["0.layer.1.score"]


def test_a_rule_for_a_head_out_of_reach_is_refused():
    model = Bert()
    model.classifier = Subclass(64, 8)
    state = apply_recipe(copy.deepcopy(model), FP4, quiet=True)
    assert state.coverage.uncovered["classifier"].startswith("the head")
    with pytest.raises(ValueError, match="a rule names no layer: the head"):
        apply_recipe(model, {**FP4, "layers": [{"head": True, "recipe": "mxfp8"}]}, quiet=True)


def test_hooks_buffers_and_attributes_stay():
    model = chain()
    linear = model[0]
    seen = []
    linear.register_forward_pre_hook(lambda *_: seen.append("pre"))
    linear.register_forward_hook(lambda *_: seen.append("forward"))
    linear.register_full_backward_hook(lambda *_: seen.append("backward"))
    linear.register_state_dict_post_hook(lambda *_: seen.append("state_dict"))
    linear.register_buffer("scale", torch.ones(3))
    linear.adapter = nn.Identity()
    linear.note = "mine"
    linear.requires_grad_(False)
    linear.eval()
    apply_recipe(model, FP4, quiet=True)
    assert type(model[0]) is QuantLinear
    assert model[0] is linear
    assert not linear.training
    assert not linear.weight.requires_grad
    assert linear.note == "mine"
    assert isinstance(linear.adapter, nn.Identity)
    model(X.clone().requires_grad_()).sum().backward()
    assert list(model.state_dict()) == ["0.weight", "0.bias", "0.scale"]
    assert seen == ["pre", "forward", "backward", "state_dict"]


class Tied(nn.Module):
    """A table's and a layer's weight, each under a second name, for products past both."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(8, 64)
        self.fc = nn.Linear(64, 64)
        self.unembedding = self.table.weight
        self.again = self.fc.weight


def test_a_parameter_under_a_second_name_is_a_matrix_of_its_own():
    with pytest.raises(ValueError, match="does not reach 2 matrices") as caught:
        apply_recipe(Tied(), FP4, quiet=True)
    assert "unembedding" in str(caught.value)
    assert "again" in str(caught.value)
    state = apply_recipe(Tied(), FP4, allow="*", quiet=True)
    assert "no product is assumed with: table (torch.nn.Embedding)" in str(state.coverage)


def test_a_model_follows_one_recipe():
    model = chain()
    apply_recipe(model, FP4, quiet=True)
    with pytest.raises(ValueError, match="layer 0 follows a recipe already"):
        apply_recipe(model, FP4, quiet=True)


class Past(nn.Module):
    """Reads the weight of its second layer past that layer."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.idle = (nn.Linear(64, 64) for _ in range(3))

    def forward(self, x):
        return F.linear(self.first(x), self.second.weight, self.second.bias)


def one_step(model, state):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            model(X).square().mean().backward()
            state.advance()
    return [str(one.message) for one in caught]


def test_a_weight_that_is_read_past_its_layer_is_told_once():
    model = Past()
    (said,) = one_step(model, apply_recipe(model, FP4, quiet=True))
    assert said.startswith("second got a gradient and never ran: ")
    model = Past()
    high = FP4 | {"layers": [{"match": "second", "recipe": "bf16"}]}
    assert not one_step(model, apply_recipe(model, high, quiet=True))


def test_layers_that_run_and_those_that_share_their_weight_are_not_told_of():
    model = chain(nn.Linear(64, 64), nn.utils.parametrizations.weight_norm(nn.Linear(64, 64)))
    model.twin = nn.Linear(64, 64)
    model.twin.weight = model[0].weight
    model.forward = lambda x: model[2](model[1](model[0](x)))
    weight_norm(model[1])
    assert not one_step(model, apply_recipe(model, FP4, allow="2", quiet=True))
