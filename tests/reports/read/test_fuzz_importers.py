"""Logs from elsewhere, damaged or hostile: runs and lines with their file, never a traceback."""

import math
import random
import re

import pytest
from damage import damaged
from logs import mllog

from ablate.base.errors import UserError
from ablate.reports.read.imported import tidied, write_study
from ablate.reports.read.mllog import read_mllog
from ablate.reports.read.rows import read_csv, read_jsonl, read_wandb_chart
from ablate.reports.read.tables import Reading, runs_of_log, runs_of_table
from ablate.results.frames import load_frames
from ablate.run.log_rows import LogSource
from ablate.store.plan_file import Target
from tests.run.writers import WRITERS

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
    b'{"tokens": %d, "val_loss": %.1f, "seed": %d, "arm": "fp4"}\n'
    % (n, 5 - n / 10, seed)
    for seed in (0, 1)
    for n in range(1, 5)
)
WANDB = b"Step,a - val_loss,a - val_loss__MIN,b - val_loss\n" + b"".join(
    b"%d,%.1f,%.1f,%.1f\n" % (n, 5 - n / 10, 4 - n / 10, 6 - n / 10)
    for n in range(1, 6)
)

TEXT = b"seed 3\n" + b"".join(
    b"%d tokens, loss %.1f, %d s\n" % (n, 5 - n / 10, 9 * n) for n in range(1, 6)
)
PATTERNS = [
    r"(?P<tokens>\S+) tokens, loss (?P<val_loss>\S+), (?P<seconds>\S+)",
    r"seed (?P<seed>\S+)",
]


def table(read):
    def read_runs(path, faults):
        runs = runs_of_table(path, read(path, faults), faults, Reading())
        return [run for runs_of_arm in runs.values() for run in runs_of_arm]

    return read_runs


def log(**source):
    def read_runs(path, faults):
        reading = Reading(stages=((0, 100),))
        return runs_of_log(path, LogSource(**source), faults, reading).get(None, [])

    return read_runs


CURVE = {20 * number: 5 - number / 7 for number in range(1, 8)}
READERS = {
    **{
        name: ("\n".join(writer(CURVE, 10)).encode(), log(preset=name, file=""))
        for name, writer in WRITERS.items()
    },
    "mllog": (
        MLLOG,
        lambda path, faults: list(filter(None, [read_mllog(path, faults)])),
    ),
    "csv": (CSV, table(read_csv)),
    "jsonl": (JSONL, table(read_jsonl)),
    "wandb": (WANDB, table(read_wandb_chart)),
    "text": (TEXT, log(patterns=PATTERNS)),
}


def holds(content, loss):
    """Whether a number stands in a file: as it is written, or as Python would write it."""
    text = content.decode("utf-8", "surrogateescape").replace(",", "").replace("_", "")
    written = re.finditer(r"(?=((?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?))", text)
    return repr(loss) in text or any(float(match[1]) == abs(loss) for match in written)


@pytest.mark.parametrize(
    "turns", [200, pytest.param(2_000, marks=pytest.mark.exhaustive)]
)
@pytest.mark.parametrize("kind", READERS)
def test_no_log_makes_a_traceback(tmp_path, kind, turns):
    content, read = READERS[kind]
    draw = random.Random(f"{kind} {turns}")
    path = tmp_path / "log.txt"
    read_some = written = 0
    for number in range(turns):
        hurt = damaged(content, draw)
        path.write_bytes(hurt)
        faults = []
        runs = []
        try:
            runs = read(path, faults)
        except UserError as refused:
            faults.append(str(refused))
        assert all(
            fault.startswith(str(path)) and "\n" not in fault for fault in faults
        )
        for run in runs:
            assert all(
                isinstance(tokens, int) and tokens >= 0 and math.isfinite(loss)
                for tokens, loss in run.evals
            )
            if number % 10 == 0:
                assert all(holds(hurt, loss) for _, loss in run.evals)
        read_some += bool(runs)
        if runs and number % 50 == 0:  # and whatever was read can be kept
            arms = {"a": runs[:1], "b": runs[-1:]} if len(runs) > 1 else {"a": runs}
            target = Target(kind="val_loss", value=3.3)
            arms, _ = tidied(arms, ())
            store, _ = write_study(
                tmp_path / f"{kind}-{number}", arms, baseline="a", target=target
            )
            load_frames(store)
            written += 1
    assert turns / 20 < read_some <= turns
    assert written > turns / 2000
