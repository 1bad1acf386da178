"""The layers that planning knows of are those of the models that are trained."""

from unittest.mock import MagicMock

import pytest

from ablate.layers.linear import QuantLinear
from ablate.models.decoder import Decoder
from ablate.run.architecture import PRESETS, linear_layers, model_size
from ablate.run.config import ModelConfig

MODELS = {
    "grouped": ModelConfig(width=64, heads=4, kv_heads=2, ffn=96, layers=3),
    "untied": ModelConfig(width=64, heads=4, ffn=96, layers=2, tied_head=False),
    "gpt": ModelConfig(architecture="gpt", width=64, heads=4, ffn=256, layers=2),
    "experts": ModelConfig(width=64, heads=4, ffn=96, layers=2, experts=3),
}


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_names_shapes_and_parameters(model):
    decoder = Decoder(model, 300, 32, MagicMock())
    assert {
        (layer.name, layer.inputs, layer.outputs) for layer in linear_layers(model, 300)
    } == {
        (layer.name, layer.in_features, layer.out_features)
        for layer in decoder.modules()
        if isinstance(layer, QuantLinear)
    }
    size = model_size(model, vocab_size=300, seq_len=32)
    assert size.parameters == sum(
        parameter.numel() for parameter in decoder.parameters()
    )


def test_a_token_goes_through_its_experts_alone():
    dense, sparse = (
        ModelConfig(experts=experts, experts_per_token=2) for experts in (2, 8)
    )
    flops = [
        model_size(model, vocab_size=256, seq_len=128).flops_per_token
        for model in (dense, sparse)
    ]
    # the router's
    assert flops[1] - flops[0] == 6 * sparse.layers * (8 - 2) * sparse.width
    shares = {
        layer.token_share
        for layer in linear_layers(sparse, 256)
        if ".experts." in layer.name
    }
    assert shares == {0.25}


PUBLISHED = {  # vocabulary, parameters of the published weights, tolerance
    "mixtral-8x7b": (32_000, 46_702_792_704, 0),
    "llama2-7b": (32_000, 6_738_415_616, 0),
    "llama3.1-8b": (128_256, 8_030_261_248, 0),
    "llama3.1-70b": (128_256, 70_553_706_496, 0),
    "llama3.2-1b": (128_256, 1_235_814_400, 0),
    "llama3.2-3b": (128_256, 3_212_749_824, 0),
    "gpt-345m": (50_257, 354_823_168, 0),  # GPT-2 medium
    "gpt-1.3b": (50_257, 1.3e9, 0.02),
    "gpt-6.7b": (50_257, 6.7e9, 0.02),
}


@pytest.mark.parametrize(
    "name", sorted({*PRESETS} - {"llama-tiny", "moe-tiny", "gpt-tiny"})
)
def test_presets_have_the_parameters_of_the_published_models(name):
    vocab_size, parameters, rel = PUBLISHED[name]
    seq_len = 1024 if name.startswith("gpt") else 8192
    size = model_size(
        ModelConfig(**PRESETS[name]), vocab_size=vocab_size, seq_len=seq_len
    )
    assert size.parameters == pytest.approx(parameters, rel=rel)
