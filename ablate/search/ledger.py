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
    from contextlib import AbstractContextManager
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
        if not url.startswith(GRPC):
            return optuna.storages.get_storage(url)
        host, _, port = url.removeprefix(GRPC).rpartition(":")
        with _experimental():
            proxy = optuna.storages.GrpcStorageProxy(host=host, port=int(port))
        proxy.wait_server_ready(timeout=_PROXY_SEC)
    except Exception as error:  # what a database driver raises is not ours to list
        from ablate.base.command_hints import redact

        expected = "expected grpc://HOST:PORT or a database's URL"
        raise UserError(
            f"cannot open Optuna's storage {redact(url)}: {first_line(error)} ({expected})"
        ) from error
    return proxy


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
            with _experimental():
                self._study.set_metric_names(list(objectives))

    def trials(self) -> list[FrozenTrial]:
        """Return all trials in the order in which they were asked."""
        return self._study.get_trials()

    def add(
        self, params: Mapping[str, Any], distributions: Mapping[str, BaseDistribution], attrs: dict[str, Any]
    ) -> FrozenTrial:
        """Write a trial as open, all at once, and return it."""
        self._study.add_trial(_open_trial(dict(params), dict(distributions), attrs))
        return self.trials()[-1]

    def tell(
        self,
        number: int,
        values: Sequence[float] | None = None,
        *,
        violation: float | None = None,
        failed: str | None = None,
        curve: Curve | None = None,
    ) -> None:
        """Record the end of an open trial, unless it is there.

        Without values it was ended early, after the last loss of ``curve``; or it ``failed``, for a fault of
        its own. ``violation`` above 0: it missed, and the values say by how much.

        Raises:
            ValueError: a value that is not finite; Optuna would take an infinity for a result.
        """
        from optuna.trial import Trial, TrialState

        if not all(map(math.isfinite, (*(values or ()), violation or 0.0))):
            raise ValueError(f"trial {number}: a value that is not finite: {values}")
        frozen = self._study.get_trials(deepcopy=False)[number]
        trial = Trial(self._study, frozen._trial_id)  # noqa: SLF001  a number has no other way to it
        for tokens, loss in sorted((curve or {}).items()):
            if tokens not in frozen.intermediate_values:
                trial.report(loss, tokens)
        if violation is not None and VIOLATION not in frozen.constraints:
            trial.set_constraint(VIOLATION, violation)
        state = TrialState.PRUNED if values is None else TrialState.COMPLETE
        if failed is not None:
            trial.set_user_attr("failed", failed)
            state = TrialState.FAIL
        self._study.tell(number, values and list(values), state)


def violation(trial: FrozenTrial) -> float:
    """Return a trial's violation, which is above 0 if it missed."""
    return trial.constraints.get(VIOLATION, 0.0)


def as_open(trial: FrozenTrial) -> FrozenTrial:
    """Return a trial as it was when it was asked: without a result."""
    return _open_trial(trial.params, trial.distributions, trial.user_attrs)


def _open_trial(params: dict[str, Any], distributions: dict[str, Any], attrs: dict[str, Any]) -> FrozenTrial:
    from optuna.trial import TrialState, create_trial

    return create_trial(
        state=TrialState.RUNNING, params=params, distributions=distributions, user_attrs=attrs
    )


def _experimental() -> AbstractContextManager[object]:
    """Do not warn of constraints, names of metrics, proxies and groups, which Optuna calls experimental."""
    from optuna.exceptions import ExperimentalWarning

    return warnings.catch_warnings(action="ignore", category=ExperimentalWarning)


def study_of(trials: Sequence[FrozenTrial], **options: Any) -> Study:
    """Return a study in memory that holds these trials; ``options``: its sampler, its pruner."""
    import optuna

    values = next((trial.values for trial in trials if trial.values is not None), (0.0,))
    study = optuna.create_study(directions=["minimize"] * len(values), **options)
    with _experimental():
        study.add_trials(trials)
    return study


def tpe(seed: int, **options: Any) -> TPESampler:
    """Return Optuna's TPE, which takes open trials for poor (the constant liar)."""
    import optuna

    with _experimental():
        return optuna.samplers.TPESampler(seed=seed, constant_liar=True, **options)


def _cut_torn_line(path: Path) -> None:
    """Cut off what follows the last line's end."""
    content = path.read_bytes() if path.exists() else b""
    whole = content.rfind(b"\n") + 1
    if whole != len(content):
        os.truncate(path, whole)
