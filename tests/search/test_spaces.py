"""A grid: every recipe once, with the factors that mean something for it. Rates: no point twice."""

import optuna
import pytest

from ablate.search.engine import search
from ablate.search.halving import candidate_of, search_grid, short_tokens
from ablate.study.search_space import Choices, combinations
from tests.search.made_up import RATE, grid_space, groups, train_all, truth


@pytest.mark.parametrize("sampler", ["tpe", "random"])
@pytest.mark.parametrize(("at_once", "trials"), [(1, 3), (5, 60)])
def test_every_recipe_is_tried_at_most_once(sampler, at_once, trials):
    sizes = []

    def run(asked):
        sizes.append(len(asked))
        return truth(asked)

    space = grid_space(
        ("named0", "sr d even"), sampler=sampler, at_once=at_once, trials=trials
    )
    storage = optuna.storages.InMemoryStorage()
    search_grid(space, storage, run)
    first, second = (
        [candidate_of(trial) for trial in trials] for trials in space.read(storage)
    )
    assert len(set(first)) == len(first) == min(trials, len(space.cells))
    assert first[:2] == list(space.first)
    assert max(sizes) <= at_once
    assert sum(sizes) == len(first) + len(second)
    assert second[0] == "named0"
    assert len(set(second)) == len(second)
    assert set(second) <= set(first)


def test_only_factors_that_mean_something_are_params():
    space = grid_space(first=("named0", "sr d even"))
    assert space.propose([], 0).params == {"gemms": "no"}
    second = space.propose([space.propose([], 0)], 0)
    assert second.params == {"stab": "sr", "gemms": "d", "rule": "even"}
    assert (second.user_attrs, second.state.name) == (
        {"candidate": "sr d even"},
        "RUNNING",
    )


def test_tpe_takes_what_is_nearest_to_its_suggestion(monkeypatch):
    space = grid_space(first=())
    monkeypatch.setattr("ablate.search.halving.RANDOM_FIRST", 0)
    for wished, expected in (
        ({"stab": "sr", "gemms": "d", "rule": "even"}, {"sr d even"}),
        (
            {"stab": "rht", "gemms": "no", "rule": "floor"},
            {"named0"},
        ),  # one of its cells
    ):
        monkeypatch.setattr(
            "ablate.search.halving.suggestions",
            lambda *_args, wished=wished, **_: [wished],
        )
        assert {candidate_of(space.propose([], seed)) for seed in range(9)} == expected
    again = {
        candidate_of(space.propose([space.propose([], 0)], seed)) for seed in range(30)
    }
    assert again == {"rht f floor", "rht d floor", "rht w floor"}


@pytest.mark.parametrize(
    ("tokens", "text"),
    [(100_000, "100k"), (2_000_000, "2M"), (520_192, "520192"), (10**9, "1B")],
)
def test_budgets_have_exact_names(tokens, text):
    assert short_tokens(tokens) == text


# Rates


RATES = Choices(values=(1e-3, 2e-3, 4e-3))
DECAY = {"weight_decay": Choices(values=(0.0, 0.1))}


@pytest.mark.parametrize(
    ("fields", "sampler", "trials"),
    [
        ({"learning_rate": RATES} | DECAY, "grid", 6),
        ({"learning_rate": Choices(values=(*RATES.values, 8e-3, 1.6e-2))}, "tpe", 5),
        (RATE | DECAY, "tpe", 12),
    ],
)
def test_nothing_is_tried_twice_and_without_pruning_all_is_complete(
    fields, sampler, trials
):
    own = {"learning_rate": 2e-3, "weight_decay": 0.1}
    (group,) = groups(
        optuna.storages.InMemoryStorage(),
        names=["fp4"],
        fields=fields,
        shared={name: own[name] for name in fields},
        sampler=sampler,
        trials=trials,
        prune=False,
    )
    assert search([group], 2, train_all)
    ended = group.study.get_trials()
    tried = [repr(trial.params) for trial in ended]
    assert ended[0].params.items() <= own.items()
    assert len(set(tried)) == trials
    assert {trial.state.name for trial in ended} == {"COMPLETE"}
    if sampler == "grid":
        assert sorted(tried) == sorted(map(repr, combinations(fields)))
