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
from torch.overrides import _get_current_function_mode_stack

from ablate.layers.linear import QuantLinear, quantised_layers
from ablate.numerics import apply_recipe
from tests.numerics.strategies import normal

FP4 = {"gemms": ["fprop", "dgrad", "wgrad"]}
X = normal(32, 64, seed=1)


def quantised(linear, x=X):
    """What the layer alone gives under the recipe."""
    alone = nn.Sequential(copy.deepcopy(linear))
    apply_recipe(alone, FP4)
    return alone(x)


class Subclass(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class Owner(nn.Module):
    """Multiplies by a parameter of its own, and by a table's and a layer's under second names."""

    def __init__(self):
        super().__init__()
        self.table, self.fc = nn.Embedding(8, 64), nn.Linear(64, 64)
        self.mixing = nn.Parameter(torch.randn(64, 64))
        self.token = nn.Parameter(torch.randn(1, 1, 64))  # one vector is no matrix
        self.unembedding, self.again = self.table.weight, self.fc.weight


def with_own(name, value):
    linear = nn.Linear(64, 64)
    setattr(linear, name, value)
    return linear


HIDDEN = [
    (lambda: orthogonal(nn.Linear(64, 64)), "1", "it is parametrised"),
    (lambda: Subclass(64, 64), "1", f"a subclass of torch.nn.Linear ({__name__}.Subclass)"),
    (lambda: nn.LazyLinear(64), "1", "has no weight yet: pass one batch through the model first"),
    (lambda: with_own("forward", lambda x: x), "1", "its forward was replaced"),
    (lambda: with_own("draw", 3), "1", "has an attribute of its own, draw,"),
    (lambda: with_own("state", nn.Identity()), "1", "has an attribute of its own, state,"),
    (lambda: nn.Bilinear(64, 64, 64), "1.weight", "torch.nn.Bilinear holds it"),
    (lambda: nn.LSTM(64, 64, bias=False, num_layers=1), "1.weight_ih_l0", "torch.nn.LSTM holds it"),
    *((Owner, f"1.{name}", f"{__name__}.Owner holds it") for name in ("mixing", "unembedding", "again")),
]  # fmt: skip


@pytest.mark.parametrize(("make", "name", "why"), HIDDEN)
def test_what_no_recipe_reaches_is_refused_by_name_unless_allowed(make, name, why):
    model = nn.Sequential(nn.Linear(64, 64), make())
    before = {key: type(module) for key, module in model.named_modules()}
    with pytest.raises(ValueError, match="does not reach") as caught:
        apply_recipe(model, FP4)
    assert all(words in str(caught.value) for words in (name, why, "allow="))
    assert {key: type(module) for key, module in model.named_modules()} == before, (
        "nothing changed"
    )
    state = apply_recipe(model, FP4, allow=["1*"])
    assert type(model[0]) is QuantLinear
    assert type(model[1]) is before["1"]
    assert why in state.coverage.uncovered[name]
    with pytest.raises(ValueError, match="layer 0 follows a recipe already"):
        apply_recipe(model, FP4)


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")
@pytest.mark.parametrize(
    "make",
    [nn.utils.weight_norm, lambda linear: prune.l1_unstructured(linear, "weight", 0.5)],
)
def test_a_weight_that_a_hook_computes_is_the_one_that_is_quantised(make):
    def hooked():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), make(nn.Linear(64, 64)))

    model, other = hooked(), hooked()
    names = [name for name, _ in model.named_parameters()]
    apply_recipe(model, FP4)
    assert [name for name, _ in model.named_parameters()] == names
    y = model(X)
    y.square().sum().backward()
    other(X)  # its hooks compute the same weight
    plain = nn.Linear(64, 64)
    plain.weight, plain.bias = nn.Parameter(other[2].weight.detach()), other[2].bias
    assert torch.equal(y, quantised(plain, torch.tanh(quantised(other[0]))))
    assert all(parameter.grad.any() for parameter in model.parameters())
    with torch.no_grad():
        (own,) = {name for name in names if name in ("2.weight_g", "2.weight_orig")}
        model.get_parameter(own).mul_(2)
        assert not torch.equal(model(X), y), "computed anew each time"


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
    state = apply_recipe(model, FP4)
    assert type(model.second["fc"]) is QuantLinear
    assert model.first is model.second["fc"] is model.unlisted[0]
    assert torch.equal(model(X), expected)
    assert list(quantised_layers(model)) == ["first"]
    assert state.coverage.share("fprop") == 1
    model = Shared()
    model.other = nn.Linear(64, 64)
    state = apply_recipe(model, FP4, skip="second.fc")  # known by all its names
    assert type(model.first) is nn.Linear
    assert "first (= second.fc)" in str(state.coverage)
    # two places, two products per token
    assert state.coverage.share("wgrad") == pytest.approx(1 / 3)


def test_the_root_may_itself_be_a_linear_layer():
    model = nn.Linear(64, 64)
    expected = quantised(model)
    apply_recipe(model, FP4)
    assert list(model.state_dict()) == ["weight", "bias"]
    assert torch.equal(model(X), expected)


IN_ATTENTION = ("*.in_proj_weight", "*.out_proj")


@pytest.mark.parametrize("padded", [False, True])
def test_torchs_fast_path_goes_through_the_recipe_and_attention_is_refused_unless_allowed(
    padded,
):
    layer = nn.TransformerEncoderLayer(64, 2, 128, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2)
    with pytest.raises(ValueError, match="does not reach 4 matrices") as caught:
        apply_recipe(model, FP4)
    of_both = "layers.*.self_attn.in_proj_weight", "layers.*.self_attn.out_proj"
    assert all(f"{name} (2)" in str(caught.value) for name in of_both)
    assert f"allow={list(of_both)}" in str(caught.value)
    state = apply_recipe(model, FP4, allow=IN_ATTENTION)
    mask = torch.arange(16).expand(2, 16) >= 16 if padded else None
    seen = []
    state.watch = lambda layer, *_: seen.append(layer)
    with torch.no_grad():
        model.eval()(X.view(2, 16, 64), src_key_padding_mask=mask)
    assert list(dict.fromkeys(seen)) == list(quantised_layers(model)) == [
        "layers.0.linear1", "layers.0.linear2", "layers.1.linear1", "layers.1.linear2",
    ]  # fmt: skip
    off = "fast path in evaluation is off: it never calls the layers of layers.* (2)"
    assert off in str(state.coverage)


def test_the_example_of_the_documents():
    model = nn.Module()
    model.layers = nn.ModuleList(
        nn.TransformerEncoderLayer(256, 4, 1024) for _ in range(2)
    )
    model.head = nn.Linear(256, 1000)
    state = apply_recipe(model, {"gemms": ["fprop", "wgrad"]}, allow=IN_ATTENTION)
    page = Path(__file__).parents[2] / "docs" / "numerics.md"
    assert f"```\n{state.coverage}\n```" in page.read_text()


def bert():
    """Names like a head's within each block."""
    block = nn.ModuleDict({"output": nn.Linear(64, 64), "score": nn.Linear(64, 64)})
    blocks = nn.ModuleList([block, copy.deepcopy(block)])
    return nn.ModuleDict({"layer": blocks, "classifier": nn.Linear(64, 8)})


def heads(model):
    layers = quantised_layers(model).values()
    return [layer.name for layer in layers if layer.place.is_head]


def test_the_head_is_what_the_model_says_or_a_name_outside_of_the_blocks():
    model = bert()
    state = apply_recipe(model, FP4)
    assert heads(model) == ["classifier"]
    assert state.coverage.uncovered == {
        "classifier": "the head keeps high precision unless a rule names it"
    }
    model = bert()
    model.classifier = nn.Linear(64, 32)  # no head then, and in FP4
    model.get_output_embeddings = lambda: model.layer[1]["score"]
    whole = nn.Sequential(model)  # inside of a wrapper, too
    apply_recipe(whole, FP4)
    assert heads(whole) == ["0.layer.1.score"]
    model = bert()
    model.classifier = Subclass(64, 8)
    with pytest.raises(ValueError, match="the model has no head"):
        apply_recipe(model, {**FP4, "layers": [{"head": True, "recipe": "mxfp8"}]})
    apply_recipe(model, FP4)


def test_hooks_buffers_and_attributes_stay():
    linear, seen = nn.Linear(64, 64), []
    linear.register_forward_hook(lambda *_: seen.append("forward"))
    linear.register_full_backward_hook(lambda *_: seen.append("backward"))
    linear.register_buffer("scale", torch.ones(3))
    linear.note = "mine"
    linear.requires_grad_(False).eval()
    apply_recipe(nn.Sequential(linear), FP4)
    assert (type(linear), linear.note, linear.training) == (QuantLinear, "mine", False)
    assert not linear.weight.requires_grad
    linear(X.clone().requires_grad_()).sum().backward()
    assert seen == ["forward", "backward"]
    assert list(linear.state_dict()) == ["weight", "bias", "scale"]


class OwnKernel(torch.autograd.Function):
    """Torch shows no product with the weight."""

    @staticmethod
    def forward(ctx, x, _weight):
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx, dy):
        return dy, dy.t() @ ctx.saved_tensors[0]


class Past(nn.Module):
    """Uses the weight of its second layer past that layer, which it may call as well."""

    def __init__(self, use, *, calls):
        super().__init__()
        self.first, self.second, self.idle = (nn.Linear(64, 64) for _ in range(3))
        self.use, self.calls = use, calls

    def forward(self, x):
        x = self.first(x)
        y = self.second(x) if self.calls else x
        return y + self.use(x, self.second.weight, self.first.weight)


class Sharing(nn.Sequential):
    """Has a second layer of a weight that ran, and one whose weight a hook computes."""

    def __init__(self):
        super().__init__(
            nn.Linear(64, 64), prune.l1_unstructured(nn.Linear(64, 64), "weight", 0.5)
        )
        self.twin = nn.Linear(64, 64)
        self.twin.weight = self[0].weight

    def forward(self, x):
        return self[1](self[0](x))


PRODUCTS = {
    "transposed": (lambda x, w, _: x @ w.t(), "second"),
    "cast": (lambda x, w, _: F.linear(x.bfloat16(), w.bfloat16()).float(), "second"),
    "einsum": (lambda x, w, _: torch.einsum("tk,nk->tn", x, w), "second"),
    "part": (lambda x, w, _: (x @ w[:8].T).sum(), "second"),
    "fused": (lambda x, w, v: F.linear(x, torch.cat([w, v]))[:, :64], "first, second"),
}
NO_PRODUCTS = {
    "penalty": lambda _, w, __: (w @ w.t() - 1).norm() + w.norm() * w.square().sum(),
    "table": lambda x, w, _: F.embedding(torch.arange(32), w) * x,
    "without gradient": lambda x, w, _: torch.no_grad()(torch.matmul)(x, w.t()),
    "decay": lambda x, w, _: x * w.abs().mean(),
}  # fmt: skip


def warned(model, recipe=FP4, **options):
    """What two steps of training warn of."""
    state = apply_recipe(model, recipe, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            with torch.no_grad():
                model(X)
            model(X).square().mean().backward()
            state.advance()
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize("calls", [False, True])
@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_with_a_weight_beside_its_layer_is_told_once_with_its_place(
    name, calls
):
    use, layers = PRODUCTS[name]
    (message,) = warned(Past(use, calls=calls))
    file, _, line = message.partition(" ")[0].rpartition(":")
    assert file == __file__
    assert int(line) in {line for *_, line in use.__code__.co_lines()}
    said = f" multiplies by the weight of {layers} itself, in high precision (call the layer"
    assert said in message
    if layers == "second":
        rule = {"match": "second", "recipe": "bf16"}
        assert not warned(Past(use, calls=calls), FP4 | {"layers": [rule]})


def test_what_is_no_product_with_a_weight_or_not_seen_by_torch():
    for use in NO_PRODUCTS.values():
        assert not warned(Past(use, calls=True))
    assert not warned(Sharing())
    (message,) = warned(Past(lambda x, w, _: OwnKernel.apply(x, w), calls=False))
    said = "code that never calls the layer multiplies by the weight of second"
    assert message.startswith(said)


def test_only_the_first_pass_with_gradients_is_watched_and_a_failed_one_ends_the_watch():
    model = Past(lambda x, w, _: x @ w.t(), calls=True)
    state = apply_recipe(model, FP4)
    with pytest.raises(ValueError, match="expected x"):
        model(torch.ones(2, 3))
    assert not _get_current_function_mode_stack()
    model(X)
    assert not state.beside
    twin = Past(model.use, calls=True)
    state = apply_recipe(twin, FP4)
    copied = copy.deepcopy(twin)
    copied(X)
    assert (len(state.beside), len(copied.first.state.beside)) == (0, 1), "its own"


def test_the_watch_compiles_nothing_twice():
    model = nn.Sequential(Past(lambda x, w, _: x @ w.t(), calls=True))
    state = apply_recipe(model, FP4)
    whole = torch.compile(model, backend="aot_eager", fullgraph=True)
    parts = copy.deepcopy(model)
    parts[0].compile(backend="aot_eager", fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for compiled in (whole, parts):
            for _ in range(2):
                compiled(X).sum().backward()
                state.advance()
