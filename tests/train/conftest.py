import numpy as np
import pytest

from ablate.recipes import RecipeSpec, resolve
from ablate.run.config import DataConfig, ModelConfig, RunConfig, TrainingConfig


@pytest.fixture(scope="session")
def tokens():
    """Learnable text-like tokens: a noisy walk over 64 symbols."""
    rng = np.random.default_rng(0)
    steps = rng.integers(1, 4, 60_000)
    stream = (np.cumsum(steps) % 64).astype(np.uint16)
    return stream[:50_000], stream[50_000:]


@pytest.fixture
def make_config():
    def make(recipe=None, *, seed=0, model=None, backend="emulated", **training):
        shape = {"width": 64, "layers": 2, "heads": 2, "ffn": 96} | (model or {})
        defaults = {
            "tokens": 16_384, "seq_len": 32, "batch_size": 16, "learning_rate": 3e-3,
            "eval_every_tokens": 4096, "eval_tokens": 2048,
        }  # fmt: skip
        return RunConfig(
            model=ModelConfig(**shape),
            data=DataConfig(),
            data_digest="test",
            vocab_size=64,
            training=TrainingConfig(**(defaults | training)),
            recipe=resolve(recipe or RecipeSpec()),
            backend=backend,
            seed=seed,
        )

    return make
