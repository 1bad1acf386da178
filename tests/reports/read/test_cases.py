"""Logs in the forms that people have (``cases`` of the shared data): each is read as its truth says."""

import csv
import json
import shlex
from collections import defaultdict

import pytest
from click.testing import CliRunner

from ablate.cli.import_ import command
from ablate.store import StudyStore
from tests.golden import rows_of

STEPS = "--tokens-per-step 1"
ARMS = ("base", "fp4")
CASES = r"""
blank-nan               | csv        | step    | --columns tokens=step
blank-None              | csv        | step    | --columns tokens=step
blank-NA                | csv        | step    | --columns tokens=step
blank-dash              | csv        | step    | --columns tokens=step
blank-empty             | csv        | step    | --columns tokens=step
stale-nemo              | nemo       | step    | --tokens-per-step 1
stale-nemo              | text       | step    | --tokens-per-step 1 --pattern 'global_step: (?P<step>\d+) .*val_loss: (?P<val_loss>\S+)'
megatron-batch-schedule | megatron   | samples | --tokens-per-sample 1
megatron-batch-schedule | megatron   | samples | --tokens-per-step 1 --tokens-per-sample 1
hf                      | hf         | step    | --tokens-per-step 1
olmo                    | olmo       | tokens  |
torchtitan-colours      | torchtitan | step    | --tokens-per-step 1
resumed                 | nanogpt    | step    | --tokens-per-step 1
resumed                 | text       | step    | --tokens-per-step 1 --pattern 'step (?P<step>\d+): .* val loss (?P<val_loss>\S+)'
nanogpt                 | nanogpt    | step    | --tokens-per-step 1
nanogpt-utf16           | nanogpt    | step    | --tokens-per-step 1
nanochat-bpb            | nanochat   | step    | --tokens-per-step 1
mllog-train-samples     | mllog      | samples | --tokens-per-sample 1
"""  # noqa: E501  the rows of the cases are lines


def imported(folder, kind, places, words=""):
    """What the command says, its exit code, and by arm and seed the state and evaluations of each run."""
    arms = [f"--arm={arm}={place}" for arm, place in places.items()]
    study = ["--study=s", f"--baseline={next(iter(places))}", f"--storage={folder}"]
    ended = CliRunner().invoke(command, [kind, *arms, *study, *shlex.split(words)])
    store = StudyStore(folder / "s")
    runs = {}
    if not store.plan_path.exists():
        return ended, runs
    for arm in store.plan().arms:
        for run in arm.runs:
            run_dir = store.run(run.id)
            evals = []
            for line in run_dir.metrics_path.read_text().splitlines():
                row = json.loads(line)
                if row["kind"] == "eval":
                    evals.append((row["tokens"], row["val_loss"]))
            runs[arm.name, run.seed] = run_dir.status().state, evals
    return ended, runs


def truth(case, place):
    rows = defaultdict(list)
    with (case / "truth.csv").open() as file:
        for row in csv.DictReader(file):
            rows[row["arm"], int(row["seed"] or 0)].append(
                (int(row[place]), float(row["val_loss"]))
            )
    return rows


@pytest.mark.parametrize(("name", "kind", "place", "words"), rows_of(CASES))
def test_a_log_is_read_as_its_truth_says(
    tmp_path, shared_data, name, kind, place, words
):
    case = shared_data / "cases" / name
    places = {arm: f"{case}/{arm}*" for arm in ARMS}
    ended, runs = imported(tmp_path, kind, places, words)
    assert ended.exit_code == 0, ended.output
    assert {key: evals for key, (_, evals) in runs.items()} == truth(case, place)


@pytest.mark.parametrize(
    ("name", "kind", "files", "sets"),
    [
        ("hf-two-sets", "hf", "{arm}-*", {"web": "web", "code": "code"}),
        (
            "megatron-two-sets",
            "megatron",
            "run.log",
            {"validation-0": "validation-0", "1": "validation-1"},
        ),
    ],
)
def test_of_several_evaluation_sets_one_must_be_named(
    tmp_path, shared_data, name, kind, files, sets
):
    case = shared_data / "cases" / name
    arms = ARMS if "{arm}" in files else ("run",)
    places = {arm: f"{case}/{files.format(arm=arm)}" for arm in arms}
    ended, _ = imported(tmp_path, kind, places, STEPS)
    assert "its evaluations are on several sets" in str(ended.exception)
    expected = truth(case, "step")
    for named, of_truth in sets.items():
        _, runs = imported(tmp_path, kind, places, f"{STEPS} --set {named}")
        for (arm, seed), (_, evals) in runs.items():
            name_in_truth = f"{arm} {of_truth}" if len(arms) > 1 else of_truth
            assert evals == expected[name_in_truth, seed]
        assert {arm for arm, _ in runs} == {*arms}


def test_a_run_whose_gradient_is_no_number_has_diverged(tmp_path, shared_data):
    places = {"run": shared_data / "cases" / "megatron-nan" / "run.log"}
    _, runs = imported(tmp_path, "megatron", places, STEPS)
    assert runs == {("run", 0): ("diverged", [(10, 5.384048)])}


@pytest.mark.parametrize(
    ("name", "kind", "words", "said"),
    [
        (
            "megatron-batch-schedule",
            "megatron",
            STEPS,
            "its batch grows from 8 to 24 samples: give --tokens-",
        ),
        (
            "stale-nemo",
            "nemo",
            "",
            "steps are counted: give --tokens-per-step or --tokens-per-sample",
        ),
    ],
)
def test_what_can_be_read_in_two_ways_is_refused(
    tmp_path, shared_data, name, kind, words, said
):
    places = {arm: f"{shared_data / 'cases' / name}/{arm}*" for arm in ARMS}
    ended, _ = imported(tmp_path, kind, places, words)
    assert said in str(ended.exception)


def test_a_grouped_chart_is_refused(tmp_path, shared_data):
    chart = shared_data / "cases" / "wandb-grouped" / "chart.csv"
    ended, _ = imported(tmp_path, "wandb-export", {"a": "*"}, str(chart))
    said = "'recipe: base' is a mean of values from 4.22439 to 4.23386"
    assert said in str(ended.exception)
