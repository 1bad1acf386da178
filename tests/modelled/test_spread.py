"""The range of a modelled speed: by hand, and from the calibrated steps."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from ablate.modelled.measured import CALIBRATION
from ablate.modelled.speed import LLAMA_8B, TokenTime, token_time
from ablate.modelled.spread import Range, kernel_spread, seconds_range, speed_up
from ablate.recipes import PRESETS
from ablate.run.config import ModelConfig

T = stats.t.ppf(0.975, len(CALIBRATION) - 2)


def test_the_spread_is_that_of_the_calibrated_steps():
    squares = []
    for step in CALIBRATION:
        parts = np.array(list(step.time.by_kernel().values()))
        shares = parts / parts.sum()
        squares.append(np.log(step.tokens_per_sec * parts.sum()) ** 2 / (shares @ shares))
    assert kernel_spread() == pytest.approx(math.sqrt(sum(squares) / (len(squares) - 2)))


def test_a_time_is_off_by_the_squares_of_its_shares():
    time = TokenTime(seconds={("fprop", "gemm4"): 3.0, ("rest_forward", "pointwise"): 1.0})
    found = seconds_range(time)
    reach = T * kernel_spread() * math.sqrt(0.75**2 + 0.25**2)
    assert found.estimate == 4.0
    assert math.log(found.high / 4) == pytest.approx(reach, rel=0.01)
    assert math.log(found.low / 4) == pytest.approx(-reach, rel=0.01)
    twice = found.times(2)
    assert (twice.estimate, twice.low, twice.high) == (8.0, 2 * found.low, 2 * found.high)


def test_of_a_speed_up_counts_what_differs():
    found = speed_up({"gemm8": 2.0, "pointwise": 2.0}, {"gemm4": 1.0, "pointwise": 1.0})
    assert found.estimate == 2.0
    assert math.log(found.high / 2) == pytest.approx(T * kernel_spread() * math.sqrt(0.5), rel=0.01)
    same = {"gemm8": 2.0, "pointwise": 2.0}
    assert speed_up(same, same) == Range(estimate=1.0, low=1.0, high=1.0)


def test_small_models_move_bytes_by_other_kernels_for_other_formats():
    small = replace(LLAMA_8B, model=ModelConfig(), vocab_size=256, devices=1, tokens_per_step=8192)
    fp8, fp4 = (
        token_time(small, PRESETS[name].recipe, "B200").by_kernel() for name in ("te-hybrid-fp8", "amd-fdw")
    )
    found = speed_up(fp8, fp4)
    assert found.high / found.low > 1.15


def test_a_rotation_that_costs_nothing_has_no_range():
    plain, rotated = (
        token_time(LLAMA_8B, PRESETS[name].recipe, "MI355X").by_kernel()
        for name in ("amd-fdw", "amd-fdw-dht16")
    )
    assert speed_up(plain, rotated) == Range(estimate=1.0, low=1.0, high=1.0)
