"""The modelled memory of a step: beside the measured peak on the CPU, and what must hold elsewhere."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from ablate.backends import emulated
from ablate.backends.cpu_bf16 import multiplies_bf16
from ablate.modelled.on_hardware import step_memory
from ablate.models import decoder as built_in
from ablate.recipes import (
    PRESETS,
    Recipe,
    RecipeSpec,
    resolve,
)
from ablate.run.architecture import PRESETS as MODELS
from ablate.run.architecture import model_size
from ablate.run.config import ModelConfig, ResourcesConfig, TrainingConfig
from tests.benchmark import load_benchmark

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
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


in_bf16 = pytest.mark.skipif(
    not multiplies_bf16(), reason="this CPU takes products in fp32, and the model does not count those copies"
)


@in_bf16
@pytest.mark.parametrize(
    "name",
    [name if name in USUAL else pytest.param(name, marks=pytest.mark.exhaustive) for name in benchmark.CASES],
)
def test_within_three_percent_of_the_measured_peak(name):
    case = benchmark.CASES[name]
    measured = benchmark.measured_bytes(case.config())
    assert case.modelled().total() == pytest.approx(measured, rel=0.03)


@in_bf16
@pytest.mark.parametrize("vocab_size", [256, pytest.param(2048, marks=pytest.mark.exhaustive)])
def test_so_are_blocks_that_are_computed_twice(monkeypatch, vocab_size):
    plain = built_in._Block.forward
    monkeypatch.setattr(
        built_in._Block,
        "forward",
        lambda block, *inputs: checkpoint(partial(plain, block), *inputs, use_reentrant=False),
    )
    run = replace(benchmark.CASES["llama, bf16"], vocab_size=vocab_size).config()
    twice, once = (
        step_memory(run, ResourcesConfig(activation_checkpointing=again), hardware=None).peak
        for again in (True, False)
    )
    measured = benchmark.measured_bytes(run)
    assert twice.total() == pytest.approx(measured, rel=0.03)
    assert once.total() > 1.3 * measured


BF16 = Recipe()
FDW = PRESETS["amd-fdw"].recipe
SOME_RUN = benchmark.CASES["llama, bf16"].config()
PARAMETERS = model_size(LLAMA_8B, vocab_size=128_256, seq_len=8192).parameters
ALONE = ResourcesConfig(gpus=1)


def step(recipe=BF16, *, resources=EIGHT, training=LONG, hardware="B200", vocab_size=128_256):
    parts = {"model": LLAMA_8B, "vocab_size": vocab_size, "training": training, "recipe": recipe}
    return step_memory(replace(SOME_RUN, **parts), resources, hardware=hardware)


def memory(recipe=BF16, **more):
    return step(recipe, **more).peak


def test_what_is_held_all_along_is_shared_among_the_devices():
    alone, shared = memory(resources=ALONE), memory()
    assert alone["optimizer"] == 8 * PARAMETERS
    assert min(alone["weights"], alone["gradients"]) >= 4 * PARAMETERS
    assert shared["optimizer"] == PARAMETERS
    outside, block = 2 * 128_256 * 4096 + 4096, 218_112_000
    assert step().at == "loss"  # no block is gathered there
    assert shared["weights"] == PARAMETERS // 2 + 4 * outside
    few = step(vocab_size=256)
    assert few.at == "blocks"
    outside = 2 * 256 * 4096 + 4096
    assert few.peak["weights"] == (32 * block + outside) // 2 + 4 * outside + 2 * 2 * block
    assert shared["activations"] == alone["activations"]
    narrow = memory(training=replace(LONG, master_weights="bf16"))
    assert narrow["optimizer"] == PARAMETERS // 2
    assert narrow.total() < shared.total()
    with pytest.raises(KeyError):
        memory(hardware="H1000")


def test_de_oscillation_holds_four_values_of_each_weight_that_it_follows():
    in_blocks = 32 * 218_103_808  # without the norms; the head is in high precision
    asked, last_in_bf16 = (
        resolve(RecipeSpec(gemms=["fprop"], layers=layers, deoscillate={}))
        for layers in ([], [{"last": 1, "recipe": "bf16"}])
    )
    assert memory(asked)["optimizer"] == PARAMETERS + 2 * in_blocks
    narrow = memory(asked, resources=ALONE, training=replace(LONG, master_weights="bf16"))
    assert narrow["optimizer"] == 4 * PARAMETERS + 14 * in_blocks
    assert memory(last_in_bf16, resources=ALONE)["optimizer"] == 8 * PARAMETERS + 16 * in_blocks * 31 // 32


def test_a_gpu_keeps_no_scores_and_checkpointing_one_tensor_a_block():
    once = memory()
    longer = replace(LONG, seq_len=2 * LONG.seq_len)
    assert memory(training=longer)["activations"] == pytest.approx(2 * once["activations"], rel=0.01)
    assert memory(hardware=None)["activations"] > 32 * 2 * 32 * 8192**2  # of each block, of each head
    twice = memory(resources=replace(EIGHT, activation_checkpointing=True))
    assert 32 * 2 * 8192 * 4096 < twice["activations"] < once["activations"] / 3
    assert (twice["weights"], twice["optimizer"]) == (once["weights"], once["optimizer"])


def test_packed_copies_are_smaller_than_emulated_ones():
    packed, emulated = (step(FDW, hardware=name) for name in ("MI355X", "H100"))
    elements = 2 * 14_336 * (8192 + 4096)  # Dgrad of the widest layer, gate and up: dy and w
    assert packed.largest_copies == elements * (4 / 8 + 1 / 32)
    assert emulated.largest_copies == elements * 2
    assert step().largest_copies == 0
    assert (packed.at, emulated.at, emulated.peak["quantised"]) == (
        "loss",
        "loss",
        0,
    )  # no copy is alive there


def test_an_experts_rows_are_filled_up_to_the_widest_group_of_all_its_phases():
    model = ModelConfig(width=256, layers=1, heads=4, ffn=256, experts=8)
    wide = {"gemms": ["wgrad"], "stabiliser": "dht", "hadamard_size": 128}

    def activations(**recipe):
        run = replace(SOME_RUN, model=model, recipe=resolve(RecipeSpec(**recipe)))
        return step_memory(run, ALONE, hardware="B200").peak["activations"]

    for_others = activations(layers=[{"match": "*.attention.*", "recipe": wide}])
    assert activations() == for_others < activations(phases=[{"from_tokens": 1 << 20, "recipe": wide}])
