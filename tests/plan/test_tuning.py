"""Tuning as arms and runs: trials, arms at the values found, and what an earlier result may stand for."""

from dataclasses import replace

import pytest

from ablate.base.files import read_record, write_record
from ablate.plan import known_plan
from ablate.plan.tuning import trial_arms, trials_plan, tuned_plan
from ablate.store import StudyStore
from ablate.store.plan_file import TrialRecord, plan_to_json

STUDY = """\
name: s
baseline: a
target: {val_loss: 3.3}
seeds: 2
baseline_again: true
base: {training: {tokens: 400_000, learning_rate: 2.0e-3}}
arms:
  a: {recipe: bf16}
  b: {recipe: mxfp4}
  c: {recipe: fp8}
tune:
  fields: {learning_rate: {low: 5.0e-4, high: 1.6e-2, log: true}}
  tokens: 100_000
  trials: 3
"""
RATES = {"a": 2e-3, "b": 4e-3, "c": 1e-3}


def found(planned, rates=RATES):
    """Return the plan with these rates found."""
    trial = TrialRecord(
        number=0,
        values={"learning_rate": 2e-3},
        state="complete",
        loss=2.5,
        diverged=0,
        tokens=10,
        runs=("x",),
    )
    groups = []
    for group in planned.tuning.groups:
        chosen = {"learning_rate": rates[group.name]}
        groups.append(replace(group, trials=(trial,), chosen=chosen))
    return tuned_plan(planned, replace(planned.tuning, done=True, groups=tuple(groups)))


def test_arms_whose_values_changed_run_again_at_them_as_the_study_would_at_that_rate(
    plan,
):
    planned = found(plan(STUDY))
    names = [arm.name for arm in planned.arms]
    assert names == ["a", "b", "c", "a again", "b tuned", "c tuned"]
    assert list(planned.tuning.tuned.values()) == ["a", "b tuned", "c tuned", "a again"]
    tuned = planned.arm("b tuned")
    untuned = planned.arm("b").config.training
    assert tuned.config.training == replace(untuned, learning_rate=4e-3)
    assert tuned.differs["training.learning_rate"] == (2e-3, 4e-3)
    own = STUDY.split("tune:", maxsplit=1)[0].replace("rate: 2.0e-3", "rate: 4.0e-3")
    assert tuned.runs == plan(own).arm("b").runs != planned.arm("b").runs
    # A tuned baseline takes its second arm along.
    again = found(plan(STUDY), RATES | {"a": 1e-3}).arm("a again tuned")
    assert again.config.training.learning_rate == 1e-3
    assert [run.seed for run in again.runs] == [2, 3]


def test_trials_are_short_runs_at_seeds_of_their_own(plan):
    planned = plan("diagnostics: {}\n" + STUDY)
    tuning = planned.tuning
    first, second, _ = tuning.groups
    arms = trial_arms(planned, tuning, first, 0, {"learning_rate": 2e-3})
    arms += trial_arms(planned, tuning, second, 1, {"learning_rate": 9e-3})
    trials = trials_plan(planned, tuning, arms)
    assert (trials.study, trials.diagnostics) == ("s tune", None)
    assert [arm.name for arm in trials.arms] == ["a trial 0", "b trial 1"]
    assert trials.arms[1].config.training.tokens == 100_000
    assert trials.arms[1].differs["training.learning_rate"] == (2e-3, 9e-3)
    assert [run.seed for run in trials.arms[1].runs] == [1_000_000]


@pytest.fixture
def stored(plan, tmp_path):
    store = StudyStore(tmp_path / "s")
    store.path.mkdir()
    store.write_plan(found(plan(STUDY)))
    return store


@pytest.mark.parametrize(
    ("before", "after", "stale"),
    [
        ("name: s", "name: s", ""),
        ("tokens: 100_000", "tokens: 150_000", "abc"),
        ("trials: 3", "trials: 4", "all"),
        ("high: 1.6e-2", "high: 3.2e-2", "abc"),
        ("b: {recipe: mxfp4}", "b: {recipe: {gemms: [fprop]}}", "b"),
        ("seeds: 2", "seeds: 3", ""),
        (
            "seeds: 2",
            "seeds: [0, 1_000_000]",
            "abc",
        ),  # the trials' seed would be that of a run
        ("val_loss: 3.3", "val_loss: 3.2", ""),
        ("b: {recipe: mxfp4}", "b: {recipe: mxfp4, description: other words}", ""),
    ],
)
def test_what_was_found_is_known_again_of_the_same_search_alone(
    plan, stored, before, after, stale
):
    assert before in STUDY
    planned = plan(STUDY.replace(before, after))
    known = known_plan(planned, stored)
    assert known.tuning.done is not bool(stale)
    if stale != "all":  # else the ledgers of the groups go on
        known_groups = stored.plan().tuning.groups
        other = {
            group.name
            for group, known_group in zip(
                planned.tuning.groups, known_groups, strict=True
            )
            if group.fingerprint != known_group.fingerprint
        }
        assert other == {*stale}
    if before == after:
        assert plan_to_json(known) == plan_to_json(stored.plan())


@pytest.mark.parametrize(
    "damage", [{}, {"tuning": None}, {"tuning": {"groups": [{"name": "a"}]}}]
)
def test_a_damaged_lock_tells_nothing(plan, stored, damage):
    write_record(stored.plan_path, damage and read_record(stored.plan_path) | damage)
    assert not known_plan(plan(STUDY), stored).tuning.done
