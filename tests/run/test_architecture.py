"""The layers that planning knows of are those of the models that are trained."""

from pathlib import Path
from unittest.mock import MagicMock

import pytest

from ablate.layers.linear import QuantLinear
from ablate.models.decoder import Decoder
from ablate.run.architecture import PRESETS, linear_layers, model_size
from ablate.run.config import ModelConfig
from tests.golden import check_answers

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


def sizes(line):
    name, vocab_size, seq_len, *_ = line.split()
    model = ModelConfig(**PRESETS[name])
    size = model_size(model, vocab_size=int(vocab_size), seq_len=int(seq_len))
    yield f"{size.parameters} parameters"


def test_presets_have_the_parameters_of_the_published_models():
    """``sizes.txt``: name, vocabulary, positions; what was published, where it is not the same number."""
    check_answers(Path(__file__).with_name("sizes.txt"), sizes)
