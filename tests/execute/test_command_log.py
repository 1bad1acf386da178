"""What a command's log says of its run: where rows are, which are evaluations, and how it ends."""

import re

import pytest

from ablate.base.errors import UserError
from ablate.execute.command_log import Rows
from ablate.run.command import Command
from ablate.run.config import TrainingConfig
from ablate.run.log_rows import LogReader, LogSource
from tests.execute.four_runs import config_of

NAN = float("nan")
STEPS = 100


def read(*printed, before=(), training=None, **source):
    """Add rows to a plan of 100 steps of 32 tokens; return the rows, what they wrote, and the faults."""
    metrics = LogSource(**(source or {"preset": "megatron"}))
    config = config_of(
        TrainingConfig(tokens=STEPS * 32, seq_len=8, batch_size=4, **training or {}),
        trainer=Command(command=["x"], metrics=metrics),
    )
    written = []
    rows = Rows(config, before, written.append, 1)
    faults = [rows.add(row, is_new=True) for row in printed]
    return rows, written, [fault for fault in faults if fault]


def evaluations(written):
    return [
        (row["step"], row["tokens"], row["val_loss"])
        for row in written
        if row["kind"] == "eval"
    ]


def test_the_logs_own_count_goes_before_steps():
    samples = {25: 50, 50: 100, 75: 400}  # the batch grows
    grown = [
        {"step": step, "samples": count, "loss": 3.0} for step, count in samples.items()
    ]
    rows, written, _ = read(*grown, {"step": 75, "val_loss": 2.9})
    assert [row["tokens"] for row in written] == [400, 800, 3200, 3200]
    assert evaluations(written) == [(75, 3200, 2.9)]
    assert rows.missing() is None
    assert (
        next(rows.notes())
        == "its own count is taken: 3,200 tokens at step 75, not 2,400 by steps"
    )


@pytest.mark.parametrize(
    ("training", "evaluations", "missing", "note"),
    [
        # as nanoGPT: it evaluates before the step
        (range(0, 100, 10), range(0, 101, 20), None, None),
        (
            range(100),
            [0, 50, 99],
            None,
            "of step 99 of 100, counted from 0: .*32 tokens",
        ),
        (
            range(0, 100, 10),
            range(0, 100, 20),
            None,
            "of step 80 of 100, counted from 0",
        ),
        (range(0, 90, 10), range(0, 90, 20), "a training row after step 80", None),
        (range(10, 101, 10), range(20, 90, 20), "an evaluation after step 80", None),
        (range(10, 101, 10), [50, 90], None, "last evaluation is of step 90 of 100$"),
        (range(10, 101, 10), [], "an evaluation after step 0", None),
        ([], [50], "an evaluation after step 50", None),
    ],
)
def test_the_row_that_a_loop_from_0_or_1_lacks_is_named(
    training, evaluations, missing, note
):
    printed = [{"step": step, "loss": 3.0} for step in training]
    printed += [{"step": step, "val_loss": 3 - step / 1000} for step in evaluations]
    rows, *_ = read(*printed)
    assert missing is None or f"without {missing}" in rows.missing()
    assert (rows.missing() is None) == (missing is None)
    notes = [*rows.notes()]
    assert len(notes) == (note is not None)
    assert note is None or re.search(note, notes[0])


def test_losses_above_the_studys_bound_in_all_attempts_are_a_divergence():
    before = [
        {"kind": "eval", "step": step, "tokens": 32 * step, "val_loss": 2.0}
        for step in (10, 20)
    ]
    printed = [{"step": step, "val_loss": 2 + step / 1000} for step in (30, 40)]
    bound = {"divergence_loss": 1.0, "divergence_evals": 4}
    _, written, faults = read(*printed, before=before, training=bound)
    assert faults == ["validation loss above 1 nats/token for 4 evaluations"]
    assert written[-1]["step"] == 40


def test_nan_on_a_training_row_is_a_blank_and_on_its_own_a_divergence():
    rows, written, faults = read(
        {"step": 10, "loss": 4.0, "val_loss": NAN},
        {"step": 20, "loss": 3.0, "val_loss": 3.1},
    )
    assert (evaluations(written), faults) == ([(20, 640, 3.1)], [])
    assert (
        rows.add({"step": 30, "val_loss": NAN}, is_new=True)
        == "the validation loss at step 30 is nan"
    )


def test_a_gradient_that_is_no_number_beside_no_loss_is_a_divergence():
    _, _, faults = read(
        {"step": 14, "loss": 5.2, "grad_norm": NAN}, {"step": 15, "grad_norm": NAN}
    )
    assert faults == ["the gradient norm at step 15 is nan, without a loss"]


def test_of_several_evaluation_sets_one_must_be_named():
    printed = [
        {"step": 10, "val_loss": 3.0, "set": name}
        for name in ("validation-0", "validation-1")
    ]
    with pytest.raises(
        UserError,
        match=r"on several sets: validation-0, validation-1 .*set: validation-0",
    ):
        read(*printed)
    source = LogSource(preset="megatron", set="1")
    line = " validation-{} loss at iteration 10 | lm loss value: 4 |"
    rows = [
        row for number in (0, 1) for row in LogReader(source).rows(line.format(number))
    ]
    assert [row["set"] for row in rows] == ["validation-1"]


def test_a_perplexity_is_kept_as_its_logarithm():
    _, written, _ = read(
        {"step": 10, "val_loss": 1.0}, preset="megatron", unit="perplexity"
    )
    assert evaluations(written) == [(10, 320, 0.0)]
