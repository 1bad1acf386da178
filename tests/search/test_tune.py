"""The search with trials that are runs of a store: what counts, what is stopped, and what is gone on with."""

import math
from dataclasses import replace
from functools import partial

import pytest

from ablate.plan import build_plan
from ablate.search.engine import TrialRuns
from ablate.search.tune import tune_arms
from ablate.store import StudyStore
from ablate.study import load_study
from tests.plan.conftest import identify
from tests.workflow.fakes import BEST, Executor, loss_of_a_rate

STUDY = """\
name: small
baseline: bf16
target: {val_loss: 2.0}
base: {training: {tokens: 400_000, learning_rate: 2.0e-3, eval_every_tokens: 25_000}}
arms:
  bf16: {recipe: bf16}
  fp4: {recipe: mxfp4}
tune:
  fields: {learning_rate: {low: 5.0e-4, high: 1.6e-2, log: true}}
  tokens: 200_000
  trials: 6
"""


@pytest.fixture
def searching(tmp_path):
    (tmp_path / "study.yaml").write_text(STUDY)
    study = load_study(tmp_path / "study.yaml")

    def make(name="storage", **change):
        plan = build_plan(
            replace(study, tune=replace(study.tune, **change)),
            identify,
        )
        store = StudyStore(tmp_path / name / "small tune")
        executor = Executor()
        executor.loss, executor.looks = loss_of_a_rate, True

        def call(**options):
            runs = TrialRuns(
                store=store, corpora={}, execute=partial(executor, store), **options
            )
            return tune_arms(plan, plan.tuning, runs)

        return call, executor, store

    return make


def test_each_arm_gets_its_own_rate(searching):
    call, executor, store = searching()
    tuning, open_runs = call()
    assert (tuning.done, open_runs) == (True, set())
    assert len(executor.ran) == len(set(executor.ran)) == 12
    assert [arm.name for arm in store.plan().arms][:3] == [
        "bf16 trial 0",
        "bf16 trial 1",
        "bf16 trial 2",
    ]
    first, second = tuning.groups
    # spread over the space, after the study's own
    for trial, other in zip(first.trials[:4], second.trials[:4], strict=True):
        assert trial.values == other.values
    pruned = []
    for group in tuning.groups:
        assert group.trials[0].values == group.shared
        ratio = group.chosen["learning_rate"] / BEST[group.name]
        assert 1 / 1.5 < ratio < 1.5
        assert len(group.trials) == 6
        pruned += [trial for trial in group.trials if trial.state == "pruned"]
    assert pruned  # stopped, and counted as far as it was trained
    for trial in pruned:
        assert trial.loss is None
        assert 0 < trial.tokens < 200_000
        assert store.run(trial.runs[0]).state() == "stopped"


@pytest.mark.parametrize("limit", [5e-3, 0])
def test_a_run_that_diverged_counts_at_the_bound_and_is_never_chosen(searching, limit):
    call, executor, _ = searching()
    executor.end = lambda run: (
        "diverged" if run.config.training.learning_rate > limit else "finished"
    )
    for group in call()[0].groups:
        # the study's own where all diverged
        assert group.chosen["learning_rate"] <= (limit or 2e-3)
        assert {trial.loss for trial in group.trials if trial.diverged} == {
            1.5 * math.log(256)
        }


def test_a_failed_run_ends_the_search_until_it_is_tried_again(searching):
    call, executor, store = searching()
    executor.end = lambda run: "failed" if run.arm == "fp4 trial 1" else "finished"
    tuning, open_runs = call()
    assert not tuning.done
    # a round is told as a whole
    assert open_runs == {run.id for _, run in store.plan().runs()}
    again, _ = call()
    assert len(executor.ran) == 4
    executor.end = lambda _run: "finished"
    assert not again.done
    assert call(retry_failed=True)[0].done


def test_the_mean_over_seeds_and_arms_counts(searching):
    call, executor, store = searching(seeds=(7, 8), trials=2)
    group = call()[0].groups[0]
    assert {seed for _, seed in executor.ran} == {7, 8}
    both = replace(group, name="both", arms=("bf16", "fp4"), trials=(), chosen=None)
    call, executor, store = searching("together", groups=(both,), trials=4, prune=False)
    (group,) = call()[0].groups
    losses = set()
    for run_id in group.trials[0].runs:
        *_, last = store.run(run_id).metrics("eval")
        losses.add(last["val_loss"])
    assert len(losses) == 2
    assert group.trials[0].loss == pytest.approx(sum(losses) / 2)
    assert 2e-3 < group.chosen["learning_rate"] < 8e-3
