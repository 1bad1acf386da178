"""How fast MLPerf logs are parsed, against reading the file and against a JSON parse of the same records.

    python benchmarks/mllog.py [--megabytes 200]

The log is made up: one record in ten lines is wanted, as in the submissions of MLPerf Training v5.1.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

from ablate.reports.read.mllog import read_mllog


def record(key: str, value: object, **meta: object) -> str:
    content = {"namespace": "", "time_ms": 1, "event_type": "POINT_IN_TIME", "key": key, "value": value}
    return f"0: :::MLLOG {json.dumps(content | {'metadata': meta})}\n"


def block(number: int) -> str:
    rates = "".join(
        record("tracked_stats", {"train_step_time": 0.34, "reduced_train_loss": 4.2}, step=n, samples_count=n)
        for n in range(number * 1000, number * 1000 + 100)
    )
    text = "0: a line of the framework that says nothing which anybody would want to read here\n" * 1000
    return text + rates + record("eval_accuracy", 4.0, samples_count=number)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=200)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result_0.txt"
        with path.open("w") as file:
            file.write(record("max_sequence_length", 8192) + record("global_batch_size", 16))
            number = 0
            while file.tell() < args.megabytes << 20:
                file.write(block(number))
                number += 1
            file.write(record("run_stop", None, status="success"))
        size = path.stat().st_size / 1e6
        started = time.perf_counter()
        path.read_bytes()
        reading = time.perf_counter() - started
        started = time.perf_counter()
        faults: list[str] = []
        run = read_mllog(path, faults)
        parsing = time.perf_counter() - started
    assert run is not None
    assert len(run.evals) == number
    print(f"{size:.0f} MB, {number} evaluations, {len(faults)} faults")
    print(f"read alone  {size / reading:8.0f} MB/s")
    print(f"read_mllog  {size / parsing:8.0f} MB/s ({parsing / reading:.1f} × reading)")


if __name__ == "__main__":
    main()
