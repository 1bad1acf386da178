from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
from click.testing import CliRunner
from synthetic_study import line

from ablate.base.errors import UserError
from ablate.cli import cli
from ablate.plan import build_plan
from ablate.store import Status, StudyStore
from ablate.study import load_study


def call(*arguments):
    return CliRunner().invoke(cli, ["report", *map(str, arguments)], catch_exceptions=False)


def test_prints_the_verdict_and_the_paths(make_study):
    store = make_study({"bf16": [line(3, 2, 1)], "fp4": [line(3, 2.5, 1)]})
    result = call("synthetic", "--storage", store.path.parent)
    assert result.exit_code == 0
    assert result.output.startswith("Nothing is settled yet: ")
    assert result.output.splitlines()[1].startswith("Of 1 arm compared with bf16")
    assert str(store.path / "report" / "report.html") in result.output.splitlines()


def test_what_a_name_holds_cannot_steer_the_terminal_and_spaces_stay_spaces(make_study):
    store = make_study(
        {"a": [line(3, 2, 1)] * 2, "b\x1b[2J": [line(3, 2.5, 1), line(3, 2.4, 1)]}, study="odd"
    )
    output = call("odd", "--storage", store.path.parent).output
    assert "\x1b" not in output
    assert "b\\x1b[2J" in output
    assert "\\xa0" not in output
    assert "\u00a0%" in output


def test_json_of_a_partial_study_prints_the_file_and_nothing_else(make_study, tmp_path):
    store = make_study({"bf16": [line(3, 2, 1)] * 2}, states={("bf16", 1): "failed"})
    result = call("synthetic", "--storage", store.path.parent, "--out", tmp_path / "out", "--json")
    assert result.output == (tmp_path / "out" / "report.json").read_text()
    assert json.loads(result.output)["study"] == "synthetic"
    assert not (store.path / "report").exists()
    result = call("synthetic", "--storage", store.path.parent)
    assert result.output.startswith("Partial: 1 of 2 runs")


def test_a_file_that_was_edited_since_it_ran_is_said_and_the_report_is_of_what_ran(tmp_path):
    path = tmp_path / "mine.yaml"
    text = "name: mine\nbaseline: a\ntarget: {val_loss: 2.0}\narms: {a: , b: {recipe: mxfp4}}\n"
    path.write_text(text)
    StudyStore(tmp_path / "runs" / "mine").write_plan(build_plan(load_study(path)))
    plain = call(path, "--storage", tmp_path / "runs")
    assert plain.stderr == ""
    path.write_text(text.replace("2.0", "1.5").replace("baseline: a", "baseline: b\npaired_seeds: false"))
    edited = call(path, "--storage", tmp_path / "runs")
    assert edited.stderr == (
        f"{path}: baseline, target, paired_seeds edited since the study ran. This report is of the plan that "
        f"ran; adopt the file with: ablate run {path} --storage {tmp_path / 'runs'}\n"
    )
    assert edited.stdout == plain.stdout
    (store := StudyStore(tmp_path / "runs" / "mine")).write_plan(replace(store.plan(), settings=("seeds=3",)))
    assert call(path, "--storage", tmp_path / "runs").stderr == (
        f"{path}: this report is of the study as it ran: ablate run {path} --set seeds=3 "
        f"--storage {tmp_path / 'runs'}\n"
    )


def test_a_study_that_never_ran(ladder):
    with pytest.raises(UserError, match="did you mean 'quickstart'"):
        call("quickstat", "--storage", ladder.path.parent)


def test_the_command_line_imports_nothing_heavy():
    script = (
        "import sys, ablate.cli, ablate.cli.report;"
        "print([m for m in ('pandas', 'scipy', 'matplotlib', 'numpy', 'jinja2') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_report_leaves_slow_parts_of_scipy_and_pyplot_alone():
    script = (
        "import sys, ablate.reports;"
        "heavy = ('scipy.stats', 'matplotlib.pyplot', 'torch', 'ray', 'mlflow');"
        "print([m for m in heavy if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_setting_or_hardware_that_is_none(ladder):
    with pytest.raises(UserError, match=r"--waive: no setting 'colour' .expected data, tokenizer"):
        call("quickstart", "--storage", ladder.path.parent, "--waive", "colour")
    with pytest.raises(UserError, match="--price: expected HARDWARE=USD, got 'TPU=1'"):
        call("quickstart", "--storage", ladder.path.parent, "--price", "TPU=1")
    for text in ("B200", "B200=-1", "B200=nan", "B200=inf"):
        with pytest.raises(UserError, match="expected HARDWARE=USD"):
            call("quickstart", "--storage", ladder.path.parent, "--price", text)


def test_watch_writes_while_the_study_runs_and_ends_with_it(make_study):
    points = line(3, 2, 1)
    store = make_study({"bf16": [points] * 2, "fp4": [points] * 2}, states={("fp4", 1): "running"})
    page = store.path / "report" / "report.html"
    process = subprocess.Popen(
        [sys.executable, "-m", "ablate", "report", store.path.name, "--storage", str(store.path.parent),
         "--watch", "--every", "1"],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    first = process.stdout.readline()
    assert "3 of 4 runs have ended" in first
    assert '<meta http-equiv="refresh" content="1">' in page.read_text()
    entry = store.plan().arms[1].runs[1]
    store.run(entry.id).write_status(Status(state="finished", tokens=300))
    rest = process.communicate()[0]
    assert process.returncode == 0
    assert str(page) in rest
    assert 'http-equiv="refresh"' not in page.read_text()
    assert "Partial" not in page.read_text()


@pytest.mark.exhaustive
def test_watch_ended_by_hand_leaves_a_page_that_does_not_reload(make_study):
    store = make_study({"bf16": [line(3, 2, 1)]}, states={("bf16", 0): "running"})
    process = subprocess.Popen(
        [sys.executable, "-m", "ablate", "report", store.path.name, "--storage", str(store.path.parent),
         "--watch"],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    process.communicate()
    assert process.returncode == 130
    assert 'http-equiv="refresh"' not in (store.path / "report" / "report.html").read_text()


def test_another_baseline_and_target_have_a_folder_of_their_own(make_study, tmp_path):
    store = make_study({"bf16": [line(3, 2, 1)] * 2, "all": [line(3.2, 2.2, 1.2)] * 2})
    options = ["report", store.path.name, "--storage", str(store.path.parent)]
    refused = CliRunner().invoke(cli, [*options, "--baseline", "all"])
    assert isinstance(refused.exception, UserError)
    assert "give it a folder with --out" in str(refused.exception)
    assert not (store.path / "report").exists()
    out = tmp_path / "against-all"
    done = CliRunner().invoke(cli, [*options, "--baseline", "all", "--target", "2.5", "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert "compared with all at a validation loss of 2.5 nats/token" in done.output
    assert "Baseline: **all**" in (out / "report.md").read_text()


@pytest.mark.parametrize("watch", [[], ["--watch"]])
def test_a_folder_that_cannot_be_written_is_one_line(make_study, tmp_path, watch):
    store = make_study({"bf16": [line(3, 2, 1)]})
    (tmp_path / "file").write_text("")
    options = [
        "report",
        store.path.name,
        "--storage",
        str(store.path.parent),
        "--out",
        tmp_path / "file" / "x",
    ]
    result = CliRunner().invoke(cli, [*map(str, options), *watch])
    assert isinstance(result.exception, UserError)
    assert str(result.exception) == f"--out: cannot write {tmp_path / 'file' / 'x'}: Not a directory"
