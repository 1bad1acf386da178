"""A grid as a space: every recipe once, and only factors that mean something for it."""

from __future__ import annotations

import itertools

import optuna
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_up import grid_space, halving, truth
from optuna.trial import TrialState, create_trial

from ablate.search.halving import search_grid, short_tokens
from ablate.search.spaces import Candidate, Grid, candidate_of


@st.composite
def spaces(draw):
    """A grid of up to three factors; cells are folded at random, some are dropped, some arms have no cell."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    factors = {f"f{i}": tuple(f"{i}{label}" for label in range(size)) for i, size in enumerate(sizes)}
    cells = [dict(zip(factors, labels, strict=True)) for labels in itertools.product(*factors.values())]
    homes = draw(st.lists(st.integers(-1, len(cells)), min_size=len(cells), max_size=len(cells)))
    folded: dict[int, list[dict[str, str]]] = {}
    for cell, home in zip(cells, homes, strict=True):
        if home >= 0:
            folded.setdefault(home, []).append(cell)
    named = tuple(Candidate(name=f"named{i}") for i in range(draw(st.integers(1, 2))))
    own = tuple(Candidate(name=f"c{home}", cells=tuple(cells)) for home, cells in folded.items())
    return Grid(
        factors=factors,
        candidates=(*named, *own),
        first=tuple(one.name for one in named),
        sampler=draw(st.sampled_from(["tpe", "random"])),
        seed=1,
    )


@settings(max_examples=40)
@given(spaces(), st.integers(1, 5), st.integers(1, 30))
def test_every_recipe_is_tried_at_most_once(space, at_once, trials):
    batches = []

    def run(asked):
        batches.append(asked)
        return truth(asked)

    wanted = halving(space, at_once=at_once, trials=max(trials, len(space.first)))
    storage = optuna.storages.InMemoryStorage()
    assert search_grid(wanted, storage, run)
    tried, second = wanted.read(storage)
    names = [candidate_of(trial) for trial in tried]
    assert len(set(names)) == len(names) == min(wanted.trials, len(space.candidates))
    assert names[: len(space.first)] == list(space.first)
    assert all(len(asked) <= at_once for asked in batches)
    assert sum(map(len, batches)) == len(tried) + len(second)
    again = [candidate_of(trial) for trial in second]
    assert len(set(again)) == len(again)
    assert set(again) <= set(names)
    assert again[0] == "named0"


@settings(max_examples=60)
@given(spaces(), st.randoms(use_true_random=False))
def test_a_walk_leads_to_a_recipe_or_where_the_grid_has_no_cell(space, random):
    asked = {}

    def choose(factor, labels):
        asked[factor] = random.choice(labels)
        return asked[factor]

    found = space.walk(choose)
    cells = {tuple(cell.values()): c for c in space.candidates for cell in c.cells}
    if found is None:
        left = [
            key
            for key in cells
            if all(dict(zip(space.factors, key, strict=True))[f] == v for f, v in asked.items())
        ]
        assert not left
    else:
        assert any(all(cell[f] == label for f, label in asked.items()) for cell in found.cells)


def test_every_cell_can_be_walked_to_also_where_only_two_factors_together_tell_candidates_apart():
    same, crossed = ([{"a": "0", "b": b}, {"a": "1", "b": c}] for b, c in ("01", "10"))
    candidates = (Candidate(name="same", cells=tuple(same)), Candidate(name="crossed", cells=tuple(crossed)))
    factors = {"a": ("0", "1"), "b": ("0", "1")}
    space = Grid(factors=factors, candidates=candidates, first=(), sampler="tpe", seed=1)
    for grid in (space, grid_space()):
        for candidate in grid.candidates:
            for cell in candidate.cells:
                assert grid.walk(lambda factor, _labels, cell=cell: cell[factor]) is candidate


def test_only_factors_that_mean_something_are_params():
    space = grid_space()
    assert space.by_name["named0"].levels == {"gemms": "no"}
    asked = []

    def choose(factor, _labels):
        asked.append(factor)
        return {"stab": "sr", "gemms": "no"}[factor]

    assert space.walk(choose).name == "named0"
    assert asked == ["stab", "gemms"]
    assert space.propose([], 0, 0).params == {"gemms": "no"}


@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_picks_of_one_round_differ_until_nothing_is_left(sampler):
    space = grid_space(sampler=sampler, first=())
    seen = []
    for position in range(len(space.candidates)):
        found = space.propose(seen, 0, position)
        seen.append(
            create_trial(
                state=TrialState.RUNNING,
                params=found.params,
                distributions={name: space.distributions[name] for name in found.params},
                user_attrs=found.attrs,
            )
        )
    assert {candidate_of(trial) for trial in seen} == set(space.by_name)


@pytest.mark.parametrize(
    ("tokens", "text"), [(100_000, "100k"), (2_000_000, "2M"), (520_192, "520192"), (10**9, "1B")]
)
def test_budgets_have_exact_names(tokens, text):
    assert short_tokens(tokens) == text
