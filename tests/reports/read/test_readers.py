"""CSV, JSON lines, W&B's charts, text by patterns and MLflow: what is read of each (``readers.txt``)."""

import csv
import json
import tracemalloc
from functools import partial
from pathlib import Path

import pandas as pd
import pytest
from logs import content_of, runs_in

from ablate.base.errors import UserError
from ablate.reports.pages.document import csv_text
from ablate.reports.read.names import by_pattern
from ablate.reports.read.rows import read_csv
from ablate.reports.read.tracking import read_mlflow
from tests.golden import cases, check


def told(run):
    evals = " ".join(f"{tokens}:{loss:g}" for tokens, loss in run.evals)
    speed = "".join(f" {rate:g}/s" for _, rate in run.throughput)
    return f"{run.seed} {'' if run.state == 'finished' else run.state} {evals}{speed}"


@pytest.mark.parametrize("case", cases(Path(__file__).with_name("readers.txt")))
def test_what_is_read_and_what_is_not(tmp_path, case):
    """Seed, losses and speed of each run, after its arm; then the faults, or why all is refused."""
    path = tmp_path / "log"
    faults = []
    kind, options, content = content_of(case)
    path.write_bytes(content)
    lines = []
    try:
        for arm, runs in runs_in(kind, path, faults, **options).items():
            lines += [f"{arm}: {told(run)}" if arm else told(run) for run in runs]
    except UserError as refused:
        lines = [str(refused)]
    check(case, [line.removeprefix(str(path)) for line in (*lines, *faults)])


def test_files_that_end_at_the_same_loss_are_several_runs(tmp_path):
    paths = [tmp_path / name for name in "ab"]
    for path in paths:
        path.write_text("val_loss\n3\n")
    assert len({runs_in("csv", path, [])[None][0].id for path in paths}) == 2


@pytest.mark.parametrize(
    "name", ["=cmd|' /C calc'!A0", "+sr", "-1", "@x", "\tx", "'=x", "plain", "a=b", ""]
)
def test_no_text_of_ours_is_a_formula_and_all_are_read_back(tmp_path, name):
    path = tmp_path / "a.csv"
    path.write_text(csv_text(pd.DataFrame({"arm": [name], "tokens": [-1.5]})))
    cell = list(csv.reader(path.open(newline="")))[1][0]
    assert not cell.startswith(("=", "+", "-", "@", "\t", "\r"))
    assert list(read_csv(path, [])) == [(2, {"arm": name, "tokens": "-1.5"})]


def test_runs_of_a_chart_go_to_arms_by_their_names(tmp_path):
    path = tmp_path / "chart.csv"
    faults = []
    path.write_text('"Step","a - l","b - l"\n1,4,\n2,3,3.5\n')
    runs = runs_in("wandb", path, faults)[None]
    arms = by_pattern(runs, {"A": ["x", "a*"], "C": ["c"]}, faults)
    assert {arm: len(of_arm) for arm, of_arm in arms.items()} == {"A": 1, "C": 0}
    assert faults == [f"{path} (b): in no arm (patterns: x, a*, c)"]


def test_large_files_are_read_in_little_memory(tmp_path):
    rows = tmp_path / "a.jsonl"
    hole = tmp_path / "a.txt"
    row = json.dumps({"kind": "train", "arm": "a", "loss": 3.0, "note": "x" * 100})
    with rows.open("w") as file:
        for step in range(100):
            evaluation = json.dumps({"tokens": step, "val_loss": 4 - step / 100})
            file.write(f"{row}\n" * 1000 + f"{evaluation}\n")
    with hole.open("wb") as file:
        file.seek(1 << 26)  # no line break in 64 MiB
        file.write(b"\n5 tokens, loss 3.0\r9 tokens, loss 2.5")
    pattern = "(?P<tokens>.) tokens, loss (?P<val_loss>...)"
    tracemalloc.start()
    (of_rows,) = runs_in("jsonl", rows, [])[None]
    (of_text,) = runs_in("text", hole, [], more=[pattern])[None]
    assert (len(of_rows.evals), len(of_text.evals)) == (100, 2)
    assert tracemalloc.get_traced_memory()[1] < 1 << 23 < rows.stat().st_size
    tracemalloc.stop()


ARMS = {"FP8": ["tags.recipe = 'fp8'"], "FP4": ["tags.recipe = 'fp4'"]}


def test_runs_of_an_mlflow_server(tmp_path):
    from mlflow import MlflowClient

    uri = f"sqlite:///{tmp_path}/mlflow.db"
    client = MlflowClient(tracking_uri=uri)
    experiment = client.create_experiment("theirs")
    for recipe, seed, losses in (
        ("fp8", 3, (4, 3)),
        ("fp8", 4, (4, 2)),
        ("fp4", 3, (5, float("nan"))),
    ):
        run = client.create_run(experiment, tags={"recipe": recipe}).info.run_id
        client.log_param(run, "seed", seed)
        for step, loss in enumerate(losses, 1):
            client.log_metric(run, "eval/loss", loss, step=step)
        client.set_terminated(run)
    client.create_run(experiment, tags={"recipe": "fp4"}, run_name="empty")
    read = partial(
        read_mlflow,
        uri,
        metric="eval/loss",
        stages=dict.fromkeys(("a", *ARMS), ((0, 100),)),
    )
    arms = read("theirs", faults := [], arms=ARMS)
    assert {arm: sorted(map(told, of_arm)) for arm, of_arm in arms.items()} == {
        "FP8": ["3  100:4 200:3", "4  100:4 200:2"], "FP4": ["3 diverged 100:5"],
    }  # fmt: skip
    assert [
        "run 'empty'" in fault and "no metric 'eval/loss'" in fault for fault in faults
    ] == [True]
    with pytest.raises(
        UserError, match=r"no experiment 'ours' at sqlite:.*there are: Default, theirs"
    ):
        read("ours", faults, arms=ARMS)
    with pytest.raises(UserError, match=r"^MLflow at sqlite:.*$"):
        read("theirs", faults, arms={"a": ["recipe is fp8"]})
