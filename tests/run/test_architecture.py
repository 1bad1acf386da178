"""The layers that planning knows of are those of the models that are trained."""

from unittest.mock import MagicMock

import pytest

from ablate.layers.linear import QuantLinear
from ablate.models.arithmetic import model_size
from ablate.models.decoder import Decoder
from ablate.run.architecture import layer_places, linear_layers, part_of
from ablate.run.config import ModelConfig

MODELS = {
    "grouped": ModelConfig(width=64, heads=4, kv_heads=2, ffn=96, layers=3),
    "untied": ModelConfig(width=64, heads=4, ffn=96, layers=2, tied_head=False),
    "gpt": ModelConfig(architecture="gpt", width=64, heads=4, ffn=256, layers=2),
    "experts": ModelConfig(width=64, heads=4, ffn=96, layers=2, experts=3),
}


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_names_shapes_and_parameters(model):
    real = Decoder(model, 300, 32, MagicMock())
    found = {
        layer.name: (layer.in_features, layer.out_features)
        for layer in real.modules()
        if isinstance(layer, QuantLinear)
    }
    layers = linear_layers(model, 300)
    assert {layer.name: (layer.inputs, layer.outputs) for layer in layers} == found
    modules = {name for name, layer in real.named_modules() if isinstance(layer, QuantLinear)}
    assert modules == set(found)
    size = model_size(model, vocab_size=300, seq_len=32)
    assert size.parameters == sum(parameter.numel() for parameter in real.parameters())


def test_a_token_goes_through_its_experts_alone():
    dense, sparse = (ModelConfig(experts=experts, experts_per_token=2) for experts in (2, 8))
    flops = [model_size(model, vocab_size=256, seq_len=128).flops_per_token for model in (dense, sparse)]
    assert flops[1] - flops[0] == 6 * sparse.layers * (8 - 2) * sparse.width  # the router's
    shares = {layer.token_share for layer in linear_layers(sparse, 256) if ".experts." in layer.name}
    assert shares == {0.25}


def test_places():
    where = layer_places(linear_layers(MODELS["experts"], 300))
    assert where["blocks.1.ffn.experts.2.down"].block == 1
    assert [name for name, place in where.items() if place.is_head] == ["head"]
    assert part_of("blocks.1.ffn.experts.2.down") == "ffn.experts.2.down"
