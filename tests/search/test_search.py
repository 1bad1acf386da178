"""A search over random spaces: every recipe once, the same after any interruption, fronts as defined."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import optuna
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ablate.search.candidates import Candidate, Space
from ablate.search.front import crowding, dominates, front, promoted
from ablate.search.ledger import Trial, open_storage
from ablate.search.propose import propose, seed_of
from ablate.search.search import DIVERGED, Plan, Result, candidate_of, read, search, short_tokens

HERE = Path(__file__).parent


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
    return Space(factors=factors, candidates=(*named, *own))


def value_of(name):
    """Return two objectives that look random and are the same every time."""
    return (seed_of("loss", name) % 1000 / 1000, seed_of("time", name) % 7 / 7)


def truth(batch):
    found = {}
    for name in batch.candidates:
        kind = seed_of("kind", name) % 9
        if kind == 0 and name != "named0":
            found[name] = Result(failed="a fault")
        elif kind == 1:
            found[name] = Result(values=(9.0, value_of(name)[1]), violation=DIVERGED)
        else:
            found[name] = Result(values=value_of(name))
    return found


def plan(space, **changes):
    first = tuple(c.name for c in space.candidates if c.name.startswith("named"))
    usual = {"trials": 60, "budgets": (100, 300), "keep": 0.4, "at_once": 3, "sampler": "tpe", "seed": 1}
    return Plan(name="s", space=space, first=first, **(usual | changes))


def facts(budgets):
    return [
        [(t.number, t.params, t.attrs, t.state, t.values, t.violation) for t in trials] for trials in budgets
    ]


def in_memory():
    return optuna.storages.InMemoryStorage()


@settings(max_examples=40, deadline=None)
@given(spaces(), st.integers(1, 5), st.integers(1, 30), st.sampled_from(["tpe", "random"]))
def test_every_recipe_is_tried_at_most_once(space, at_once, trials, sampler):
    first = sum(c.name.startswith("named") for c in space.candidates)
    batches = []

    def run(batch):
        batches.append(batch)
        return truth(batch)

    wanted = plan(space, at_once=at_once, trials=max(trials, first), sampler=sampler)
    tried, second = search(wanted, in_memory(), run)
    names = [candidate_of(trial) for trial in tried]
    assert len(set(names)) == len(names) == min(wanted.trials, len(space.candidates))
    assert names[:first] == list(wanted.first)
    assert all(len(batch.candidates) <= at_once for batch in batches)
    assert sum(len(batch.candidates) for batch in batches) == len(tried) + len(second)
    again = [candidate_of(trial) for trial in second]
    assert len(set(again)) == len(again)
    assert set(again) <= set(names)
    assert again[0] == "named0"


@settings(max_examples=60, deadline=None)
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


@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_every_candidate_with_a_cell_can_be_walked_to(sampler):
    space = grid_space()
    for candidate in space.candidates:
        for cell in candidate.cells:
            assert space.walk(lambda factor, _labels, cell=cell: cell[factor]) is candidate


def grid_space():
    """Stabiliser × GEMMs × rule, where without a GEMM all is one recipe: 1 + 3 × 4 × 2 candidates."""
    factors = {
        "stab": ("none", "sr", "rht", "dht"),
        "gemms": ("no", "f", "d", "w"),
        "rule": ("even", "floor"),
    }
    cells = [dict(zip(factors, labels, strict=True)) for labels in itertools.product(*factors.values())]
    high = Candidate(name="named0", cells=tuple(cell for cell in cells if cell["gemms"] == "no"))
    low = [Candidate(name=" ".join(c.values()), cells=(c,)) for c in cells if c["gemms"] != "no"]
    return Space(factors=factors, candidates=(high, *low))


def test_only_factors_that_mean_something_are_params():
    space = grid_space()
    assert space.by_name["named0"].levels == {"gemms": "no"}
    asked = []

    def choose(factor, _labels):
        asked.append(factor)
        return {"stab": "sr", "gemms": "no"}[factor]

    assert space.walk(choose).name == "named0"
    assert asked == ["stab", "gemms"]
    (tried,) = search(plan(space, budgets=(100,)), in_memory(), truth)
    assert len(tried) == 25
    assert tried[0].params == {"gemms": "no"}


def interrupted_search(space, storage, whole, after):
    """Raise in the run of the batch ``after``, or between the tells of it, and go on with a new ledger."""
    count = itertools.count()

    def run(batch):
        if next(count) == after:
            raise KeyboardInterrupt
        return truth(batch)

    with pytest.raises(KeyboardInterrupt):
        search(whole, storage, run)
    return search(whole, storage, truth)


@pytest.mark.parametrize("after", [0, 1, 4, 6, 8])
def test_an_interrupted_search_is_the_uninterrupted_one(tmp_path, after):
    whole = plan(grid_space(), at_once=4)
    expected = facts(search(whole, in_memory(), truth))
    storage = open_storage(None, tmp_path)
    assert facts(interrupted_search(grid_space(), storage, whole, after)) == expected


class _Dies:
    """Raises at the n-th write to the ledger, before or after it, as a kill would."""

    def __init__(self, monkeypatch, at, *, before):
        from ablate.search.ledger import Ledger

        self.writes = 0
        for name in ("add", "complete", "fail"):
            real = getattr(Ledger, name)

            def dying(ledger, *args, real=real, **kwargs):
                self.writes += 1
                if self.writes == at and before:
                    raise KeyboardInterrupt
                done = real(ledger, *args, **kwargs)
                if self.writes == at and not before:
                    raise KeyboardInterrupt
                return done

            monkeypatch.setattr(Ledger, name, dying)


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("at", [1, 3, 6, 11, 30, 41, 55, 60])
def test_a_search_that_ends_at_any_write_loses_nothing(monkeypatch, at, before):
    whole = plan(grid_space(), at_once=4)
    expected = facts(search(whole, in_memory(), truth))
    storage = in_memory()
    _Dies(monkeypatch, at, before=before)
    with pytest.raises(KeyboardInterrupt):
        search(whole, storage, truth)
    assert facts(search(whole, storage, truth)) == expected


def test_a_search_goes_on_in_every_storage(opens):
    whole = plan(grid_space(), at_once=4, trials=10)
    expected = facts(search(whole, in_memory(), truth))
    batches = []

    def run(batch):
        batches.append(batch)
        if len(batches) == 2:
            raise KeyboardInterrupt
        return truth(batch)

    with pytest.raises(KeyboardInterrupt):
        search(whole, opens(), run)
    assert facts(search(whole, opens(), run)) == expected
    assert batches[1] == batches[2]  # the open round again, and no other
    assert facts(read(whole, opens())) == expected


def test_more_trials_go_on_from_those_there(tmp_path):
    storage = open_storage(None, tmp_path)
    search(plan(grid_space(), trials=14, at_once=4), storage, truth)  # TPE picks half of its last round
    longer = plan(grid_space(), trials=20, at_once=4)
    grown = search(longer, storage, truth)
    whole = search(longer, in_memory(), truth)
    assert facts(grown)[0] == facts(whole)[0]
    again, expected = ([candidate_of(trial) for trial in found[1]] for found in (grown, whole))
    assert len(set(again)) == len(again)
    assert set(again) >= set(expected)


@pytest.mark.parametrize("after_trials", [1, 5, 12, 22])
def test_a_killed_search_is_the_uninterrupted_one(tmp_path, after_trials):
    def start():
        return subprocess.Popen(
            [sys.executable, str(HERE / "killed_search.py"), str(tmp_path)], stdout=subprocess.PIPE, text=True
        )

    process = start()
    for line in process.stdout:
        if int(line) >= after_trials:
            os.kill(process.pid, signal.SIGKILL)
            break
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    process = start()
    *_, last = process.communicate()[0].splitlines()
    from killed_search import PLAN, slow_truth

    assert json.loads(last) == json.loads(json.dumps(facts(search(PLAN, in_memory(), slow_truth(0)))))


def trial(number, values, violation=None, state="complete"):
    return Trial(number=number, params={}, attrs={}, state=state, values=values, violation=violation)


def test_the_front_is_what_nothing_dominates():
    trials = [trial(0, (1.0, 1.0)), trial(1, (2.0, 0.5)), trial(2, (2.0, 1.0)), trial(3, (0.5, 0.1), 1.0)]
    trials += [trial(4, None, state="failed"), trial(5, (1.0, 1.0))]
    assert [one.number for one in front(trials)] == [1, 0, 5]
    assert front([]) == []


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=12))
def test_nothing_dominates_the_front_and_all_else_is_dominated(points):
    trials = [trial(number, point) for number, point in enumerate(points)]
    best = {one.number for one in front(trials)}
    for number, point in enumerate(points):
        assert (number in best) == (not any(dominates(other, point) for other in points))


def test_promotion_keeps_the_whole_front_and_the_share():
    trials = [trial(i, (i / 10, 1 - i / 10)) for i in range(5)]  # all on the front
    assert len(promoted(trials, 0.2, DIVERGED)) == 5
    trials = [trial(0, (0.0, 0.0)), trial(1, (1.0, 1.0)), trial(2, (2.0, 2.0)), trial(3, (3.0, 3.0))]
    assert [one.number for one in promoted(trials, 0.5, DIVERGED)] == [0, 1]
    assert [one.number for one in promoted(trials, 0.6, DIVERGED)] == [0, 1, 2]
    missed = [
        trial(0, (0.0, 0.0)),
        trial(1, (1.0, 1.0), 0.3),
        trial(2, (1.0, 1.0), 0.1),
        trial(3, (1.0, 1.0), DIVERGED),
    ]
    assert [one.number for one in promoted(missed, 1.0, DIVERGED)] == [0, 2, 1]


def test_within_a_layer_the_lonely_ones_are_promoted_first():
    best = [trial(0, (0.0, 0.0))]
    layer = [trial(1, (1.0, 4.0)), trial(2, (1.1, 3.9)), trial(3, (2.5, 2.5)), trial(4, (4.0, 1.0))]
    assert [one.number for one in promoted(best + layer, 0.8, DIVERGED)] == [0, 1, 4, 3]


def test_crowding_is_the_gap_to_the_neighbours():
    far = crowding({0: (0.0, 4.0), 1: (1.0, 2.0), 2: (1.5, 1.0), 3: (4.0, 0.0)})
    assert far[0] == far[3] == float("inf")
    assert far[1] == pytest.approx(1.5 / 4 + 3 / 4)


def test_picks_of_one_round_differ_and_nothing_is_left_at_the_end():
    space = grid_space()
    taken = set()
    while (found := propose(space, [], taken, sampler="tpe", seed=len(taken))) is not None:
        assert found.name not in taken
        taken.add(found.name)
    assert taken == set(space.by_name)


@pytest.mark.parametrize(
    ("tokens", "text"), [(100_000, "100k"), (2_000_000, "2M"), (520_192, "520192"), (10**9, "1B")]
)
def test_budgets_have_exact_names(tokens, text):
    assert short_tokens(tokens) == text
