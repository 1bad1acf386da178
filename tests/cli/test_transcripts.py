"""What commands print, whole (``transcripts.txt``); ``REWRITE=1`` writes it anew, for the diff to show."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from pathlib import Path

from tests.cli.command import ablate

GOLDEN = Path(__file__).with_name("transcripts.txt")
# What depends on the machine, on Python's own text and on where a rounding lies.
VARIES = {r"(\.\d{5})\d+": r"\1", r"about [\d.]+ \w+ on \d+ CPU": "about … CPU", r"\b[0-9a-f]{16}\b": "ID"}


def said(command, folder):
    words, _, keys = command.partition(" | ")
    ended = ablate(*shlex.split(words)[2:], cwd=folder)
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


def test_commands_print_what_they_printed(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    folder = Path(shutil.copytree(GOLDEN.with_suffix(""), tmp_path / "folder"))
    before = sorted(folder.rglob("*"))
    head, *commands = re.findall(r"^[#$] .*$", GOLDEN.read_text(encoding="utf-8"), re.MULTILINE)
    found = "\n".join([f"{head}\n", *(said(command, folder) for command in commands)])
    if "REWRITE" in os.environ:
        GOLDEN.write_text(found, encoding="utf-8")
    assert found == GOLDEN.read_text(encoding="utf-8")
    assert sorted(path for path in folder.rglob("*") if "__pycache__" not in path.parts) == before
