"""Which timing counts: the runs' own, and what ``ablate throughput`` measured. The hardware is a stand-in."""

from __future__ import annotations

import json
import math
import random

import numpy as np
import pytest
from click.testing import CliRunner
from damage import damage, replace_somewhere
from scipy import stats
from synthetic_study import (
    GPU,
    NATIVE,
    RATES,
    build_study,
    line,
    native_study,
    rewrite,
    speed_of,
    write_throughput,
)

from ablate.backends.device import Device
from ablate.base.files import read_record, record_text
from ablate.cli import cli
from ablate.reports import analyse, load_frames, write_report
from ablate.reports.findings.speed import alone_speed
from ablate.reports.findings.timing import runs_at_once, timing_of_runs
from ablate.reports.pages.document import report_document
from ablate.reports.words import speed_tables
from ablate.reports.words.caveats import warnings
from ablate.reports.words.method import definitions
from ablate.reports.words.verdict import write_verdict
from ablate.results.cost import token_cost
from ablate.run.outcome import Outcome
from ablate.store.leases import Attempt
from ablate.store.plan_file import LockedArm, LockedPlan
from ablate.store.records import Environment, with_whole


def hits(*tokens):
    return [Outcome(seed=i, end="hit", low=t, high=t) for i, t in enumerate(tokens)]


ARM, BASE = hits(110.0, 113.0, 108.0, 111.0), hits(100.0, 104.0, 97.0)


def welch(parts, degrees):
    """The formula, once more: (sum of variances)² / sum of (variance² / degrees)."""
    total = sum(parts)
    return total, total**2 / sum(v**2 / d for v, d in zip(parts, degrees, strict=True))


def test_the_speed_up_carries_the_errors_of_rates_and_of_tokens():
    cost = token_cost(ARM, BASE)
    found = alone_speed(RATES["fp4"], RATES["fp8"], cost=cost, tokens=None)
    rates = [np.log(RATES[arm]) for arm in ("fp4", "fp8")]
    tokens = [np.log([run.high for run in side]) for side in (ARM, BASE)]
    samples = [*rates, *tokens]
    variance, degrees = welch(
        [np.var(x, ddof=1) / len(x) for x in samples], [len(x) - 1 for x in samples]
    )  # fmt: skip
    middle = rates[0].mean() - rates[1].mean() - tokens[0].mean() + tokens[1].mean()
    low, high = stats.t.interval(0.95, degrees, loc=middle, scale=math.sqrt(variance))
    assert found.end_to_end.estimate == pytest.approx(math.exp(middle))
    assert found.end_to_end.estimate == pytest.approx(found.throughput.estimate / (1 + cost.estimate))
    assert (found.end_to_end.low, found.end_to_end.high) == pytest.approx((math.exp(low), math.exp(high)))
    theirs = stats.ttest_ind(*rates, equal_var=False).confidence_interval(0.95)
    assert (found.throughput.low, found.throughput.high) == pytest.approx(np.exp(theirs))


def test_with_paired_seeds_the_token_part_is_the_paired_one():
    cost = token_cost(ARM[:3], BASE, paired=True)
    assert cost.pairs == 3
    found = alone_speed(RATES["fp4"], RATES["fp8"], cost=cost, tokens=None).end_to_end
    pairs = np.log([a.high / b.high for a, b in zip(ARM, BASE, strict=False)])
    samples = [*(np.log(RATES[arm]) for arm in ("fp4", "fp8")), pairs]
    variance, degrees = welch([np.var(x, ddof=1) / len(x) for x in samples], [5, 5, 2])
    middle = samples[0].mean() - samples[1].mean() - pairs.mean()
    low, high = stats.t.interval(0.95, degrees, loc=middle, scale=math.sqrt(variance))
    assert (found.low, found.high) == pytest.approx((math.exp(low), math.exp(high)))


def test_what_has_no_interval_makes_none():
    rates = (RATES["fp4"], RATES["fp8"])
    one = alone_speed(*rates, cost=token_cost(ARM[:1], BASE[:1]), tokens=None).end_to_end
    assert (one.low, one.note) == (None, "n = 1: no interval")
    assert one.estimate is not None
    same = alone_speed(*rates, cost=token_cost(hits(5.0, 5.0), hits(4.0, 4.0)), tokens=None).end_to_end
    assert (same.estimate, same.low) == (pytest.approx(1.502 / 1.25, rel=0.01), None)
    late = [*ARM, Outcome(seed=9, end="censored", low=300.0)]
    bound = alone_speed(*rates, cost=token_cost(late, BASE), tokens=None)
    assert bound.end_to_end.estimate is None
    assert bound.hours.estimate is None
    assert bound.throughput.estimate is not None


def page_of(store):
    frames = load_frames(store)
    analysis = analyse(frames)
    verdict = write_verdict(analysis)
    document = report_document(analysis, verdict, (), warnings(analysis, frames.faults), ())
    json.dumps(document, allow_nan=False)
    speed_tables.measured_table(analysis, {})
    return analysis, document, " ".join(document["warnings"]), dict(definitions(analysis))["Timing"]


def test_the_record_feeds_the_speed_up_of_the_report(tmp_path):
    store = native_study(tmp_path)
    write_throughput(store, speed_of(store, "fp8"), speed_of(store, "fp4"))
    written = write_report(store)
    document = json.loads(written.json.read_text())
    fp8, fp4 = document["arms"]
    cost = fp4["token_cost"]["estimate"]
    assert fp4["measured"]["timed"] == "alone"
    # 1.5, as timed alone; the runs' own rows would say 1.25.
    assert fp4["measured"]["throughput_over_baseline"]["estimate"] == pytest.approx(1.5, abs=0.01)
    assert fp4["measured"]["end_to_end_speed"]["estimate"] == pytest.approx(1.5 / (1 + cost), abs=0.01)
    assert fp4["measured"]["end_to_end_speed"]["low"] is not None
    seconds = fp8["tokens_to_target"]["estimate"] / stats.gmean(RATES["fp8"])
    assert fp8["measured"]["gpu_hours_to_target"]["estimate"] == pytest.approx(seconds / 3600)
    assert document["throughput"]["device"] == GPU.name
    assert (document["throughput"]["repeats"], document["throughput"]["steps"]) == (6, 10)
    assert document["throughput"]["not_used"] == {}
    page = written.html.read_text()
    said = "by `ablate throughput` on AMD Instinct MI355X, 6 repeats of 10 steps, 2023-11-14 22:13 UTC"
    assert said in page
    assert "Measured speed is from `ablate throughput` (AMD Instinct MI355X, 6 repeats" in page
    assert "gives no speed-up" not in page
    assert "6 repeats of 10 steps" in (written.tables / "measured.tex").read_text()


def test_it_serves_where_the_runs_shared_their_gpu(tmp_path):
    store = native_study(tmp_path)
    for run_id in [entry.id for arm in store.plan().arms for entry in arm.runs]:
        run = store.run(run_id)
        rewrite(run, run.attempts / "1.json", **vars(attempt(0.0, 9.0)))
    analysis, document, warned, timing = page_of(store)
    assert analysis.timing.kind == "unvouched"
    assert document["timing_reasons"] == [{"reason": "4 runs at once on one GPU", "runs": 4}]
    assert all(arm.measured is None for arm in analysis.arms)
    assert "4 runs at once on one GPU (4 runs)" in timing
    assert "nothing here is a measured speed-up" in timing
    assert "no claim on speed is made: 4 runs at once on one GPU (4 runs)." in document["verdict"][-1]
    write_throughput(store, speed_of(store, "fp8"), speed_of(store, "fp4"))
    analysis, document, warned, timing = page_of(store)
    assert analysis.others[0].measured.timed == "alone"
    assert "4 runs at once on one GPU (4 runs)" in timing
    assert "Measured speed is from `ablate throughput`" in timing
    assert not any("no claim on speed" in sentence for sentence in document["verdict"])
    assert "throughput" not in warned


EMULATED = {"backend_mode": "emulated", "timing_valid": False, "why_not": "emulated arithmetic"}
BUSY = {"timing_valid": False, "why_not": "the GPU is 40 % busy"}
STALE = {"run": "0123456789abcdef"}


@pytest.mark.parametrize(
    ("fp8", "fp4", "record", "said"),
    [
        (EMULATED, EMULATED, {}, "gives no speed-up: emulated arithmetic (fp8, fp4)."),
        (BUSY, BUSY, {}, "gives no speed-up: the GPU is 40 % busy (fp8, fp4)."),
        ({}, STALE, {}, "for some arms: timed with another configuration than its runs have (fp4)."),
        (
            STALE,
            {},
            {},
            "than its runs have (fp8); no baseline to compare it with (fp4).",
        ),
        ({}, {}, {"code": "other"}, "no speed-up: timed with other code than trained its runs (fp8, fp4)."),
        (
            {},
            {},
            {"device": Device(kind="cuda", arch="sm_100", name="B200")},
            "no speed-up: timed on B200, trained on AMD Instinct MI355X (fp8, fp4).",
        ),
        # A record that contradicts itself counts for nothing.
        (EMULATED | {"timing_valid": True}, {}, {}, "no speed-up: emulated arithmetic (fp8)"),
    ],
)
def test_what_does_not_count_is_named_and_gives_no_speed_up(tmp_path, fp8, fp4, record, said):
    store = native_study(tmp_path)
    for entry in store.plan().arms[1].runs:  # so that the runs' own timing does not serve instead
        run, why_not = store.run(entry.id), "the GPU is 55 % busy"
        rewrite(run, run.environment_path, timing_valid=False, timing_why_not=why_not)
    write_throughput(store, speed_of(store, "fp8", **fp8), speed_of(store, "fp4", **fp4), **record)
    analysis, document, warned, timing = page_of(store)
    assert said in warned
    assert analysis.others[0].measured is None
    assert "the GPU is 55 % busy (2 runs)" in timing
    assert any(
        "no claim on speed is made: the GPU is 55 % busy (2 runs)" in one for one in document["verdict"]
    )
    assert document["throughput"]["not_used"]


def test_an_arm_that_was_not_timed_has_the_figure_of_its_runs(tmp_path):
    store = native_study(tmp_path)
    write_throughput(store, speed_of(store, "fp8"))
    analysis, _, warned, _ = page_of(store)
    assert "gives no speed-up for some arms: not timed (fp4)." in warned
    assert [arm.measured.timed for arm in analysis.arms] == ["alone", "in its runs"]
    assert analysis.others[0].measured.throughput.estimate == pytest.approx(1.25, abs=0.01)
    table = speed_tables.measured_table(analysis, {})
    assert [row[2] for row in table.rows] == ["alone", "in its runs"]
    assert "Timed in its runs" in table.caption


def test_runs_under_emulation_are_not_those_that_were_timed(tmp_path):
    store = native_study(tmp_path)
    for arm in store.plan().arms:
        for entry in arm.runs:
            run = store.run(entry.id)
            rewrite(run, run.environment_path, backend_mode="emulated")
    write_throughput(store, speed_of(store, "fp8"), speed_of(store, "fp4"))
    analysis, _, warned, _ = page_of(store)
    assert "its runs had emulated arithmetic (fp8, fp4)" in warned
    assert all(arm.measured is None for arm in analysis.arms)


def test_code_that_is_waived_may_differ(tmp_path):
    store = native_study(tmp_path, waive=["code"])
    write_throughput(store, speed_of(store, "fp8"), speed_of(store, "fp4"), code="other")
    assert analyse(load_frames(store)).others[0].measured.timed == "alone"


def attempt(start, end, machine="m"):
    return Attempt(
        attempt=1, owner="o", host="h", machine=machine, pid=1, process_started="1", started_unix=start,
        ended_unix=end, outcome=None if end is None else "finished",
    )  # fmt: skip


def test_who_was_on_a_gpu_at_the_same_time():
    environments = {name: Environment(gpu="H100", gpu_uuid="1") for name in "abcd"}
    environments["c"] = Environment(gpu="H100", gpu_uuid="2")
    spans = {"a": (0, 10), "b": (9, 20), "c": (0, 20), "d": (20, 30)}
    attempts = {name: attempt(*span) for name, span in spans.items()}
    assert runs_at_once(environments, attempts) == dict.fromkeys("ab", "2 runs at once on one GPU")
    # Two containers of one machine are two machines to the ledger; the GPU is one.
    attempts["b"] = attempt(9, 20, machine="another container")
    assert set(runs_at_once(environments, attempts)) == {"a", "b"}
    attempts["a"] = attempt(0, None)  # not known to have ended
    assert set(runs_at_once(environments, attempts)) == {"a", "b", "d"}
    assert runs_at_once(dict.fromkeys("ab", Environment(gpu="H100")), attempts) == {}  # which one is not told


def test_processors_are_shared_where_threads_exceed_cores():
    environments = {name: Environment(threads=1, cpus_visible=2) for name in "abc"}
    attempts = {"a": attempt(0, 10), "b": attempt(5, 15), "c": attempt(11, 20)}
    assert runs_at_once(environments, attempts) == {}
    attempts["c"] = attempt(9, 20)
    assert runs_at_once(environments, attempts) == dict.fromkeys("abc", "3 runs at once on 2 CPU cores")
    attempts["c"] = attempt(9, 20, machine="another")
    assert runs_at_once(environments, attempts) == {}
    timing = timing_of_runs(
        {"a": Environment(backend_mode="emulated"), "b": with_whole(Environment, NATIVE)},
        {},
        LockedPlan(study="s", baseline="a", target=None, arms=(LockedArm(name="a", runs=()),)),
    )
    assert (timing.kind, timing.reasons) == ("emulated", (("emulated arithmetic", 1),))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda _: b"{", "altered or cut"),
        (lambda record: json.dumps(record).encode(), "altered or cut"),
        (lambda record: record | {"format": 2}, "format"),
        (lambda record: record | {"measured_unix": 1e300}, "measured_unix"),
        (lambda record: record | {"settings": {"steps": 10}}, "settings.repeats"),
        (lambda record: record | {"arms": [record["arms"][0] | {"tokens_per_sec": []}]}, "tokens_per_sec"),
        (lambda record: record | {"arms": [record["arms"][0] | {"tokens_per_sec": [0.0]}]}, "tokens_per_sec"),
        (lambda record: record | {"arms": [record["arms"][0] | {"tokens_per_sec": [10**400]}]}, "tokens_per"),
        (lambda record: record | {"arms": [record["arms"][0] | {"timing_valid": 1}]}, "timing_valid"),
    ],
)
def test_a_damaged_record_is_a_line_and_no_speed(tmp_path, change, said):
    store = native_study(tmp_path)
    write_throughput(store, speed_of(store, "fp8"), speed_of(store, "fp4"))
    changed = change(read_record(store.throughput_path))
    store.throughput_path.write_bytes(changed if isinstance(changed, bytes) else record_text(changed))
    done = CliRunner().invoke(
        cli,
        ["report", store.path.name, "--storage", str(store.path.parent), "--json"],
        catch_exceptions=False,
    )
    (line,) = [one for one in json.loads(done.stdout)["warnings"] if "throughput.json" in one]
    assert line.startswith("Left out: throughput.json: ")
    assert said in line
    assert json.loads(done.stdout)["throughput"] is None


@pytest.mark.parametrize("turns", [150, pytest.param(800, marks=pytest.mark.exhaustive)])
def test_no_record_makes_a_traceback(tmp_path, turns):
    draw = random.Random(5)
    # Without whole configurations, whose modelled speed takes the time of a hundred records.
    store = build_study(
        tmp_path, {arm: [line(3, 2.5, 1.8), line(3, 2.4, 1.8)] for arm in RATES}, environment=NATIVE
    )
    write_throughput(store, speed_of(store, "fp8"), speed_of(store, "fp4"))
    path = store.throughput_path
    whole, record = path.read_bytes(), read_record(path)
    used, left_out = 0, 0
    for turn in range(turns):
        if turn % 4 == 0:
            path.write_bytes(damage(whole, draw))
        else:
            odd = replace_somewhere(record, draw)
            path.write_bytes(record_text(odd) if isinstance(odd, dict) else b"[]")
        analysis, *_ = page_of(store)
        used += bool(analysis.throughput and analysis.throughput.tokens_per_sec)
        left_out += analysis.throughput is None
    assert min(used, left_out) > turns / 8
