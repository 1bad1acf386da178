"""The presets are the published models: their parameters are counted as their authors count them."""

import pytest

from ablate.models.arithmetic import model_size
from ablate.run.config import ModelConfig
from ablate.run.presets import PRESETS

PUBLISHED = {  # vocabulary, parameters of the published weights
    "mixtral-8x7b": (32_000, 46_702_792_704),
    "llama2-7b": (32_000, 6_738_415_616),
    "llama3.1-8b": (128_256, 8_030_261_248),
    "llama3.1-70b": (128_256, 70_553_706_496),
    "llama3.2-1b": (128_256, 1_235_814_400),
    "llama3.2-3b": (128_256, 3_212_749_824),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters(name):
    vocab_size, parameters = PUBLISHED[name]
    size = model_size(ModelConfig(**PRESETS[name]), vocab_size=vocab_size, seq_len=8192)
    assert size.parameters == parameters


def test_all_but_ours_are_published():
    named_by_size = {"gpt-345m", "gpt-1.3b", "gpt-6.7b"}
    assert set(PRESETS) - set(PUBLISHED) - named_by_size == {"llama-tiny", "moe-tiny", "gpt-tiny"}


def test_gpt_sizes_are_those_of_their_names():
    def millions(name):
        size = model_size(ModelConfig(**PRESETS[name]), vocab_size=50_257, seq_len=1024)
        return size.parameters / 1e6

    assert millions("gpt-345m") == pytest.approx(354.823168)  # GPT-2 medium, exactly
    assert millions("gpt-1.3b") == pytest.approx(1300, rel=0.02)
    assert millions("gpt-6.7b") == pytest.approx(6700, rel=0.02)
