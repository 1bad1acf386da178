"""Logs from elsewhere, damaged or hostile: runs and lines with their file, never a traceback."""

import json
import math
import random

import pytest
from damage import damaged
from logs import mllog

from ablate.base.errors import UserError
from ablate.reports.read.imported import tidied, write_study
from ablate.reports.read.mllog import read_mllog
from ablate.reports.read.tables import (
    check_patterns,
    read_csv,
    read_jsonl,
    read_text,
    read_wandb_chart,
    runs_of,
)
from ablate.results.frames import load_frames
from ablate.store.plan_file import Target

MLLOG = "\n".join(
    mllog(
        "seed=7 global_batch_size=16 max_sequence_length=8192 run_start "
        + " ".join(f"eval_accuracy={5 - n}@samples_count={n}00" for n in range(1, 4))
        + ' tracked_stats={"throughput":11.5}@step=100 eval_accuracy=1.5@epoch_num=400'
        " run_stop=@status=success"
    )
).encode()
CSV = b"tokens,val_loss,seed,arm,run\n" + b"".join(
    b"%d,%.2f,%d,%s,r%d\n" % (n, 5 - n / 10, seed, arm, seed)
    for arm in (b"fp8", b"fp4")
    for seed in (0, 1)
    for n in range(1, 4)
)
JSONL = b"".join(
    json.dumps({"tokens": n, "val_loss": 5 - n / 10, "seed": seed, "arm": "fp4"}).encode() + b"\n"
    for seed in (0, 1)
    for n in range(1, 5)
)
WANDB = b"Step,a - val_loss,a - val_loss__MIN,b - val_loss\n" + b"".join(
    b"%d,%.1f,%.1f,%.1f\n" % (n, 5 - n / 10, 4 - n / 10, 6 - n / 10) for n in range(1, 6)
)

TEXT = b"seed 3\n" + b"".join(b"%d tokens, loss %.1f, %d s\n" % (n, 5 - n / 10, 9 * n) for n in range(1, 6))
PATTERNS = check_patterns(
    [r"(?P<tokens>\S+) tokens, loss (?P<val_loss>\S+), (?P<seconds>\S+)", r"seed (?P<seed>\S+)"]
)


def table(read, *more):
    def read_runs(path, faults):
        runs = runs_of(path, read(path, faults, *more), faults, {})
        return [run for own in runs.values() for run in own]

    return read_runs


READERS = {
    "mllog": (MLLOG, lambda path, faults: list(filter(None, [read_mllog(path, faults)]))),
    "csv": (CSV, table(read_csv)),
    "jsonl": (JSONL, table(read_jsonl)),
    "wandb": (WANDB, table(read_wandb_chart)),
    "text": (TEXT, table(read_text, PATTERNS)),
}


@pytest.mark.parametrize("turns", [200, pytest.param(2_000, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("kind", READERS)
def test_no_log_makes_a_traceback(tmp_path, kind, turns):
    content, read = READERS[kind]
    draw, path = random.Random(f"{kind} {turns}"), tmp_path / "log.txt"
    read_some = written = 0
    for number in range(turns):
        path.write_bytes(damaged(content, draw))
        faults, runs = [], []
        try:
            runs = read(path, faults)
        except UserError as refused:
            faults.append(str(refused))
        assert all(fault.startswith(str(path)) and "\n" not in fault for fault in faults)
        for run in runs:
            assert all(isinstance(at, int) and at >= 0 and math.isfinite(loss) for at, loss in run.evals)
        read_some += bool(runs)
        if runs and number % 50 == 0:  # and whatever was read can be kept
            arms = {"a": runs[:1], "b": runs[-1:]} if len(runs) > 1 else {"a": runs}
            target = Target(kind="val_loss", value=3.3)
            arms, _ = tidied(arms, ())
            store, _ = write_study(tmp_path / f"{kind}-{number}", arms, baseline="a", target=target)
            load_frames(store)
            written += 1
    assert turns / 20 < read_some < turns
    assert written > turns / 2000
