"""What to try next: Optuna's TPE over the conditional space, in a study in memory that is thrown away.

The pick depends on the seed, on the results of earlier rounds and on the earlier picks of the same round (as
running trials, which TPE takes for poor: the constant liar), and on nothing else. So an exploration that was
killed picks the same again, and picks that were rejected leave no trace in the storage.

How it fails: TPE that has converged suggests what was tried already. After some tries the pick is what is
untried and shares the most levels with what it suggested; None only where nothing is untried.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from ablate.search.candidates import Candidate, Space
    from ablate.search.ledger import Trial

Sampler = Literal["tpe", "random"]
RANDOM_FIRST = 10
"""Results before TPE has something to go on; until then picks are at random."""
_TRIES = 12


def seed_of(*parts: object) -> int:
    """Return a seed of 32 bits that is a hash of the parts."""
    text = "|".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "little")


def propose(
    space: Space, seen: Sequence[Trial], taken: Collection[str], *, sampler: Sampler, seed: int
) -> Candidate | None:
    """Return a candidate that is not in ``taken``, None where there is none.

    ``seen``: complete trials of earlier rounds, and open ones of this round.
    """
    untried = [candidate for candidate in space.candidates if candidate.name not in taken]
    if not untried:
        return None
    if sampler == "random" or sum(trial.state == "complete" for trial in seen) < RANDOM_FIRST:
        return random.Random(seed).choice(untried)  # noqa: S311  no secret
    import warnings

    import optuna

    from ablate.search.ledger import to_frozen

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)  # group, multivariate
        tpe = optuna.samplers.TPESampler(
            seed=seed,
            n_startup_trials=RANDOM_FIRST,
            multivariate=True,
            group=True,
            constant_liar=True,
        )
    complete = next(trial for trial in seen if trial.values is not None)
    study = optuna.create_study(directions=["minimize"] * len(complete.values or ()), sampler=tpe)
    study.add_trials([to_frozen(trial, space.distributions) for trial in seen])
    wished: Counter[tuple[str, str]] = Counter()
    for _ in range(_TRIES):
        trial = study.ask()
        found = space.walk(
            lambda factor, labels, trial=trial: str(trial.suggest_categorical(factor, labels))  # type: ignore[misc]
        )
        study.tell(trial, state=optuna.trial.TrialState.FAIL)
        if found is not None and found.name not in taken:
            return found
        wished.update(trial.params.items())
    # At random among the nearest: the order of the file must not decide.
    order = random.Random(seed).sample(untried, len(untried))  # noqa: S311  no secret
    return max(order, key=lambda candidate: sum(wished[level] for level in candidate.levels.items()))
