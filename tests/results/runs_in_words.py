"""Runs in words, for the tests of costs and of the stop rule."""

from __future__ import annotations

from ablate.run.outcome import Outcome

_ENDS = {"x": "diverged", "c": "censored"}


def runs_of(text):
    """Read runs of the seeds 0, 1, …, as in ``120 x300 c200 <50 -``.

    That is: a hit after 120 tokens, diverged at a budget of 300, censored after 200, at the target by the
    first evaluation, which was after 50, and no result.
    """
    found = []
    for seed, word in enumerate(text.split()):
        first, number = word[0], float(word.lstrip("xc<-") or 0)
        if first == "-":
            found.append(Outcome(seed=seed, end="missing"))
        elif first in _ENDS:
            found.append(Outcome(seed=seed, end=_ENDS[first], low=number))
        else:
            found.append(
                Outcome(
                    seed=seed,
                    end="hit",
                    low=0.0 if first == "<" else number,
                    high=number,
                )
            )
    return found
