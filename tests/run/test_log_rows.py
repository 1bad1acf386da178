"""What trainers print, in the forms that they have, becomes rows."""

from __future__ import annotations

import json
import math

import pytest

from ablate.run.log_rows import LogReader, LogSource

MEGATRON = (
    " [2026-08-22 10:11:12.000123] iteration      100/   20000 | consumed samples:        51200 | "
    "elapsed time per iteration (ms): 1234.5 | throughput per GPU (TFLOP/s/GPU): 812.3 | learning rate: "
    "1.500000E-04 | global batch size:   512 | lm loss: 6.543210E+00 | loss scale: 1.0 | grad norm: 1.234 | "
    "number of skipped iterations:   0 | number of nan iterations:   0 |"
)
TITAN = (
    "[titan] \x1b[31mstep: 10  \x1b[32mloss:  8.01234  \x1b[38;2;54;177;0mgrad_norm:  0.5123  \x1b[36mmem"
    "ory: 10.50GiB(13.2%)  \x1b[34mtps: 12,345  \x1b[35mtflops: 512.10  mfu: 51.20%\x1b[39m"
)
MLLOG = (
    '0: :::MLLOG {"namespace": "", "time_ms": 1759967227205, "event_type": "POINT_IN_TIME", "key": '
    '"eval_accuracy", "value": 5.6529, "metadata": {"file": "a.py", "lineno": 12, "samples_count": 12256}}'
)
LINES = [
    (
        "megatron",
        MEGATRON,
        [{"step": 100, "step_ms": 1234.5, "lr": 1.5e-4, "loss": 6.54321, "grad_norm": 1.234}],
    ),
    ("megatron", MEGATRON.replace("6.543210E+00", "NAN"), [{"step": 100, "loss": math.nan}]),
    (
        "megatron",
        " validation loss at iteration 2000 | lm loss value: 3.123456E+00 | lm loss PPL: 2.272E+01 | ",
        [{"step": 2000, "val_loss": 3.123456}],
    ),
    (
        "megatron",
        " validation loss at iteration 20000 on validation set | lm loss value: 2.5E+00 | ",
        [{"step": 20000, "val_loss": 2.5}],
    ),
    ("megatron", " validation loss at iteration 20000 on test set | lm loss value: 2.5E+00 | ", []),
    (
        "torchtitan",
        TITAN,
        [{"step": 10, "loss": 8.01234, "grad_norm": 0.5123, "tokens_per_sec_per_device": 12345.0}],
    ),
    (
        "torchtitan",
        "[titan] validate step: 20  loss:  7.5021  memory: 10.50GiB(13.2%)  tps: 30,100",
        [{"step": 20, "val_loss": 7.5021}],
    ),
    (
        "nanogpt",
        "step:125/1750 val_loss:4.2517 train_time:8012ms step_avg:64.10ms",
        [{"step": 125, "val_loss": 4.2517, "step_ms": 64.1}],
    ),
    ("mllog", MLLOG, [{"samples": 12256, "val_loss": 5.6529}]),
    ("mllog", MLLOG.replace("eval_accuracy", "train_loss"), []),
    ("ablate", '{"step": 3, "val_loss": 5.25}', [{"step": 3, "val_loss": 5.25}]),
]


def is_near(found, expected):
    return all(
        (math.isnan(value) and math.isnan(found[name])) or found[name] == value
        for name, value in expected.items()
    )


@pytest.mark.parametrize(("preset", "line", "expected"), LINES, ids=range(len(LINES)))
def test_known_trainers(preset, line, expected):
    rows = list(LogReader(LogSource(preset=preset)).rows(line))
    assert len(rows) == len(expected)
    assert all(map(is_near, rows, expected)), rows


def test_a_step_on_a_line_of_its_own_is_that_of_the_losses_after_it():
    # OLMo-core's console prints the step first, and a line for each metric.
    reader = LogReader(
        LogSource(
            patterns=[
                r"\[step=(?P<step>[\d,]+)/",
                r"train/CE loss=(?P<loss>\S+)",
                r"eval/CE loss=(?P<val_loss>\S+)",
            ]
        )
    )
    lines = ["[step=1,000/10,000,epoch=1,eta=1h]", "    train/CE loss=3.5", "    eval/CE loss=3.75"]
    rows = [row for line in lines for row in reader.rows(line)]
    assert rows == [{"step": 1000, "loss": 3.5}, {"step": 1000, "val_loss": 3.75}]


def test_lines_of_json_with_keys_in_keys():
    reader = LogReader(LogSource(jsonl={"step": "trainer/step", "val_loss": "eval.loss"}))
    assert list(reader.rows('INFO {"trainer/step": 7, "eval": {"loss": "3.5"}}')) == [
        {"step": 7, "val_loss": 3.5}
    ]
    assert not list(reader.rows('{"trainer/step": 7'))
    assert not list(reader.rows('{"trainer/step": 7, "eval": 3}'))


def test_the_state_of_hugging_faces_trainer():
    history = [
        {"epoch": 0.1, "grad_norm": 1.5, "learning_rate": 1e-4, "loss": 4.1533251, "step": 1},
        {"epoch": 0.1, "eval_loss": 4.25, "eval_runtime": 1.0, "step": 1},
        {"train_runtime": 3.0, "train_loss": 4.2, "step": 1},
    ]
    reader = LogReader(LogSource(preset="hf", file="{run_dir}/*/trainer_state.json"))
    assert list(reader.rows(json.dumps({"log_history": history}, indent=2))) == [
        {"step": 1, "loss": 4.1533251, "grad_norm": 1.5, "lr": 1e-4},
        {"step": 1, "val_loss": 4.25},
    ]
