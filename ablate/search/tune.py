"""The search before a study's seeds: rounds of trials of each group, asked, run and told.

Whoever calls it says how a batch of trials is run; nothing here knows of Ray, runs or files but the ledger's.
All groups go through their rounds together, so that their runs fill a machine that one group's would not.

How it fails: a batch that comes back without some of its trials (an interruption, a failed run) ends the
search; these trials stay open in the ledger, and the next call runs them again before it asks for new ones.
Trials are told at the end of their round, pruned ones first, so that what is decided on is never a part of a
round.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from ablate.search.pick import Settings, hopeless_at, pick

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from ablate.search.ledger import Ledger

Curve = dict[int, float]
"""Validation losses in nats per token, by tokens."""


@dataclass(frozen=True, kw_only=True)
class SearchGroup:
    """What is searched together: its ledger, its own values, and the ids of the runs of any values."""

    name: str
    ledger: Ledger
    shared: dict[str, Any]
    runs_of: Callable[[Mapping[str, Any]], list[str]]


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A trial to be run."""

    group: str
    number: int
    values: dict[str, Any]
    run_ids: tuple[str, ...]

    @property
    def key(self) -> tuple[str, int]:
        """The group and the trial's number in it."""
        return self.group, self.number


@dataclass(frozen=True, kw_only=True)
class Came:
    """What a trial came to. ``loss``: None if its runs were ended; ``diverged``: how many of them did."""

    curve: Curve
    loss: float | None
    diverged: int = 0


class Batch(Protocol):
    """Runs trials. ``is_hopeless`` tells of a curve as far as it goes whether the trial need not go on."""

    def __call__(
        self, asked: Sequence[Asked], is_hopeless: Callable[[Asked, Curve], bool]
    ) -> Mapping[tuple[str, int], Came]:
        """Return what the trials came to, by their keys, leaving out those that did not come to an end."""


def search(groups: Sequence[SearchGroup], settings: Settings, run: Batch) -> bool:
    """Bring every group to its number of trials; return whether that is done."""
    rounds = range(-(-settings.trials // settings.at_once))
    return all(_round(groups, settings, run, round_) for round_ in rounds)


def _round(groups: Sequence[SearchGroup], settings: Settings, run: Batch, round_: int) -> bool:
    """Bring one round of every group to its end; return whether that is done."""
    batch = {one.key: one for group in groups for one in _ask_round(group, settings, round_)}
    ledgers = {group.name: group.ledger for group in groups}
    earlier = {
        name: [trial for trial in ledger.trials() if trial.attrs["round"] < round_]
        for name, ledger in ledgers.items()
    }

    def ended_at(one: Asked, curve: Curve) -> int | None:
        return hopeless_at(settings, earlier[one.group], curve)

    def is_hopeless(one: Asked, curve: Curve) -> bool:
        return ended_at(one, curve) is not None

    came = run(list(batch.values()), is_hopeless) if batch else {}
    ends = {key: ended_at(batch[key], one.curve) for key, one in came.items()}
    if any(key not in came or (came[key].loss is None and ends[key] is None) for key in batch):
        return False
    for key in sorted(ends, key=lambda key: ends[key] is None):
        _tell(ledgers[key[0]], key[1], came[key], ends[key])
    return True


def _ask_round(group: SearchGroup, settings: Settings, round_: int) -> Iterator[Asked]:
    """Fill a round of a group up, and yield its trials that have not been told."""
    for position in range(min(settings.at_once, settings.trials - round_ * settings.at_once)):
        trials = group.ledger.trials()
        place = {"round": round_, "position": position}
        trial = next((one for one in trials if one.attrs.items() >= place.items()), None)
        if trial is None:
            values = pick(settings, group.shared, trials, round_, position)
            distributions = {name: field.distribution() for name, field in settings.space.items()}
            attrs = place | {"runs": group.runs_of(values)}
            trial = group.ledger.add(values, distributions, attrs)
        if trial.state == "open":
            yield Asked(
                group=group.name, number=trial.number, values=trial.params, run_ids=tuple(trial.attrs["runs"])
            )


def _tell(ledger: Ledger, number: int, came: Came, ended_at: int | None) -> None:
    """Write what a trial came to: its losses as far as they were looked at, and its end."""
    for tokens, loss in sorted(came.curve.items()):
        if ended_at is None or tokens <= ended_at:
            ledger.report(number, tokens, loss)
    if ended_at is not None:
        ledger.prune(number)
    else:
        assert came.loss is not None
        ledger.complete(number, [came.loss], violation=float(came.diverged))
