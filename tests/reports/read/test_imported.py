"""The run store of imported runs: what is pooled, what is refused, and that it can be done again."""

import dataclasses
import json
import re

import numpy as np
import pytest
import yaml
from texts import check_words, said_of

from ablate.base.errors import UserError
from ablate.base.files import write_record
from ablate.reports import write_report
from ablate.reports.findings.analyse import analyse
from ablate.reports.read.imported import (
    ImportedRun,
    run_of_losses,
    tidied,
    with_settings,
    write_study,
)
from ablate.reports.words.caveats import warnings
from ablate.reports.words.tables import design_table
from ablate.reports.words.verdict import write_verdict
from ablate.results.frames import load_frames
from ablate.store import StudyStore
from ablate.store.plan_file import Margin, Target


def run(seed, *losses, first=1, settings=None, **other):
    return ImportedRun(
        source=f"log {seed}", content=repr((seed, losses, other)).encode(), seed=seed,
        evals=tuple((1000 * n, loss) for n, loss in enumerate(losses, first)),
        settings={"batch": 16} if settings is None else settings, **other,
    )  # fmt: skip


def runs(text, **more):
    """Return the runs of ``SEED: LOSS LOSS; SEED: …``."""
    parts = (part.split(":") for part in text.split("; "))
    return [
        run(int(seed), *map(float, losses.split()), **more) for seed, losses in parts
    ]


@pytest.fixture
def write(tmp_path):
    def write(
        target=3.0,
        crossing="confirmed",
        baseline=None,
        hardware=None,
        constant_from=None,
        **arms,
    ):
        more = {
            key: arms.pop(key)
            for key in list(arms)
            if key in write_study.__kwdefaults__
        }
        target = target and Target(kind="val_loss", value=target, crossing=crossing)
        arms = with_settings(arms, hardware, constant_from)
        return write_study(
            tmp_path / "s",
            arms,
            baseline=baseline or next(iter(arms)),
            target=target,
            **more,
        )

    return write


@pytest.fixture
def analysed(write):
    return lambda *target, **arms: analyse(load_frames(write(*target, **arms)[0]))


def files(folder):
    paths = (
        path
        for path in folder.rglob("*")
        if path.is_file() and path.name != "status.json"
    )
    return {path: path.read_bytes() for path in paths}


H100, B200 = ({"hardware": f"8x NVIDIA {name}"} for name in ("H100", "B200"))
NVFP4, FP8 = (
    {
        "lowest_numerical_precision_in_linear": linear,
        "lowest_numerical_precision_in_attn": "bf16",
    }
    for linear in ("nvfp4", "fp8")
)


def test_an_ordinary_run_store(write, analysed):
    a = [
        run(None, 4, 2),
        run(0, 4, 4.5, state="diverged"),
        run(None, 4, state="interrupted"),
        run(2, 4, 3.5),
    ]
    b = [
        run(5, 5, 4, 2.0, settings={"batch": 32, "submission_platform": "theirs"}),
        run(6, 4, 2),
    ]
    b[1] = dataclasses.replace(b[1], settings=b[0].settings)
    analysis = analysed(a=a, b=b)
    assert [run.seed for run in analysis.plan.arms[0].runs] == [1, 0, 3, 2]
    assert [(*map(arm.count, ("hit", "censored", "diverged", "missing")),) for arm in analysis.arms] == [
        (1, 1, 1, 1), (2, 0, 0, 0),
    ]  # fmt: skip
    assert analysis.others[0].planned.differs["batch"] == (16, 32)
    assert analysis.timing.kind == "logged"
    check_words("logs of two batches", said_of(analysis))
    assert write(a=[run(7, 4)] * 2)[1] == [
        "log 7: same content as log 7 (arm 'a'): counted once"
    ]


def test_a_second_import_writes_the_same_and_forgets_what_is_gone(write, tmp_path):
    made = {"fp8": [run(0, 4, 2)], "fp4": [run(1, 5, 2)]}
    write(**made)
    first = files(tmp_path)
    write(**made | {"fp8": [run(0, 4, 2), run(9, 4, 2)]})
    write(**made)
    assert files(tmp_path) == first


def test_another_study_of_that_name_is_left_alone(write, tmp_path):
    write_record(
        StudyStore(tmp_path / "s").plan_path, {"format": 1, "study": "s", "arms": []}
    )
    before = files(tmp_path)
    with pytest.raises(
        UserError, match="holds a study that was not imported: choose another --study"
    ):
        write(a=[run(0, 4, 2)])
    assert files(tmp_path) == before


@pytest.mark.parametrize(
    ("made", "line"),
    [
        ({"a": [run(0, 4)], "b": []}, "arm 'b' has no run that could be read"),
        ({"a": [run(0, 4)], "b": [run(0, 4)]}, "log 0 is in arm 'a' and in arm 'b' (expected one)"),
        ({"a": [*runs("0: 4; 1: 4"), run(2, 4, settings={"batch": 32})]},
         "arm 'a': its runs differ in batch (32 in log 2, 16 in most) and cannot be pooled; make two arms"),
        ({"a": [run(0, 4, settings=FP8), run(1, 4, settings=NVFP4)]}, "lowest_numerical_precision_in_linear"),
        ({"a": runs("0: 4; 0: 3"), "paired_seeds": True},
         "--paired: arm 'a' has several runs of seed 0 (leave --paired out)"),
        ({"a": runs("0: 4; 1: 4"), "b": runs("2: 4"), "paired_seeds": True},
         "--paired: no arm has a seed of 'a', so it pairs nothing"),
        ({"a": [run(2, 4, settings=B200)], "hardware": "8x NVIDIA H100"},
         "--hardware: log 2 was trained on 8x NVIDIA B200 (leave the option out)"),
        ({"a": [run(0, 4, settings={"opt_decay": "cosine"})], "constant_from": 0},
         "--constant-from: log 0 tells opt_decay cosine"),
        ({"a": [run(0, 3, first=0)]}, "--target: the logs hold final losses alone"),
    ],
)  # fmt: skip
def test_what_makes_no_study(write, tmp_path, made, line):
    with pytest.raises(UserError, match=re.escape(line)):
        write(**made)
    assert not (tmp_path / "s").exists()


def test_runs_that_differ_in_a_waived_setting_are_pooled(analysed):
    assert (
        analysed(a=[run(0, 4), run(1, 4, settings={"batch": 32})], waived=("batch",))
        .arms[0]
        .n
        == 2
    )


def test_a_diverged_run_counts_with_the_longest_of_the_study(analysed):
    # Two of four diverge after one evaluation of ten: as if that had been their budget, the arm looked cheap.
    long = "4.5 4.4 4.3 4.2 4.1 4.0 3.9 3.8 3.7 2.9"
    base = runs(f"0: {long}; 1: {long}; 2: {long}; 3: {long}")
    gone = runs("4: 4.5; 5: 4.5", state="diverged")
    (arm,) = analysed(a=base, b=gone + runs(f"6: {long}; 7: {long}")).others
    assert (arm.token_cost.kind, arm.token_cost.note) == (
        "bound",
        "this arm: of 4 runs 2 diverged",
    )
    assert arm.token_cost.low == pytest.approx(0, abs=0.01)
    assert [run.trained for run in arm.runs] == [1000, 1000, 10_000, 10_000]


def test_precision_is_the_recipe(analysed):
    analysis = analysed(
        a=[run(0, 4, 2, settings=FP8)], b=[run(1, 4, 2, settings=NVFP4)]
    )
    recipes = [arm.recipe for arm in analysis.arms]
    assert recipes == [
        "as logged: linear fp8, attn bf16",
        "as logged: linear nvfp4, attn bf16",
    ]
    assert "lowest_numerical_precision_in_linear: fp8 → nvfp4" in str(
        design_table(analysis).rows
    )
    check_words("logs of two precisions", said_of(analysis))


def timed(seed, *losses, speed=1000.0, settings=H100):
    return run(
        seed,
        *losses,
        settings=settings,
        throughput=((1000, speed * (1 + seed / 1000)),),
    )


def test_speed_as_logged_on_equal_hardware(analysed):
    slow = [timed(seed, 4, 3.5, 2.5 + seed / 100) for seed in (0, 1, 2)]
    fast = [
        timed(seed, 4, 3.5, 3.2, 2.5 + seed / 100, speed=2000) for seed in (3, 4, 5)
    ]
    analysis = analysed(a=slow, b=fast)
    (arm,) = analysis.others
    assert arm.measured.timed == "as logged"
    bare = {
        name: [dataclasses.replace(run, settings={}) for run in runs]
        for name, runs in {"a": slow, "b": fast}.items()
    }
    assert (
        analysed(**bare, hardware="8x NVIDIA H100").others[0].measured == arm.measured
    )
    check_words("logs with times", said_of(analysis))
    # 8 devices: the hours are of all of them together.
    hours = [8 * run.tokens_to_target / run.tokens_per_sec / 3600 for run in arm.runs]
    assert arm.measured.hours.estimate == pytest.approx(sum(hours) / 3, rel=1e-3)


@pytest.mark.parametrize(
    ("base", "arm", "hardware", "why"),
    [
        (H100, B200, None, "b was trained on 8x NVIDIA B200, a on 8x NVIDIA H100"),
        (
            H100,
            {"hardware": "16x NVIDIA H100"},
            None,
            "b was trained on 16x NVIDIA H100, a on 8x NVIDIA H10",
        ),
        (
            {},
            B200,
            None,
            "the logs of a do not tell one kind and number of devices (`ablate import --hardwa",
        ),
        (H100, {}, None, "the logs of b do not tell one kind and number of devices"),
        ({}, {}, "8x NVIDIA H100", "the logs tell no time to set b beside it"),
    ],
)
def test_no_speed_where_the_logs_do_not_say_equal_hardware(
    analysed, base, arm, hardware, why
):
    made = run(1, 4, 2, settings=arm) if hardware else timed(1, 4, 2, settings=arm)
    analysis = analysed(a=[timed(0, 4, 2, settings=base)], b=[made], hardware=hardware)
    # tokens are compared all the same
    assert [arm.n for arm in analysis.arms] == [1, 1]
    assert analysis.others[0].measured is None
    assert f"no claim on speed is made: {why}" in " ".join(
        write_verdict(analysis).sentences
    )


def report_texts(report):
    files = (
        path
        for path in report.html.parent.rglob("*")
        if path.is_file() and path.suffix != ".png"
    )
    return {path.name: path.read_text() for path in files}


def test_losses_in_another_unit_are_named_by_it_everywhere(write, tmp_path):
    def twice(text):
        return [
            dataclasses.replace(
                run, in_bf16={tokens: 0.99 * loss for tokens, loss in run.evals}
            )
            for run in runs(text)
        ]

    arms = {
        "a": twice("0: 1.2 1.0 0.8; 1: 1.2 1.0 0.81"),
        "b": twice("2: 1.3 1.1 0.9; 3: 1.3 1.1 0.92"),
    }
    store, _ = write(0.95, loss_unit="bits-per-byte", **arms)
    plan = store.plan()
    margin = Margin(kind="loss", value=0.1)
    store.write_plan(
        dataclasses.replace(
            plan, target=dataclasses.replace(plan.target, within=margin)
        )
    )
    report = write_report(store)
    texts = report_texts(report)
    assert [
        name for name, text in texts.items() if re.search(r"nats|perplexity", text)
    ] == []
    assert {name for name, text in texts.items() if "bits/byte" in text} == {
        *(
            "report.html",
            "report.md",
            "report.json",
            "arms.tex",
            "evaluation.tex",
            "runs.tex",
        ),
        *("convergence.svg", "difference.svg", "sweep.svg"),
    }
    assert json.loads(texts["report.json"])["loss_unit"] == "bits/byte"
    assert "±0.1 bits/byte in final loss" in texts["report.md"]
    store, _ = write(None, loss_unit="bits-per-byte", **arms)
    without_target = write_report(store, tmp_path / "no target").verdict
    assert any("] bits/byte after" in sentence for sentence in without_target.sentences)


def test_a_perplexity_is_a_target_of_losses_in_nats_per_token_alone(tmp_path):
    target = Target(kind="perplexity", value=20.0)
    named = {"arms": {"a": runs("0: 4 2")}, "baseline": "a", "target": target}
    with pytest.raises(
        UserError,
        match=r"these losses are in log10 per token \(write --target val_loss=NUMBER\)",
    ):
        write_study(tmp_path / "s", loss_unit="log10", **named)
    assert not (tmp_path / "s").exists()
    assert (
        write_study(tmp_path / "s", loss_unit="perplexity", **named)[0].plan().loss_unit
        == "nats"
    )


def test_final_losses_alone(write):
    a, b, c = (
        [dataclasses.replace(run, evals=((0, run.evals[0][1]),)) for run in runs(text)]
        for text in (
            "0: 3; 1: 3.01; 2: 3.02",
            "3: 3.1; 4: 3.12; 5: 3.11",
            "6: 3.01; 7: 3.001; 8: 3.03",
        )
    )
    store, _ = write(
        None, a=a, b=b, c=c, d=[run(9, 3, first=0), run(10, state="diverged")]
    )
    report = write_report(store)
    check_words("logs of final losses", report.verdict.sentences)
    page = report.markdown.read_text()
    assert not re.search(
        "token cost|budget|break-even|tokens to target|ablate run", page, re.IGNORECASE
    )
    assert json.loads(report.json.read_text())["target"] is None
    with pytest.raises(
        UserError, match="--target: study 's' has no curves to read it on"
    ):
        write_report(store, target=3.0)


def test_curves_without_a_target(write, tmp_path):
    store, _ = write(None, a=runs("0: 4 3; 1: 4 3.1"), b=runs("2: 4 3.5; 3: 4 3.55"))
    report = write_report(store)
    check_words("logs without a target", report.verdict.sentences)
    assert (report.figures / "convergence.svg").exists()
    other = write_report(store, tmp_path / "other", target=3.6)
    check_words("logs with a target of the report", other.verdict.sentences)
    page = report.html.read_text()  # of logs no page tells to train
    assert ("ablate run" in page, "ablate import" in page) == (False, True)


def stretched(seed, by, last):
    """Return a log whose curve is stretched to its budget of ``last`` thousand tokens."""
    losses = {
        1000 * t: float(5 - 0.6 * np.log(t / by) + 0.001 * seed)
        for t in range(50, last + 1, 50)
    }
    return run_of_losses(losses, [seed], source=str(seed), seed=seed)


def test_a_rate_that_is_said_to_be_constant_lets_crossings_be_read_off_a_fit(analysed):
    arms = {
        "a": [stretched(seed, 1.0, 1000) for seed in (0, 1)],
        "b": [stretched(2, 1.2, 1000)],
    }
    for constant_from, fitted in ((None, False), (60_000, True), (900_000, False)):
        analysis = analysed(1.2, **arms, constant_from=constant_from)
        assert {
            run.fitted is not None for arm in analysis.arms for run in arm.runs
        } == {fitted}
        is_unknown = any(
            "schedule is not known" in text for text in warnings(analysis, ())
        )
        assert is_unknown == (constant_from is None)


def test_a_cost_that_unequal_budgets_alone_may_make_is_named(analysed):
    arms = {
        "short": [stretched(seed, 1.0, 1000) for seed in (0, 1)],
        "long": [stretched(seed, 1.09, 1100) for seed in (2, 3)],
        "slow": [stretched(seed, 1.3, 1100) for seed in (4, 5)],
    }
    check_words("logs of unequal budgets", said_of(analysed(1.0, **arms)))


@pytest.mark.parametrize("crossing", ["confirmed", "first_eval"])
def test_a_run_at_the_target_before_it_began_is_a_bound_and_no_error(write, crossing):
    begun = runs("0: 2.9 2.5; 1: 2.9 2.5", first=0)
    store, _ = write(3.0, crossing, a=begun, b=runs("2: 4 2; 3: 4 2.5"))
    assert write_report(store).html.exists()
    (arm,) = analyse(load_frames(store)).others
    assert (arm.token_cost.estimate, arm.token_cost.low) == (None, None)


def pieces(text):
    """Return runs of ``FILE RUN SEED TOKENS: LOSS LOSS; …``: 10 tokens from one evaluation to the next."""
    for part in text.split("; "):
        (name, named, seed, start), losses = (
            words.split() for words in part.split(":")
        )
        evals = {int(start) + 10 * n: float(loss) for n, loss in enumerate(losses)}
        seed = yaml.safe_load(seed.replace("-", "null"))
        yield run_of_losses(
            evals, [name], source=name, seed=seed, piece=(named.strip("-"), seed)
        )


WHOLE = "a - - 0: 5 4.9 4.8; b - -"


@pytest.mark.parametrize(
    ("text", "waived", "said"),
    [
        (
            "b - 3 30: 4.7 4.6; a - 3 0: 5 4.9 4.8",
            (),
            r"^a and b \(arm 'arm'\) are of one run by their name or",
        ),
        (
            "b r - 30: 4.7 4.6; a r - 0: 5 4.9 4.8",
            (),
            "put a run that was resumed into one file",
        ),
        (
            f"{WHOLE} 30: 4.7 4.6",
            (),
            "b begins at 30 tokens, a of arm 'arm' at 0: is it the rest of a resumed",
        ),
        (f"{WHOLE} 30: 4.7 4.6", ("beginning",), None),
        (f"{WHOLE} 20: 4.7 4.6", (), None),
        ("a - 3 0: 5 4.9; b - 4 0: 5 4.8; c r 3 0: 5", (), None),
    ],
)
def test_a_run_lies_in_one_file(text, waived, said):
    arms = {"arm": [*pieces(text)]}
    if said is None:
        assert tidied(arms, waived) == (arms, [])
    else:
        with pytest.raises(UserError, match=said):
            tidied(arms, waived)


def test_seeds_that_are_text_are_numbered():
    arms, lines = tidied(
        {"a": [*pieces("a - s1 0: 5; b - s0 0: 5")], "b": [*pieces("c - 0 0: 9")]}, ()
    )
    assert [run.seed for run in arms["a"]] == [2, 1]
    assert lines == ["seeds 's0' = 1, 's1' = 2"]
