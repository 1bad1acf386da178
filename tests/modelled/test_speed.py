"""The modelled step time: what must hold of any roofline, and the published figures beside it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from ablate.modelled.hardware import PEAKS, peaks_of
from ablate.modelled.speed import (
    BACKWARD,
    FORWARD,
    HARDWARE,
    LLAMA_8B,
    RATES,
    Workload,
    fp4_share,
    token_time,
    workload_of,
)
from ablate.models.arithmetic import model_size
from ablate.recipes import PRESETS, GemmPolicy, OperandPolicy, Recipe, RecipeSpec, resolve
from ablate.run.config import ModelConfig, TrainingConfig

BF16 = Recipe()


def recipe(**spec):
    return resolve(RecipeSpec(**spec))


def test_bf16_gemms_take_the_flops_of_the_model_at_the_assumed_share_of_the_peak():
    time = token_time(LLAMA_8B, BF16, "B200")
    size = model_size(LLAMA_8B.model, vocab_size=LLAMA_8B.vocab_size, seq_len=LLAMA_8B.seq_len)
    attention = 6 * 32 * 4096 * 8192
    linear = size.flops_per_token - attention
    assert time.of("fprop", "dgrad", "wgrad") == pytest.approx(
        linear / (PEAKS["B200"].bf16 * 1e12 * RATES["gemm16"])
    )
    assert time.of("quantise_forward", "quantise_backward") == 0


def test_every_part_of_a_step_by_hand():
    model = ModelConfig(width=1024, layers=1, heads=8, kv_heads=2, ffn=4096, tied_head=False)
    work = Workload(model=model, vocab_size=1, seq_len=2048, tokens_per_step=2 * 65_536, devices=2)
    time = token_time(work, PRESETS["amd-fdw"].recipe, "MI355X")
    memory = 8e12 * RATES["memory"]
    # q, k, v: 1024 × (1024 + 2 · 256); out: 1024²; gate and up: 1024 × 8192; down: 4096 × 1024; head: 1024.
    x, dy = 3 * 1024 + 4096, 1536 + 1024 + 8192 + 1024
    blocks = 1024 * (1536 + 1024 + 8192) + 4096 * 1024
    four, copy = 10_066e12 * RATES["gemm4"], 0.5 + 1 / 32
    assert time.by_kernel("fprop")["gemm4"] == pytest.approx(2 * blocks / four)
    assert time.by_kernel("quantise_backward") == pytest.approx({"quantise4": dy * (2 + 2 * copy) / memory})
    assert time.of("quantise_forward") == pytest.approx((x + blocks / 65_536) * (2 + 2 * copy) / memory)
    attention, moved = 2 * 1024 * 2048, 2 * (10 * 1024 + 2 * (1024 + 256) + 3 * 4096 + 2 * 1)
    assert time.by_kernel("rest_forward") == pytest.approx(
        {"attention16": attention / (2517e12 * RATES["attention16"]), "pointwise": moved / memory}
    )
    assert time.by_kernel("rest_backward")["attention16"] == pytest.approx(
        2.5 * attention / (2517e12 * RATES["attention16"])
    )
    assert time.by_kernel("optimizer") == pytest.approx(
        {"pointwise": (blocks + 1024) / 2 * 30 / memory / 65_536}
    )
    assert time.total == pytest.approx(time.of(*FORWARD) + time.of(*BACKWARD) + time.of("optimizer"))


def test_attention_in_fp8_has_a_rate_of_its_own():
    plain, eight = (
        token_time(replace(LLAMA_8B, fp8_attention=fp8), BF16, "B200").by_kernel("rest_forward")
        for fp8 in (False, True)
    )
    sped = 4500 * RATES["attention8"] / (2250 * RATES["attention16"])
    assert plain["attention16"] / eight["attention8"] == pytest.approx(sped)
    assert plain["pointwise"] == eight["pointwise"]


def test_in_fp4_the_gemms_of_the_blocks_are_faster_by_the_peaks_and_their_shares():
    big = replace(LLAMA_8B, vocab_size=1)
    fp8, fp4 = (token_time(big, PRESETS[name].recipe, "B200") for name in ("te-hybrid-fp8", "amd-fdw"))
    for gemm in ("fprop", "dgrad", "wgrad"):
        assert fp8.of(gemm) / fp4.of(gemm) == pytest.approx(2 * RATES["gemm4"] / RATES["gemm8"], rel=1e-3)
    for part in ("rest_forward", "rest_backward", "optimizer"):
        assert fp8.of(part) == fp4.of(part)


@pytest.mark.parametrize("hardware", ["B200", "B300", "MI355X"])
def test_each_further_gemm_in_fp4_makes_a_large_model_faster(hardware):
    names = ("te-hybrid-fp8", "amd-f", "amd-fd", "amd-fdw")
    totals = [token_time(LLAMA_8B, PRESETS[name].recipe, hardware).total for name in names]
    assert totals == sorted(totals, reverse=True)
    assert len(set(totals)) == 4


def test_a_tiny_model_moves_more_than_it_computes_and_gains_nothing():
    tiny = workload_of(SimpleNamespace(model=ModelConfig(), vocab_size=256, training=TrainingConfig()))
    bf16, fp4 = (token_time(tiny, recipe, "B200") for recipe in (BF16, PRESETS["amd-fdw"].recipe))
    assert fp4.total == token_time(tiny, PRESETS["amd-fdw"].recipe, "B300").total  # whose FP4 unit is faster
    large = [token_time(LLAMA_8B, recipe, "B200").total for recipe in (BF16, PRESETS["amd-fdw"].recipe)]
    assert bf16.total / fp4.total < 1.1 < large[0] / large[1]


def test_no_time_without_the_unit():
    mxfp4 = PRESETS["amd-fdw"].recipe
    assert token_time(LLAMA_8B, mxfp4, "H100") is None
    assert token_time(LLAMA_8B, BF16, "H100") is not None
    assert token_time(LLAMA_8B, PRESETS["nvidia-nvfp4"].recipe, "MI355X") is None
    assert token_time(LLAMA_8B, PRESETS["nvidia-nvfp4"].recipe, "B200") is not None
    e3m0 = OperandPolicy(format="fp4_e3m0")
    assert token_time(LLAMA_8B, Recipe(fprop=GemmPolicy(left=e3m0, right=e3m0)), "B200") is None
    with pytest.raises(KeyError):
        token_time(LLAMA_8B, BF16, "a toaster")


def test_a_gemm_runs_at_the_rate_of_its_wider_operand():
    four, eight = OperandPolicy(format="mxfp4"), OperandPolicy(format="mxfp8")
    mixed = Recipe(fprop=GemmPolicy(left=eight, right=four))
    plain = Recipe(fprop=GemmPolicy(left=eight, right=eight))
    big = replace(LLAMA_8B, vocab_size=1)
    assert token_time(big, mixed, "B200").of("fprop") == pytest.approx(
        token_time(big, plain, "B200").of("fprop")
    )
    assert fp4_share(big, mixed) == 0


def test_a_scale_over_the_whole_tensor_costs_a_second_read():
    def quantising(scale):
        policy = OperandPolicy(format="fp8_e4m3", scale=scale)
        same = GemmPolicy(left=policy, right=policy)
        return token_time(LLAMA_8B, Recipe(fprop=same, dgrad=same, wgrad=same), "B200").of("quantise_forward")

    # One read of 2 bytes and two copies of 1 each, against two reads.
    assert quantising("tensor") / quantising("delayed") == pytest.approx(6 / 4)


def test_a_rotation_that_is_small_hides_behind_memory():
    plain, rotated = PRESETS["amd-fdw"].recipe, PRESETS["amd-fdw-dht16"].recipe
    assert token_time(LLAMA_8B, plain, "B200") == token_time(LLAMA_8B, rotated, "B200")
    wide = recipe(gemms=["fprop", "dgrad", "wgrad"], stabiliser="dht", hadamard_size=256)
    narrow = recipe(gemms=["fprop", "dgrad", "wgrad"], stabiliser="dht", hadamard_size=16)
    slow, quick = (token_time(LLAMA_8B, one, "B200") for one in (wide, narrow))
    assert slow.of("quantise_forward") > quick.of("quantise_forward")


def test_fp4_share():
    tseng = PRESETS["tseng"].recipe
    assert fp4_share(LLAMA_8B, tseng) > 0.5  # "more than half of the training FLOPs", 2502.20586, abstract
    assert fp4_share(LLAMA_8B, PRESETS["amd-fdw"].recipe) == pytest.approx(1.5 * fp4_share(LLAMA_8B, tseng))
    assert fp4_share(LLAMA_8B, BF16) == 0


def test_the_documents_give_these_shares():
    page = (Path(__file__).parents[2] / "docs" / "report.md").read_text(encoding="utf-8")
    shares = [f"{fp4_share(LLAMA_8B, PRESETS[name].recipe):.0%}" for name in ("tseng", "amd-fdw")]
    assert f"runs {shares[0]} of the training FLOPs".replace("%", " %") in page
    assert f"AMD's {shares[1]}.".replace("%", " %") in page


def test_the_optimizer_is_shared_by_the_devices_and_paid_once_a_step():
    alone = token_time(replace(LLAMA_8B, devices=1, tokens_per_step=LLAMA_8B.device_tokens), BF16, "B200")
    assert alone.of("optimizer") == pytest.approx(8 * token_time(LLAMA_8B, BF16, "B200").of("optimizer"))


def test_every_hardware_of_the_report_is_known():
    assert set(HARDWARE) <= set(PEAKS)


def test_a_device_has_the_peaks_of_its_whole_name():
    assert peaks_of("NVIDIA GB200") == PEAKS["GB200"]
    assert peaks_of("NVIDIA B200") == PEAKS["B200"]
