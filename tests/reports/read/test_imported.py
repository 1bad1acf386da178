"""The run store of imported runs: what is pooled, what is refused, and that it can be done again."""

import dataclasses
import json
import re
from pathlib import Path

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
from ablate.reports.words.format import ends
from ablate.results.frames import load_frames
from ablate.store import StudyStore
from ablate.store.plan_file import Margin, Target
from tests.golden import cases, check


def run(words, *, speed=None, first=1, **other):
    """Return the run of ``SEED: LOSS LOSS``; see ``imported.txt``."""
    seed, losses = words.split(":")
    losses = map(float, losses.split())
    if speed is not None:
        other["throughput"] = ((1000, float(speed)),)
    return ImportedRun(
        source=f"log {seed}",
        content=repr((words, other)).encode(),
        seed=None if seed == "-" else int(seed),
        evals=tuple((1000 * n, loss) for n, loss in enumerate(losses, first)),
        **{"settings": {"batch": 16}} | other,
    )


def runs(*texts, **more):
    return [run(text, **more) for text in texts]


@pytest.fixture
def write(tmp_path):
    def write(
        arms,
        target=3.0,
        crossing="confirmed",
        hardware=None,
        constant_from=None,
        **more,
    ):
        if isinstance(target, float):
            target = Target(kind="val_loss", value=target, crossing=crossing)
        arms = with_settings(arms, hardware, constant_from)
        return write_study(
            tmp_path / "s", arms, baseline=next(iter(arms)), target=target, **more
        )

    return write


def told(arm):
    """Return a line of the recipe, the ends and the tokens of an arm's runs, by seed."""
    trained = ", ".join(f"{run.seed}: {run.trained:,}" for run in arm.runs)
    return f"{arm.name}: {arm.recipe}; {ends(arm.runs)}; {trained}"


@pytest.mark.parametrize("case", cases(Path(__file__).with_name("imported.txt")))
def test_what_is_made_of_logs(write, tmp_path, case):
    keys = yaml.safe_load(case[2])
    arms = {}
    for name, of_arm in keys.pop("arms").items():
        arms[name] = []
        for words in of_arm:
            more = dict(words) if isinstance(words, dict) else {"run": words}
            arms[name].append(run(more.pop("run"), **more))
    if isinstance(keys.get("target"), dict):
        keys["target"] = Target(**keys["target"])
    try:
        store, lines = write(arms, **keys)
    except UserError as refused:
        assert not (tmp_path / "s").exists()
        lines = [str(refused)]
    else:
        analysis = analyse(load_frames(store))
        lines += [*map(told, analysis.arms), *said_of(analysis)]
    check(case, lines)


def files(folder):
    paths = (
        path
        for path in folder.rglob("*")
        if path.is_file() and path.name != "status.json"
    )
    return {path: path.read_bytes() for path in paths}


def test_a_second_import_writes_the_same_and_forgets_what_is_gone(write, tmp_path):
    made = {"fp8": runs("0: 4 2"), "fp4": runs("1: 5 2")}
    write(made)
    first = files(tmp_path)
    write(made | {"fp8": runs("0: 4 2", "9: 4 2")})
    write(made)
    assert files(tmp_path) == first


def test_another_study_of_that_name_is_left_alone(write, tmp_path):
    plan = {"format": 1, "study": "s", "arms": []}
    write_record(StudyStore(tmp_path / "s").plan_path, plan)
    before = files(tmp_path)
    with pytest.raises(
        UserError, match="holds a study that was not imported: choose another --study"
    ):
        write({"a": runs("0: 4 2")})
    assert files(tmp_path) == before


def test_hours_are_of_all_devices_together(write):
    fast = [run(f"{seed}: 4 3.5 2.5", speed=2000 + seed) for seed in (3, 4, 5)]
    arms = {"a": runs("0: 4 2.5", "1: 4 2.6", speed=1000), "b": fast}
    store, _ = write(arms, hardware="8x NVIDIA H100")
    (arm,) = analyse(load_frames(store)).others
    hours = [8 * run.tokens_to_target / run.tokens_per_sec / 3600 for run in arm.runs]
    assert arm.measured.hours.estimate == pytest.approx(sum(hours) / 3, rel=1e-3)


def report_texts(report):
    files = (
        path
        for path in report.html.parent.rglob("*")
        if path.is_file() and path.suffix != ".png"
    )
    return {path.name: path.read_text() for path in files}


def test_losses_in_another_unit_are_named_by_it_everywhere(write, tmp_path):
    def twice(*texts):
        return [
            dataclasses.replace(
                run, in_bf16={tokens: 0.99 * loss for tokens, loss in run.evals}
            )
            for run in runs(*texts)
        ]

    arms = {
        "a": twice("0: 1.2 1.0 0.8", "1: 1.2 1.0 0.81"),
        "b": twice("2: 1.3 1.1 0.9", "3: 1.3 1.1 0.92"),
    }
    within = Margin(kind="loss", value=0.1)
    target = Target(kind="val_loss", value=0.95, within=within)
    store, _ = write(arms, target, loss_unit="bits-per-byte")
    texts = report_texts(write_report(store))
    assert not [text for text in texts.values() if re.search("nats|perplexity", text)]
    named = sorted(name for name, text in texts.items() if "bits/byte" in text)
    assert " ".join(named) == (
        "arms.tex convergence.svg difference.svg evaluation.tex report.html report.json report.md runs.tex "
        "sweep.svg"
    )
    assert json.loads(texts["report.json"])["loss_unit"] == "bits/byte"
    assert "±0.1 bits/byte in final loss" in texts["report.md"]
    store, _ = write(arms, None, loss_unit="bits-per-byte")
    without_target = write_report(store, tmp_path / "no target").verdict
    assert any("] bits/byte after" in sentence for sentence in without_target.sentences)


def test_final_losses_alone(write):
    texts = {
        "a": ("0: 3", "1: 3.01", "2: 3.02"),
        "b": ("3: 3.1", "4: 3.12", "5: 3.11"),
        "c": ("6: 3.01", "7: 3.001", "8: 3.03"),
        "d": ("9: 3",),
    }
    arms = {name: runs(*of_arm, first=0) for name, of_arm in texts.items()}
    arms["d"] += runs("10:", state="diverged")
    store, _ = write(arms, None)
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
    arms = {"a": runs("0: 4 3", "1: 4 3.1"), "b": runs("2: 4 3.5", "3: 4 3.55")}
    store, _ = write(arms, None)
    assert (write_report(store).figures / "convergence.svg").exists()
    other = write_report(store, tmp_path / "other", target=3.6)
    check_words("logs with a target of the report", other.verdict.sentences)
    page = other.html.read_text()  # of logs no page tells to train
    assert ("ablate run" in page, "ablate import" in page) == (False, True)


def stretched(seed, by, last):
    """Return a log whose curve is stretched to its budget of ``last`` thousand tokens."""
    losses = {
        1000 * t: float(5 - 0.6 * np.log(t / by) + 0.001 * seed)
        for t in range(50, last + 1, 50)
    }
    return run_of_losses(losses, [seed], source=str(seed), seed=seed)


def test_a_rate_that_is_said_to_be_constant_lets_crossings_be_read_off_a_fit(write):
    arms = {
        "a": [stretched(seed, 1.0, 1000) for seed in (0, 1)],
        "b": [stretched(2, 1.2, 1000)],
    }
    for constant_from, fitted in ((None, False), (60_000, True), (900_000, False)):
        store, _ = write(arms, 1.2, constant_from=constant_from)
        analysis = analyse(load_frames(store))
        for arm in analysis.arms:
            assert {run.fitted is not None for run in arm.runs} == {fitted}
        cautions = "\n".join(warnings(analysis, ()))
        assert ("schedule is not known" in cautions) == (constant_from is None)


def test_a_cost_that_unequal_budgets_alone_may_make_is_named(write):
    arms = {
        "short": [stretched(seed, 1.0, 1000) for seed in (0, 1)],
        "long": [stretched(seed, 1.09, 1100) for seed in (2, 3)],
        "slow": [stretched(seed, 1.3, 1100) for seed in (4, 5)],
    }
    store, _ = write(arms, 1.0)
    check_words("logs of unequal budgets", said_of(analyse(load_frames(store))))


@pytest.mark.parametrize("crossing", ["confirmed", "first_eval"])
def test_a_run_at_the_target_before_it_began_is_a_bound_and_no_error(write, crossing):
    begun = runs("0: 2.9 2.5", "1: 2.9 2.5", first=0)
    store, _ = write({"a": begun, "b": runs("2: 4 2", "3: 4 2.5")}, 3.0, crossing)
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


def test_seeds_that_are_text_are_numbered_and_arms_that_differ_in_case_are_named():
    arms, lines = tidied(
        {"a": [*pieces("a - s1 0: 5; b - s0 0: 5")], "A": [*pieces("c - 0 0: 9")]}, ()
    )
    assert [run.seed for run in arms["a"]] == [2, 1]
    assert lines == [
        "arms a and A differ in case alone: taken as two",
        "seeds 's0' = 1, 's1' = 2",
    ]
