"""``ablate run`` of a study that tunes its arms, with real runs under Ray; killed on the way and resumed."""

import json
import os
import signal
import subprocess
import sys

import optuna
import pytest

from ablate.search.engine import TrialGroup, TrialResult, search
from ablate.search.ledger import Ledger
from ablate.search.spaces import Rates, best_trial
from ablate.store import StudyStore
from ablate.study import load_study
from tests.cli import command
from tests.waiting import wait_until

STUDY = """\
name: small
baseline: bf16
target: {val_loss: 3.0}
seeds: 1
tune:
  fields: {learning_rate: {low: 5.0e-4, high: 1.6e-2, log: true}}
  tokens: 8192
  trials: 3
base:
  model: {width: 32, layers: 1, heads: 2, ffn: 32}
  data: {source: stdlib, max_bytes: 200_000}
  training:
    tokens: 16_384
    seq_len: 64
    batch_size: 8
    learning_rate: 2.0e-3
    eval_every_tokens: 2048
    eval_tokens: 1024
arms:
  bf16: {recipe: bf16}
  fp4: {recipe: mxfp4}
"""


def start(folder, *words):
    return subprocess.Popen(
        [sys.executable, "-m", "ablate", *words], cwd=folder, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, env=os.environ | {"ABLATE_STORAGE": "runs"}, process_group=0,
    )  # fmt: skip


def tuning_of(folder):
    """Return what the search came to: what it tried, how that ended, what it chose."""
    lock = StudyStore(folder / "runs" / "small").plan()
    return [
        (
            group.name,
            group.chosen,
            [(one.number, one.values, one.state, one.loss) for one in group.trials],
        )
        for group in lock.tuning.groups
    ]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "small.yaml").write_text(STUDY)
    return tmp_path


def ended(folder):
    """Count the trials' runs that have ended."""
    files = (folder / "runs" / "small tune" / "runs").glob("*/status.json")
    return sum(json.loads(path.read_text())["state"] == "finished" for path in files)


def kill_at(folder, count):
    """Kill ``ablate run`` once so many runs of trials have ended."""
    process = start(folder, "run", "small.yaml")
    wait_until(lambda: ended(folder) >= count, process)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    for lock_file in (folder / "runs" / "small tune").glob("optuna.log.lock*"):
        lock_file.unlink()  # Optuna breaks it after 30 s: not waited for here


def searched_in_memory(folder):
    """Return what the search comes to without any kill, if its trials end as those in the lock did."""
    ends = {
        (group.name, one.number): TrialResult(values=(one.loss,), violation=float(one.diverged))
        for group in StudyStore(folder / "runs" / "small").plan().tuning.groups
        for one in group.trials
    }
    tune = load_study(folder / "small.yaml").tune
    space = Rates(
        fields=tune.fields, shared=tune.groups[0].shared, sampler="tpe", prune=True, tokens=tune.tokens,
        seed=tune.seeds[0],
    )  # fmt: skip
    memory = optuna.storages.InMemoryStorage()
    groups = [
        TrialGroup(name=group.name, ledger=Ledger(memory, group.name), space=space, num_trials=tune.trials,
              describe=lambda _: {})
        for group in tune.groups
    ]  # fmt: skip
    assert search(
        groups, tune.at_once, lambda asked: [ends[one.group.name, one.trial.number] for one in asked]
    )
    return [
        (
            group.name,
            best_trial(group.ledger.trials()).params,
            [(one.number, one.params, "complete", *one.values) for one in group.ledger.trials()],
        )
        for group in groups
    ]


@pytest.mark.exhaustive
def test_killed_in_two_rounds_it_is_tuned_as_without_a_kill_and_run(folder):
    for count in (1, 4):  # in the first round, and in the second
        kill_at(folder, count)
    process = start(folder, "run", "small.yaml")
    output, _ = process.communicate()
    assert process.returncode == 0, output
    assert "Tuning 2 groups of arms, 3 trials of 8,192 tokens each." in output
    assert tuning_of(folder) == searched_in_memory(folder)
    lock = StudyStore(folder / "runs" / "small").plan()
    assert lock.tuning.done
    assert all(len(group.trials) == 3 for group in lock.tuning.groups)
    report = json.loads((folder / "runs" / "small" / "report" / "report.json").read_text())
    assert report["runs_missing"] == 0
    assert report["baseline"] == lock.tuning.tuned["bf16"]

    def ablate(*words):
        done = command.ablate(*words, cwd=folder)
        assert done.code == 0, done
        return done.out

    output = ablate("run", "small.yaml")
    assert "Tuning" not in output  # found before
    assert "0 to run" in output
    assert "small tune: " in ablate("status", "small")
    assert "3 trials of 8,192 tokens for each of 2 groups, by tpe" in ablate("plan", "small.yaml")
