"""Whole jobs as plain calls: a verb of the command line without its options and its printing.

Each call takes a ``Where``, and tells a ``Listener`` what happens. The default listener says nothing; that of
the command line prints. ``StudyEnd`` says how a call that ran a study ended: for the last lines, the exit
code, or a notebook.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ablate.plan.shares import this_machine
from ablate.store import END_STATES

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from ablate.execute.queue import ExecutionEnd
    from ablate.plan.shares import Machine
    from ablate.reports import ReportPaths
    from ablate.store import State, StudyStore
    from ablate.store.plan_file import LockedPlan

    Prepared = Callable[[str, float, str], None]
    """Takes a corpus's digest, the fraction of it that is done, and what is being done."""
    Poll = Callable[[], None]
    """Is called a few times a second while runs are executed."""


@dataclass(frozen=True, kw_only=True)
class Where:
    """A storage, a Ray cluster and an MLflow server.

    ``address``: of a Ray cluster; None: Ray on this machine. ``tracking_uri``: of MLflow; None:
    $MLFLOW_TRACKING_URI, else a database in the storage.
    """

    storage: Path
    address: str | None = None
    tracking_uri: str | None = None

    @property
    def cluster(self) -> str:
        """Where Ray is, in words."""
        if self.address:
            return f"at {self.address}"
        return "on this machine"

    def machines(self) -> tuple[Machine, ...]:
        """Describe the machines that runs go to.

        Raises:
            UserError: the cluster cannot be reached.
        """
        if self.address is None:
            return this_machine()
        from ablate.execute.cluster import machines_at

        return machines_at(self.address)


class Listener:
    """Ignores everything. Override what you want to show; nothing that a listener does changes a result."""

    def say(self, sentence: str) -> None:
        """Take a sentence for the user, without markup."""

    def reported(self, written: ReportPaths) -> None:
        """Take a report that has been written, with its verdict."""

    def preparing(self) -> AbstractContextManager[Prepared]:
        """Follow the preparation of token files during the block."""
        return nullcontext(lambda _digest, _fraction, _what: None)

    def executing(
        self,
        store: StudyStore,  # noqa: ARG002
        run_ids: Sequence[str],  # noqa: ARG002
    ) -> AbstractContextManager[Poll]:
        """Follow the execution of these runs during the block; the store has their progress."""
        return nullcontext(lambda: None)


@dataclass(frozen=True, kw_only=True)
class StudyEnd:
    """The end of a call: ``outcome``, that of its runs; ``states``, of the runs that were asked for.

    ``failed``: the runs that failed in this call, each as a sentence, with the file that it printed to.
    ``report``: the report's page, if one was written. If the study's arms must be tuned first and that is
    not done, all is of the trials, of which one at least has no result.
    """

    outcome: ExecutionEnd
    states: list[State]
    failed: dict[str, Path]
    report: Path | None

    @property
    def is_done(self) -> bool:
        """Whether every run that was asked for has a result."""
        return not self.outcome.interrupted and END_STATES.issuperset(self.states)


def end_of(
    store: StudyStore,
    plan: LockedPlan,
    asked: Collection[str],
    outcome: ExecutionEnd,
    report: Path | None = None,
) -> StudyEnd:
    """Summarise how an execution ended. ``asked``: ids of the runs that were asked for."""
    failed = {}
    for arm, planned in plan.runs():
        if outcome.states.get(planned.id) == "failed":
            run = store.run(planned.id)
            status = run.status()
            failed[f"{arm.name} seed {planned.seed}: {status.message}"] = (
                run.attempt_log(status.attempt)
            )
    states = [store.run(run_id).state() for run_id in asked]
    return StudyEnd(outcome=outcome, states=states, failed=failed, report=report)
