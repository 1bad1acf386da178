"""A table of final losses: what it holds, and one line for what is wrong with it."""

from __future__ import annotations

import pytest

from ablate.base.errors import UserError
from ablate.reports.read.losses import LossPoint, read_losses

HEAD = "arm,parameters,tokens,seed,val_loss\n"


def table(folder, text):
    path = folder / "losses.csv"
    path.write_text(text)
    return path


def test_rows_become_losses(tmp_path):
    text = HEAD + "bf16,30482560,7.5e8,0,3.42\nbf16,30482560,750000000,1,3.43\n"
    points, left_out = read_losses(table(tmp_path, text))
    assert points[0] == LossPoint(
        arm="bf16", parameters=30482560, tokens=750_000_000, seed=0, loss=3.42, run="line 2"
    )
    assert [one.seed for one in points] == [0, 1]
    assert left_out == {}


def test_seed_and_run_may_be_missing_and_other_columns_are_not_read(tmp_path):
    text = "run,arm,D/N,parameters,tokens,val_loss\nr7,bf16,25,1000,20,3.4\n,bf16,25,1000,40,3.3\n"
    points, _ = read_losses(table(tmp_path, text))
    assert [(one.seed, one.run) for one in points] == [(0, "r7"), (0, "line 3")]


def test_an_arm_with_a_diverged_run_is_left_out_with_the_reason(tmp_path):
    text = HEAD + "bf16,1000,20,0,3.4\nfp4,1000,20,0,3.5\nfp4,1000,40,0,nan\nfp4,1000,80,0,inf\n"
    points, left_out = read_losses(table(tmp_path, text))
    assert [one.arm for one in points] == ["bf16"]
    assert left_out == {"fp4": "diverged: 2 of its losses not finite or beyond 1e6"}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "has no rows (expected columns arm, parameters, tokens, val_loss)"),
        ("arm,tokens,val_loss\nbf16,20,3\n", "has no column 'parameters' (has arm, tokens, val_loss)"),
        (HEAD + "bf16,30M,20,0,3.4\n", "losses.csv:2: expected a number in 'parameters', got '30M'"),
        (HEAD + "bf16,30,0,0,3.4\n", "losses.csv:2: expected a whole number from 1 on in 'tokens', got '0'"),
        (HEAD + "bf16,30,20.5,0,3.4\n", "expected a whole number from 1 on in 'tokens', got '20.5'"),
        (HEAD + "bf16,inf,20,0,3.4\n", "expected a whole number from 1 on in 'parameters', got 'inf'"),
        (HEAD + "bf16,30,20,x,3.4\n", "expected a number in 'seed', got 'x'"),
        (HEAD + "bf16,30,20,0,\n", "expected a number in 'val_loss', got ''"),
        (HEAD + "bf16,30,20,0,-1\n", "expected a loss above 0 nats in 'val_loss', got '-1'"),
        (HEAD + "bf16,30,20\n", "losses.csv:2: expected 5 fields"),
        (
            HEAD + "bf16,30,20,0,3\nbf16,30,20,0,4\n",
            "losses.csv:3: 'bf16' of 30 parameters and 20 tokens stands",
        ),
    ],
)
def test_a_bad_table_gets_one_line(tmp_path, text, says):
    with pytest.raises(UserError) as caught:
        read_losses(table(tmp_path, text))
    (problem,) = caught.value.problems
    assert says in str(problem)
    assert str(problem).startswith("--losses: ")
    assert "\n" not in str(problem)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(UserError, match="cannot be read"):
        read_losses(tmp_path / "none.csv")
