"""The size of a run by shapes alone, and the time of its steps."""

import subprocess
import sys

import pytest

from ablate.check.training import config_of
from ablate.layers.deoscillation import Deoscillation
from ablate.recipes import RecipeSpec, read_recipe
from ablate.run.config import ModelConfig
from ablate.train.probe import dry_run, time_steps


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
    sizes = {"seq_len": 128, "batch_size": 4}
    run = dry_run(config_of(model, read_recipe(recipe), "emulated", 256, **sizes))
    assert (run.linear_layers, run.tokens) == (9, 512)


@pytest.mark.exhaustive
def test_llama_8b_in_seconds_and_little_memory():
    code = """
import resource
from ablate.check.training import config_of
from ablate.recipes import read_recipe
from ablate.run.architecture import PRESETS
from ablate.run.config import ModelConfig
from ablate.train.probe import dry_run
recipe = read_recipe({"gemms": ["fprop", "dgrad", "wgrad"], "stabiliser": "dht"})
sizes = {"seq_len": 8192, "batch_size": 32, "micro_batch_size": 1}
run = dry_run(config_of(ModelConfig(**PRESETS["llama3.1-8b"]), recipe, "emulated", 128_256, **sizes))
assert (run.parameters, run.linear_layers, run.tokens) == (8_030_261_248, 129, 8192), run
peak_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
assert peak_gib < 4, peak_gib
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_time_of_a_step_holds_its_de_oscillation(make_config, monkeypatch):
    taken = []
    own = Deoscillation.step
    monkeypatch.setattr(Deoscillation, "step", lambda self: taken.append(own(self)))
    recipe = RecipeSpec(gemms=["fprop"], deoscillate={"window": 2})
    config = make_config(recipe, tokens=2048)
    time_steps(config, device="cpu", steps=2, warmup=1, repeats=2)
    assert len(taken) == 5
    assert [reset is not None for reset in taken] == [False, False, True, False, True]
