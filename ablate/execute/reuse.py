"""Runs that another study of the same storage has ended already: the same id is the same run.

Several questions are often asked of the same runs, in a study each. A run's id holds everything of its
configuration that can change its result, so a result is copied, with its ledger and diagnostics, where the
sources that made it and the kind of device are those that would make it here. The copy is whole or absent.

How it fails: a neighbour that is damaged, half written or of other code is passed over. Writing into the
study may raise ``OSError``.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING

from ablate.store import END_STATES, RunDir, StudyStore
from ablate.store.leases import Leases

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ablate.execute.request import RunRequest
    from ablate.run.config import ResourcesConfig

_DRAFT = ".taken"
_OWN = ("checkpoints", "stop")
"""What of a run belongs to whoever executes it."""


def find_elsewhere(store: StudyStore, runs: Mapping[str, ResourcesConfig]) -> dict[str, StudyStore]:
    """Return for each run, by id, that another study of the storage has a result of: that study."""
    from ablate.execute.environment import code_digest

    found: dict[str, StudyStore] = {}
    try:
        neighbours = sorted(path for path in store.path.parent.iterdir() if path.name != store.path.name)
    except OSError:
        return found
    for neighbour in map(StudyStore, neighbours):
        try:
            there = {entry.name for entry in os.scandir(neighbour.path / "runs")}
        except OSError:
            continue
        for run_id, resources in runs.items():
            new = run_id in there and run_id not in found
            if new and _would_be_ours(neighbour.run(run_id), code_digest(), resources):
                found[run_id] = neighbour
    return found


def take_results(store: StudyStore, missing: Iterable[RunRequest]) -> dict[str, str]:
    """Copy the results that other studies have of these runs; return the id and study of each.

    Only for who runs the study alone. A run that was ever begun here goes on here.
    """
    fresh = {run.run_id: run for run in missing if not Leases(store.run(run.run_id).attempts).latest()}
    found = find_elsewhere(store, {run_id: run.resources for run_id, run in fresh.items()})
    taken = {}
    for run_id, neighbour in found.items():
        # Looked at again: somebody who came later may have begun it while others were copied.
        if not Leases(store.run(run_id).attempts).latest():
            _copy(neighbour.run(run_id), store.run(run_id), fresh[run_id])
            taken[run_id] = neighbour.path.name
    return taken


def taken_text(taken: Mapping[str, str]) -> str:
    """Say how many results come from which other studies of the storage. ``taken``: run id → study."""
    return ", ".join(f"{n} taken from {study}" for study, n in Counter(taken.values()).items())


def _would_be_ours(run: RunDir, code: str, resources: ResourcesConfig) -> bool:
    try:
        environment = run.environment()
        return (
            run.status().state in END_STATES
            and environment.get("code") == code
            and (environment.get("gpu") is not None) == (resources.gpus > 0)
            and environment.get("world_size") == resources.devices_per_run
            and run.state() in END_STATES  # last: it reads the whole file of metrics
        )
    except (OSError, ValueError, AttributeError):
        return False


def _copy(source: RunDir, target: RunDir, request: RunRequest) -> None:
    draft = RunDir(target.path.parent / _DRAFT / target.run_id)
    shutil.rmtree(draft.path.parent, ignore_errors=True)  # of a driver that was killed
    try:
        shutil.copytree(source.path, draft.path, ignore=shutil.ignore_patterns(*_OWN, ".*"))
        draft.create(asdict(request.config))  # paths of the data may be other ones here
        shutil.rmtree(target.path, ignore_errors=True)  # asked for before, never begun
        draft.path.rename(target.path)
    finally:
        shutil.rmtree(draft.path.parent, ignore_errors=True)
