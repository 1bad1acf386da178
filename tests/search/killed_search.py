"""A search in a process of its own, for tests that kill it; prints how many trials are told, then all."""

from __future__ import annotations

import itertools
import json
import sys
import time
from pathlib import Path

from ablate.search.candidates import Candidate, Space
from ablate.search.ledger import open_storage
from ablate.search.propose import seed_of
from ablate.search.search import Plan, Result, search

FACTORS = {"a": ("0", "1", "2", "3"), "b": ("x", "y", "z"), "c": ("p", "q")}
CELLS = [dict(zip(FACTORS, labels, strict=True)) for labels in itertools.product(*FACTORS.values())]
SPACE = Space(
    factors=FACTORS,
    candidates=(
        Candidate(name="named0"),
        *(Candidate(name=" ".join(cell.values()), cells=(cell,)) for cell in CELLS),
    ),
)
PLAN = Plan(
    name="killed",
    space=SPACE,
    first=("named0",),
    trials=20,
    budgets=(100, 300),
    keep=0.3,
    at_once=3,
    sampler="tpe",
    seed=5,
)


def slow_truth(seconds):
    told = itertools.count(1)

    def run(batch):
        results = {}
        for name in batch.candidates:
            time.sleep(seconds)
            print(next(told), flush=True)
            results[name] = Result(values=(seed_of("loss", name) % 1000 / 1000, seed_of(name) % 5 / 5))
        return results

    return run


if __name__ == "__main__":
    found = search(PLAN, open_storage(None, Path(sys.argv[1])), slow_truth(0.02))
    facts = [
        [(t.number, t.params, t.attrs, t.state, t.values, t.violation) for t in trials] for trials in found
    ]
    print(json.dumps(facts))
