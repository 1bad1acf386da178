"""What commands print, whole: ``transcripts/*.txt``. ``REWRITE=1`` writes them anew, for the diff to show."""

import json
import re
import shutil
from pathlib import Path

import pytest

from ablate.base.files import append_line
from ablate.store import Status
from tests.cli.command import ablate
from tests.cli.stored import IDS, make_store
from tests.golden import check_text

TRANSCRIPTS = Path(__file__).with_name("transcripts")
# What depends on the machine, on the moment, on Python's own text and on where a rounding lies.
VARIES = {
    r"(\.\d{5})\d+": r"\1",
    r"(not timed here: arm '\w+': ).*": r"\1…",
    r"\[\d:\d\d:\d\d\]": "[TIME]",
    r".* CPU quantiser .*\n|Emulating with plain torch.*\n": "",  # as this machine has its kernel
    r"about [\d.]+ \w+ on \d+ CPU": "about … CPU",
    r"\b(?!00)[0-9a-f]{16}\b": "ID",
    r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC on \S+, \d+ s": "TIME on HOST",
}


def stored(folder):
    """Make a study ``s`` with leftovers of all kinds, ``t`` with a run of its, and a damaged one, ``d``."""
    store = make_store(folder / "runs")
    run = store.run(IDS[0])
    store.run("0123456789abcdef").create({})
    for path in (run.checkpoints, run.weights, run.path / ".weights.123"):
        path.mkdir()
    (run.path / ".status.json.x1").write_text("{")
    (store.path / ".stop-1234").touch()
    (folder / "runs" / "t" / "runs" / IDS[0]).mkdir(parents=True)
    damaged = make_store(folder / "runs", "d")
    append_line(damaged.run(IDS[0]).metrics_path, {})
    stopped = damaged.run(IDS[1])
    stopped.checkpoints.mkdir()
    stopped.write_status(
        Status(state="stopped", tokens=5, message="above 10 % at 3 seeds")
    )
    stopped.stop_path.write_text("its executor was killed before it saw this")


def said(command, folder):
    words, _, keys = command.partition(" | ")
    ended = ablate(words.removeprefix("$ ablate "), cwd=folder)
    shown = ended.out
    if keys:
        content = json.loads(shown)
        for key in keys.split("."):
            content = content[int(key) if key.isdigit() else key]
        shown = json.dumps(content, indent=1) + "\n"
    code = f"exit code {ended.code}\n" if ended.code else ""
    shown = f"{shown}{ended.err}{code}".replace(str(folder), "FOLDER")
    for pattern, text in VARIES.items():
        shown = re.sub(pattern, text, shown)
    return f"{command}\n{shown}"


def hold(golden, folder):
    """Hold what the file's commands print in a folder against the file."""
    text = golden.read_text(encoding="utf-8")
    head = text.partition("\n")[0]
    commands = re.findall(r"^\$ .*$", text, re.MULTILINE)
    outputs = [said(command, folder) for command in commands]
    check_text(golden, "\n".join([f"{head}\n", *outputs]))


@pytest.mark.usefixtures("without_figures")
@pytest.mark.parametrize("name", ["import", "plan", "store"])
def test_commands_print_what_they_printed(tmp_path, monkeypatch, name):
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    golden, folder = TRANSCRIPTS / f"{name}.txt", tmp_path / "folder"
    if (TRANSCRIPTS / name).exists():
        shutil.copytree(TRANSCRIPTS / name, folder)
    else:
        stored(folder)
    hold(golden, folder)
    assert (folder / "runs").exists() == (name != "plan")  # planning writes nothing
