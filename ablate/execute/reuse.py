"""Reuse of runs that have ended in another study of the same storage: the same id is the same run.

Several studies often ask for the same runs. A run's id hashes the configuration that can change its result.
So a result is copied, with its ledger and diagnostics, if the same sources and the same kind of device would
make it here. The copy is complete or absent.

How it fails: other studies that are damaged, incomplete or from other code are skipped. Writing into this
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
"""Files that belong to the process that executes the run, and are not copied."""


def find_elsewhere(store: StudyStore, runs: Mapping[str, ResourcesConfig]) -> dict[str, StudyStore]:
    """Return the study of the storage that has a result, for each run that has one elsewhere."""
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
    """Copy other studies' results of these runs; return the study of each, by run id.

    Call it only while no other process runs the study. A run that has begun here is not copied.
    """
    fresh = {run.run_id: run for run in missing if not Leases(store.run(run.run_id).attempts).latest()}
    found = find_elsewhere(store, {run_id: run.resources for run_id, run in fresh.items()})
    taken = {}
    for run_id, neighbour in found.items():
        # Check again: another process may have begun the run during the copies.
        if not Leases(store.run(run_id).attempts).latest():
            _copy(neighbour.run(run_id), store.run(run_id), fresh[run_id])
            taken[run_id] = neighbour.path.name
    return taken


def taken_text(taken: Mapping[str, str]) -> str:
    """Return how many results come from each other study. ``taken``: run id → study."""
    return ", ".join(f"{n} taken from {study}" for study, n in Counter(taken.values()).items())


def _would_be_ours(run: RunDir, code: str, resources: ResourcesConfig) -> bool:
    try:
        environment = run.environment()
        return (
            run.status().state in END_STATES
            and environment.get("code") == code
            and (environment.get("gpu") is not None) == (resources.gpus > 0)
            and environment.get("world_size") == resources.devices_per_run
            and run.state() in END_STATES  # last: it reads the whole metrics file
        )
    except (OSError, ValueError, AttributeError):
        return False


def _copy(source: RunDir, target: RunDir, request: RunRequest) -> None:
    draft = RunDir(target.path.parent / _DRAFT / target.run_id)
    shutil.rmtree(draft.path.parent, ignore_errors=True)  # left by a killed driver
    try:
        shutil.copytree(source.path, draft.path, ignore=shutil.ignore_patterns(*_OWN, ".*"))
        draft.create(asdict(request.config))  # paths of the data may be other ones here
        shutil.rmtree(target.path, ignore_errors=True)  # asked for before, never begun
        draft.path.rename(target.path)
    finally:
        shutil.rmtree(draft.path.parent, ignore_errors=True)
