"""CSV, JSON lines and W&B's chart export."""

import csv
import json

import pandas as pd
import pytest

from ablate.reports.pages.csv_files import csv_text
from ablate.reports.read.tables import (
    Columns,
    by_pattern,
    read_csv,
    read_jsonl,
    read_wandb_chart,
    runs_of,
)


def write(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text)
    return path


def test_csv_with_columns_of_any_name(tmp_path):
    path = write(tmp_path, "a.csv", "step,eval/loss,s,lr\n10,4.0,1,.1\n20,,1,.1\n20,3.0,1,.1\n10,4.5,2,.1\n")
    rows, faults = read_csv(path)
    names = {"tokens": "step", "val_loss": "eval/loss", "seed": "s"}
    runs, more = runs_of(path, rows, Columns(names=names, tokens_per_unit=512))
    assert faults == more == []
    assert [(run.seed, run.evals) for run in runs[None]] == [
        (1, ((5120, 4.0), (10240, 3.0))), (2, ((5120, 4.5),)),
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["=cmd|' /C calc'!A0", "+sr", "-1", "@x", "\tx", "'=x", "plain", "a=b", ""])
def test_no_text_of_ours_is_a_formula_and_all_are_read_back(tmp_path, name):
    path = write(tmp_path, "a.csv", csv_text(pd.DataFrame({"arm": [name], "tokens": [-1.5]})))
    cell = list(csv.reader(path.open(newline="")))[1][0]
    assert not cell.startswith(("=", "+", "-", "@", "\t", "\r"))
    ((_, row),) = read_csv(path)[0]
    assert row == {"arm": name, "tokens": "-1.5"}


def test_arms_and_runs_of_their_own_columns(tmp_path):
    text = "tokens,val_loss,run,arm\n" + "".join(
        f"{n},{loss},r{r},{arm}\n" for arm in ("fp8", "fp4") for r in (0, 1) for n, loss in ((1, 4), (2, 3))
    )
    path = write(tmp_path, "a.csv", text)
    runs, faults = runs_of(path, read_csv(path)[0], Columns(names={}))
    assert faults == []
    assert {arm: [run.seed for run in own] for arm, own in runs.items()} == {"fp8": [0, 1], "fp4": [0, 1]}


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("step,loss\n1,2\n", "a.csv:2: no column 'tokens' (has step, loss); see --columns"),
        ("tokens,val_loss\n1,x\n2,3\n", "a.csv:2: expected a number in 'val_loss', got 'x'"),
        ("tokens,val_loss\nmany,4\n2,3\n", "a.csv:2: expected a number in 'tokens', got 'many'"),
        ("tokens,val_loss\n-1,4\n2,3\n", "a.csv:2: expected a number in 'tokens', got '-1'"),
        ("tokens,val_loss\n1,4,5\n2,3\n", "a.csv:2: expected 2 fields"),
        ("tokens,val_loss\n1\n2,3\n", "a.csv:2: expected 2 fields"),
    ],
)
def test_rows_that_do_not_parse_are_named(tmp_path, text, fault):
    path = write(tmp_path, "a.csv", text)
    rows, faults = read_csv(path)
    _, more = runs_of(path, rows, Columns(names={}))
    assert [*faults, *more] == [f"{tmp_path}/{fault}"]


def test_a_loss_that_is_not_finite_is_a_divergence(tmp_path):
    path = write(tmp_path, "a.csv", "tokens,val_loss\n1,4\n2,nan\n")
    (run,) = runs_of(path, read_csv(path)[0], Columns(names={}))[0][None]
    assert (run.state, run.evals) == ("diverged", ((1, 4.0),))


def test_jsonl(tmp_path):
    lines = [json.dumps({"tokens": 1, "val_loss": 4, "seed": 3}), "", "{cut", "[1]", json.dumps({"lr": 1})]
    path = write(tmp_path, "a.jsonl", "\n".join(lines))
    rows, faults = read_jsonl(path)
    assert [number for number, _ in rows] == [1, 5]
    assert [fault.removeprefix(f"{path}:").split(":")[0] for fault in faults] == ["3", "4"]
    assert "not a JSON object" in faults[1]
    runs, more = runs_of(path, rows, Columns(names={}))
    assert [run.seed for run in runs[None]] == [3]
    assert "no column 'tokens' (has lr)" in more[0]


def test_a_chart_of_wandb(tmp_path):
    header = '"Step","fp8-0 - val_loss","fp8-0 - val_loss__MIN","fp8-0 - val_loss__MAX","fp4-0 - val_loss"'
    path = write(tmp_path, "chart.csv", f'{header}\n"1","4.0","4.0","4.0",""\n"2","3.0","3.0","3.0","3.5"\n')
    rows, faults = read_wandb_chart(path)
    runs, more = runs_of(path, rows, Columns(names={}))
    assert faults == more == []
    assert [run.evals for run in runs[None]] == [((1, 4.0), (2, 3.0)), ((2, 3.5),)]
    found, unsorted = by_pattern(runs[None], ["fp8-0", "fp4-0"], {"FP8": "fp8-*"})
    assert [len(own) for own in found.values()] == [1]
    assert "in no arm (patterns: fp8-*)" in unsorted[0]


def test_a_chart_of_two_metrics_needs_one_named(tmp_path):
    path = write(tmp_path, "chart.csv", '"Step","r - a","r - b"\n1,2,3\n')
    assert "found: a, b (--metric)" in read_wandb_chart(path)[1][0]
    assert len(read_wandb_chart(path, "b")[0]) == 1
    plain = write(tmp_path, "plain.csv", "tokens,val_loss\n1,2\n")
    assert "found: none" in read_wandb_chart(plain)[1][0]


def test_files_that_cannot_be_read(tmp_path):
    assert "cannot be read" in read_csv(tmp_path / "absent.csv")[1][0]
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    assert "not UTF-8" in read_jsonl(tmp_path / "binary.jsonl")[1][0]
