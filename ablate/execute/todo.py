"""The runs of a plan to execute: those that are needed and have no result."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ablate.execute.request import RunRequest
from ablate.execute.reuse import take_results
from ablate.store import END_STATES

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from ablate.data import TokenFiles
    from ablate.plan import Plan
    from ablate.store import StudyStore


@dataclass(frozen=True, kw_only=True)
class Todo:
    """The runs to execute, in order, and why other requested runs are left out.

    ``taken``: run id → the study whose result was copied.
    """

    runs: tuple[RunRequest, ...]
    num_ended: int
    num_unneeded: int
    taken: Mapping[str, str] = field(default_factory=dict)


def requests_of(plan: Plan, chosen: Collection[str], corpora: Mapping[str, TokenFiles]) -> list[RunRequest]:
    """Order the chosen runs, given by their ids, seed by seed, so that early results can be compared.

    ``corpora``: token files by the digest of their data.
    """
    order = sorted(((run.seed, n, arm, run) for n, (arm, run) in enumerate(plan.runs())), key=lambda t: t[:2])
    return [
        RunRequest(
            run_id=run.id,
            arm=arm.name,
            config=arm.config.with_seed(run.seed),
            tokens_dir=corpora[arm.config.data_digest].folder.resolve(),
            resources=arm.resources,
            diagnostics=plan.diagnostics,
        )
        for _, _, arm, run in order
        if run.id in chosen
    ]


def missing_runs(
    store: StudyStore, runs: Sequence[RunRequest], *, retry_failed: bool = False
) -> list[RunRequest]:
    """Select the runs without a result; failed ones only with ``retry_failed``."""
    done = set(END_STATES) if retry_failed else {*END_STATES, "failed"}
    return [run for run in runs if store.run(run.run_id).state() not in done]


def find_todo(
    store: StudyStore,
    requests: Sequence[RunRequest],
    unneeded: Callable[[], Mapping[str, str]],
    *,
    retry_failed: bool = False,
    take: bool = False,
) -> Todo:
    """Find the requests that are left to execute.

    ``unneeded`` returns the ids of runs whose results are not needed. ``take``: copy results from other
    studies of the storage; only allowed while no other process runs the study.
    """
    missing = missing_runs(store, requests, retry_failed=retry_failed)
    settled = unneeded()
    needed = [run for run in missing if run.run_id not in settled]
    taken = take_results(store, needed) if take else {}
    return Todo(
        runs=tuple(run for run in needed if run.run_id not in taken),
        num_ended=len(requests) - len(missing),
        num_unneeded=len(missing) - len(needed),
        taken=taken,
    )
