"""The engine over both spaces: rounds, and that neither a kill nor an interruption changes what is tried."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import optuna
import pytest
from made_up import SEARCHES, go_grid, go_rates, groups, halving, train_all, truth

from ablate.search.engine import TrialResult, search
from ablate.search.halving import search_grid
from ablate.search.ledger import JOURNAL, open_storage
from ablate.search.spaces import candidate_of

BOTH = pytest.mark.parametrize("go", SEARCHES.values(), ids=SEARCHES)


def in_memory():
    return optuna.storages.InMemoryStorage()


@pytest.fixture(scope="module")
def whole():
    """What each search comes to when nothing happens."""
    return {go: go(in_memory()) for go in SEARCHES.values()}


WRITES = (
    "create_new_trial", "set_trial_intermediate_value", "set_trial_state_values", "set_trial_user_attr",
)  # fmt: skip


def dies(go, whole, at):
    """Tell whether a search that ends before a write to its storage gets there, and loses nothing."""
    storage = in_memory()
    count = itertools.count(1)

    def ending(write):
        def call(*args, **kwargs):
            if next(count) == at:
                raise KeyboardInterrupt
            return write(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in WRITES:
            patch.setattr(storage, name, ending(getattr(storage, name)))
        try:
            go(storage)
        except KeyboardInterrupt:
            pass
        else:
            return False
    assert go(storage) == whole[go]
    return True


@BOTH
@pytest.mark.parametrize("at", [1, 17, 60])
def test_a_search_that_ends_at_a_write_loses_nothing(go, whole, at):
    assert dies(go, whole, at)


@pytest.mark.exhaustive
@BOTH
def test_a_search_that_ends_at_any_third_write_loses_nothing(go, whole):
    survived = list(itertools.takewhile(lambda at: dies(go, whole, at), itertools.count(2, 3)))
    assert len(survived) > 20


@BOTH
@pytest.mark.parametrize("after", [0, 1, 3])
def test_an_interruption_in_a_round_leaves_it_open(go, whole, tmp_path, after):
    def interrupted(run):
        count = itertools.count()

        def call(asked):
            if next(count) == after:
                raise KeyboardInterrupt
            return run(asked)

        return call

    with pytest.raises(KeyboardInterrupt):
        go(open_storage(None, tmp_path), interrupted)
    assert go(open_storage(None, tmp_path)) == whole[go]


@BOTH
def test_a_trial_without_an_end_is_run_again(go, whole):
    """Whichever trial a round comes back without, none of the round is told, and the next call goes on."""
    storage = in_memory()
    for lost in range(30):
        asked_before = []

        def losing(run, lost=lost, asked_before=asked_before):
            def call(asked):
                asked_before.extend(asked)
                results = run(asked)
                if len(asked_before) > lost:
                    results[lost % len(asked)] = None
                return results

            return call

        ledgers = go(storage, losing)
        if ledgers == whole[go]:
            break
        states = [trial[3] for trials in ledgers for trial in trials if trial[2]["round"] == _last(trials)]
        assert "RUNNING" in states
    assert go(storage) == whole[go]


def _last(trials):
    return max(trial[2]["round"] for trial in trials)


@pytest.mark.exhaustive
@BOTH
def test_a_search_goes_on_in_every_storage(go, opens):
    expected = go(in_memory(), trials=6)
    batches = []

    def interrupted(run):
        def call(asked):
            batches.append([one.trial for one in asked])
            if len(batches) == 2:
                raise KeyboardInterrupt
            return run(asked)

        return call

    with pytest.raises(KeyboardInterrupt):
        go(opens(), interrupted, trials=6)
    assert go(opens(), interrupted, trials=6) == expected
    assert batches[1] == batches[2]  # the open round again, and no other
    count = len(batches)
    assert go(opens(), interrupted, trials=6) == expected
    assert len(batches) == count  # what was told is not run again


def killed(name, folder, operation):
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "killed_search.py"), name, str(folder), str(operation)],
        capture_output=True, text=True, check=False, env=os.environ | {"PYTHONHASHSEED": str(operation)},
    )  # fmt: skip
    return done.returncode, done.stdout


def check_kills(go, whole, folder, first, step):
    """Be killed at a write to the journal and again at a later one: the ledgers are as if nothing was."""
    folder.mkdir()
    name = next(name for name in SEARCHES if SEARCHES[name] is go)
    kills = 0
    for operation in (first, first + step, 0):
        code, output = killed(name, folder, operation)
        if code == 0:
            break
        assert code == -9
        kills += 1
        # A lock that a killed process leaves behind is broken by Optuna after 30 s: not waited for here.
        for lock in folder.glob("optuna.log.lock*"):
            lock.unlink()
    assert kills > 0
    assert json.loads(output) == whole[go]
    ran = (folder / "ran.txt").read_text().splitlines()
    assert len(set(ran)) == sum(map(len, whole[go]))
    assert len(ran) <= len(set(ran)) + 4 * kills  # what was killed in the middle is run again, nothing else


@pytest.mark.exhaustive
@BOTH
@pytest.mark.parametrize("first", [1, 4, 9, 14, 26, 39, 57, 70])
def test_killed_anywhere_and_resumed_it_is_the_same(go, whole, tmp_path, first):
    check_kills(go, whole, tmp_path / "killed", first, 43)


def test_a_round_is_of_its_size_and_runs_all_groups_together(tmp_path):
    sizes = []

    def run(asked):
        sizes.append([(one.group.name, one.trial.number) for one in asked])
        return train_all(asked)

    assert search(groups(open_storage(None, tmp_path)), 3, run)
    assert [len(keys) for keys in sizes] == [6, 6, 2]
    # It can be watched from another process.
    assert set(optuna.get_all_study_names(open_storage(None, tmp_path))) == {"baseline", "fp4"}


def test_pruning_does_not_depend_on_when_the_runner_looks(whole):
    late = go_rates(in_memory(), lambda run: lambda asked: run(asked, look=False))
    assert late == whole[go_rates]
    assert any(trial[3] == "PRUNED" for trials in late for trial in trials)


def test_a_pruned_trial_needs_no_values_and_no_other_goes_without():
    storage = in_memory()
    assert not search(groups(storage), 2, lambda asked: [TrialResult() for _ in asked])
    assert {t.state.name for group in groups(storage) for t in group.ledger.trials()} == {"RUNNING"}


def test_more_trials_go_on_from_those_that_are_there():
    storage = in_memory()
    go_rates(storage)
    asked = []

    def logged(run):
        return lambda batch: asked.extend(batch) or run(batch)

    assert go_rates(storage, logged, trials=10) == go_rates(in_memory(), trials=10)
    assert len(asked) == 6


def test_more_trials_of_a_grid_go_on_at_every_budget():
    storage = in_memory()
    go_grid(storage, trials=14)  # TPE picks half of its last round
    grown, whole = go_grid(storage, trials=20), go_grid(in_memory(), trials=20)
    assert grown[0] == whole[0]
    again, expected = ([trial[2]["candidate"] for trial in found[1]] for found in (grown, whole))
    assert len(set(again)) == len(again)
    assert set(again) >= set(expected)


def test_a_ledger_says_what_the_search_is_told_to_say():
    storage = in_memory()
    plan = halving(budgets=(100, 300), trials=5)
    search_grid(plan, storage, truth, lambda budget, name: {"runs": [f"{name} at {budget}"]})
    first, second = plan.read(storage)
    assert first[0].user_attrs == {
        "runs": ["named0 at 100"], "tokens": 100, "started_from": True, "round": 0, "position": 0,
        "candidate": "named0",
    }  # fmt: skip
    assert second[0].user_attrs["tokens"] == 300
    assert "started_from" not in first[1].user_attrs | second[0].user_attrs
    assert candidate_of(second[0]) == "named0"


@BOTH
def test_a_search_that_an_earlier_version_began_goes_on(go, whole, tmp_path):
    """Its journals: killed in the second round, of which no trial had been told."""
    name = next(name for name in SEARCHES if SEARCHES[name] is go)
    shutil.copy(Path(__file__).parent / "begun" / f"{name}.log", tmp_path / JOURNAL)
    run = []

    def logged(real):
        return lambda asked: run.extend(asked) or real(asked)

    assert go(open_storage(None, tmp_path), logged) == whole[go]
    assert len(run) == sum(map(len, whole[go])) - 4  # what was told is not run again
