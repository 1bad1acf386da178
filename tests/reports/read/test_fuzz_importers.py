"""Logs from elsewhere, damaged or hostile: runs and lines with their file, never a traceback."""

import math
import random
import re
from pathlib import Path

import pytest
from damage import damaged
from logs import content_of, mllog, runs_in

from ablate.base.errors import UserError
from ablate.reports.read.imported import tidied, write_study
from ablate.reports.read.mllog import read_mllog
from ablate.results.frames import load_frames
from ablate.store.plan_file import Target
from tests.golden import cases
from tests.run.writers import WRITERS

MLLOG = (
    "seed=7 global_batch_size=16 max_sequence_length=8192 run_start eval_accuracy=4@samples_count=100 "
    "eval_accuracy=3@samples_count=200 eval_accuracy=2@samples_count=300 "
    'tracked_stats={"throughput":11.5}@step=100 eval_accuracy=1.5@epoch_num=400 run_stop=@status=success'
)
CURVE = {20 * number: 5 - number / 7 for number in range(1, 8)}
CONTENTS = {"mllog": [({}, "\n".join(mllog(MLLOG)).encode())]}
"""By kind: the options and the bytes of each file."""
for name, writer in WRITERS.items():
    log = "\n".join(writer(CURVE, 10)).encode()
    CONTENTS[name] = [({"stages": [[0, 100]]}, log)]
for parameters in cases(Path(__file__).with_name("readers.txt")):
    kind, options, content = content_of(*parameters.values)
    CONTENTS.setdefault(kind, []).append((options, content))


def read(kind, path, faults, options):
    if kind == "mllog":
        run = read_mllog(path, faults)
        return [run] if run else []
    runs_by_arm = runs_in(kind, path, faults, **options)
    return [run for runs in runs_by_arm.values() for run in runs]


def holds(content, loss):
    """Whether a number stands in a file: as it is written, or as Python would write it."""
    text = content.decode("utf-8", "surrogateescape")
    text += " " + text.replace(",", "").replace("_", "")
    written = re.finditer(r"(?=((?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?))", text)
    return repr(loss) in text or any(float(match[1]) == abs(loss) for match in written)


@pytest.mark.parametrize(
    "turns", [200, pytest.param(2_000, marks=pytest.mark.exhaustive)]
)
@pytest.mark.parametrize("kind", CONTENTS)
def test_no_log_makes_a_traceback(tmp_path, kind, turns):
    draw = random.Random(f"{kind} {turns}")
    path = tmp_path / "log.txt"
    read_some = written = 0
    for number in range(turns):
        options, content = draw.choice(CONTENTS[kind])
        hurt = damaged(content, draw)
        path.write_bytes(hurt)
        faults = []
        runs = []
        try:
            runs = read(kind, path, faults, options)
        except UserError as refused:
            faults.append(str(refused))
        assert all(str(path) in fault and "\n" not in fault for fault in faults)
        for run in runs:
            for tokens, loss in run.evals:
                assert isinstance(tokens, int)
                assert tokens >= 0
                assert math.isfinite(loss)
                assert number % 10 or holds(hurt, loss)
        read_some += bool(runs)
        if runs and number % 20 == 0:  # and whatever was read can be kept
            target = None if runs[0].tokens == 0 else Target(kind="val_loss", value=3.3)
            arms = {"a": runs[:1]}
            if len(runs) > 1:
                arms["b"] = runs[-1:]
            folder = tmp_path / f"{kind}-{number}"
            try:
                arms, _ = tidied(arms, ())
                store, _ = write_study(folder, arms, baseline="a", target=target)
            except UserError:
                continue
            load_frames(store)
            written += 1
    assert turns / 20 < read_some <= turns
    assert written > turns / 2000
