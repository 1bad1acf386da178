"""CSV, JSON lines, W&B's chart export, text by patterns and MLflow: each input and what is read of it."""

import csv
import json
import tracemalloc
from functools import partial

import pandas as pd
import pytest

from ablate.base.errors import UserError
from ablate.reports.pages.document import csv_text
from ablate.reports.read.tables import (
    TOKENS,
    by_pattern,
    check_patterns,
    read_csv,
    read_jsonl,
    read_text,
    read_wandb_chart,
    runs_of,
)
from ablate.reports.read.tracking import read_mlflow

STEP = r"step:(?P<step>\d+)/\d+ val_loss:(?P<val_loss>\S+)"
READERS = {"csv": read_csv, "jsonl": read_jsonl, "wandb": read_wandb_chart, "text": read_text}


def runs_in(kind, path, faults, columns="", stages=TOKENS, more=()):
    """``columns``: ours=theirs. ``more``: the patterns of a text, or the metric of a chart."""
    rows = READERS[kind](path, faults, *((check_patterns(more),) if kind == "text" else more))
    names = dict(pair.split("=") for pair in columns.split())
    return runs_of(path, rows, faults, names, stages)


def told(run):
    evals = " ".join(f"{at}:{loss:g}" for at, loss in run.evals)
    speed = "".join(f" {rate:g}/s" for _, rate in run.throughput)
    return f"{run.seed} {'' if run.state == 'finished' else run.state} {evals}{speed}"


CHART = '"Step","a - l","a - l__MIN","a - l__MAX","b - l"\n1,4,4,4,\n2,3,3,3,3.5\n'
TIMED = "tokens,val_loss,ms\n0,9,0\n1000,4,1000\n9000,3,5000\n"
LOG = """\
    print(f"step:{step}/{last} val_loss:{loss}")
seed 42
step:0/200 val_loss:10.5 train_time:0ms
step:1/200 train_loss:9.0
step:100/200 val_loss:4.5 train_time:2000ms
restarted with seed 43
step:200/200 val_loss:nan
"""
LAST = r"val_loss:(?P<val_loss>\S+)"
PATTERNS = (STEP, r"seed (?P<seed>\d+)", r"train_time:(?P<ms>\d+)ms")
STAGES = ((0.0, 10.0), (100.0, 20.0), (150.0, 5.0))
SECOND = "of one run (if there are several, name what tells them apart: --columns run=NAME, of "


@pytest.mark.parametrize(
    ("kind", "text", "options", "found", "faults"),
    [
        ("csv", "step,eval/loss,s,lr\n1,4,1,.1\n2,,1,.1\n2,3,1,.1\n1,4.5,2,.1\n",
         ("tokens=step val_loss=eval/loss seed=s", ((0, 512),)),
         {None: ["1  512:4 1024:3", "2  512:4.5"]}, []),
        ("csv", "tokens,val_loss\n" + "".join(f"{n},1\n" for n in (0, 99, 100, 120, 160)), ("", STAGES),
         {None: ["None  0:1 990:1 1000:1 1400:1 2050:1"]}, []),
        ("csv", "tokens,val_loss\n0.0082,4\n0.0164,3\n", ("", ((0.0, 1e9),)),
         {None: ["None  8200000:4 16400000:3"]}, []),
        # No seed is told, and none is made up: runs of the same place in a file are no pairs.
        ("csv", "tokens,val_loss,run,arm\n1,4,r0,a\n1,5,r1, a \n1,6,r0,b\n", (),
         {"a": ["None  1:4", "None  1:5"], "b": ["None  1:6"]}, []),
        ("csv", "tokens,val_loss,seed\n" + "".join(f"1,2,{s}\n" for s in ("s0", "0.5", "1e30", "7", "7.0")),
         (), {None: ["s0  1:2", "0.5  1:2", "1e30  1:2", "7  1:2"]}, []),
        ("csv", "tokens,val_loss\n1,4\n2,nan\n", (), {None: ["None diverged 1:4"]}, []),
        # A resumed run may repeat what it said, and the order is free.
        ("csv", "tokens,val_loss\n1,4\n2,3\n3,2\n2,3\n3,2\n4,1\n", (), {None: ["None  1:4 2:3 3:2 4:1"]}, []),
        ("csv", "tokens,val_loss\n4,1\n3,2\n2,3\n1,4\n", (), {None: ["None  1:4 2:3 3:2 4:1"]}, []),
        ("csv", "val_loss,arm,seed\n3.1,a,0\n3.1,a,1\nnan,b,0\n", (),
         {"a": ["0  0:3.1", "1  0:3.1"], "b": ["0 diverged "]}, []),
        ("csv", TIMED, ("ms=ms",), {None: ["None  0:9 1000:4 9000:3 1800/s"]}, []),
        ("csv", TIMED, ("seconds=ms",), {None: ["None  0:9 1000:4 9000:3 1.8/s"]}, []),
        ("csv", TIMED, (), {None: ["None  0:9 1000:4 9000:3"]}, []),  # it may be the time of a step
        ("csv", TIMED.replace("5000", "900"), ("ms=ms",), {None: ["None  0:9 1000:4 9000:3"]},
         [": the time falls, so it is not since the training began: not read"]),
        ("csv", "tokens,loss\n1,2\n", (), {}, [": no column 'val_loss' (has tokens, loss); see --columns"]),
        ("csv", "tokens,val_loss\n1,x\nmany,4\n-1,4\n1,4,5\n1\n\udce9,2\n9,3\n", (), {None: ["None  9:3"]},
         [":2: expected a number in 'val_loss', got 'x'", ":3: expected a number in 'tokens', got 'many'",
          ":4: expected a number in 'tokens', got '-1'", ":5: expected 2 fields", ":6: expected 2 fields",
          ":7: not UTF-8"]),
        ("jsonl", '{"tokens":1,"val_loss":4,"seed":3}\n\n{cut\n[1]\n{"lr":1}\n{"val_loss":3}\n\udcff', (),
         {None: ["3  1:4"]},
         [":3: not JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)",
          ":4: not a JSON object", ":6: expected a number in 'tokens', got None", ":7: not UTF-8"]),
        ("jsonl", '[{"tokens": 1, "val_loss": 4},\n {"tokens": 2, "val_loss": 3}]', (),
         {None: ["None  1:4 2:3"]}, []),
        ("wandb", CHART, (), {None: ["None  1:4 2:3", "None  2:3.5"]}, []),
        ("wandb", '"Step","r - a","r - b"\n1,2,3\n', ("", TOKENS, ("b",)), {None: ["None  1:3"]}, []),
        ("wandb", '"Step","r - a","r - b"\n1,2,3\n', (), {},
         [":1: expected columns 'RUN - METRIC' of one metric, found: a, b (--metric)"]),
        ("wandb", "tokens,val_loss\n1,2\n", (), {},
         [":1: expected columns 'RUN - METRIC' of one metric, found: none (--metric)"]),
        ("text", LOG, ("tokens=step ms=ms", STAGES, PATTERNS),
         {None: ["42 diverged 0:10.5 1000:4.5 1125/s"]}, []),
        # What an earlier line says holds.
        ("text", "Step 10\nloss 1\nval 5\nStep 20\nval 4\n",
         ("", TOKENS, (r"^Step (?P<tokens>\d+)", r"^val (?P<val_loss>\S+)")),
         {None: ["None  10:5 20:4"]}, []),
        ("text", "step:5/9 val_loss:3.5\nstep:9/9 val_loss:3.28\n", ("", TOKENS, (LAST,)),
         {None: ["None  0:3.28"]}, []),
        ("text", "nothing", ("", TOKENS, (LAST,)), {},
         [": no line matches the --pattern of val_loss"]),
    ],
)  # fmt: skip
def test_what_is_read(tmp_path, kind, text, options, found, faults):
    path, wrong = tmp_path / "log", []
    path.write_text(text, encoding="utf-8", errors="surrogateescape")
    runs = runs_in(kind, path, wrong, *options)
    assert {arm: [told(run) for run in own] for arm, own in runs.items()} == found
    assert [fault.removeprefix(str(path)) for fault in wrong] == faults


@pytest.mark.parametrize(
    ("text", "columns", "said"),
    [
        ("tokens,val_loss\n0.008,4\n", "", ":2: expected whole tokens in 'tokens', got '0.008' (name their"),
        ("tokens,val_loss\n1,4\n2,3\n1,5\n", "", f":4: losses 4 and 5 at 1 tokens {SECOND}tokens, val_loss)"),
        ("tokens,val_loss\n1,4\n5,3\n2,4\n6,3\n", "", f": tokens that rise and fall {SECOND}tokens"),
        ("s,val_loss\n1,2\n2,1\n", "", f":3: losses 2 and 1 at 0 tokens {SECOND}s, val_loss)"),
        ("seed,val_loss\n1,2\n1,2\n", "", f":3: losses 2 and 2 at 0 tokens {SECOND}seed"),
    ],
)
def test_rows_of_several_runs_never_merge(tmp_path, text, columns, said):
    path = tmp_path / "a.csv"
    path.write_text(text)
    with pytest.raises(UserError) as error:
        runs_in("csv", path, [], columns)
    assert f"{path}{said}" in str(error.value)


def test_files_that_end_at_the_same_loss_are_several_runs(tmp_path):
    paths = [tmp_path / name for name in "ab"]
    for path in paths:
        path.write_text("val_loss\n3\n")
    assert len({runs_in("csv", path, [])[None][0].id for path in paths}) == 2


@pytest.mark.parametrize("name", ["=cmd|' /C calc'!A0", "+sr", "-1", "@x", "\tx", "'=x", "plain", "a=b", ""])
def test_no_text_of_ours_is_a_formula_and_all_are_read_back(tmp_path, name):
    path = tmp_path / "a.csv"
    path.write_text(csv_text(pd.DataFrame({"arm": [name], "tokens": [-1.5]})))
    cell = list(csv.reader(path.open(newline="")))[1][0]
    assert not cell.startswith(("=", "+", "-", "@", "\t", "\r"))
    assert list(read_csv(path, [])) == [(2, {"arm": name, "tokens": "-1.5"})]


def test_runs_of_a_chart_go_to_arms_by_their_names(tmp_path):
    path, faults = tmp_path / "chart.csv", []
    path.write_text(CHART)
    runs = runs_in("wandb", path, faults)[None]
    found = by_pattern(runs, {"A": ["x", "a*"], "C": ["c"]}, faults)
    assert {arm: len(own) for arm, own in found.items()} == {"A": 1, "C": 0}
    assert faults == [f"{path} (b): in no arm (patterns: x, a*, c)"]


def test_large_files_are_read_in_little_memory(tmp_path):
    rows, hole = tmp_path / "a.jsonl", tmp_path / "a.txt"
    row = json.dumps({"kind": "train", "arm": "a", "loss": 3.0, "note": "x" * 100})
    with rows.open("w") as file:
        for step in range(100):
            file.write(f"{row}\n" * 1000)
            file.write(json.dumps({"tokens": step, "val_loss": 4.0}) + "\n")
    with hole.open("wb") as file:
        file.seek(1 << 26)  # no line break in 64 MiB
        file.write(b"\nstep:5/9 val_loss:3.0\rstep:9/9 val_loss:2.5")
    tracemalloc.start()
    assert len(runs_in("jsonl", rows, [])[None][0].evals) == 100
    assert len(runs_in("text", hole, [], "tokens=step", TOKENS, (STEP,))[None][0].evals) == 2
    assert tracemalloc.get_traced_memory()[1] < 1 << 23 < rows.stat().st_size
    tracemalloc.stop()


ARMS = {"FP8": ["tags.recipe = 'fp8'"], "FP4": ["tags.recipe = 'fp4'"]}


def test_runs_of_an_mlflow_server(tmp_path):
    from mlflow import MlflowClient

    uri = f"sqlite:///{tmp_path}/mlflow.db"
    client = MlflowClient(tracking_uri=uri)
    experiment = client.create_experiment("theirs")
    for recipe, seed, losses in (("fp8", 3, (4, 3)), ("fp8", 4, (4, 2)), ("fp4", 3, (5, float("nan")))):
        run = client.create_run(experiment, tags={"recipe": recipe}).info.run_id
        client.log_param(run, "seed", seed)
        for step, loss in enumerate(losses, 1):
            client.log_metric(run, "eval/loss", loss, step=step)
        client.set_terminated(run)
    client.create_run(experiment, tags={"recipe": "fp4"}, run_name="empty")
    read = partial(read_mlflow, uri, metric="eval/loss", stages=dict.fromkeys(("a", *ARMS), ((0, 100),)))
    arms = read("theirs", faults := [], arms=ARMS)
    assert {arm: sorted(map(told, own)) for arm, own in arms.items()} == {
        "FP8": ["3  100:4 200:3", "4  100:4 200:2"], "FP4": ["3 diverged 100:5"],
    }  # fmt: skip
    assert ["run 'empty'" in fault and "no metric 'eval/loss'" in fault for fault in faults] == [True]
    with pytest.raises(UserError, match=r"no experiment 'ours' at sqlite:.*there are: Default, theirs"):
        read("ours", faults, arms=ARMS)
    with pytest.raises(UserError, match=r"^MLflow at sqlite:.*$"):
        read("theirs", faults, arms={"a": ["recipe is fp8"]})
