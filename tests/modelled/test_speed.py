"""The modelled step time: what must hold of any roofline, the published figures beside it, and its range."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from scipy import stats

from ablate.modelled.hardware import PEAKS, peak_tflops
from ablate.modelled.speed import (
    BACKWARD,
    FORWARD,
    HARDWARE,
    KERNEL_SPREAD,
    LLAMA_8B,
    RATES,
    STEP_MS,
    ModelledFigure,
    TokenTime,
    Workload,
    emulation_factor,
    fp4_share,
    seconds_range,
    speed_up,
    token_time,
)
from ablate.recipes import (
    GemmPolicy,
    OperandPolicy,
    Recipe,
    read_recipe,
)
from ablate.run.architecture import linear_layers
from ablate.run.config import ModelConfig

ALL = ["fprop", "dgrad", "wgrad"]
BF16 = Recipe()
FDW, DHT, NVFP4 = map(read_recipe, ("amd-fdw", "amd-fdw-dht16", "nvidia-nvfp4"))
BIG = replace(LLAMA_8B, vocab_size=1)


def gemm(left, right=None, **more):
    return GemmPolicy(
        left=OperandPolicy(format=left, **more),
        right=OperandPolicy(format=right or left, **more),
    )


def test_every_part_of_a_step_by_hand():
    model = ModelConfig(
        width=1024, layers=1, heads=8, kv_heads=2, ffn=4096, tied_head=False
    )
    work = Workload(
        model=model, vocab_size=1, seq_len=2048, tokens_per_step=2 * 65_536, devices=2
    )
    time = token_time(work, FDW, "MI355X")
    memory = 8e12 * RATES["memory"][1]
    # q, k, v: 1024 × (1024 + 2 · 256); out: 1024²; gate and up: 1024 × 8192; down: 4096 × 1024; head: 1024.
    x, dy = 3 * 1024 + 4096, 1536 + 1024 + 8192 + 1024
    blocks = 1024 * (1536 + 1024 + 8192) + 4096 * 1024
    four, copy = 10_066e12 * RATES["gemm4"][1], 0.5 + 1 / 32
    moved = 2 * (10 * 1024 + 2 * (1024 + 256) + 3 * 4096 + 2 * 1)
    attend = 2 * 1024 * 2048 / (2517e12 * RATES["attention16"][1])
    for part, expected in {
        "quantise_backward": {"quantise4": dy * (2 + 2 * copy) / memory},
        "quantise_forward": {
            "quantise4": (x + blocks / 65_536) * (2 + 2 * copy) / memory
        },
        "rest_forward": {"attention16": attend, "pointwise": moved / memory},
        "rest_backward": {"attention16": 2.5 * attend, "pointwise": 2 * moved / memory},
        "optimizer": {"pointwise": (blocks + 1024) / 2 * 30 / memory / 65_536},
    }.items():
        assert time.by_kernel(part) == pytest.approx(expected)
    assert time.by_kernel("fprop")["gemm4"] == pytest.approx(2 * blocks / four)
    parts = (*FORWARD, *BACKWARD, "optimizer")
    assert time.total == pytest.approx(sum(map(time.of, parts)))


@pytest.mark.parametrize(
    ("recipe", "hardware", "has"),
    [
        (FDW, "H100", False),
        (BF16, "H100", True),
        (NVFP4, "MI355X", False),
        (NVFP4, "B200", True),
        (Recipe(fprop=gemm("fp4_e3m0")), "B200", False),
    ],
)
def test_no_time_without_the_unit(recipe, hardware, has):
    assert (token_time(LLAMA_8B, recipe, hardware) is not None) is has
    with pytest.raises(KeyError):
        token_time(LLAMA_8B, recipe, "a toaster")


def test_a_gemm_runs_at_the_rate_of_its_wider_operand():
    mixed, plain = Recipe(fprop=gemm("mxfp8", "mxfp4")), Recipe(fprop=gemm("mxfp8"))
    times = [token_time(BIG, recipe, "B200").of("fprop") for recipe in (mixed, plain)]
    assert times[0] == pytest.approx(times[1])
    assert fp4_share(BIG, mixed) == 0


def test_a_scale_over_the_whole_tensor_costs_a_second_read_and_a_small_rotation_nothing():
    def quantising(recipe):
        return token_time(LLAMA_8B, recipe, "B200").of("quantise_forward")

    def scaled(scale):
        of_all = gemm("fp8_e4m3", scale=scale)
        return quantising(Recipe(fprop=of_all, dgrad=of_all, wgrad=of_all))

    def rotated(size):
        recipe = {"gemms": ["fprop", "dgrad"], "stabiliser": "dht"}
        return quantising(read_recipe(recipe | {"hadamard_size": size}))

    # two copies of 1 byte each, and 2 bytes a read
    assert scaled("tensor") / scaled("delayed") == pytest.approx(6 / 4)
    assert token_time(LLAMA_8B, FDW, "B200") == token_time(LLAMA_8B, DHT, "B200")
    assert rotated(256) > rotated(16)


def test_fp4_share():
    tseng = fp4_share(LLAMA_8B, read_recipe("tseng"))
    assert tseng > 0.5  # "more than half of the training FLOPs", 2502.20586, abstract
    assert fp4_share(LLAMA_8B, FDW) == pytest.approx(1.5 * tseng)


def test_a_phase_counts_with_its_share_of_the_budget():
    late = {"phases": [{"from_fraction": 0.75, "recipe": "bf16"}]}
    whole = read_recipe({"gemms": ALL})
    phased = read_recipe({"gemms": ALL} | late)
    work = replace(LLAMA_8B, total_tokens=1_000_000)
    assert fp4_share(work, phased) == pytest.approx(0.75 * fp4_share(work, whole))
    mean = 0.75 * token_time(work, whole, "B200").total
    mean += 0.25 * token_time(work, BF16, "B200").total
    assert token_time(work, phased, "B200").total == pytest.approx(mean)
    nvfp4 = read_recipe({"gemms": ALL, "format": "nvfp4"} | late)
    assert token_time(work, nvfp4, "MI355X") is None
    with pytest.raises(ValueError, match="needs the workload's total_tokens"):
        token_time(LLAMA_8B, phased, "B200")


def test_a_device_has_the_peaks_of_its_whole_name():
    assert set(HARDWARE) <= set(PEAKS)
    for name in ("GB200", "B200"):
        assert peak_tflops(f"NVIDIA {name}", "nvfp4") == PEAKS[name].fp4
    assert peak_tflops("NVIDIA H100 80GB HBM3", "fp8_e4m3") == PEAKS["H100"].fp8
    assert peak_tflops("NVIDIA H100 80GB HBM3", "mxfp4") is None
    assert peak_tflops("CPU", "bf16") is None


# Its range

T = stats.t.ppf(0.975, 6)


def test_a_time_is_off_by_the_squares_of_its_shares_and_a_speed_up_by_what_differs():
    seconds = {("fprop", "gemm4"): 3.0, ("rest_forward", "pointwise"): 1.0}
    figure = seconds_range(TokenTime(seconds=seconds))
    reach = math.exp(T * KERNEL_SPREAD * math.sqrt(0.75**2 + 0.25**2))
    assert (figure.estimate, figure.high, figure.low) == pytest.approx(
        (4, 4 * reach, 4 / reach), rel=1e-3
    )
    twice = ModelledFigure(estimate=8.0, low=2 * figure.low, high=2 * figure.high)
    assert figure.times(2) == twice
    slow = {"gemm8": 2.0, "pointwise": 2.0}
    figure = speed_up(slow, {"gemm4": 1.0, "pointwise": 1.0})
    assert figure.estimate == 2.0
    reach = T * KERNEL_SPREAD * math.sqrt(0.5)
    assert math.log(figure.high / 2) == pytest.approx(reach, rel=0.01)
    assert speed_up(slow, slow) == ModelledFigure(estimate=1.0, low=1.0, high=1.0)


@pytest.mark.parametrize(
    ("recipe", "measured"),
    [
        ("bf16", "bf16"),
        ("mxfp4", "mxfp4"),
        ({"gemms": ALL, "stabiliser": "sr+rht"}, "mxfp4 SR RHT16"),
        ({"preset": "nvidia-nvfp4", "layers": []}, "nvfp4"),
        ("fp8", "fp8"),
    ],
)
def test_an_emulated_step_takes_what_was_measured_but_for_the_heads_share(
    recipe, measured
):
    layers = linear_layers(LLAMA_8B.model, LLAMA_8B.vocab_size)
    sizes = [layer.inputs * layer.outputs for layer in layers]
    in_recipe = 1 - sizes[-1] / sum(sizes)
    expected = 1 + in_recipe * (STEP_MS[measured] / STEP_MS["bf16"] - 1)
    assert emulation_factor(LLAMA_8B, read_recipe(recipe)) == pytest.approx(expected)


def test_a_gemm_alone_adds_a_third():
    whole = emulation_factor(LLAMA_8B, read_recipe({"gemms": ALL})) - 1
    third = emulation_factor(LLAMA_8B, read_recipe({"gemms": ["wgrad"]})) - 1
    assert third == pytest.approx(whole / 3)
