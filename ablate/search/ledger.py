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
from typing import TYPE_CHECKING, Any

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

Curve = dict[int, float]
"""Validation losses in nats per token, by tokens."""


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """What to try: Optuna's parameters, and further plain data."""

    params: dict[str, Any]
    attrs: dict[str, Any] = field(default_factory=dict)


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
        from ablate.base.command_hints import redact

        raise UserError(f"cannot open Optuna's storage {redact(url)}: {first_line(error)}") from error


class Ledger:
    """One Optuna study as a ledger of trials; made if it is not there.

    ``objectives``: what is minimised, with its unit, as Optuna's pages name it.
    """

    def __init__(self, storage: BaseStorage, name: str, objectives: Sequence[str] = (LOSS,)) -> None:
        import optuna

        self.name = name
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

    def trials(self) -> list[FrozenTrial]:
        """Return all trials in the order in which they were asked."""
        return self._study.get_trials()

    def add(
        self, params: Mapping[str, Any], distributions: Mapping[str, BaseDistribution], attrs: dict[str, Any]
    ) -> FrozenTrial:
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
        if step not in self._frozen(number).intermediate_values:
            self._open(number).report(value, step)

    def complete(self, number: int, values: Sequence[float], *, violation: float | None = None) -> None:
        """Record the end of an open trial. ``violation`` above 0: it missed, and the values say by how much.

        Raises:
            ValueError: a value that is not finite; Optuna would take an infinity for a result.
        """
        if not all(map(math.isfinite, (*values, violation or 0.0))):
            raise ValueError(f"trial {number}: a value that is not finite: {values}")
        if violation is not None and VIOLATION not in self._frozen(number).constraints:
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

    def _frozen(self, number: int) -> FrozenTrial:
        return self._study.get_trials(deepcopy=False)[number]

    def _open(self, number: int) -> Any:
        from optuna.trial import Trial as OptunaTrial

        return OptunaTrial(self._study, self._frozen(number)._trial_id)  # noqa: SLF001  a number has no other way to it


def violation(trial: FrozenTrial) -> float:
    """Return a trial's violation, which is above 0 if it missed."""
    return trial.constraints.get(VIOLATION, 0.0)


def as_open(trial: FrozenTrial) -> FrozenTrial:
    """Return a trial as it was when it was asked: without a result."""
    from optuna.trial import TrialState, create_trial

    return create_trial(
        state=TrialState.RUNNING,
        params=trial.params,
        distributions=trial.distributions,
        user_attrs=trial.user_attrs,
    )


def study_of(trials: Sequence[FrozenTrial], **options: Any) -> Study:
    """Return a study in memory that holds these trials; ``options``: its sampler, its pruner."""
    import optuna

    values = next((trial.values for trial in trials if trial.values is not None), (0.0,))
    study = optuna.create_study(directions=["minimize"] * len(values), **options)
    with warnings.catch_warnings(
        action="ignore", category=optuna.exceptions.ExperimentalWarning
    ):  # constraints
        study.add_trials(trials)
    return study


def tpe(seed: int, **options: Any) -> TPESampler:
    """Return Optuna's TPE, which takes open trials for poor (the constant liar)."""
    import optuna

    with warnings.catch_warnings(
        action="ignore", category=optuna.exceptions.ExperimentalWarning
    ):  # group, multivariate
        return optuna.samplers.TPESampler(seed=seed, constant_liar=True, **options)


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
