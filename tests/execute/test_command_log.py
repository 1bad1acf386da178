"""What a command's log says of its run: where rows are, which are evaluations, and how it ends.

``REWRITE=1 pytest`` writes the answers in ``command_log.txt`` anew.
"""

import json
from pathlib import Path

import pytest

from ablate.base.errors import UserError
from ablate.execute.command_log import Rows
from ablate.run.command import Command
from ablate.run.config import TrainingConfig
from ablate.run.log_rows import LogReader, LogSource
from tests.execute.four_runs import config_of
from tests.golden import cases, check


def expanded(printed):
    for row in printed:
        if isinstance(row["step"], int):
            yield row
            continue
        [(name, loss)] = [pair for pair in row.items() if pair[0] != "step"]
        for step in range(*row["step"]):
            yield {"step": step, name: loss - step / 1000}


@pytest.mark.parametrize("case", cases(Path(__file__).with_suffix(".txt")))
def test_what_rows_say_of_a_run(case):
    lines = case[1].splitlines()[1:-1]
    options, *printed = map(json.loads, lines)
    metrics = LogSource(**{"preset": "megatron"} | options.get("source", {}))
    training = {"tokens": 3200, "seq_len": 8, "batch_size": 4}
    config = config_of(
        TrainingConfig(**training | options.get("training", {})),
        trainer=Command(command=["x"], metrics=metrics),
    )
    before = [
        {"kind": "eval", "step": step, "tokens": 32 * step, "val_loss": 2.0}
        for step in options.get("before", [])
    ]
    written = []
    rows = Rows(config, before, written.append, 1)
    try:
        faults = [rows.add(row, is_new=True) for row in expanded(printed)]
        said = [json.dumps(row) for row in written[-3:]]
        said += [f"diverged: {fault}" for fault in faults if fault]
        said += [f"missing: {rows.missing()}", *rows.notes()]
    except UserError as error:
        said = [str(error)]
    check(case, said)


def test_the_evaluation_set_that_is_named_is_read():
    reader = LogReader(LogSource(preset="megatron", set="1"))
    line = " validation-{} loss at iteration 10 | lm loss value: 4 |"
    sets = [row["set"] for name in (0, 1) for row in reader.rows(line.format(name))]
    assert sets == ["validation-1"]
