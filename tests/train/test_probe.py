"""The size of a run by shapes alone, and the time of its steps."""

import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from ablate.layers.deoscillation import Deoscillation
from ablate.recipes import RecipeSpec, expand_word, resolve
from ablate.run.config import DataConfig, ModelConfig, RunConfig, TrainingConfig
from ablate.train.probe import dry_run, time_steps


def config(model, recipe, *, vocab_size=256, **training):
    spec = TypeAdapter(RecipeSpec).validate_python(expand_word(recipe))
    return RunConfig(
        model=model, data=DataConfig(), data_digest="x", vocab_size=vocab_size,
        training=TrainingConfig(**training), recipe=resolve(spec), backend="emulated", seed=0,
    )  # fmt: skip


@pytest.mark.parametrize(
    "recipe",
    [
        "bf16", "fp8",
        {"gemms": ["fprop", "dgrad", "wgrad"], "stabiliser": "dht"},
        {"gemms": ["wgrad"], "stabiliser": "sr+rht"},
        {"preset": "tseng"}, {"preset": "quartet2"}, {"preset": "deepseek-v3-fp8"},
    ],
)  # fmt: skip
def test_every_kind_of_recipe_goes_through(recipe):
    model = ModelConfig(width=128, layers=2, heads=4, kv_heads=2, ffn=256)
    found = dry_run(config(model, recipe, seq_len=128, batch_size=4))
    assert (found.linear_layers, found.tokens) == (9, 512)


@pytest.mark.exhaustive
def test_llama_8b_in_seconds_and_little_memory():
    code = """
import resource, sys
sys.path.insert(0, sys.argv[1])
from ablate.run.architecture import PRESETS
from test_probe import ModelConfig, config, dry_run
model = ModelConfig(**PRESETS["llama3.1-8b"])
recipe = {"gemms": ["fprop", "dgrad", "wgrad"], "stabiliser": "dht"}
found = dry_run(config(model, recipe, vocab_size=128_256, seq_len=8192, batch_size=32, micro_batch_size=1))
assert (found.parameters, found.linear_layers, found.tokens) == (8_030_261_248, 129, 8192), found
peak_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
assert peak_gib < 4, peak_gib
"""
    subprocess.run([sys.executable, "-c", code, str(Path(__file__).parent)], check=True)


def test_the_time_of_a_step_holds_its_de_oscillation(make_config, monkeypatch):
    taken = []
    own = Deoscillation.step
    monkeypatch.setattr(Deoscillation, "step", lambda self: taken.append(own(self)))
    config = make_config(RecipeSpec(gemms=["fprop"], deoscillate={"window": 2}), tokens=2048)
    time_steps(config, device="cpu", steps=2, warmup=1, repeats=2)
    assert len(taken) == 5
    assert [reset is not None for reset in taken] == [False, False, True, False, True]
