"""Texts that tests hold to files, and files of cases.

Of cases: first a text in which ``@`` stands for what differs, then the cases with their lines: ``=== TITLE``,
what differs, ``--- faults`` or ``--- means``, then the lines. ``# --set KEY=VALUE`` is a setting of the
command line. Where lines are meant to change, ``REWRITE=1 pytest`` writes them anew, for the diff to show.
"""

import os
import re

import pytest


def cases(*paths):
    """Return each case as (file, the case with its title, the whole text, its lines)."""
    found = []
    for path in paths:
        head, *blocks = path.read_text(encoding="utf-8").split("\n=== ")
        for block in blocks:
            asked, lines = re.split(r"(?<=\n--- faults\n)|(?<=\n--- means\n)", block)
            text = asked.split("\n", 1)[1].rpartition("---")[0].rstrip("\n")
            case = (path, asked, head.replace("@", text), lines)
            found.append(pytest.param(case, id=asked.split("\n")[0]))
    return found


def check(case, found):
    """Hold the lines found against those of the file."""
    path, asked, _, lines = case
    if "REWRITE" in os.environ:
        whole, new = (
            path.read_text(encoding="utf-8"),
            "".join(f"{line}\n" for line in found),
        )
        path.write_text(
            whole.replace(f"\n=== {asked}{lines}", f"\n=== {asked}{new}"),
            encoding="utf-8",
        )
    assert found == lines.splitlines()


def check_text(path, found):
    """Hold a text against its file."""
    if "REWRITE" in os.environ:
        path.write_text(found, encoding="utf-8")
    assert found == path.read_text(encoding="utf-8")


def check_answers(path, told):
    """Hold what is told of each line of a file against the indented lines under it."""
    lines = [
        line
        for line in path.read_text(encoding="utf-8").splitlines()
        if not line.startswith("    ")
    ]
    answers = ((asked, *(f"    {line}" for line in told(asked))) for asked in lines)
    check_text(path, "".join(f"{line}\n" for answer in answers for line in answer))


def settings_of(text):
    """Return the settings that a case asks for."""
    return tuple(re.findall(r"^# --set (.*)$", str(text), re.MULTILINE))


def rows_of(text):
    """Split a table: a row a line, cells between bars; lines that begin with # are remarks."""
    lines = (line for line in text.strip().splitlines() if not line.startswith("#"))
    return [[cell.strip() for cell in line.split("|")] for line in lines]
