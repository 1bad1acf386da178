"""Values of training as a space: the study's own first, spread points, no point twice, the best found."""

from __future__ import annotations

import optuna
from made_up import BEST, RATE, SHARED, groups, train, train_all

from ablate.search.engine import TrialResult, search
from ablate.search.ledger import violation
from ablate.search.spaces import best_trial
from ablate.study.search_space import Choices, combinations

RATES = Choices(values=(1e-3, 2e-3, 4e-3))


def searched(run=train_all, **changes):
    found = groups(optuna.storages.InMemoryStorage(), **changes)
    assert search(found, 2, run)
    return found


def test_each_group_finds_its_own_rate():
    for group in searched():
        best = best_trial(group.ledger.trials())
        assert BEST[group.name] / 1.4 < best.params["learning_rate"] < BEST[group.name] * 1.4


def test_all_groups_have_as_many_trials_and_begin_with_the_studys_own():
    found = searched()
    for group in found:
        trials = group.ledger.trials()
        assert [trial.number for trial in trials] == list(range(7))
        assert trials[0].params == SHARED
        assert len({trial.params["learning_rate"] for trial in trials}) == 7
        assert all(trial.state.name in ("COMPLETE", "PRUNED") for trial in trials)
    first, second = ([trial.params for trial in group.ledger.trials()[:4]] for group in found)
    assert first == second  # the points that are spread over the space can be laid side by side


def test_a_trial_that_diverged_is_never_chosen():
    def run(asked):
        return [
            TrialResult(values=(8.3,), violation=1.0)
            if one.trial.params["learning_rate"] > 4e-3
            else train(one)
            for one in asked
        ]

    (group,) = searched(run, names=["fp4"])
    trials = group.ledger.trials()
    assert any(violation(trial) for trial in trials)
    assert best_trial(trials).params["learning_rate"] <= 4e-3
    assert best_trial([trial for trial in trials if violation(trial)]) is None


def test_a_grid_takes_every_combination_once():
    fields = {"learning_rate": RATES, "weight_decay": Choices(values=(0.0, 0.1))}
    shared = SHARED | {"weight_decay": 0.1}
    (group,) = searched(names=["fp4"], fields=fields, shared=shared, sampler="grid", trials=6)
    tried = [trial.params for trial in group.ledger.trials()]
    assert tried[0] == shared
    assert sorted(map(repr, tried)) == sorted(map(repr, combinations(fields)))


def test_a_small_space_is_tried_without_repeating_and_without_pruning_every_trial_is_complete():
    fields = {"learning_rate": Choices(values=(*RATES.values, 8e-3, 1.6e-2))}
    (group,) = searched(names=["fp4"], fields=fields, trials=5, prune=False)
    trials = group.ledger.trials()
    assert len({trial.params["learning_rate"] for trial in trials}) == 5
    assert {trial.state.name for trial in trials} == {"COMPLETE"}


def test_several_fields_are_searched_together():
    fields = RATE | {"weight_decay": Choices(values=(0.0, 0.1))}
    (group,) = searched(names=["fp4"], fields=fields, shared=SHARED | {"weight_decay": 0.1}, trials=12)
    assert len({repr(trial.params) for trial in group.ledger.trials()}) == 12
