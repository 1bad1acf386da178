"""The search before the seeds: what is tried, what is found, and that a kill changes neither."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import optuna
import pytest

sys.path.insert(0, str(Path(__file__).parent))
import trainer
from trainer import BEST, SHARED, groups, ledger_of, outcome, run_all, settings

from ablate.search.ledger import open_storage
from ablate.search.pick import best_trial
from ablate.search.tune import Came, search
from ablate.study.space import Choices, Range, combinations, spread_point


@pytest.fixture
def found(tmp_path):
    searched = groups(open_storage(None, tmp_path))
    assert search(searched, settings(), run_all)
    return searched


def test_each_group_finds_its_own_rate(found):
    for group in found:
        best = best_trial(group.ledger.trials())
        assert BEST[group.name] / 1.4 < best.params["learning_rate"] < BEST[group.name] * 1.4


def test_all_groups_have_as_many_trials_and_begin_with_the_studys_own(found):
    for group in found:
        trials = group.ledger.trials()
        assert [trial.number for trial in trials] == list(range(7))
        assert trials[0].params == SHARED
        assert len({trial.params["learning_rate"] for trial in trials}) == 7
        assert all(trial.state in ("complete", "pruned") for trial in trials)
    first, second = ([trial.params for trial in group.ledger.trials()[:4]] for group in found)
    assert first == second  # the points that are spread over the space can be laid side by side


def test_a_round_is_of_the_specs_size_and_runs_all_groups_together(tmp_path):
    sizes = []

    def run(asked, is_hopeless):
        sizes.append([one.key for one in asked])
        return run_all(asked, is_hopeless)

    assert search(groups(open_storage(None, tmp_path)), settings(at_once=3), run)
    assert [len(keys) for keys in sizes] == [6, 6, 2]


def test_pruning_does_not_depend_on_when_the_runner_looks(found, tmp_path):
    late = groups(open_storage(None, tmp_path / "late"))
    assert search(late, settings(), lambda *arguments: run_all(*arguments, look=False))
    assert ledger_of(late) == ledger_of(found)
    assert any(trial.state == "pruned" for group in found for trial in group.ledger.trials())


def test_without_pruning_every_trial_is_complete(tmp_path):
    searched = groups(open_storage(None, tmp_path))
    assert search(searched, settings(prune=False), run_all)
    assert {trial.state for group in searched for trial in group.ledger.trials()} == {"complete"}


def test_what_is_interrupted_is_gone_on_with(found, tmp_path):
    """Whichever trial a batch comes back without, the next call runs it again; the ledger ends the same."""
    broken = groups(open_storage(None, tmp_path / "broken"))
    for lost in range(20):
        asked_before = []

        def run(asked, is_hopeless, lost=lost, asked_before=asked_before):
            asked_before += asked
            came = run_all(asked, is_hopeless)
            if len(asked_before) > lost:
                came.pop(asked[lost % len(asked)].key, None)
            return came

        if search(broken, settings(), run):
            break
    assert ledger_of(broken) == ledger_of(found)


def test_more_trials_go_on_from_those_that_are_there(found, tmp_path):
    whole = groups(open_storage(None, tmp_path / "whole"))
    assert search(whole, settings(trials=10), run_all)
    asked = []

    def run(batch, is_hopeless):
        asked.extend(batch)
        return run_all(batch, is_hopeless)

    assert search(found, settings(trials=10), run)
    assert len(asked) == 6
    assert ledger_of(whole) == ledger_of(found)


def test_a_trial_that_diverged_is_never_chosen(tmp_path):
    searched = groups(open_storage(None, tmp_path), ["fp4"])

    def run(asked, is_hopeless):
        came = {}
        for one in asked:
            diverged = one.values["learning_rate"] > 4e-3
            one_came = outcome(one, is_hopeless)
            came[one.key] = Came(curve={}, loss=8.3, diverged=1) if diverged else one_came
        return came

    assert search(searched, settings(), run)
    trials = searched[0].ledger.trials()
    assert any(trial.violation for trial in trials)
    assert best_trial(trials).params["learning_rate"] <= 4e-3
    assert best_trial([trial for trial in trials if trial.violation]) is None


def test_a_grid_takes_every_combination_once(tmp_path):
    space = {"learning_rate": Choices(values=(1e-3, 2e-3, 4e-3)), "weight_decay": Choices(values=(0.0, 0.1))}
    searched = groups(open_storage(None, tmp_path), ["fp4"])
    shared = SHARED | {"weight_decay": 0.1}
    searched = [
        trainer.SearchGroup(name="fp4", ledger=searched[0].ledger, shared=shared, runs_of=lambda _: ["x"])
    ]
    assert search(searched, settings(space=space, sampler="grid", trials=6), run_all)
    tried = [trial.params for trial in searched[0].ledger.trials()]
    assert tried[0] == shared
    assert sorted(map(repr, tried)) == sorted(map(repr, combinations(space)))


def test_a_small_space_is_tried_without_repeating(tmp_path):
    space = {"learning_rate": Choices(values=(1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2))}
    searched = groups(open_storage(None, tmp_path), ["fp4"])
    assert search(searched, settings(space=space, trials=5, prune=False), run_all)
    assert len({trial.params["learning_rate"] for trial in searched[0].ledger.trials()}) == 5


def test_points_are_spread_over_the_whole_space():
    space = {"rate": Range(low=1e-4, high=1e-2, log=True), "warmup": Range(low=0, high=1000, whole=True)}
    points = [spread_point(space, n) for n in range(1, 9)]
    assert points[0] == {"rate": 1e-3, "warmup": 333}
    assert {sum(point["rate"] > edge for edge in (3.2e-4, 1e-3, 3.2e-3)) for point in points} == {0, 1, 2, 3}
    assert all(type(point["warmup"]) is int and 0 <= point["warmup"] <= 1000 for point in points)


def test_several_fields_are_searched_together(tmp_path):
    space = {
        "learning_rate": Range(low=5e-4, high=1.6e-2, log=True),
        "weight_decay": Choices(values=(0.0, 0.1)),
    }
    searched = groups(open_storage(None, tmp_path), ["fp4"])
    shared = SHARED | {"weight_decay": 0.1}
    searched = [
        trainer.SearchGroup(name="fp4", ledger=searched[0].ledger, shared=shared, runs_of=lambda _: ["x"])
    ]
    assert search(searched, settings(space=space, trials=12), run_all)
    assert len({repr(trial.params) for trial in searched[0].ledger.trials()}) == 12


def killed(folder, operation):
    done = subprocess.run(
        [sys.executable, str(Path(trainer.__file__)), str(folder), str(operation)],
        capture_output=True, text=True, check=False, env=os.environ | {"PYTHONHASHSEED": str(operation)},
    )  # fmt: skip
    return done.returncode, done.stdout


@pytest.mark.parametrize("first", [1, 9, 26, 57, 90])
def test_killed_and_resumed_it_is_the_same(found, tmp_path, first):
    """Killed at a write to the storage, again and again at later ones, the ledger ends as if nothing was."""
    for turn in range(4):
        code, output = killed(tmp_path / "killed", first + 31 * turn)
        if code == 0:
            break
        assert code == -9
        # A lock that a killed process leaves behind is broken by Optuna after 30 s: not waited for here.
        for lock in (tmp_path / "killed").glob("optuna.log.lock*"):
            lock.unlink()
    else:
        code, output = killed(tmp_path / "killed", 0)
    assert code == 0
    assert turn > 0
    assert json.loads(output) == json.loads(json.dumps(ledger_of(found)))
    ran = (tmp_path / "killed" / "ran.txt").read_text().split()
    assert len(ran) <= 14 + 4  # what was killed in the middle is run again, nothing else


def test_it_can_be_watched_from_another_process(found, tmp_path):
    storage = open_storage(None, tmp_path)
    assert set(optuna.get_all_study_names(storage)) == set(BEST)
