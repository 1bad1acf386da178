"""CSV, JSON lines, W&B's chart export, and text by patterns."""

import csv
import json
import tracemalloc

import pandas as pd
import pytest

from ablate.base.errors import UserError
from ablate.reports.pages.document import csv_text
from ablate.reports.read.tables import (
    TOKENS,
    Columns,
    by_pattern,
    check_patterns,
    read_csv,
    read_jsonl,
    read_text,
    read_wandb_chart,
    runs_of,
    tokens_at,
)

SECOND = "a second loss of one run, and no column 'tokens'"


def write(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text)
    return path


def test_csv_with_columns_of_any_name(tmp_path):
    path = write(tmp_path, "a.csv", "step,eval/loss,s,lr\n10,4.0,1,.1\n20,,1,.1\n20,3.0,1,.1\n10,4.5,2,.1\n")
    rows, faults = read_csv(path)
    names = {"tokens": "step", "val_loss": "eval/loss", "seed": "s"}
    runs, more = runs_of(path, rows, Columns(names=names, stages=((0, 512),)))
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
    # No seed is told, and none is made up: runs of the same place in a file are no pairs.
    assert {arm: [run.seed for run in own] for arm, own in runs.items()} == {
        "fp8": [None, None], "fp4": [None, None],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("tokens,loss\n1,2\n", "a.csv: no column 'val_loss' (has tokens, loss); see --columns"),
        ("s,val_loss\n1,2\n2,1\n", f"a.csv:3: {SECOND}, run or seed (has s, val_loss); see --columns"),
        ("seed,val_loss\n1,2\n1,1\n", f"a.csv:3: {SECOND} (has seed, val_loss); see --columns"),
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
    lines = [
        json.dumps({"tokens": 1, "val_loss": 4, "seed": 3}), "", "{cut", "[1]", json.dumps({"lr": 1}),
        json.dumps({"val_loss": 3}),
    ]  # fmt: skip
    path = write(tmp_path, "a.jsonl", "\n".join(lines))
    found, faults = read_jsonl(path)
    rows = list(found)
    assert [number for number, _ in rows] == [1, 5, 6]
    assert [fault.removeprefix(f"{path}:").split(":")[0] for fault in faults] == ["3", "4"]
    assert "not a JSON object" in faults[1]
    runs, more = runs_of(path, rows, Columns(names={}))
    assert [run.seed for run in runs[None]] == [3]
    # A row without a loss is one of training.
    assert more == [f"{path}:6: expected a number in 'tokens', got None"]


def test_an_array_of_objects_is_read_too(tmp_path):
    content = [{"tokens": n, "val_loss": 5 - n, "seed": 1} for n in (1, 2)]
    rows, _ = read_jsonl(write(tmp_path, "a.json", json.dumps(content, indent=1)))
    assert list(rows) == [(1, content[0]), (2, content[1])]


def test_a_chart_of_wandb(tmp_path):
    header = '"Step","fp8-0 - val_loss","fp8-0 - val_loss__MIN","fp8-0 - val_loss__MAX","fp4-0 - val_loss"'
    path = write(tmp_path, "chart.csv", f'{header}\n"1","4.0","4.0","4.0",""\n"2","3.0","3.0","3.0","3.5"\n')
    rows, faults = read_wandb_chart(path)
    runs, more = runs_of(path, rows, Columns(names={}))
    assert faults == more == []
    assert [run.evals for run in runs[None]] == [((1, 4.0), (2, 3.0)), ((2, 3.5),)]
    found, unsorted = by_pattern(runs[None], ["fp8-0", "fp4-0"], {"FP8": ["fp8-*"]})
    assert [len(own) for own in found.values()] == [1]
    assert "in no arm (patterns: fp8-*)" in unsorted[0]


def test_a_chart_of_two_metrics_needs_one_named(tmp_path):
    path = write(tmp_path, "chart.csv", '"Step","r - a","r - b"\n1,2,3\n')
    assert "found: a, b (--metric)" in read_wandb_chart(path)[1][0]
    assert len(read_wandb_chart(path, "b")[0]) == 1
    plain = write(tmp_path, "plain.csv", "tokens,val_loss\n1,2\n")
    assert "found: none" in read_wandb_chart(plain)[1][0]


def test_files_that_cannot_be_read(tmp_path):
    for read, name, fault in (
        (read_csv, "absent.csv", "absent.csv: cannot be read"),
        (read_jsonl, "binary.jsonl", "binary.jsonl:1: not UTF-8"),
        (read_csv, "latin.csv", "latin.csv:3: not UTF-8"),
    ):
        (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
        (tmp_path / "latin.csv").write_bytes(b"arm,val_loss\na,1\n\xe9,2\n")
        rows, faults = read(tmp_path / name)
        assert len(list(rows)) == (name == "latin.csv")
        assert fault in faults[0]


def test_the_tokens_of_steps_that_grow():
    stages = ((0, 10), (100, 20), (150, 5))
    assert [tokens_at(step, stages) for step in (0, 99, 100, 120, 150, 160)] == [
        0,
        990,
        1000,
        1400,
        2000,
        2050,
    ]
    assert tokens_at(7, TOKENS) == 7


def test_final_losses_are_a_run_a_row(tmp_path):
    path = write(tmp_path, "a.csv", "val_loss,arm,seed\n3.1,fp8,0\n3.1,fp8,1\nnan,fp4,0\n3.2,fp4,1\n")
    runs, faults = runs_of(path, read_csv(path)[0], Columns(names={}))
    assert faults == []
    assert [(run.state, run.evals) for own in runs.values() for run in own] == [
        ("finished", ((0, 3.1),)), ("finished", ((0, 3.1),)), ("diverged", ()), ("finished", ((0, 3.2),)),
    ]  # fmt: skip
    assert len({run.content for own in runs.values() for run in own}) == 4  # equal losses are no copies


def test_a_time_column_is_the_speed_of_the_whole_run(tmp_path):
    text = "tokens,val_loss,ms\n0,9,0\n1000,4,1000\n9000,3,5000\n"
    path = write(tmp_path, "a.csv", text)
    rows = list(read_csv(path)[0])
    (run,) = runs_of(path, rows, Columns(names={"ms": "ms"}))[0][None]
    assert run.throughput == ((9000, 1800.0),)
    (run,) = runs_of(path, rows, Columns(names={"seconds": "ms"}))[0][None]
    assert run.throughput == ((9000, 1.8),)
    (run,) = runs_of(path, rows, Columns(names={}))[0][None]
    assert run.throughput == ()  # what is not named may be the time of a step
    path = write(tmp_path, "b.csv", text.replace("5000", "900"))
    runs, faults = runs_of(path, read_csv(path)[0], Columns(names={"ms": "ms"}))
    assert runs[None][0].throughput == ()
    assert faults == [f"{path}: the time falls, so it is not since the training began: not read"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tokens,val_loss\n0.008,4\n0.016,3\n", "2: expected whole tokens in 'tokens', got '0.008' (name"),
        ("tokens,val_loss\n1,4\n2,3\n1,5\n", "4: losses 4 and 5 at 1 tokens of one run (if there are"),
        ("tokens,val_loss\n1,4\n5,3\n2,4\n6,3\n", "4: tokens that fall from 5 to 2 in one run (if there"),
        ("tokens,val_loss,trial\n1,4,a\n2,4,b\n3,4,a\n", "2: a column 'trial' that differs within one run"),
    ],
)  # fmt: skip
def test_rows_of_several_runs_never_merge(tmp_path, text, said):
    path = write(tmp_path, "a.csv", text)
    with pytest.raises(UserError) as error:
        runs_of(path, read_csv(path)[0], Columns(names={}))
    assert str(error.value).startswith(f"{path}:{said}")
    if "one run" in said:
        assert "name what tells them apart: --run-column, of tokens, val_loss" in str(error.value)


def test_a_resumed_run_may_repeat_what_it_said_and_order_is_free(tmp_path):
    for text in ("1,4\n2,3\n3,2\n2,3\n3,2\n4,1\n", "4,1\n3,2\n2,3\n1,4\n"):
        path = write(tmp_path, "a.csv", f"tokens,val_loss\n{text}")
        (run,) = runs_of(path, read_csv(path)[0], Columns(names={}))[0][None]
        assert run.evals == ((1, 4.0), (2, 3.0), (3, 2.0), (4, 1.0))


def test_a_unit_of_tokens(tmp_path):
    path = write(tmp_path, "a.csv", "tokens,val_loss\n0.0082,4\n0.0164,3\n")
    (run,) = runs_of(path, read_csv(path)[0], Columns(names={}, stages=((0.0, 1e9),)))[0][None]
    assert run.evals == ((8_200_000, 4.0), (16_400_000, 3.0))


def test_any_text_is_a_seed_and_names_of_arms_have_no_blanks(tmp_path):
    seeds = ["s0", "s1", "0.5", "1e30", "7", "7.0"]
    rows = "".join(f"{'a' if n % 2 else ' a '},{n},{4 + n},{seed}\n" for n, seed in enumerate(seeds))
    path = write(tmp_path, "a.csv", f"arm,tokens,val_loss,seed\n{rows}")
    runs, faults = runs_of(path, read_csv(path)[0], Columns(names={}))
    assert faults == []
    assert {arm: [run.seed for run in own] for arm, own in runs.items()} == {
        "a": ["s0", "s1", "0.5", "1e30", 7]
    }


def test_many_rows_are_read_in_little_memory(tmp_path):
    path = tmp_path / "a.jsonl"
    row = json.dumps({"kind": "train", "arm": "a", "loss": 3.0, "note": "x" * 100})
    with path.open("w") as file:
        for step in range(100):
            file.write(f"{row}\n" * 1000)
            file.write(json.dumps({"arm": "ab"[step % 2], "tokens": step, "val_loss": 4.0}) + "\n")
    tracemalloc.start()
    rows, _ = read_jsonl(path)
    runs, _ = runs_of(path, rows, Columns(names={}))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert {arm: len(run.evals) for arm, (run,) in runs.items()} == {"a": 50, "b": 50}
    assert peak < 1 << 20 < path.stat().st_size / 10


STEP = r"step:(?P<step>\d+)/\d+ val_loss:(?P<val_loss>\S+)"
LOG = """\
    print(f"step:{step}/{last} val_loss:{loss}")
seed 42
step:0/200 val_loss:10.5 train_time:0ms
step:1/200 train_loss:9.0
step:100/200 val_loss:4.5 train_time:2000ms
restarted with seed 43
step:200/200 val_loss:nan
"""


def text_runs(path, *patterns, stages=((0.0, 10.0), (100.0, 20.0))):
    rows, faults = read_text(path, check_patterns(patterns))
    runs, more = runs_of(path, rows, Columns(names={"tokens": "step"}, stages=stages))
    return runs.get(None, []), [*faults, *more]


def test_text_by_patterns(tmp_path):
    path = write(tmp_path, "a.txt", LOG)
    (run,), faults = text_runs(path, STEP, r"seed (?P<seed>\d+)", r"train_time:(?P<ms>\d+)ms")
    assert faults == []
    assert (run.seed, run.evals, run.state) == (42, ((0, 10.5), (1000, 4.5)), "diverged")
    assert text_runs(write(tmp_path, "b.txt", "nothing here"), STEP) == (
        [], [f"{tmp_path}/b.txt: no line matches the --pattern of val_loss"],
    )  # fmt: skip
    assert "cannot be read" in text_runs(tmp_path / "absent.txt", STEP)[1][0]


def test_what_an_earlier_line_says_holds(tmp_path):
    path = write(tmp_path, "a.txt", "Step 10\nloss 1\nval 5.0\nStep 20\nval 4.0\n")
    (run,), faults = text_runs(path, r"^Step (?P<step>\d+)", r"^val (?P<val_loss>\S+)", stages=TOKENS)
    assert faults == []
    assert run.evals == ((10, 5.0), (20, 4.0))


def test_without_steps_a_texts_last_loss_is_its_final_one(tmp_path):
    """Two files that end at the same loss are two runs."""
    text = "step:500/900 val_loss:3.5\nstep:900/900 val_loss:3.28\n"
    found = []
    for name in ("a.txt", "b.txt"):
        rows, faults = read_text(write(tmp_path, name, text), check_patterns([r"val_loss:(?P<val_loss>\S+)"]))
        runs, more = runs_of(tmp_path / name, rows, Columns(names={}))
        assert [*faults, *more] == []
        found += runs[None]
    assert [run.evals for run in found] == [((0, 3.28),)] * 2
    assert found[0].content != found[1].content


def test_a_text_is_read_by_lines_even_without_line_breaks(tmp_path):
    path = tmp_path / "a.txt"
    with path.open("wb") as file:
        file.seek(1 << 26)  # a hole of 64 MiB
        file.write(b"\nstep:5/9 val_loss:3.0\rstep:9/9 val_loss:2.5")
    tracemalloc.start()
    (run,), _ = text_runs(path, STEP, stages=TOKENS)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert run.evals == ((5, 3.0), (9, 2.5))
    assert peak < 1 << 23


@pytest.mark.parametrize(
    ("patterns", "line"),
    [
        ([r"val_loss:(?P<val_loss>\S+"], r"--pattern: '.*' is no regular expression: missing \)"),
        ([r"(?P<loss>\S+)"], "--pattern: no group of ours is 'loss' .expected step, tokens, val_loss"),
        ([r"step:(?P<step>\d+)"], r"--pattern: no group \(\?P<val_loss>…\)"),
        (
            [r"val_loss:(?P<val_loss>\S+) train_time:(?P<ms>\d+)ms"],
            r"--pattern: a group 'ms', and none of step or tokens",
        ),
        ([STEP, r"tokens (?P<tokens>\d+)"], "--pattern: groups for step and for tokens"),
    ],
)
def test_a_pattern_that_cannot_work_is_one_line(patterns, line):
    with pytest.raises(UserError, match=line) as caught:
        check_patterns(patterns)
    assert "\n" not in str(caught.value)
