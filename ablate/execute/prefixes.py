"""Steps that several runs begin with (a prefix): one run trains them, the others wait for its state.

A prefix is kept in ``<study>/prefixes/<key>``. The key is a hash of all that its steps use and of the code
that trains them, so it does not matter which run has put it there, and when.

How it fails: a prefix is only a short cut: a run whose prefix never comes, or is damaged, trains those steps
itself, to the same bits. A fork is not started if its parent diverged or failed before the fork, and a run
that replays the routes of another not before that one has finished.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from typing import TYPE_CHECKING

from ablate.execute.environment import code_digest
from ablate.run.ids import run_id as id_of
from ablate.run.schedule import plan_steps, shared_prefixes
from ablate.store import END_STATES, RunDir, StudyStore
from ablate.store.checkpoints import newest_step

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from ablate.execute.pending_runs import RunRequest
    from ablate.run.config import ResourcesConfig, RunConfig


def share_prefixes(
    store: StudyStore,
    runs: Sequence[RunRequest],
    planned: Sequence[tuple[str, RunConfig, ResourcesConfig]] = (),
) -> tuple[list[RunRequest], dict[str, str]]:
    """Fill in the prefixes that runs start from and keep; return also the key of each run's prefix.

    ``planned``: runs that may follow later, with configuration and resources.
    """
    run_ids = {run.run_id for run in runs}
    everyone = [(run.run_id, run.config, run.resources) for run in runs]
    everyone += [run for run in planned if run[0] not in run_ids]
    # Which layers are diagnosed depends on the whole recipe, even before its later phases begin; a record of
    # routes has every step.
    if any(run.diagnostics is not None for run in runs) or any(
        config.replayed for _, config, _ in everyone
    ):
        return list(runs), {}
    prefixes = shared_prefixes(
        everyone,
        salt=code_digest(),
        is_there=lambda key: (store.prefixes / key).exists(),
        can_hold=lambda run_id, step: (
            run_id in run_ids and newest_step(store.run(run_id).checkpoints) < step
        ),
    )
    keys = {
        run_id: prefix.key
        for run_id, prefix in prefixes.items()
        if _is_open(store, run_id)
    }
    to_keep: dict[str, dict[int, Path]] = {}
    for run_id, key in keys.items():
        prefix = prefixes[run_id]
        to_keep.setdefault(prefix.holder, {})[prefix.tokens] = store.prefixes / key
    filled = []
    for run in runs:
        request = replace(run, prefixes=to_keep.get(run.run_id, {}))
        if run.run_id in keys:
            prefix = prefixes[run.run_id]
            request = replace(
                request,
                prefix=(store.prefixes / prefix.key, prefix.step),
                holder=prefix.holder,
            )
        filled.append(request)
    return filled, keys


def clean_prefixes(store: StudyStore, keys: Mapping[str, str]) -> None:
    """Keep the prefixes that runs without a result start from, by run id; remove the others."""
    needed = {key for run_id, key in keys.items() if _is_open(store, run_id)}
    for path in store.prefixes.glob("*") if needed else [store.prefixes]:
        if path.name not in needed:
            shutil.rmtree(path, ignore_errors=True)


def _is_open(store: StudyStore, run_id: str) -> bool:
    return store.run(run_id).status().state not in END_STATES


def _has_state(run: RunRequest) -> bool:
    """Whether the run can go on, from its prefix or its own checkpoint."""
    has_prefix = run.prefix is not None and run.prefix[0].exists()
    return has_prefix or newest_step(run.folder.checkpoints) > 0


def waits_for(run: RunRequest) -> str | None:
    """Return the id of the run whose routes it replays, or that trains its prefix unless it can go on."""
    if (original := run.config.original) is not None:
        return id_of(original)
    if run.holder is None or _has_state(run):
        return None
    return run.holder


def why_it_cannot_begin(run: RunRequest) -> str | None:
    """Say why a run cannot begin: what it forks from or replays did not come so far. None if it can."""
    if (original := run.config.original) is not None:
        return _why_no_routes(run.folder_of(original))
    fork = run.config.fork
    parent = run.config.parent
    if fork is None or parent is None or _has_state(run):
        return None
    source = run.folder_of(parent)
    status = source.status()
    step = max(status.step, newest_step(source.checkpoints))
    is_past_fork = step * plan_steps(run.config.training).tokens_per_step > fork.tokens
    # Without a prefix the fork trains the parent's steps itself, and may succeed where the parent failed.
    is_final = status.state == "diverged" or (
        status.state == "failed" and run.prefix is not None
    )
    if is_past_fork or not is_final:
        return None
    return f"the run that it forks from, {source.run_id}, {status.state} before the fork: {status.message}"


def _why_no_routes(source: RunDir) -> str | None:
    state: str = source.examined().state
    if state == "finished":
        if source.routes_path.exists():
            return None
        state += (
            " before they were asked for; under another study name it is trained again"
        )
    return f"no record of the routes of {source.run_id}: it is {state}"
