"""Trials in Optuna's storage: which were asked, which are open, and their results; and questions to Optuna.

One process at a time writes, the driver. A trial is written as running in one operation, with its values and
attributes: there is no moment at which a kill leaves half of one. Optuna is asked through a study in memory
(``study_of``), filled with the relevant trials and discarded after one answer, which therefore depends only
on these trials and a seed, even after a kill.

How it fails: a storage that cannot be opened is a ``UserError``. The last line of a journal that a full disk
cut is cut off on opening, because a line that follows it would make the whole journal unreadable; what the
line said is found again in the run store. A process that is killed while it writes leaves a lock that Optuna
breaks after 30 s.
"""

from __future__ import annotations

import math
import os
import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from ablate.base.errors import UserError, first_line

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from optuna import Study
    from optuna.distributions import BaseDistribution
    from optuna.samplers import TPESampler
    from optuna.storages import BaseStorage
    from optuna.trial import FrozenTrial

JOURNAL = "optuna.log"
GRPC = "grpc://"
LOSS = "validation loss (nats per token)"
VIOLATION = "violation"
_PROXY_SEC = 10

TrialState = Literal["open", "complete", "pruned", "failed"]
_STATES: dict[str, TrialState] = {
    "RUNNING": "open", "COMPLETE": "complete", "PRUNED": "pruned", "FAIL": "failed",
}  # fmt: skip
"""By Optuna's names."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One trial as the storage has it.

    ``params``: what Optuna chose, by name. ``attrs``: plain data that say what it is. ``values``: one for
    each objective, of a complete trial. ``violation``: above nought where the values are a stand-in for a
    result that was missed. ``intermediate``: values by step, such as tokens.
    """

    number: int
    params: dict[str, Any]
    attrs: dict[str, Any]
    state: TrialState
    values: tuple[float, ...] | None = None
    violation: float | None = None
    intermediate: dict[int, float] = field(default_factory=dict)


def open_storage(url: str | None, folder: Path) -> BaseStorage:
    """Open the storage: a journal in ``folder``; or a database or gRPC proxy, by its URL.

    Raises:
        UserError: it cannot be opened or reached.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    if url is None:
        from optuna.storages.journal import JournalFileBackend, JournalStorage

        folder.mkdir(parents=True, exist_ok=True)
        _cut_torn_line(folder / JOURNAL)
        try:
            return JournalStorage(JournalFileBackend(str(folder / JOURNAL)))
        except (ValueError, KeyError) as error:
            raise UserError(f"{folder / JOURNAL}: not a journal of Optuna: {first_line(error)}") from error
    try:
        if url.startswith(GRPC):
            return _proxy(url)
        return optuna.storages.get_storage(url)
    except UserError:
        raise
    except Exception as error:  # what a database driver raises is not ours to list
        from ablate.track.uri import redact

        raise UserError(f"cannot open Optuna's storage {redact(url)}: {first_line(error)}") from error


class Ledger:
    """One Optuna study as a ledger of trials; made if it is not there.

    ``objectives``: what is minimised, with its unit, as Optuna's pages name it.
    """

    def __init__(self, storage: BaseStorage, name: str, objectives: Sequence[str] = (LOSS,)) -> None:
        import optuna

        # Nothing is sampled here; Optuna's default would set up one that is not used.
        self._study: Study = optuna.create_study(
            storage=storage,
            study_name=name,
            directions=["minimize"] * len(objectives),
            sampler=optuna.samplers.RandomSampler(seed=0),
            pruner=optuna.pruners.NopPruner(),
            load_if_exists=True,
        )
        if (has := len(self._study.directions)) != len(objectives):
            raise UserError(f"Optuna's study '{name}' has {has} objectives (expected {len(objectives)})")
        if self._study.metric_names != list(objectives):
            with warnings.catch_warnings(action="ignore", category=optuna.exceptions.ExperimentalWarning):
                self._study.set_metric_names(list(objectives))

    @property
    def name(self) -> str:
        """The name of Optuna's study."""
        return self._study.study_name

    def trials(self) -> list[Trial]:
        """Return all trials in the order in which they were asked."""
        return [_trial(one) for one in self._study.get_trials(deepcopy=False)]

    def add(
        self, params: Mapping[str, Any], distributions: Mapping[str, BaseDistribution], attrs: dict[str, Any]
    ) -> Trial:
        """Write a trial as open, all at once, and return it."""
        from optuna.trial import TrialState as State
        from optuna.trial import create_trial

        self._study.add_trial(
            create_trial(
                state=State.RUNNING, params=dict(params), distributions=dict(distributions), user_attrs=attrs
            )
        )
        return self.trials()[-1]

    def report(self, number: int, step: int, value: float) -> None:
        """Write an intermediate value of an open trial, unless it is there."""
        if step not in self._study.get_trials(deepcopy=False)[number].intermediate_values:
            self._open(number).report(value, step)

    def complete(self, number: int, values: Sequence[float], *, violation: float | None = None) -> None:
        """Tell what an open trial came to; ``violation`` above nought: the values stand for a miss.

        Raises:
            ValueError: a value that is not finite; Optuna would take an infinity for a result.
        """
        if not all(map(math.isfinite, (*values, violation or 0.0))):
            raise ValueError(f"trial {number}: a value that is not finite: {values}")
        if violation is not None and self.trials()[number].violation is None:
            self._open(number).set_constraint(VIOLATION, violation)
        self._study.tell(number, list(values))

    def prune(self, number: int) -> None:
        """Tell that an open trial was ended early; its last intermediate value is what is known of it."""
        from optuna.trial import TrialState as State

        self._study.tell(number, state=State.PRUNED)

    def fail(self, number: int, why: str) -> None:
        """Tell that an open trial has no result, for a fault of its own."""
        from optuna.trial import TrialState as State

        self._open(number).set_user_attr("failed", why)
        self._study.tell(number, state=State.FAIL)

    def _open(self, number: int) -> Any:
        from optuna.trial import Trial as OptunaTrial

        frozen = self._study.get_trials(deepcopy=False)[number]
        return OptunaTrial(self._study, frozen._trial_id)  # noqa: SLF001  a number has no other way to it


def _trial(frozen: FrozenTrial) -> Trial:
    state = _STATES.get(frozen.state.name, "open")
    return Trial(
        number=frozen.number,
        params=dict(frozen.params),
        attrs=dict(frozen.user_attrs),
        state=state,
        values=tuple(frozen.values) if state == "complete" else None,
        violation=frozen.constraints.get(VIOLATION),
        intermediate=dict(frozen.intermediate_values),
    )


def study_of(trials: Sequence[Trial], distributions: Mapping[str, BaseDistribution], **options: Any) -> Study:
    """Return a study in memory that holds these trials; ``options``: its sampler, its pruner."""
    import optuna

    values = next((trial.values for trial in trials if trial.values is not None), (0.0,))
    study = optuna.create_study(directions=["minimize"] * len(values), **options)
    with warnings.catch_warnings(
        action="ignore", category=optuna.exceptions.ExperimentalWarning
    ):  # constraints
        study.add_trials([to_frozen(trial, distributions) for trial in trials])
    return study


def tpe(seed: int, **options: Any) -> TPESampler:
    """Return Optuna's TPE, which takes open trials for poor (the constant liar)."""
    import optuna

    with warnings.catch_warnings(
        action="ignore", category=optuna.exceptions.ExperimentalWarning
    ):  # group, multivariate
        return optuna.samplers.TPESampler(seed=seed, constant_liar=True, **options)


def to_frozen(trial: Trial, distributions: Mapping[str, BaseDistribution]) -> FrozenTrial:
    """Return a trial as Optuna's own."""
    from optuna.trial import TrialState as State
    from optuna.trial import create_trial

    values = list(trial.values) if trial.values is not None else None
    if trial.state == "pruned" and trial.intermediate:
        values = [trial.intermediate[max(trial.intermediate)]]
    return create_trial(
        state=State[next(name for name, own in _STATES.items() if own == trial.state)],
        values=values,
        params=trial.params,
        distributions={name: distributions[name] for name in trial.params},
        intermediate_values=trial.intermediate,
        constraints=None if trial.violation is None else {VIOLATION: trial.violation},
    )


def _proxy(url: str) -> BaseStorage:
    from optuna.exceptions import ExperimentalWarning
    from optuna.storages import GrpcStorageProxy

    host, colon, port = url.removeprefix(GRPC).rpartition(":")
    if not (colon and host and port.isdecimal()):
        raise UserError(f"Optuna's storage '{url}' (expected grpc://HOST:PORT)")
    with warnings.catch_warnings(action="ignore", category=ExperimentalWarning):
        proxy = GrpcStorageProxy(host=host, port=int(port))
    proxy.wait_server_ready(timeout=_PROXY_SEC)
    return proxy


def _cut_torn_line(path: Path) -> None:
    """Cut off what follows the last line's end."""
    content = path.read_bytes() if path.exists() else b""
    whole = content.rfind(b"\n") + 1
    if whole != len(content):
        os.truncate(path, whole)
