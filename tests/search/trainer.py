"""A synthetic trainer with a known best rate, and a search over it that can be killed and gone on with."""

from __future__ import annotations

import hashlib
import json
import math
import os
import signal
import sys
from pathlib import Path

from ablate.search.ledger import Ledger, open_storage
from ablate.search.pick import Settings
from ablate.search.tune import Asked, Came, Curve, SearchGroup, search
from ablate.study.space import Range

BEST = {"baseline": 2e-3, "fp4": 8e-3}
SHARED = {"learning_rate": 2e-3}
TOKENS = range(25, 201, 25)


def settings(**change):
    usual = {
        "space": {"learning_rate": Range(low=5e-4, high=1.6e-2, log=True)}, "sampler": "tpe", "trials": 7,
        "at_once": 2, "prune": True, "tokens": 200, "seed": 3,
    }  # fmt: skip
    return Settings(**(usual | change))


def loss(group: str, rate: float, tokens: int) -> float:
    """Return a loss with a little noise that depends on nothing but the trial and the tokens."""
    digest = hashlib.sha256(f"{group} {rate} {tokens}".encode()).digest()
    noise = digest[0] / 256 * 0.004
    return 2 + 0.1 * math.log2(rate / BEST[group]) ** 2 + 3 * math.exp(-tokens / 60) + noise


def groups(storage, names=tuple(BEST), shared=SHARED):
    return [
        SearchGroup(
            name=name,
            ledger=Ledger(storage, name),
            shared=shared,
            runs_of=lambda values, name=name: [f"{name}-{values['learning_rate']}"],
        )
        for name in names
    ]


def outcome(one: Asked, is_hopeless, *, look: bool = True) -> Came:
    """Train a trial, looking after each evaluation whether it is hopeless, or at the end alone."""
    curve: Curve = {}
    for tokens in TOKENS:
        curve[tokens] = loss(one.group, one.values["learning_rate"], tokens)
        if look and is_hopeless(one, curve):
            return Came(curve=curve, loss=None)
    return Came(curve=curve, loss=curve[TOKENS[-1]])


def run_all(asked, is_hopeless, *, look=True):
    return {one.key: outcome(one, is_hopeless, look=look) for one in asked}


def ledger_of(searched):
    """Return what a search wrote, in plain data."""
    return {
        group.name: [
            (one.number, one.params, one.attrs, one.state, one.values, one.intermediate)
            for one in group.ledger.trials()
        ]
        for group in searched
    }


def die_at(operation: int) -> None:
    """Be killed just before the n-th write to a file from now on."""
    left = [operation]
    real = os.write, os.fsync

    def counted(function):
        def call(*arguments):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments)

        return call

    os.write, os.fsync = (counted(function) for function in real)


def main() -> None:
    """Search in a folder, where a finished run is kept and not run again; may be killed on the way."""
    folder, operation = Path(sys.argv[1]), int(sys.argv[2])
    storage = open_storage(None, folder)
    searched = groups(storage)
    ran = folder / "ran.txt"

    def run(asked, is_hopeless):
        came = {}
        for one in asked:
            kept = folder / f"{one.run_ids[0]}.json"
            if not kept.exists():
                with ran.open("a") as file:
                    file.write(f"{one.run_ids[0]}\n")
                came_now = outcome(one, is_hopeless)
                kept.with_suffix(".new").write_text(json.dumps([came_now.curve, came_now.loss]))
                kept.with_suffix(".new").rename(kept)
            curve, final = json.loads(kept.read_text())
            came[one.key] = Came(curve={int(key): value for key, value in curve.items()}, loss=final)
        return came

    if operation:
        die_at(operation)
    assert search(searched, settings(), run)
    print(json.dumps(ledger_of(searched)))


if __name__ == "__main__":
    main()
