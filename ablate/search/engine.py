"""One engine for every search: rounds of trials that are asked of a space, run, and told to their ledgers.

A trial is written to its ledger before it is run, and told when its round is over. What a round tries depends
on the rounds before it alone: trials of the same round count as open, however they ended. A trial's place is
its number: trial n is in round n // ``at_once``. So a search that was killed goes on as if it had not been:
open trials are run, a round that was being filled is filled up, what was told is not asked again. All groups
go through their rounds together, so that their runs fill a machine that those of one group would not.

Nothing here knows of Ray, of runs or of files but the ledger's: ``run`` is a callable that runs trials.

How it fails: a round that comes back without some of its trials (an interruption, a failed run) ends the
search, with none of that round told; so does an exception of ``run``. A trial without a result for a fault of
its own is told as failed.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from optuna.distributions import BaseDistribution

    from ablate.search.ledger import Ledger, Trial

    Run = Callable[[Sequence["Asked"]], Sequence["Result | None"]]
    """Runs trials; returns their results in order, None for a trial that came to no end."""

Curve = dict[int, float]
"""Validation losses in nats per token, by tokens."""


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """What to try: Optuna's parameters, and plain data that say more of it."""

    params: dict[str, Any]
    attrs: dict[str, Any] = field(default_factory=dict)


class Space(Protocol):
    """What may be tried, as plain data: the same question has the same answer every time."""

    @property
    def prune(self) -> bool:
        """Whether a trial can be hopeless."""

    @property
    def distributions(self) -> Mapping[str, BaseDistribution]:
        """The parameters as Optuna has them."""

    def propose(self, seen: Sequence[Trial], round_: int, position: int) -> Proposal:
        """Return what to try at a position of a round, of which no trial seen has been told."""

    def hopeless_at(self, earlier: Sequence[Trial], curve: Curve) -> int | None:
        """Return the tokens at which a trial need not go on; None if it is worth going on."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """A ledger, and the space that it is filled from. ``describe``: what else it says of a trial."""

    name: str
    ledger: Ledger
    space: Space
    num_trials: int
    describe: Callable[[Proposal], dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A trial to be run. ``earlier``: the trials of the rounds before, all of them told."""

    group: Group
    trial: Trial
    earlier: Sequence[Trial]

    def hopeless_at(self, curve: Curve) -> int | None:
        """Return the tokens at which the trial need not go on; None if it is worth going on."""
        return self.group.space.hopeless_at(self.earlier, curve)


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a trial came to: values, with a violation where they stand for a miss; or why there are none.

    ``curve``: what decides whether it was hopeless; then it has no values, whatever stands here.
    """

    values: tuple[float, ...] | None = None
    violation: float | None = None
    failed: str | None = None
    curve: Curve = field(default_factory=dict)


def search(groups: Sequence[Group], at_once: int, run: Run) -> bool:
    """Bring every group to its number of trials; return whether that is done.

    ``at_once``: how many trials of a group are in a round.
    """
    most = max(group.num_trials for group in groups)
    return all(_round(groups, at_once, run, round_) for round_ in range(-(-most // at_once)))


def _round(groups: Sequence[Group], at_once: int, run: Run, round_: int) -> bool:
    """Bring one round of every group to its end; return whether that is done."""
    asked = [one for group in groups for one in _ask(group, at_once, round_)]
    ended = []
    for one, result in zip(asked, run(asked) if asked else (), strict=True):
        if result is None:
            return False
        end = one.hopeless_at(result.curve)
        if end is None and result.values is None and result.failed is None:
            return False
        ended.append((one, result, end))
    for one, result, end in sorted(ended, key=lambda item: item[2] is None):
        _tell(one.group.ledger, one.trial.number, result, end)
    return True


def _ask(group: Group, at_once: int, round_: int) -> list[Asked]:
    """Fill a round of a group up, and return its trials that have not been told."""
    trials = group.ledger.trials()
    start, stop = round_ * at_once, min((round_ + 1) * at_once, group.num_trials)
    for number in range(len(trials), stop):
        found = group.space.propose([*trials[:start], *map(_as_open, trials[start:])], round_, number - start)
        distributions = {name: group.space.distributions[name] for name in found.params}
        place = {"round": round_, "position": number - start}
        trials.append(
            group.ledger.add(found.params, distributions, {**group.describe(found), **place, **found.attrs})
        )
    return [
        Asked(group=group, trial=trial, earlier=trials[:start])
        for trial in trials[start:stop]
        if trial.state == "open"
    ]


def _as_open(trial: Trial) -> Trial:
    """Return a trial as it was when its round was filled: without a result."""
    return replace(trial, state="open", values=None, violation=None, intermediate={})


def _tell(ledger: Ledger, number: int, result: Result, ended_at: int | None) -> None:
    """Write what a trial came to: its losses as far as they were looked at, and its end."""
    for tokens, loss in sorted(result.curve.items()):
        if ended_at is None or tokens <= ended_at:
            ledger.report(number, tokens, loss)
    if ended_at is not None:
        ledger.prune(number)
    elif result.failed is not None:
        ledger.fail(number, result.failed)
    else:
        assert result.values is not None
        ledger.complete(number, result.values, violation=result.violation)
