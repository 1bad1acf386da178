"""Speed: as logged, by ``ablate check steps STUDY``, and by the model; made-up hardware."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats
from synthetic_study import (
    RATES,
    analysed,
    hits,
    native_study,
    parts,
    rewrite,
    speed_of,
    token_cost,
    whole_config,
    write_throughput,
)
from texts import check_page

from ablate.backends.device import Device
from ablate.modelled.speed import speed_up, token_time, workload_of
from ablate.recipes import PRESETS, Recipe
from ablate.reports import write_report
from ablate.reports.findings.speed import (
    alone_speed,
    measured_speed,
    modelled_speed,
    share_in_fp4,
)
from ablate.results.cost import Cost, log_tokens
from ablate.results.ends import RunResult
from ablate.results.intervals import (
    NO_SPREAD,
    ONE_RUN,
    Interval,
    Method,
    difference,
    exponential,
    mean_estimate,
    t_interval,
)
from ablate.run.outcome import Outcome

BASE = [(100.0, 10.0), (104.0, 10.4), (97.0, 9.9)]
ARM = [(110.0, 12.1), (113.0, 12.0), (108.0, 12.4)]


def timed(pairs):
    """Runs of these tokens to target and tokens/s."""
    runs = []
    for seed, (tokens, speed) in enumerate(pairs):
        run = RunResult(
            seed=seed, end="hit", low=tokens, high=tokens, run_id=f"{seed}", arm="a", state="finished",
            tokens=np.empty(0), loss=np.empty(0), trained=20, budget=20, message=None, seconds=None,
            tokens_per_sec=speed, devices=1, backend_mode="native",
        )  # fmt: skip
        runs.append(run)
    return runs


@pytest.mark.parametrize("paired", [False, True])
def test_both_errors_are_in_the_end_to_end_speed_as_logged(paired):
    how = Method(paired=paired)
    found = measured_speed(timed(ARM), timed(BASE), how)
    times = [
        [math.log(tokens / speed) for tokens, speed in side] for side in (BASE, ARM)
    ]
    speeds = [[math.log(speed) for _, speed in side] for side in (ARM, BASE)]
    for ours, logs in ((found.end_to_end, times), (found.throughput, speeds)):
        test = (
            stats.ttest_rel(*logs)
            if paired
            else stats.ttest_ind(*logs, equal_var=False)
        )
        gap = np.mean(logs[0]) - np.mean(logs[1])
        assert parts(ours) == pytest.approx(np.exp([gap, *test.confidence_interval()]))
    hours = stats.gmean([tokens / speed for tokens, speed in ARM]) / 3600
    assert found.hours.estimate == pytest.approx(hours)
    on_eight = [replace(run, devices=8) for run in timed(ARM)]
    together = measured_speed(on_eight, timed(BASE), how)
    assert together.hours.estimate == pytest.approx(8 * hours)
    assert together.end_to_end == found.end_to_end


def test_never_over_the_hits_alone_nor_over_the_runs_that_were_timed():
    first, *rest = timed(ARM)
    late = replace(first, end="censored", low=20.0, high=math.inf)
    found = measured_speed([late, *rest], timed(BASE), Method())
    assert (found.end_to_end.estimate, found.hours.estimate) == (None, None)
    assert found.throughput.estimate is not None
    unknown = replace(first, tokens_per_sec=None)
    found = measured_speed([unknown, *rest], timed(BASE), Method())
    assert found.throughput.estimate is None


@pytest.mark.parametrize("paired", [False, True])
def test_the_speed_up_of_a_timing_carries_the_errors_of_rates_and_of_tokens(paired):
    arm, base = hits(110.0, 113.0, 108.0), hits(100.0, 104.0, 97.0)
    cost = token_cost(arm, base, paired=paired)
    found = alone_speed(RATES["fp4"], RATES["fp8"], cost=cost, tokens=None)
    rates = difference(*(mean_estimate(np.log(RATES[arm])) for arm in ("fp4", "fp8")))
    for ours, by_hand in (
        (found.end_to_end, difference(rates, cost.figure)),
        (found.throughput, rates),
    ):
        assert parts(ours) == pytest.approx(parts(exponential(t_interval(by_hand))))


CENSORED = [*hits(5.0), Outcome(seed=9, end="censored", low=300.0)]


@pytest.mark.parametrize(
    ("arm", "base", "estimate", "note"),
    [
        (hits(5.0), hits(4.0), True, ONE_RUN),
        (hits(5.0, 5.0), hits(4.0, 4.0), True, NO_SPREAD),
        (CENSORED, hits(4.0, 4.1), False, "this arm: of 2 runs"),
    ],
)
def test_what_has_no_interval_makes_none(arm, base, estimate, note):
    cost = token_cost(arm, base)
    tokens = log_tokens(arm)
    found = alone_speed(RATES["fp4"], RATES["fp8"], cost=cost, tokens=tokens)
    for interval in (found.end_to_end, found.hours):
        assert (interval.estimate is not None, interval.low) == (estimate, None)
    assert found.end_to_end.note.startswith(note)
    assert found.throughput.low is not None


def test_modelled_net_speed_has_the_errors_of_the_model_and_of_the_token_cost():
    fp8 = whole_config(PRESETS["te-hybrid-fp8"].recipe)
    fp4 = whole_config(PRESETS["amd-fdw-dht16"].recipe)

    def modelled(arm, base, tokens=None, **cost):
        found = modelled_speed(arm, base, tokens_to_target=tokens, cost=Cost(**cost))
        return {one.hardware: one for one in found}

    cost = {"kind": "interval", "estimate": 0.08, "low": 0.05, "high": 0.12}
    found = modelled(fp4, fp8, 3.6e9, **cost)
    speed, net, hours = (
        getattr(found["MI355X"], name) for name in ("speed", "net", "hours")
    )
    slow, fast = (
        token_time(workload_of(arm), arm.recipe, "MI355X") for arm in (fp8, fp4)
    )
    assert (
        vars(speed).items()
        >= vars(speed_up(slow.by_kernel(), fast.by_kernel())).items()
    )
    up = math.hypot(math.log(speed.high / speed.estimate), math.log(1.08 / 1.05))
    down = math.hypot(math.log(speed.low / speed.estimate), math.log(1.12 / 1.08))
    middle = speed.estimate / 1.08
    assert parts(net) == pytest.approx(
        (middle, middle * math.exp(-down), middle * math.exp(up))
    )
    assert hours.low < hours.estimate < hours.high
    assert found["H100"].speed == found["H100"].hours == Interval()
    bound = modelled(fp4, fp8, kind="bound", low=0.2, note="why")["MI355X"]
    assert bound.net == Interval(note="why")
    assert bound.hours == Interval()
    own = whole_config(Recipe())
    alone = modelled(own, own, 1e12, kind="baseline")["MI355X"]
    assert alone.speed == alone.net == Interval(estimate=1.0, low=1.0, high=1.0)
    seconds = token_time(workload_of(own), Recipe(), "MI355X").total * 1e12
    assert alone.hours.estimate == pytest.approx(seconds / 3600)
    # A model that a trainer builds, and that the configuration does not describe, has nothing to model.
    trained = replace(own, trainer="mine.py:train")
    assert modelled(trained, own, **cost) == {}
    assert share_in_fp4(trained) is None


# ---- a study ---------------------------------------------------------------------------------------------


def test_what_was_timed_alone_feeds_the_speed_up_of_the_report(tmp_path):
    """The tokens/s that the runs trained at are no speed."""
    store = native_study(tmp_path)
    assert all(arm.measured is None for arm in analysed(store).arms)
    write_throughput(store, speed_of(store, "fp8"), speed_of(store, "fp4"))
    written = write_report(store)
    check_page("native", written.markdown)
    fp8, fp4 = json.loads(written.json.read_text())["arms"]
    measured = fp4["measured"]
    assert measured["timed"] == "alone"
    # As timed alone; the runs' own rows would say 1.
    over_baseline = measured["throughput_over_baseline"]["estimate"]
    assert over_baseline == pytest.approx(1.5, abs=0.01)
    end_to_end = over_baseline / (1 + fp4["token_cost"]["estimate"])
    assert measured["end_to_end_speed"]["estimate"] == pytest.approx(end_to_end)
    hours = fp8["tokens_to_target"]["estimate"] / stats.gmean(RATES["fp8"]) / 3600
    assert fp8["measured"]["gpu_hours_to_target"]["estimate"] == pytest.approx(hours)


EMULATED = {
    "backend_mode": "emulated",
    "timing_valid": False,
    "why_not": "emulated arithmetic",
}
BUSY = {"timing_valid": False, "why_not": "the GPU is 40 % busy"}
STALE = {"run": "0123456789abcdef"}
B200 = Device(kind="cuda", arch="sm_100", name="B200")
OLD = "timed with another configuration than its runs have"
NO_BASE = "no baseline to compare it with"
OTHER_CODE = "timed with other code than trained its runs"


@pytest.mark.parametrize(
    ("fp8", "fp4", "record", "not_used"),
    [
        (EMULATED, EMULATED, {}, ["emulated arithmetic"] * 2),
        (BUSY, BUSY, {}, ["the GPU is 40 % busy"] * 2),
        ({}, STALE, {}, [None, OLD]),
        (STALE, {}, {}, [OLD, NO_BASE]),
        ({}, None, {}, [None, "not timed"]),
        ({}, {}, {"code": "other"}, [OTHER_CODE] * 2),
        (
            {},
            {},
            {"device": B200},
            ["timed on B200, trained on AMD Instinct MI355X"] * 2,
        ),
        # A record that contradicts itself counts for nothing.
        (EMULATED | {"timing_valid": True}, {}, {}, ["emulated arithmetic", NO_BASE]),
    ],
)
def test_what_does_not_count_is_named_and_gives_no_speed(
    tmp_path, fp8, fp4, record, not_used
):
    store = native_study(tmp_path)
    speeds = [speed_of(store, "fp8", **fp8)]
    if fp4 is not None:
        speeds.append(speed_of(store, "fp4", **fp4))
    write_throughput(store, *speeds, **record)
    analysis = analysed(store)
    assert [analysis.throughput.not_used.get(arm) for arm in ("fp8", "fp4")] == not_used
    assert analysis.others[0].measured is None
    said = " ".join(json.loads(write_report(store).json.read_text())["warnings"])
    assert all(reason in said for reason in not_used if reason)
    store.write_plan(replace(store.plan(), waive=("code",)))
    waived = analysed(store).others[0].measured
    assert (waived is not None) == (not_used == [OTHER_CODE] * 2)


@pytest.mark.parametrize("mode", ["emulated", "imported"])
def test_no_other_timing_of_a_run_becomes_a_speed(tmp_path, mode):
    store = native_study(tmp_path)
    run = store.run(store.plan().arms[0].runs[0].id)
    rewrite(run, run.environment_path, backend_mode=mode)
    write_throughput(store, speed_of(store, "fp8"), speed_of(store, "fp4"))
    analysis = analysed(store)
    assert all(arm.measured is None for arm in analysis.arms)
    assert analysis.throughput.not_used["fp8"] == f"its runs had {mode} arithmetic"
