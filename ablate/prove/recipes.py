"""The recipes, models and configurations that the proof trains and times."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ablate.backends.select import Selection
from ablate.recipes import GEMMS, Recipe, read_recipe
from ablate.run.config import DataConfig, ModelConfig, RunConfig, TrainingConfig
from ablate.run.presets import PRESETS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ablate.prove.task import Setup

BF16 = read_recipe("bf16")
RECIPES: dict[str, Recipe] = {
    "mxfp4": read_recipe({"gemms": list(GEMMS), "stabiliser": "sr+rht"}),
    "nvfp4": read_recipe({"preset": "nvidia-nvfp4", "layers": []}),
    "mxfp8": read_recipe("mxfp8"),
    "fp8": read_recipe("fp8"),
}
"""MXFP4 with stochastic rounding and random Hadamard in all three GEMMs, and the presets of other formats."""

MODELS: dict[str, ModelConfig] = {
    "llama-tiny": ModelConfig(**PRESETS["llama-tiny"]),
    "llama 150M": ModelConfig(
        **PRESETS["llama3.2-1b"] | {"width": 896, "layers": 12, "heads": 14, "kv_heads": 14, "ffn": 2432}
    ),
    "llama3.2-1b": ModelConfig(**PRESETS["llama3.2-1b"]),
}
"""The models whose steps are timed, by name."""


def trained_by(setup: Setup) -> Iterator[tuple[str, str, Recipe]]:
    """Yield (back end, recipe's name, recipe) for each recipe whose every GEMM a back end does here."""
    for backend in setup.backends:
        for name, recipe in RECIPES.items():
            try:
                Selection(backend).choices(recipe, setup.device)
            except ValueError:
                continue
            yield backend, name, recipe


def config_of(
    model: ModelConfig, recipe: Recipe, backend: str, vocab_size: int, **training: Any
) -> RunConfig:
    """Return the configuration of a run that reads no data."""
    return RunConfig(
        model=model, data=DataConfig(), data_digest="none", vocab_size=vocab_size, recipe=recipe,
        training=TrainingConfig(**training), backend=backend, seed=0,
    )  # fmt: skip
