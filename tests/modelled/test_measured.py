"""Public measurements: the rates come from them, the page shows them, and the logs say the same."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import geometric_mean, median

import pytest

from ablate.modelled.speed import KERNEL_SPREAD, RATES, seconds_range
from tests.benchmark import load_benchmark

benchmark = load_benchmark("speed_model")
MEASURED_UPS = [speed_up for speed_up in benchmark.SPEED_UPS if not speed_up.at_least]
PAGE = Path(__file__).parents[2] / "docs" / "planning.md"


def test_rates_are_the_means_of_kernels_and_attentions_make_the_median_step_as_long_as_measured():
    for rate in ("gemm16", "gemm8", "gemm4", "memory"):
        shares = [share for _, unit, share in benchmark.KERNELS if unit == rate]
        assert RATES[rate][1] == round(geometric_mean(shares), 2)
    off = {False: [], True: []}
    for step in benchmark.CALIBRATION:
        off[step.work.fp8_attention].append(math.log1p(step.deviation))
    assert all(abs(median(logs)) < 0.003 for logs in off.values())  # of two digits
    page = PAGE.read_text(encoding="utf-8")
    for rate, (_, share) in RATES.items():
        assert f"| `{rate}` | {share:.2f} |" in page
    assert benchmark.kernel_spread() == pytest.approx(KERNEL_SPREAD, rel=1e-9)
    assert f"s = {KERNEL_SPREAD:.3f} comes" in page


def test_deviations_above_a_tenth_are_explained_and_counted():
    counts = []
    for cases in (benchmark.CALIBRATION, benchmark.HELD_OUT, MEASURED_UPS):
        far = [case for case in cases if abs(case.deviation) > 0.1]
        assert all(case.why for case in far)
        counts += [f"{len(cases) - len(far)} of {len(cases)}"]
    page = PAGE.read_text(encoding="utf-8")
    sentence = "Within 10 % are {} calibrated steps, {} held-out ones, and {} measured speed-ups"
    assert sentence.format(*counts) in page


def test_ranges_hold_all_that_was_held_out():
    steps = benchmark.HELD_OUT
    pairs = [(seconds_range(step.time), 1 / step.tokens_per_sec) for step in steps]
    pairs += [(speed_up.modelled, speed_up.published) for speed_up in MEASURED_UPS]
    assert len(pairs) == 19  # as docs/planning.md says
    assert all(modelled.low <= value <= modelled.high for modelled, value in pairs)


def test_the_logs_say_what_the_table_has(shared_data):
    logs = shared_data / "mlperf_v5.1"
    there = [step for step in benchmark.CALIBRATION if (logs / step.logs).is_dir()]
    assert {step.hardware for step in there} == {"B300", "GB300", "MI355X"}
    for step in there:
        logged = benchmark.logged(logs / step.logs)
        assert logged == pytest.approx(step.tokens_per_sec, rel=1e-4)
