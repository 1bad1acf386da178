"""The modelled memory of a step: beside the measured peak on the CPU, and what must hold elsewhere."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ablate.backends import emulated
from ablate.backends.cpu_bf16 import multiplies_bf16
from ablate.backends.testing.suite import one_thread
from ablate.modelled.hardware import PEAKS
from ablate.modelled.on_hardware import step_memory
from ablate.recipes import PRESETS, Recipe, read_recipe
from ablate.run.architecture import PRESETS as MODELS
from ablate.run.architecture import model_size
from ablate.run.config import ModelConfig, ResourcesConfig, TrainingConfig
from tests.benchmark import load_benchmark
from tests.exhaustive import rest_exhaustive

benchmark = load_benchmark("memory_model")

USUAL = ("llama, mxfp4, few tokens", "gpt, bf16", "experts, nvfp4, bytes")
"""One of each architecture; the rest are long proofs."""

LLAMA_8B = ModelConfig(**MODELS["llama3.1-8b"])
LONG = TrainingConfig(seq_len=8192, batch_size=32, micro_batch_size=1)
EIGHT = ResourcesConfig(devices_per_run=8, gpus=1)


@pytest.fixture(autouse=True)
def one_thread_that_multiplies_bf16(monkeypatch):
    """The model is of devices that multiply bf16: a CPU that does not would hold operands in fp32 besides."""
    monkeypatch.setattr(emulated, "multiplies_bf16", lambda: True)
    with one_thread():
        yield


in_bf16 = pytest.mark.skipif(
    not multiplies_bf16(),
    reason="this CPU takes products in fp32, and the model does not count those copies",
)


@in_bf16
@pytest.mark.parametrize("name", rest_exhaustive(benchmark.CASES, USUAL.__contains__))
def test_rather_above_the_measured_peak_and_by_a_tenth_at_most(name):
    case = benchmark.CASES[name]
    measured = benchmark.measured_bytes(case.config())
    assert 0.97 < case.modelled().total() / measured < 1.1


BF16 = Recipe()
FDW = PRESETS["amd-fdw"].recipe
SOME_RUN = benchmark.CASES["llama, bf16"].config()
PARAMETERS = model_size(LLAMA_8B, vocab_size=128_256, seq_len=8192).parameters
ALONE = ResourcesConfig(gpus=1)


def memory(
    recipe=BF16, *, resources=EIGHT, training=LONG, hardware="B200", vocab_size=128_256
):
    config = replace(
        SOME_RUN, model=LLAMA_8B, vocab_size=vocab_size, training=training, recipe=recipe
    )  # fmt: skip
    return step_memory(config, resources, hardware and PEAKS[hardware])


def test_what_is_held_all_along_is_shared_among_the_devices():
    alone, shared = memory(resources=ALONE), memory()
    assert alone["optimizer"] == 8 * PARAMETERS
    assert min(alone["weights"], alone["gradients"]) >= 4 * PARAMETERS
    assert shared["optimizer"] == PARAMETERS
    outside, block = 2 * 128_256 * 4096 + 4096, 218_112_000
    # at the loss: no block is gathered there
    assert shared["weights"] == PARAMETERS // 2 + 4 * outside
    outside = 2 * 256 * 4096 + 4096
    at_a_block = (32 * block + outside) // 2 + 4 * outside + 2 * 2 * block
    assert memory(vocab_size=256)["weights"] == at_a_block
    assert shared["activations"] == alone["activations"]
    narrow = memory(training=replace(LONG, master_weights="bf16"))
    assert narrow["optimizer"] == PARAMETERS // 2
    assert narrow.total() < shared.total()


def test_de_oscillation_holds_four_values_of_each_weight_that_it_follows():
    in_blocks = 32 * 218_103_808  # without the norms; the head is in high precision
    rule = {"last": 1, "recipe": "bf16"}
    asked = read_recipe({"gemms": ["fprop"], "layers": [rule], "deoscillate": {}})
    expected = 8 * PARAMETERS + 16 * in_blocks * 31 // 32
    assert memory(asked, resources=ALONE)["optimizer"] == expected


def test_a_gpu_keeps_no_scores_and_checkpointing_one_tensor_a_block():
    once = memory()
    longer = replace(LONG, seq_len=2 * LONG.seq_len)
    twice = 2 * once["activations"]
    assert memory(training=longer)["activations"] == pytest.approx(twice, rel=0.01)
    # of each block, of each head
    assert memory(hardware=None)["activations"] > 32 * 2 * 32 * 8192**2
    twice = memory(resources=replace(EIGHT, activation_checkpointing=True))
    assert 32 * 2 * 8192 * 4096 < twice["activations"] < once["activations"] / 3


def test_packed_copies_are_smaller_than_emulated_ones():
    packed = memory(FDW, hardware="MI355X", vocab_size=256)
    emulated = memory(FDW, hardware="H100", vocab_size=256)
    # Dgrad of the widest layer, gate and up: dy and w
    elements = 2 * 14_336 * (8192 + 4096)
    assert emulated["quantised"] == elements * 2
    assert packed.total() < emulated.total()
    assert memory(vocab_size=256)["quantised"] == 0
