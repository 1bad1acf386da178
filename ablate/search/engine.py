"""One engine for every search: rounds of trials that are asked of a space, run, and told to their ledgers.

A trial is written to its ledger before it runs, and told when its round is over. A round depends only on the
rounds before it: trials of the same round count as open, however they ended. A killed search therefore
resumes as if it had not been killed: it runs open trials, fills the unfinished round, and asks no told trial
again. All groups go through their rounds together, so that their runs use a whole machine.

How it fails: a round with missing results (an interruption, a failed run) ends the search, and none of its
trials is told. An exception of ``run`` does the same. A trial that failed by its own fault is told as failed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ablate.search.ledger import as_open

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from optuna.trial import FrozenTrial

    from ablate.search.grid import Grid
    from ablate.search.ledger import Curve, Ledger, Proposal
    from ablate.search.rates import Rates

    Run = Callable[[Sequence["Asked"]], Sequence["TrialResult | None"]]
    """Runs trials; returns their results in order, None for a trial that came to no end."""


@dataclass(frozen=True, kw_only=True)
class TrialGroup:
    """A ledger, and the space that its trials come from, whose answers depend on what it is given alone.

    ``describe``: further attributes of a trial.
    """

    name: str
    ledger: Ledger
    space: Grid | Rates
    num_trials: int
    describe: Callable[[Proposal], dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A trial to be run. ``earlier``: the trials of the rounds before, all of them told."""

    group: TrialGroup
    trial: FrozenTrial
    earlier: Sequence[FrozenTrial]

    def hopeless_at(self, curve: Curve) -> int | None:
        """Return the tokens at which the trial need not go on; None if it is worth going on."""
        return self.group.space.hopeless_at(self.earlier, curve)


@dataclass(frozen=True, kw_only=True)
class TrialResult:
    """A trial's values, with a violation if they stand for a miss; or why it has no values.

    ``curve``: decides whether the trial was hopeless; then ``values`` are ignored.
    """

    values: tuple[float, ...] | None = None
    violation: float | None = None
    failed: str | None = None
    curve: Curve = field(default_factory=dict)


def search(groups: Sequence[TrialGroup], at_once: int, run: Run) -> bool:
    """Run every group's trials; return whether all rounds are complete.

    ``at_once``: the number of a group's trials in a round.
    """
    most = max(group.num_trials for group in groups)
    return all(_round(groups, at_once, run, round_) for round_ in range(-(-most // at_once)))


def _round(groups: Sequence[TrialGroup], at_once: int, run: Run, round_: int) -> bool:
    """Run one round of every group; return whether it is complete."""
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


def _ask(group: TrialGroup, at_once: int, round_: int) -> list[Asked]:
    """Fill a group's round, and return its trials that have not been told."""
    trials = group.ledger.trials()
    start, stop = round_ * at_once, min((round_ + 1) * at_once, group.num_trials)
    for number in range(len(trials), stop):
        found = group.space.propose([*trials[:start], *map(as_open, trials[start:])], round_, number - start)
        distributions = {name: group.space.distributions[name] for name in found.params}
        place = {"round": round_, "position": number - start}
        trials.append(
            group.ledger.add(found.params, distributions, {**group.describe(found), **place, **found.attrs})
        )
    return [
        Asked(group=group, trial=trial, earlier=trials[:start])
        for trial in trials[start:stop]
        if not trial.state.is_finished()
    ]


def _tell(ledger: Ledger, number: int, result: TrialResult, ended_at: int | None) -> None:
    """Write a trial's losses, up to ``ended_at`` if it ended early, and its end."""
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
