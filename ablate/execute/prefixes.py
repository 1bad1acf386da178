"""States that several runs of an execution begin with: who trains them, who waits, and when they can go.

A prefix lies in ``<study>/prefixes/<key>``, where the key is a hash of all that its steps use and of the code
that trains them. So it does not matter which run has put it there, and when.

How it fails: it is only a short cut. A run whose prefix never comes, or is damaged, trains those steps
itself, to the same bits. A run that forks from one that has diverged or failed before the fork is not
started.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from typing import TYPE_CHECKING

from ablate.execute.environment import code_digest
from ablate.run.ids import run_id as id_of
from ablate.run.schedule import plan_steps
from ablate.run.shared_steps import kept_by, shared_prefixes
from ablate.store import END_STATES
from ablate.store.checkpoints import newest_step

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ablate.execute.pending_runs import RunRequest
    from ablate.run.config import ResourcesConfig, RunConfig
    from ablate.run.shared_steps import Prefix
    from ablate.store import StudyStore

    Planned = Sequence[tuple[str, RunConfig, ResourcesConfig]]


class Prefixes:
    """The prefixes of ``runs``, which are executed here, and of ``planned`` ones, which may be so later."""

    def __init__(self, store: StudyStore, runs: Sequence[RunRequest], planned: Planned = ()) -> None:
        self._store, self._folder = store, store.prefixes.resolve()
        self._configs = {run.run_id: run.config for run in runs}
        here = [(run.run_id, run.config, run.resources) for run in runs]
        everyone = [*here, *(one for one in planned if one[0] not in self._configs)]
        self._found: dict[str, Prefix] = {}
        changes = any(config.fork is not None or config.recipe.later for _, config, _ in everyone)
        # Which layers are diagnosed depends on the whole recipe, also before its phases begin.
        if changes and all(run.diagnostics is None for run in runs):
            found = shared_prefixes(
                everyone,
                salt=code_digest(),
                is_there=lambda key: (self._folder / key).exists(),
                can_hold=lambda run_id, step: run_id in self._configs and self._step(run_id) < step,
            )
            self._found = {run_id: prefix for run_id, prefix in found.items() if self._is_open(run_id)}
        self._begun = {run_id for run_id in self._found if self._step(run_id)}

    def _is_open(self, run_id: str) -> bool:
        return self._store.run(run_id).status().state not in END_STATES

    def _step(self, run_id: str) -> int:
        return newest_step(self._store.run(run_id).checkpoints)

    def filled_in(self, run: RunRequest) -> RunRequest:
        """Return a run with the prefix that it begins with, and with those that it keeps for others."""
        prefix, kept = self._found.get(run.run_id), kept_by(self._found).get(run.run_id, {})
        return replace(
            run,
            prefix=None if prefix is None else (self._folder / prefix.key, prefix.step),
            prefixes={step * _tokens_per_step(run.config): self._folder / key for step, key in kept.items()},
        )

    def waits_for(self, run_id: str) -> str | None:
        """Return the run that a run has to wait for, None if there is none or its prefix is there."""
        prefix = self._found.get(run_id)
        if prefix is None or run_id in self._begun or (self._folder / prefix.key).exists():
            return None
        return prefix.holder

    def why_it_cannot_begin(self, run_id: str) -> str | None:
        """Return why a run cannot begin: what it forks from ended before the fork. None if it can."""
        config, prefix = self._configs[run_id], self._found.get(run_id)
        if config.parent is None or config.fork is None or self._step(run_id):
            return None
        if prefix is not None and (self._folder / prefix.key).exists():
            return None
        forked = id_of(config.parent)
        status = self._store.run(forked).status()
        step = max(status.step, self._step(forked))
        # A run without a state to wait for trains as its parent itself, and may fare better than that one.
        final = ("diverged",) if prefix is None else ("diverged", "failed")
        if status.state not in final or step * _tokens_per_step(config) > config.fork.tokens:
            return None
        return f"the run that it forks from, {forked}, {status.state} before the fork: {status.message}"

    def clean(self) -> None:
        """Remove the prefixes that no run without a result begins with."""
        needed = {prefix.key for run_id, prefix in self._found.items() if self._is_open(run_id)}
        for path in self._folder.glob("*") if needed else [self._folder]:
            if path.name not in needed:
                shutil.rmtree(path, ignore_errors=True)


def _tokens_per_step(config: RunConfig) -> int:
    return plan_steps(config.training).tokens_per_step
