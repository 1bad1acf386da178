"""The presets are the published models: their parameters are counted as their authors count them."""

import pytest

from ablate.models.arithmetic import model_size
from ablate.run.config import ModelConfig
from ablate.run.presets import PRESETS

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


@pytest.mark.parametrize("name", sorted({*PRESETS} - {"llama-tiny", "moe-tiny", "gpt-tiny"}))
def test_parameters(name):
    vocab_size, parameters, rel = PUBLISHED[name]
    seq_len = 1024 if name.startswith("gpt") else 8192
    size = model_size(ModelConfig(**PRESETS[name]), vocab_size=vocab_size, seq_len=seq_len)
    assert size.parameters == pytest.approx(parameters, rel=rel)
