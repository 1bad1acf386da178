"""The presets are the published models: their parameters are counted as their authors count them."""

import pytest

from ablate.config import ModelConfig
from ablate.plan.arithmetic import model_size
from ablate.presets import PRESETS

PUBLISHED = {  # vocabulary, parameters of the published weights
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
    assert set(PRESETS) - set(PUBLISHED) == {"llama-tiny"}
