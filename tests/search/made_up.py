"""Two made-up searches, one of each space, whose results look random and are the same every time."""

import itertools
import math
from functools import partial
from types import SimpleNamespace

from ablate.search.engine import TrialGroup, TrialResult, open_study, search, seed_of
from ablate.search.halving import DIVERGED, SearchPlan, candidate_of, search_grid
from ablate.search.tune import propose_values
from ablate.study.search_space import Range, Search

BEST = {"baseline": 2e-3, "fp4": 8e-3}
SHARED = {"learning_rate": 2e-3}
RATE = {"learning_rate": Range(low=5e-4, high=1.6e-2, log=True)}
TOKENS = range(25, 201, 25)


def grid_space(first=("named0",), **changes):
    """Stabiliser × GEMMs × rule, where without a GEMM all is one recipe: 1 + 3 × 4 × 2 candidates."""
    factors = {
        "stab": ("none", "sr", "rht", "dht"),
        "gemms": ("no", "f", "d", "w"),
        "rule": ("even", "floor"),
    }
    cells = {}
    for labels in itertools.product(*factors.values()):
        name = "named0" if "no" in labels else " ".join(labels)
        cells.setdefault(name, []).append(dict(zip(factors, labels, strict=True)))
    settings = {
        "hardware": "B200",
        "trials": 60,
        "budgets": (100, 300),
        "keep": 0.4,
        "seed": 1,
    }
    search = Search(**(settings | changes), factors=factors, cells=())
    plan = SimpleNamespace(arm=lambda name: SimpleNamespace(runs=[], recipe=name))
    return SearchPlan(
        name="s",
        search=search,
        cells=cells,
        first=first,
        study=None,
        plans=(plan, plan),
        times={},
    )


def truth(asked):
    results = []
    for trial in asked:
        name = candidate_of(trial.trial)
        kind = seed_of("kind", name) % 9
        if kind == 0 and name != "named0":
            results.append(TrialResult(failed="a fault"))
            continue
        values = (seed_of("loss", name) % 1000, seed_of("time", name) % 7)
        violation = DIVERGED if kind == 1 else None
        results.append(TrialResult(values=values, violation=violation))
    return results


def groups(
    storage, names=tuple(BEST), *, trials=7, prune=True, shared=SHARED, **changes
):
    tuning = SimpleNamespace(
        **{"fields": RATE, "sampler": "tpe", "seeds": (3,)} | changes
    )
    return [
        TrialGroup(
            name=name,
            study=open_study(storage, name),
            propose=partial(propose_values, tuning, shared),
            arms=lambda _: [],
            num_trials=trials,
            watched_from=67 if prune else None,
        )
        for name in names
    ]


def loss(group, rate, tokens):
    """Return a loss with a little noise that depends on nothing but the trial and the tokens."""
    octaves = math.log2(rate / BEST[group])
    noise = seed_of(group, rate, tokens) % 256 / 64_000
    return 2 + 0.1 * octaves**2 + 3 * math.exp(-tokens / 60) + noise


def train_all(asked, *, look=True):
    """Train trials, looking after each evaluation whether one is hopeless, or at the end alone."""
    results = []
    for trial in asked:
        rate = trial.trial.params["learning_rate"]
        curve = {}
        for tokens in TOKENS:
            curve[tokens] = loss(trial.group.name, rate, tokens)
            if look and trial.hopeless_at(curve) is not None:
                break
        values = (curve[200],) if 200 in curve else None
        results.append(TrialResult(values=values, violation=0.0, curve=curve))
    return results


def facts(trials):
    """Return what a study holds, as JSON would."""
    found = []
    for trial in trials:
        curve = {str(step): loss for step, loss in trial.intermediate_values.items()}
        values = trial.values and [*trial.values]
        fact = [trial.number, trial.params, trial.user_attrs, trial.state.name]
        found.append([*fact, values, trial.constraints, curve])
    return found


def go_grid(storage, wrap=lambda run: run, **changes):
    grid = grid_space(**changes)
    search_grid(grid, storage, wrap(truth))
    return [facts(trials) for trials in grid.read(storage)]


def go_rates(storage, wrap=lambda run: run, **changes):
    tuned = groups(storage, **changes)
    search(tuned, 2, wrap(train_all))
    return [facts(group.study.get_trials()) for group in tuned]


SEARCHES = {"grid": go_grid, "rates": go_rates}
"""Each goes on with its search in a storage, with ``wrap`` around what runs it, and returns its trials."""
