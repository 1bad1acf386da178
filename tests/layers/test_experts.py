"""Experts in one parameter [experts, out, in] follow the recipe as so many linear layers do, to the bit."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

from ablate.layers.linear import QuantLinear
from ablate.numerics import apply_recipe, fake_quantize
from tests.numerics.strategies import normal
from tests.tensors import assert_same

RECIPE = {
    "gemms": ["fprop", "dgrad"],
    "stabiliser": "sr+rht",
    "rest": "bf16-dequantised",
}
EXPERTS, WIDTH, INNER = 3, 64, 32


class Gathered(nn.Module):
    """As transformers' experts: a slice for each expert."""

    is_transposed, has_bias = False, False

    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(0.2 * normal(EXPERTS, INNER, WIDTH))
        self.down = nn.Parameter(0.2 * normal(EXPERTS, WIDTH, INNER, seed=1))

    def forward(self, x, counts):
        out, begin = torch.zeros_like(x), 0
        for expert in torch.arange(EXPERTS):
            end = begin + int(counts[expert])
            if end > begin:
                inner = torch.relu(functional.linear(x[begin:end], self.up[expert]))
                out[begin:end] = functional.linear(inner, self.down[expert])
            begin = end
        return out


class Grouped(Gathered):
    """As torchtitan's experts: one product for all."""

    def forward(self, x, counts):
        ends = torch.cumsum(counts, 0, dtype=torch.int32)
        inner = torch.relu(self._grouped_mm(x.bfloat16(), self.up, ends))
        return self._grouped_mm(inner, self.down, ends).type_as(x)

    def _grouped_mm(self, x, weight, ends):
        weight = weight.bfloat16().transpose(-2, -1)
        return torch._grouped_mm(x, weight, offs=ends)


class Transposed(Gathered):
    """As gpt-oss's experts: parameters [experts, in, out], with biases."""

    is_transposed, has_bias = True, True

    def __init__(self):
        super().__init__()
        self.up_bias = nn.Parameter(torch.zeros(EXPERTS, INNER))
        for weight in (self.up, self.down):
            weight.data = weight.data.mT.contiguous()

    def forward(self, x, counts):
        out, begin = torch.zeros_like(x), 0
        for expert, end in enumerate(counts.cumsum(0)):
            inner = torch.relu(x[begin:end] @ self.up[expert] + self.up_bias[expert])
            out[begin:end] = inner @ self.down[expert]
            begin = end
        return out


class Matmul(Gathered):
    """Multiplies past both."""

    def forward(self, x, _):
        return torch.einsum("tk,enk->ten", x, self.up).sum(1)


class Apart(nn.Module):
    """The same experts as linear layers, under the same names."""

    def __init__(self, experts):
        super().__init__()
        for name in ("up", "down"):
            layers = nn.ModuleList()
            for weight in getattr(experts, name).detach():
                layers.append(nn.Linear(*weight.mT.shape, bias=False))
                layers[-1].weight = nn.Parameter(weight.clone())
            setattr(self, name, layers)

    forward = Gathered.forward


def in_model(experts):
    return nn.ModuleDict({"experts": experts})


def trained(experts, counts):
    """Output and gradients of two steps."""
    model = in_model(experts)
    state = apply_recipe(model, RECIPE, seed=3)
    x = normal(96, WIDTH, seed=2).requires_grad_()
    outputs = []
    for _ in range(2):
        y = model.experts(x, counts)
        y.pow(2).sum().backward()
        state.advance()
        outputs.append(y.detach().clone())
    return [*outputs, x.grad]


@pytest.mark.parametrize("counts", [[32, 32, 32], [64, 0, 32]])
def test_slices_are_as_layers(counts, monkeypatch):
    counts = torch.tensor(counts)
    experts = Gathered()
    apart = Apart(experts)
    plain = functional.linear

    def linear(x, weight, bias=None):
        # ``Gathered`` multiplies by what ``self.up[expert]`` is
        return weight(x) if isinstance(weight, nn.Module) else plain(x, weight, bias)

    with monkeypatch.context() as patch:
        patch.setattr(functional, "linear", linear)
        expected = trained(apart, counts)
    assert_same(trained(experts, counts), expected)
    for name in ("up", "down"):
        for layer, gradient in zip(
            getattr(apart, name), getattr(experts, name).grad, strict=True
        ):
            if layer.weight.grad is None:
                assert not gradient.any()
            else:
                assert torch.equal(gradient, layer.weight.grad)


@pytest.mark.parametrize("kind", [Grouped, Transposed])
def test_other_products_are_as_slices(kind):
    experts, other = Gathered(), kind()
    assert_same(*(trained(one, torch.tensor([64, 0, 32])) for one in (other, experts)))
    gradient = other.up.grad
    assert torch.equal(gradient.mT if kind is Transposed else gradient, experts.up.grad)
    assert experts.state_dict().keys() == {"up", "down"}


def test_another_product_is_an_error_not_high_precision():
    model = in_model(Matmul())
    apply_recipe(model, RECIPE)
    with pytest.raises(RuntimeError, match=r"experts\.up\.0, …: einsum uses their we"):
        model.experts(torch.ones(32, WIDTH), None)


def test_rules_skips_and_copies():
    model = in_model(Gathered())
    recipe = RECIPE | {"layers": [{"match": "*.down.*", "recipe": "bf16"}]}
    state = apply_recipe(model, recipe, skip="*.up.1")
    assert "6 matrices" in str(state.coverage)
    assert state.coverage.count("fprop") == 2
    twin = copy.deepcopy(model)
    twin.experts(torch.ones(96, WIDTH), torch.tensor([32, 32, 32]))
    assert sum(isinstance(module, QuantLinear) for module in twin.modules()) == 5


@pytest.mark.parametrize("kind", [Gathered, Transposed])
def test_weights_are_de_oscillated_to_their_own_grid(kind):
    experts = kind()
    asked = {"preset": "primus-turbo", "deoscillate": {"window": 2, "threshold": 1e-9}}
    state = apply_recipe(in_model(experts), asked)
    torch.manual_seed(0)
    weights = experts.up.detach()
    weights = weights.mT if kind is Transposed else weights
    for _ in range(3):
        weights += 0.05 * torch.randn_like(weights)
        before = weights.clone()
        state.advance()
    grid = fake_quantize(before.bfloat16().float(), state.recipe.fprop.right)
    reset = weights != before
    assert reset.float().mean() > 0.5
    assert torch.equal(weights[reset], grid[reset])


def of_transformers(kind, depth):
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        kind, vocab_size=64, hidden_size=64, intermediate_size=64, head_dim=32, num_hidden_layers=depth,
        num_attention_heads=2, num_key_value_heads=2, num_local_experts=4,
        layer_types=["full_attention"] * depth,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize(
    ("kind", "depth", "recipe", "matrices"),
    [
        ("mixtral", 1, RECIPE, 4 + 2 * 4),
        ("gpt_oss", 1, RECIPE, 4 + 2 * 4),
        # of experts alone, in one block or four
        ("gpt_oss", 5, "primus-gpt-oss-experts", 2 * 4),
        ("gpt_oss", 5, "humans-nvfp4-experts", 4 * 2 * 4),
    ],
)
def test_transformers(kind, depth, recipe, matrices):
    model = of_transformers(kind, depth)
    config, plain = model.config, copy.deepcopy(model)
    allow = "*.gate.weight" if kind == "mixtral" else "*.router.weight"
    state = apply_recipe(model, recipe, allow=allow, total_tokens=1000)
    assert state.coverage.count("fprop") == matrices
    x = torch.arange(128).view(2, 64) * 29 % 64
    loss, expected = (each(x, labels=x).loss for each in (model, plain))
    assert loss != expected
    torch.testing.assert_close(loss, expected, rtol=0.02, atol=0)
    loss.backward()
    assert all(weight.grad.isfinite().all() for weight in model.parameters())
    assert plain.config._experts_implementation == config._experts_implementation
