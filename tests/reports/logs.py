"""Logs for tests: MLPerf's lines, and how the cases of ``read/readers.txt`` are read."""

import json

import yaml

from ablate.reports.read.rows import read_csv, read_jsonl, read_wandb_chart
from ablate.reports.read.tables import Reading, runs_of_log, runs_of_table
from ablate.run.log_rows import LogSource

TABLES = {"csv": read_csv, "jsonl": read_jsonl, "wandb": read_wandb_chart}


def mllog(words):
    """Return a line for each ``KEY=VALUE@WHAT=NUMBER``, the part from @ on being its metadata."""
    lines = []
    for word in words.split():
        key, _, rest = word.partition("=")
        value, _, meta = rest.partition("@")
        content = {
            "time_ms": 1.7e12,
            "key": key,
            "value": yaml.safe_load(value or "null"),
        }
        what, _, number = meta.partition("=")
        content["metadata"] = {what: yaml.safe_load(number)} if what else {}
        lines.append(f":::MLLOG {json.dumps(content)}")
    return lines


def content_of(case):
    """Return a case's kind, its options, and the bytes of its file."""
    reader, _, text = case[2].partition("\n")
    kind, options = reader.split(" ", 1)
    for code in ("udce9", "udcff"):  # bytes that are not UTF-8
        text = text.replace(f"\\{code}", chr(int(code[1:], 16)))
    return kind, json.loads(options), f"{text}\n".encode(errors="surrogateescape")


def runs_in(kind, path, faults, columns="", more=(), **reading):
    """``columns``: ours=theirs. ``more``: the patterns of a text, or the metric of a chart."""
    names = dict(pair.split("=") for pair in columns.split())
    reading = Reading(names=names, **reading)
    if kind in TABLES:
        return runs_of_table(path, TABLES[kind](path, faults, *more), faults, reading)
    source = {"preset": kind, "file": ""}
    if kind == "text":
        source = {"patterns": list(more)}
    return runs_of_log(path, LogSource(**source, set=reading.set_name), faults, reading)
