"""The modelled step time: what must hold of any roofline, and the published figures beside it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from ablate.modelled.hardware import PEAKS
from ablate.modelled.speed import (
    GEMM_SHARE,
    HARDWARE,
    LLAMA_8B,
    fp4_share,
    published_checks,
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
    assert time.fprop + time.dgrad + time.wgrad == pytest.approx(
        linear / (PEAKS["B200"].bf16 * 1e12 * GEMM_SHARE)
    )
    assert time.quantise_forward == time.quantise_backward == 0


def test_in_fp4_the_gemms_of_the_blocks_are_twice_as_fast_as_in_fp8():
    big = replace(LLAMA_8B, vocab_size=1)
    fp8, fp4 = (token_time(big, PRESETS[name].recipe, "B200") for name in ("te-hybrid-fp8", "amd-fdw"))
    for gemm in ("fprop", "dgrad", "wgrad"):
        assert getattr(fp8, gemm) / getattr(fp4, gemm) == pytest.approx(2, rel=1e-3)
    assert fp8.rest_forward == fp4.rest_forward
    assert fp8.rest_backward == fp4.rest_backward


@pytest.mark.parametrize("hardware", ["B200", "B300", "MI355X"])
def test_each_further_gemm_in_fp4_makes_a_large_model_faster(hardware):
    names = ("te-hybrid-fp8", "amd-f", "amd-fd", "amd-fdw")
    totals = [token_time(LLAMA_8B, PRESETS[name].recipe, hardware).total for name in names]
    assert totals == sorted(totals, reverse=True)
    assert len(set(totals)) == 4


def test_a_tiny_model_moves_more_than_it_computes_and_gains_nothing():
    tiny = workload_of(SimpleNamespace(model=ModelConfig(), vocab_size=256, training=TrainingConfig()))
    fp8, fp4 = (token_time(tiny, PRESETS[name].recipe, "B200") for name in ("te-hybrid-fp8", "amd-fdw"))
    large = token_time(LLAMA_8B, PRESETS["te-hybrid-fp8"].recipe, "B200").total
    assert fp8.total / fp4.total < large / token_time(LLAMA_8B, PRESETS["amd-fdw"].recipe, "B200").total


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
    assert token_time(big, mixed, "B200").fprop == pytest.approx(token_time(big, plain, "B200").fprop)
    assert fp4_share(big, mixed) == 0


def test_a_scale_over_the_whole_tensor_costs_a_second_read():
    def quantising(scale):
        policy = OperandPolicy(format="fp8_e4m3", scale=scale)
        same = GemmPolicy(left=policy, right=policy)
        return token_time(LLAMA_8B, Recipe(fprop=same, dgrad=same, wgrad=same), "B200").quantise_forward

    # One read of 2 bytes and two copies of 1 each, against two reads.
    assert quantising("tensor") / quantising("delayed") == pytest.approx(6 / 4)


def test_a_rotation_that_is_small_hides_behind_memory():
    plain, rotated = PRESETS["amd-fdw"].recipe, PRESETS["amd-fdw-dht16"].recipe
    assert token_time(LLAMA_8B, plain, "B200") == token_time(LLAMA_8B, rotated, "B200")
    wide = recipe(gemms=["fprop", "dgrad", "wgrad"], stabiliser="dht", hadamard_size=256)
    narrow = recipe(gemms=["fprop", "dgrad", "wgrad"], stabiliser="dht", hadamard_size=16)
    slow, quick = (token_time(LLAMA_8B, one, "B200") for one in (wide, narrow))
    assert slow.quantise_forward > quick.quantise_forward


def test_fp4_share():
    tseng = PRESETS["tseng"].recipe
    assert fp4_share(LLAMA_8B, tseng) > 0.5  # "more than half of the training FLOPs", 2502.20586, abstract
    assert fp4_share(LLAMA_8B, PRESETS["amd-fdw"].recipe) == pytest.approx(1.5 * fp4_share(LLAMA_8B, tseng))
    assert fp4_share(LLAMA_8B, BF16) == 0


def test_the_published_speed_ups_are_near_or_above_their_bound():
    amd, fp8, bf16 = published_checks()
    assert abs(amd.deviation) < 0.2
    assert fp8.at_least
    assert bf16.at_least
    assert fp8.modelled > fp8.published
    assert bf16.modelled > bf16.published
    assert bf16.modelled > fp8.modelled


def test_the_documents_give_these_figures():
    page = (Path(__file__).parents[2] / "docs" / "report.md").read_text(encoding="utf-8")
    for check in published_checks():
        bound = "> " if check.at_least else ""
        published = f"{check.published:.2f}" if not check.at_least else f"{check.published:.1f}"
        assert f"| {bound}{published}× | {check.modelled:.2f}× | +{check.deviation:.0%} |".replace(
            "%", " %"
        ) in page.replace("\u00a0", " ")
    shares = [f"{fp4_share(LLAMA_8B, PRESETS[name].recipe):.0%}" for name in ("tseng", "amd-fdw")]
    assert f"runs {shares[0]} of the training FLOPs".replace("%", " %") in page
    assert f"AMD's {shares[1]}.".replace("%", " %") in page


def test_the_optimizer_is_shared_by_the_devices_and_paid_once_a_step():
    alone = token_time(replace(LLAMA_8B, devices=1, tokens_per_step=LLAMA_8B.device_tokens), BF16, "B200")
    assert alone.optimizer == pytest.approx(8 * token_time(LLAMA_8B, BF16, "B200").optimizer)


def test_every_hardware_of_the_report_is_known():
    assert set(HARDWARE) <= set(PEAKS)
