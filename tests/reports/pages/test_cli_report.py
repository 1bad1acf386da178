from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
from click.testing import CliRunner
from synthetic_study import line, lines

from ablate.base.errors import UserError
from ablate.cli import cli
from ablate.plan import build_plan
from ablate.store import Status, StudyStore
from ablate.study import load_study


@pytest.fixture
def call(make_study):
    """Call ``ablate report`` of a small study, with options behind."""
    store = make_study(
        lines("a: 3 2 1, 3 2 1; b\x1b[2J: 3 2.5 1, 3 2.4 1"),
        states={("a", 1): "failed"},
        study="odd",
    )

    def call(*options, study="odd"):
        arguments = ["report", study, "--storage", store.path.parent, *options]
        return CliRunner().invoke(cli, [*map(str, arguments)], catch_exceptions=False)

    call.store = store
    return call


def test_the_verdict_and_the_paths_are_printed_and_no_name_steers_the_terminal(call):
    output = call().output
    assert output.startswith("Partial: 1 of 4 runs")
    assert str(call.store.path / "report" / "report.html") in output.splitlines()
    assert "\x1b" not in output
    assert "b\\x1b[2J" in output
    assert "\u00a0%" in output


def test_json_prints_the_file_and_nothing_else(call, tmp_path):
    result = call("--out", tmp_path / "out", "--json")
    assert result.output == (tmp_path / "out" / "report.json").read_text()
    assert json.loads(result.output)["study"] == "odd"
    assert not (call.store.path / "report").exists()


def test_a_file_that_was_edited_since_it_ran_is_said_and_the_report_is_of_what_ran(
    call, monkeypatch
):
    storage = call.store.path.parent
    path = storage.parent / "mine.yaml"
    text = "name: mine\nbaseline: a\ntarget: {val_loss: 2.0}\narms: {a: , b: {recipe: mxfp4}}\n"
    path.write_text(text)
    (store := StudyStore(storage / "mine")).write_plan(build_plan(load_study(path)))
    plain = call(study=path)
    assert plain.stderr == ""
    path.write_text(
        text.replace("2.0", "1.5").replace(
            "baseline: a", "baseline: b\npaired_seeds: false"
        )
    )
    edited = call(study=path)
    assert edited.stderr == (
        f"{path}: baseline, target, paired_seeds edited since the study ran. This report is of the plan that "
        f"ran; adopt the file with: ablate run {path} --storage {storage}\n"
    )
    assert edited.stdout == plain.stdout
    assert call(study="mine").stderr == ""  # it is not in this folder
    monkeypatch.chdir(path.parent)
    assert call(study="mine").stderr == edited.stderr.replace(str(path), "mine")
    store.write_plan(replace(store.plan(), settings=("seeds=3",)))
    assert call(study=path).stderr == (
        f"{path}: this report is of the study as it ran: ablate run {path} --set seeds=3 "
        f"--storage {storage}\n"
    )


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"study": "od"}, "did you mean 'odd'"),
        (("--baseline", "b\x1b[2J"), "give it a folder with --out"),
        (
            ("--out", "/dev/null/x"),
            "^--out: cannot write /dev/null/x: Not a directory$",
        ),
        (
            ("--out", "/dev/null/x", "--watch"),
            "^--out: cannot write /dev/null/x: Not a directory$",
        ),
    ],
)
def test_what_cannot_be_done_is_one_line(call, options, line):
    with pytest.raises(UserError, match=line):
        call(**options) if isinstance(options, dict) else call(*options)
    assert not (call.store.path / "report").exists()


TARGETS = {
    "2.5": "validation loss of 2.5 nats",
    "perplexity=11": "perplexity of 11",
    "val_loss=2": "of 2 nats",
}


@pytest.mark.parametrize(("target", "shown"), TARGETS.items())
def test_another_baseline_and_target_have_a_folder_of_their_own(
    call, tmp_path, target, shown
):
    done = call("--baseline", "b\x1b[2J", "--target", target, "--out", tmp_path / "out")
    assert "compared with b\\x1b[2J at a " in done.output
    assert shown in done.output
    assert r"Baseline: **b\\x1b\[2J**" in (tmp_path / "out" / "report.md").read_text()


@pytest.mark.parametrize(
    "ended", ["study", pytest.param("hand", marks=pytest.mark.exhaustive)]
)
def test_watch_writes_while_the_study_runs_and_ends_with_it(make_study, ended):
    points = line(3, 2, 1)
    states = {("fp4", seed): "running" for seed in (1, 2)}
    store = make_study({"bf16": [points] * 2, "fp4": [points] * 3}, states=states)
    plan = store.plan()
    base, fp4 = plan.arms
    store.write_plan(replace(plan, arms=(base, replace(fp4, runs=fp4.runs[:2]))))
    page = store.path / "report" / "report.html"
    process = subprocess.Popen(
        [sys.executable, "-m", "ablate", "report", store.path, "--watch", "--every=1"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert "3 of 4 runs have ended" in process.stdout.readline()
    assert '<meta http-equiv="refresh" content="1">' in page.read_text()
    if ended == "study":
        store.write_plan(plan)  # as a search or a study that tunes adds runs
        store.run(fp4.runs[1].id).write_status(Status(state="finished", tokens=300))
        assert any("4 of 5 runs have ended" in said for said in process.stdout)
        store.run(fp4.runs[2].id).write_status(Status(state="finished", tokens=300))
    else:
        process.send_signal(signal.SIGINT)
    rest = process.communicate()[0]
    assert 'http-equiv="refresh"' not in page.read_text()
    if ended == "study":
        assert str(page) in rest
        assert "Partial" not in page.read_text()
    assert process.returncode == (0 if ended == "study" else 130)
