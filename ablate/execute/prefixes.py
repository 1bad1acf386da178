"""States that several runs of an execution begin with: who trains them, who waits, and when they can go.

A prefix lies in ``<study>/prefixes/<key>``, where the key is a hash of all that its steps use and of the code
that trains them. So it does not matter which run has put it there, and when.

How it fails: it is only a short cut. A run whose prefix never comes, or is damaged, trains those steps
itself, to the same bits. A run that forks from one that has diverged or failed before the fork is not
started.
"""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

from ablate.execute.environment import code_digest
from ablate.run.ids import run_id as id_of
from ablate.run.schedule import plan_steps
from ablate.run.shared_steps import kept_by, shared_prefixes
from ablate.store import END_STATES
from ablate.store.checkpoints import newest_step

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from ablate.execute.pending_runs import RunRequest
    from ablate.run.config import ResourcesConfig, RunConfig
    from ablate.run.shared_steps import Prefix
    from ablate.store import StudyStore

    Planned = Sequence[tuple[str, RunConfig, ResourcesConfig]]


class Prefixes:
    """The prefixes of ``runs``, which are executed here, and of ``planned`` ones, which may be so later."""

    def __init__(self, store: StudyStore, runs: Sequence[RunRequest], planned: Planned = ()) -> None:
        self._store = store
        self._folder = store.prefixes.resolve()
        self._configs = {run.run_id: run.config for run in runs}
        here = [(run.run_id, run.config, run.resources) for run in runs]
        everyone = [*here, *(one for one in planned if one[0] not in self._configs)]
        self._found: dict[str, Prefix] = {}
        changes = any(config.fork is not None or config.recipe.later for _, config, _ in everyone)
        # Which layers are diagnosed depends on the whole recipe, also before its phases begin.
        if changes and all(run.diagnostics is None for run in runs):
            found = shared_prefixes(
                everyone, salt=code_digest(), is_there=self._is_there, can_hold=self._can_hold
            )
            self._found = {run_id: prefix for run_id, prefix in found.items() if self._is_open(run_id)}
        self._kept = kept_by(self._found)
        self._begun = frozenset(run_id for run_id in self._found if self._has_begun(run_id))

    def _is_open(self, run_id: str) -> bool:
        return self._store.run(run_id).status().state not in END_STATES

    def _is_there(self, key: str) -> bool:
        return (self._folder / key).exists()

    def _can_hold(self, run_id: str, step: int) -> bool:
        """Whether a run still comes by a step, in this execution."""
        return run_id in self._configs and newest_step(self._store.run(run_id).checkpoints) < step

    def of(self, run_id: str) -> tuple[Path, int] | None:
        """Return the folder of the prefix that a run begins with, and its step; None if it has none."""
        prefix = self._found.get(run_id)
        return None if prefix is None else (self._folder / prefix.key, prefix.step)

    def kept(self, run_id: str) -> Mapping[int, Path]:
        """Return the tokens after which a run keeps its state for others, with the folders for it."""
        steps = self._kept.get(run_id, {})
        if not steps:
            return {}
        per_step = _tokens_per_step(self._configs[run_id])
        return {step * per_step: self._folder / key for step, key in steps.items()}

    def waits_for(self, run_id: str) -> str | None:
        """Return the run that a run has to wait for, None if there is none or its prefix is there."""
        prefix = self._found.get(run_id)
        if prefix is None or run_id in self._begun or self._is_there(prefix.key):
            return None
        return prefix.holder

    def why_it_cannot_begin(self, run_id: str) -> str | None:
        """Return why a run cannot begin: what it forks from ended before the fork. None if it can."""
        config = self._configs[run_id]
        parent, prefix = config.parent, self._found.get(run_id)
        if parent is None or config.fork is None or self._has_begun(run_id):
            return None
        if prefix is not None and self._is_there(prefix.key):
            return None
        forked = self._store.run(id_of(parent))
        status = forked.status()
        step = max(status.step, newest_step(forked.checkpoints))
        # A run without a state to wait for trains as its parent itself, and may fare better than that one.
        final = ("diverged",) if prefix is None else ("diverged", "failed")
        if status.state not in final or step * _tokens_per_step(config) > config.fork.tokens:
            return None
        what = f"the run that it forks from, {forked.run_id}, {status.state} before the fork"
        return f"{what}: {status.message}" if status.message else what

    def _has_begun(self, run_id: str) -> bool:
        return newest_step(self._store.run(run_id).checkpoints) > 0

    def clean(self) -> None:
        """Remove the prefixes that no run without a result begins with."""
        needed = {prefix.key for run_id, prefix in self._found.items() if self._is_open(run_id)}
        for path in self._folder.iterdir() if self._folder.is_dir() else ():
            if path.name not in needed:
                shutil.rmtree(path, ignore_errors=True)
        if not needed:
            shutil.rmtree(self._folder, ignore_errors=True)


def _tokens_per_step(config: RunConfig) -> int:
    return plan_steps(config.training).tokens_per_step
