"""Speed in the report: measured only where it is native, modelled only where there is a configuration."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats
from synthetic_study import native_study, rewrite, whole_config

from ablate.modelled.speed import token_time, workload_of
from ablate.modelled.spread import speed_up
from ablate.recipes import PRESETS, Recipe
from ablate.reports import analyse, load_frames, write_report
from ablate.reports.findings.results import RunResult
from ablate.reports.findings.speed import measured_speed, modelled_speed, share_in_fp4
from ablate.results.cost import Cost
from ablate.results.intervals import Interval
from ablate.run.config import ModelConfig

BASE = [(100.0, 10.0), (104.0, 10.4), (97.0, 9.9)]
ARM = [(110.0, 12.1), (113.0, 12.0), (108.0, 12.4)]


def timed(pairs):
    return [
        RunResult(
            run_id=f"{i}",
            arm="a",
            seed=i,
            state="finished",
            end="hit",
            tokens=20,
            budget=20,
            tokens_to_target=tokens,
            interpolated=tokens,
            fitted=None,
            left_bound=False,
            last_loss=1.0,
            message=None,
            seconds=None,
            tokens_per_sec=speed,
            devices=1,
            backend_mode="native",
        )
        for i, (tokens, speed) in enumerate(pairs)
    ]


def test_both_errors_are_in_the_end_to_end_speed():
    found = measured_speed(timed(ARM), timed(BASE), paired=False)
    times = [[math.log(tokens / speed) for tokens, speed in side] for side in (BASE, ARM)]
    theirs = stats.ttest_ind(*times, equal_var=False).confidence_interval(0.95)
    assert found.end_to_end.estimate == pytest.approx(math.exp(np.mean(times[0]) - np.mean(times[1])))
    assert (found.end_to_end.low, found.end_to_end.high) == pytest.approx(np.exp(theirs))
    speeds = [[math.log(speed) for _, speed in side] for side in (ARM, BASE)]
    theirs = stats.ttest_ind(*speeds, equal_var=False).confidence_interval(0.95)
    assert (found.throughput.low, found.throughput.high) == pytest.approx(np.exp(theirs))
    assert found.hours.estimate == pytest.approx(stats.gmean([t / s for t, s in ARM]) / 3600)


def test_hours_are_those_of_every_device_of_a_run():
    alone = measured_speed(timed(ARM), timed(BASE), paired=False)
    together = [replace(run, devices=8) for run in timed(ARM)]
    found = measured_speed(together, timed(BASE), paired=False)
    assert found.hours.estimate == pytest.approx(8 * alone.hours.estimate)
    assert found.end_to_end == alone.end_to_end


def test_pairs_are_compared_as_pairs():
    found = measured_speed(timed(ARM), timed(BASE), paired=True)
    differences = [math.log(b[0] / b[1]) - math.log(a[0] / a[1]) for a, b in zip(ARM, BASE, strict=True)]
    theirs = stats.ttest_1samp(differences, 0).confidence_interval(0.95)
    assert (found.end_to_end.low, found.end_to_end.high) == pytest.approx(np.exp(theirs))


def test_never_over_the_hits_alone():
    runs = timed(ARM)
    late = dataclasses.replace(runs[0], end="censored", tokens_to_target=None)
    found = measured_speed([late, *runs[1:]], timed(BASE), paired=False)
    assert found.end_to_end.estimate is None
    assert found.hours.estimate is None
    assert found.throughput.estimate is not None
    unknown = dataclasses.replace(runs[0], tokens_per_sec=None)
    assert measured_speed([unknown, *runs[1:]], timed(BASE), paired=False).throughput.estimate is None


def test_modelled_net_speed_has_the_errors_of_the_model_and_of_the_token_cost():
    fp8, fp4 = whole_config(PRESETS["te-hybrid-fp8"].recipe), whole_config(PRESETS["amd-fdw-dht16"].recipe)
    cost = Cost(kind="interval", estimate=0.08, low=0.05, high=0.12)
    found = {one.hardware: one for one in modelled_speed(fp4, fp8, tokens_to_target=3.6e9, cost=cost)}
    mi355x = found["MI355X"]
    slow, fast = (token_time(workload_of(one), one.recipe, "MI355X").by_kernel() for one in (fp8, fp4))
    assert vars(mi355x.speed).items() >= vars(speed_up(slow, fast)).items()
    speed, net = mi355x.speed, mi355x.net
    assert net.estimate == pytest.approx(speed.estimate / 1.08)
    up, down = math.log(speed.high / speed.estimate), math.log(speed.low / speed.estimate)
    assert net.high == pytest.approx(net.estimate * math.exp(math.hypot(up, math.log(1.08 / 1.05))))
    assert net.low == pytest.approx(net.estimate * math.exp(-math.hypot(down, math.log(1.12 / 1.08))))
    assert mi355x.hours.low < mi355x.hours.estimate < mi355x.hours.high
    assert {found["H100"].speed, found["H100"].hours} == {Interval()}
    bound = Cost(kind="bound", low=0.2, reason="why")
    net = modelled_speed(fp4, fp8, tokens_to_target=None, cost=bound)[0]
    assert (net.net.estimate, net.net.note, net.hours) == (None, "why", Interval())
    point = Cost(kind="point", estimate=0.08)
    one = modelled_speed(fp4, fp8, tokens_to_target=None, cost=point)[0]
    assert one.net == Interval(estimate=one.speed.estimate / 1.08)


def test_a_model_that_a_trainer_builds_has_nothing_to_model():
    own = replace(whole_config(PRESETS["amd-fdw"].recipe), trainer="mine.py:train")
    described = replace(own, model=ModelConfig(layers=8))
    assert modelled_speed(described, described, tokens_to_target=1e9, cost=Cost(kind="baseline")) != ()
    assert modelled_speed(own, own, tokens_to_target=1e9, cost=Cost(kind="baseline")) == ()
    assert share_in_fp4(own) is None
    assert share_in_fp4(replace(own, trainer=None)) > 0.5


def test_hours_are_those_of_one_device():
    own = whole_config(Recipe())
    one = modelled_speed(own, own, tokens_to_target=1e12, cost=Cost(kind="baseline"))[0]
    assert one.speed == one.net == Interval(estimate=1.0, low=1.0, high=1.0)
    seconds = token_time(workload_of(own), Recipe(), "B200").total * 1e12
    assert one.hours.estimate == pytest.approx(seconds / 3600)


def test_native_timing_is_in_the_report_with_its_price(tmp_path):
    written = write_report(native_study(tmp_path), prices={"MI355X": 2.5, "B200": 4.0})
    page = written.html.read_text()
    assert "Measured" in page
    assert "End-to-end speed" in page
    assert "Cost at 2.5 $/h" in page
    assert "B200: GPU-hours to target, at 4 $/h" in page
    arm = json.loads(written.json.read_text())["arms"][1]
    assert arm["measured"]["throughput_over_baseline"]["estimate"] == pytest.approx(1.25, abs=0.01)
    assert arm["fp4_share_of_flops"] > 0.5
    assert {one["hardware"] for one in arm["modelled"]} == {"B200", "B300", "MI355X", "H100"}
    assert arm["published"][0]["figure"] == "26–27 % more tokens"
    assert (written.tables / "measured.tex").exists()
    assert (written.tables / "modelled.tex").exists()
    assert (written.tables / "published.tex").exists()


@pytest.mark.parametrize("mode", ["emulated", "imported"])
def test_no_other_timing_becomes_a_speed(tmp_path, mode):
    store = native_study(tmp_path)
    entry = store.plan().arms[0].runs[0]
    run = store.run(entry.id)
    rewrite(run, run.environment_path, backend_mode=mode, timing_valid=False)
    analysis = analyse(load_frames(store))
    assert all(arm.measured is None for arm in analysis.arms)
    page = write_report(store).html.read_text()
    assert "End-to-end speed" not in page
    assert "Modelled, not measured" in page


def test_logs_of_others_have_nothing_to_model(ladder):
    analysis = analyse(load_frames(ladder))  # its configurations are not whole
    assert all(arm.modelled == () and arm.fp4_share is None for arm in analysis.arms)
    assert "Modelled" not in write_report(ladder).html.read_text()
