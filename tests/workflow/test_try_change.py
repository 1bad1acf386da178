"""``ablate try``: a command on real Ray, then what else may happen, without it."""

import json
import math
import random
import shutil
from types import SimpleNamespace

import pytest

from ablate.track.cursor import MirrorReport
from tests.cli.command import ablate
from tests.workflow.fakes import STUDY

TRAINER = """
import math, random, sys
from speed import SPEED
seed, steps, speed = int(sys.argv[1]), int(sys.argv[2]), float((sys.argv + [SPEED])[3])
own = random.Random(seed * speed).gauss(0, 0.01)
pace = speed * math.exp(random.Random(seed).gauss(0, 0.05) + own)
for step in range(5, steps + 1, 5):
    print(f"step {step} val {1.5 + 2 / (1 + pace * step / 20):.5f}")
"""
COMMAND = r"""
name: demo
baseline: as it is
target: {val_loss: 2.2}
seeds: 4
base:
  trainer:
    command: ["{python}", train.py, "{seed}", "{steps}", "{args}"]
    files: [speed.py]
    metrics: {patterns: ['step (?P<step>\d+) val (?P<val_loss>\S+)']}
  training: {tokens: 10_000, seq_len: 10, batch_size: 10}
arms:
  as it is: {}
  faster: {trainer: {args: ["1.3"]}}
"""


@pytest.mark.usefixtures("local_ray")
def test_a_command_is_tried_and_the_baseline_runs_once(tmp_path, monkeypatch):
    mirror = lambda _, uri: SimpleNamespace(tracking_uri=str(uri), stop=MirrorReport)  # noqa: E731
    monkeypatch.setattr("ablate.track.process.start_mirror", mirror)
    code = tmp_path / "code"
    code.mkdir()
    files = {"train.py": TRAINER, "speed.py": "SPEED = 1.0\n", "study.yaml": COMMAND}
    for name, text in files.items():
        (code / name).write_text(text)
    changed = shutil.copytree(code, tmp_path / "changed")

    def tried(*words):
        end = ablate("try study.yaml", *words, cwd=code, storage=tmp_path / "runs")
        return end.code, end.out

    keep = tried("--args", "1.3")
    assert keep[0] == 0
    assert "keep: token cost −2" in keep[1]
    # another source file than those that the study names, and a change in such a file alone
    (code / "other.py").write_text("# a comment\n")
    (changed / "other.py").write_text("SPEED = 2.0\n")
    (changed / "speed.py").write_text("from other import SPEED\nSPEED *= 0.4\n")
    discard = tried("--change", "../changed")
    assert discard[0] == 10
    assert (
        "2 to run, 0 of those asked for have ended before, 2 taken from demo try 1"
        in discard[1]
    )
    assert "Try 2 of this baseline" in discard[1]
    (changed / "other.py").write_text("SPEED = 2.5\n")
    number_3 = tried("--change", "../changed")
    assert number_3[0] in (10, 11)
    assert "Study demo try 3" in number_3[1]
    code_of_first, said = tried("--args", "1.3")
    assert code_of_first == 0
    assert keep[1].splitlines()[-2:] == said.splitlines()[-2:]
    assert "Ray" not in said


# ---- without Ray -----------------------------------------------------------------------------------------

TRIED = STUDY.replace("null", "{val_loss: 3.4}").replace("seeds: 2", "seeds: 6")


@pytest.fixture
def tried(executor, tmp_path):
    """Try a learning rate that makes runs reach each loss after ``factor`` of the baseline's tokens."""
    (tmp_path / "tiny.yaml").write_text(TRIED)

    def loss(run, tokens):
        seed = run.config.seed
        pace = random.Random(seed).gauss(0, 0.05)
        if run.arm != "bf16":
            own = random.Random(f"{seed} {run.arm}").gauss(0, 0.02)
            pace += own - math.log(run.config.training.learning_rate)
        return 6 - 0.3 * (math.log(tokens) + pace)

    executor.loss = loss

    def call(factor, *words):
        change = f"base.training.learning_rate={factor}"
        return ablate("try tiny.yaml --set", change, "--json", *words, cwd=tmp_path)

    return call


def test_each_decision_has_its_code_and_the_same_try_its_answer(tried, executor):
    kept = tried(0.8)
    assert (kept.code, json.loads(kept.out)["decision"]) == (0, "keep")
    first = json.loads(kept.out)
    assert first["cost"]["high"] < 0
    assert (first["seeds"], first["number"], first["level_in_loop"]) == (2, 1, 0.025)
    assert tried(1.3).code == 10
    assert tried(0.97).code == 11
    assert tried(0.97, "--margin", "10%").code == 0
    assert json.loads(tried(0.8, "--loop").out)["seeds"] == 3
    ran = len(executor.ran)
    assert tried(0.8).out == kept.out
    assert len(executor.ran) == ran


def test_an_interrupted_try_goes_on_and_a_failed_run_is_run_again(tried, executor):
    executor.stops_after = 3
    assert tried(0.8).code == 130
    executor.stops_after = 1_000_000
    executor.end = lambda run: "failed" if run.config.seed == 1 else "finished"
    failed = tried(0.8)
    assert failed.code == 1
    assert "seed 1: no such luck" in failed.err
    assert "try again with: ablate try tiny.yaml --set" in failed.err
    executor.end = lambda _: "finished"
    assert tried(0.8).code == 0
    assert executor.ran.count(("bf16", 0)) == 1
