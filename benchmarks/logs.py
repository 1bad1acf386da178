"""How fast logs are read, each against a plain reading of the same file in the same process.

    python benchmarks/logs.py [--megabytes 200]

MLPerf's log is made up: one record in ten lines is wanted, as in the submissions of MLPerf Training v5.1. The
output of a command is noise with an evaluation now and then, as of a command that floods its log.
"""

from __future__ import annotations

import argparse
import csv
import json
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

from ablate.reports.read.mllog import read_mllog
from ablate.reports.read.rows import read_csv
from ablate.reports.read.tables import Reading, runs_of_log, runs_of_table
from ablate.run.log_rows import LogReader, LogSource
from ablate.run.log_text import NewText

if TYPE_CHECKING:
    from collections.abc import Callable

ROWS = 1_000_000


def record(key: str, value: object, **meta: object) -> str:
    content = {
        "namespace": "",
        "time_ms": 1,
        "event_type": "POINT_IN_TIME",
        "key": key,
        "value": value,
    }
    return f"0: :::MLLOG {json.dumps(content | {'metadata': meta})}\n"


def block(number: int) -> str:
    rates = "".join(
        record(
            "tracked_stats",
            {"train_step_time": 0.34, "reduced_train_loss": 4.2},
            step=n,
            samples_count=n,
        )
        for n in range(number * 1000, number * 1000 + 100)
    )
    text = (
        "0: a line of the framework that says nothing which anybody would want to read here\n"
        * 1000
    )
    return text + rates + record("eval_accuracy", 4.0, samples_count=number)


def timed(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def plain_lines(path: Path) -> None:
    with path.open("rb") as file:
        deque(file, maxlen=0)


def plain_csv(path: Path) -> None:
    with path.open(newline="") as file:
        deque(csv.DictReader(file), maxlen=0)


def follow(path: Path) -> None:
    """Read a command's output as its worker does."""
    reader = LogReader(LogSource(preset="megatron"))
    text = NewText(path)
    while True:
        for lines in text.new_pieces():
            if reader.may_hold_rows("\n".join(lines)):
                for line in lines:
                    deque(reader.rows(line), maxlen=0)
        if not text.is_behind:
            return


def tell(name: str, seconds: float, plain: float, path: Path) -> None:
    rate = path.stat().st_size / 1e6 / seconds
    print(f"{name:<42} {rate:7.0f} MB/s  {seconds / plain:6.1f} × plain reading")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=200)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mllog = Path(folder) / "result_0.txt"
        with mllog.open("w") as file:
            file.write(
                record("max_sequence_length", 8192) + record("global_batch_size", 16)
            )
            number = 0
            while file.tell() < args.megabytes << 20:
                file.write(block(number))
                number += 1
            file.write(record("run_stop", None, status="success"))
        plain = timed(mllog.read_bytes)
        tell("an MLPerf log", timed(lambda: read_mllog(mllog, [])), plain, mllog)

        table = Path(folder) / "table.csv"
        with table.open("w") as file:
            file.write("tokens,val_loss\n")
            file.writelines(f"{row},{9 - row / ROWS:.6f}\n" for row in range(ROWS))
        plain = timed(lambda: plain_csv(table))
        seconds = timed(
            lambda: runs_of_table(table, read_csv(table, []), [], Reading())
        )
        tell(f"a table of {ROWS:,} evaluations", seconds, plain, table)

        text = Path(folder) / "text.log"
        with text.open("w") as file:
            file.writelines(
                f"tokens {row} val {9 - row / ROWS:.6f}\n" for row in range(ROWS)
            )
        source = LogSource(patterns=[r"tokens (?P<tokens>\d+) val (?P<val_loss>\S+)"])
        plain = timed(lambda: plain_lines(text))
        seconds = timed(lambda: runs_of_log(text, source, [], Reading()))
        tell(f"a text of {ROWS:,} evaluations", seconds, plain, text)

        flood = Path(folder) / "flood.log"
        noise = "a line that says nothing which anybody would want to read\n" * 100_000
        with flood.open("w") as file:
            step = 0
            while file.tell() < args.megabytes << 20:
                step += 1
                file.write(
                    f"{noise} validation loss at iteration {step} | lm loss value: 3 |\n"
                )
        plain = timed(lambda: plain_lines(flood))
        tell("what a command prints", timed(lambda: follow(flood)), plain, flood)


if __name__ == "__main__":
    main()
