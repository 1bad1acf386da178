"""The search with trials that are runs of a store: what counts, what is stopped, and what is gone on with."""

from __future__ import annotations

import math
from dataclasses import asdict, replace

import pytest

from ablate.base.files import append_line
from ablate.data import DataIdentity
from ablate.execute.queue import ExecutionEnd
from ablate.plan import build_plan
from ablate.search.engine import TrialRuns
from ablate.search.tune import tune_arms
from ablate.store import Status, StudyStore
from ablate.study import load_study

STUDY = """\
name: small
baseline: bf16
target: {val_loss: 2.0}
base: {training: {tokens: 400_000, learning_rate: 2.0e-3, eval_every_tokens: 25_000}}
arms:
  bf16: {recipe: bf16}
  fp8: {recipe: fp8}
tune:
  fields: {learning_rate: {low: 5.0e-4, high: 1.6e-2, log: true}}
  tokens: 200_000
  trials: 6
"""
BEST = {"bf16": 2e-3, "fp8": 8e-3}


class Executor:
    """Runs in the place of Ray: writes what a trainer would, and asks after each evaluation who is needed."""

    def __init__(self, store):
        self.store, self.ran = store, []
        self.end = lambda _run: "finished"

    def __call__(self, todo, unneeded):
        for run in todo:
            self.ran.append(run)
            folder = self.store.run(run.run_id)
            folder.create(asdict(run.config))
            octaves = math.log2(run.config.training.learning_rate / BEST[run.arm.partition(" ")[0]])
            state, tokens = self.end(run), 0
            for tokens in range(25_000, 200_001, 25_000) if state == "finished" else ():
                loss = 2 + 0.1 * octaves**2 + 3 * math.exp(-tokens / 60_000)
                row = {"kind": "eval", "tokens": tokens, "step": 1, "val_loss": loss}
                append_line(folder.metrics_path, row)
                if run.run_id in unneeded():
                    state = "stopped"
                    break
            folder.write_status(Status(state=state, attempt=1, tokens=tokens))
        return ExecutionEnd(states={}, interrupted=False)


@pytest.fixture
def searching(tmp_path):
    (tmp_path / "study.yaml").write_text(STUDY)
    study = load_study(tmp_path / "study.yaml")

    def make(name="storage", **change):
        plan = build_plan(
            replace(study, tune=replace(study.tune, **change)),
            lambda _: DataIdentity(digest="d", vocab_size=256, num_bytes=1),
        )
        store = StudyStore(tmp_path / name / "small tune")
        executor = Executor(store)

        def call(**options):
            runs = TrialRuns(store=store, corpora={}, execute=executor, **options)
            return tune_arms(plan, plan.tuning, runs)

        return call, executor

    return make


def test_each_arm_gets_its_own_rate(searching):
    call, executor = searching()
    found, open_runs = call()
    assert (found.done, open_runs) == (True, set())
    assert len(executor.ran) == len({run.run_id for run in executor.ran}) == 12
    lock = executor.store.plan()
    assert [arm.name for arm in lock.arms][:3] == ["bf16 trial 0", "bf16 trial 1", "bf16 trial 2"]
    pruned = []
    first, second = ([trial.values for trial in group.trials[:4]] for group in found.groups)
    assert first == second  # spread over the space, after the study's own
    for group in found.groups:
        assert group.trials[0].values == group.shared
        assert BEST[group.name] / 1.5 < group.chosen["learning_rate"] < BEST[group.name] * 1.5
        assert len(group.trials) == 6
        pruned += [trial for trial in group.trials if trial.state == "pruned"]
    assert pruned  # stopped, and counted as far as it was trained
    for trial in pruned:
        assert trial.loss is None
        assert 0 < trial.tokens < 200_000
        assert executor.store.run(trial.runs[0]).state() == "stopped"


@pytest.mark.parametrize("limit", [5e-3, 0])
def test_a_run_that_diverged_counts_at_the_bound_and_is_never_chosen(searching, limit):
    call, executor = searching()
    executor.end = lambda run: "diverged" if run.config.training.learning_rate > limit else "finished"
    for group in call()[0].groups:
        assert group.chosen["learning_rate"] <= (limit or 2e-3)  # the study's own where all diverged
        assert {trial.loss for trial in group.trials if trial.diverged} == {1.5 * math.log(256)}


def test_a_failed_run_ends_the_search_until_it_is_tried_again(searching):
    call, executor = searching()
    executor.end = lambda run: "failed" if run.arm == "fp8 trial 1" else "finished"
    found, open_runs = call()
    assert not found.done
    assert open_runs == {run.run_id for run in executor.ran}  # a round is told as a whole
    again, _ = call()
    assert len(executor.ran) == 4
    executor.end = lambda _run: "finished"
    assert not again.done
    assert call(retry_failed=True)[0].done


def test_the_mean_over_seeds_and_arms_counts(searching):
    call, executor = searching(seeds=(7, 8), trials=2)
    both = replace(call()[0].groups[0], name="both", arms=("bf16", "fp8"), trials=(), chosen=None)
    assert {run.config.seed for run in executor.ran} == {7, 8}
    call, executor = searching("together", groups=(both,), trials=4, prune=False)
    (group,) = call()[0].groups
    runs = (executor.store.run(run_id) for run_id in group.trials[0].runs)
    losses = [list(run.metrics())[-1]["val_loss"] for run in runs]
    assert group.trials[0].loss == pytest.approx(sum(losses) / 2)
    assert len(set(losses)) == 2
    assert 2e-3 < group.chosen["learning_rate"] < 8e-3
