"""``ablate run`` of a study that tunes its arms, with real runs under Ray; killed on the way and resumed."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from ablate.store import StudyStore

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


def start(folder, storage, *words):
    return subprocess.Popen(
        [sys.executable, "-m", "ablate", *words], cwd=folder, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, env=os.environ | {"ABLATE_STORAGE": storage}, process_group=0,
    )  # fmt: skip


def ablate(folder, storage, *words):
    process = start(folder, storage, *words)
    output, _ = process.communicate(timeout=400)
    return process.returncode, output


def tuning_of(folder, storage):
    """Return what the search came to: what it tried, how that ended, what it chose."""
    lock = StudyStore(folder / storage / "small").plan()
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


def ended(folder, storage):
    """Count the trials' runs that have ended."""
    files = (folder / storage / "small tune" / "runs").glob("*/status.json")
    return sum(json.loads(path.read_text())["state"] == "finished" for path in files)


def test_tuned_killed_and_resumed(folder):
    code, output = ablate(folder, "whole", "run", "small.yaml")
    assert code == 0, output
    assert "Tuning 2 groups of arms, 3 trials of 8,192 tokens each." in output
    lock = StudyStore(folder / "whole" / "small").plan()
    assert lock.tuning.done
    assert all(len(group.trials) == 3 for group in lock.tuning.groups)
    report = json.loads((folder / "whole" / "small" / "report" / "report.json").read_text())
    assert report["runs_missing"] == 0
    assert report["baseline"] == lock.tuning.tuned["bf16"]

    for count in (1, 4):  # in the first round, and in the second
        process = start(folder, "killed", "run", "small.yaml")
        end = time.monotonic() + 300
        while ended(folder, "killed") < count:
            assert process.poll() is None
            assert time.monotonic() < end
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        for lock_file in (folder / "killed" / "small tune").glob("optuna.log.lock*"):
            lock_file.unlink()  # Optuna breaks it after 30 s: not waited for here
    code, output = ablate(folder, "killed", "run", "small.yaml")
    assert code == 0, output
    assert tuning_of(folder, "killed") == tuning_of(folder, "whole")

    code, output = ablate(folder, "whole", "run", "small.yaml")
    assert code == 0, output
    assert "Tuning" not in output  # found before
    assert "0 to run" in output
    code, output = ablate(folder, "whole", "status", "small")
    assert "small tune: " in output
    code, output = ablate(folder, "whole", "plan", "small.yaml")
    assert "3 trials of 8,192 tokens for each of 2 groups, by tpe" in output
