"""The runs of a plan to execute: those that are needed and have no result, here or in another study.

A run's id is a hash of the configuration that can change its result. So a result of another study in the
storage is copied, with its ledger and diagnostics, if it comes from the same sources, the same kind and
number of devices and, on a CPU, the same arithmetic.

Several runs may begin with the same steps (``Prefixes``): one trains them, the others wait for its state. A
prefix is kept in ``<study>/prefixes/<key>``. The key is a hash of all that its steps use and of the code that
trains them, so it does not matter which run has put it there, and when.

How it fails: other studies that are damaged, incomplete or from other code are skipped. A prefix is only a
short cut: a run whose prefix never comes, or is damaged, trains those steps itself, to the same bits. A fork
is not started if its parent diverged or failed before the fork. Writing into this study may raise
``OSError``.
"""

from __future__ import annotations

import shutil
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ablate.execute.environment import code_digest, fingerprint
from ablate.run.ids import run_id as id_of
from ablate.run.schedule import plan_steps, shared_prefixes
from ablate.store import END_STATES, RunDir, StudyStore
from ablate.store.checkpoints import newest_step
from ablate.store.leases import Leases

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from ablate.data import TokenFiles
    from ablate.plan import Plan
    from ablate.run.config import ResourcesConfig, RunConfig
    from ablate.run.diagnostics import Diagnostics
    from ablate.run.schedule import Prefix

DEFAULT_TRAINER = "ablate.train:train"
_DRAFT = ".taken"
_OWN = ("checkpoints", "stop", "weights", ".*")
"""Files that are not copied with a result: those of the process that executes the run, and large ones."""


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """A run to execute. ``tokens_dir``: None for a trainer that reads no tokens.

    ``keep_weights``: leave the final weights in the run's folder. The driver sets the fields from ``run_dir``
    on, for the worker; their paths are on the shared storage. ``given_up``: the attempt whose holder was
    found dead, or 0. ``prefix``: folder and step of the state that a fresh run starts from. ``prefixes``: the
    folders for states that other runs start from, by the number of tokens before the state.
    """

    run_id: str
    arm: str
    config: RunConfig
    tokens_dir: Path | None
    resources: ResourcesConfig
    diagnostics: Diagnostics | None = None
    keep_weights: bool = False
    run_dir: Path = Path()
    stop_path: Path = Path("stop")
    device: str = "cpu"
    git_commit: str | None = None
    trainer: str = DEFAULT_TRAINER
    given_up: int = 0
    prefix: tuple[Path, int] | None = None
    prefixes: Mapping[int, Path] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Todo:
    """The runs to execute, in order, and how many requested runs are left out for which reason.

    ``taken``: run id → the study whose result was copied.
    """

    runs: tuple[RunRequest, ...]
    num_ended: int
    num_unneeded: int
    taken: Mapping[str, str]


def requests_of(plan: Plan, chosen: Collection[str], corpora: Mapping[str, TokenFiles]) -> list[RunRequest]:
    """Make requests of the runs with the ids ``chosen``, seed by seed, so that early results can be compared.

    Of each seed, forks come last. ``corpora``: token files by the digest of their data.
    """
    return [
        RunRequest(
            run_id=run.id,
            arm=arm.name,
            config=arm.config.with_seed(run.seed),
            tokens_dir=corpora[arm.config.data_digest].folder.resolve(),
            resources=arm.resources,
            diagnostics=plan.diagnostics,
            keep_weights=plan.keep_weights,
        )
        for arm, run in sorted(plan.runs(), key=lambda pair: (pair[1].seed, pair[0].config.fork is not None))
        if run.id in chosen
    ]


def find_todo(
    store: StudyStore,
    requests: Sequence[RunRequest],
    unneeded: Callable[[], Mapping[str, str]] = dict,
    *,
    retry_failed: bool = False,
    take: bool = False,
) -> Todo:
    """Find the requests without a result; failed runs only with ``retry_failed``.

    ``unneeded`` returns the ids of runs whose results are not needed, with the reasons. ``take``: copy
    results from other studies of the storage; only allowed while no other process runs the study.
    """
    done = set(END_STATES) if retry_failed else {*END_STATES, "failed"}
    missing = [run for run in requests if store.run(run.run_id).state() not in done]
    settled = unneeded()
    needed = [run for run in missing if run.run_id not in settled]
    taken = copy_results(store, needed) if take else {}
    return Todo(
        runs=tuple(run for run in needed if run.run_id not in taken),
        num_ended=len(requests) - len(missing),
        num_unneeded=len(missing) - len(needed),
        taken=taken,
    )


def stop_unneeded(store: StudyStore, requests: Iterable[RunRequest], reasons: Mapping[str, str]) -> None:
    """Mark the pending runs among ``reasons`` (by run id) as stopped, each with its reason."""
    for request in requests:
        run = store.run(request.run_id)
        if request.run_id in reasons and run.state() == "pending":
            run.create(asdict(request.config))
            run.write_status(replace(run.status(), state="stopped", message=reasons[request.run_id]))


def find_elsewhere(store: StudyStore, runs: Mapping[str, ResourcesConfig]) -> dict[str, StudyStore]:
    """Find another study of the storage that has a run's result; runs without one have no entry."""
    found: dict[str, StudyStore] = {}
    for folder in sorted(store.path.parent.glob("*/runs")):
        neighbour = StudyStore(folder.parent)
        there = neighbour.begun() if neighbour.path.name != store.path.name else ()
        for run_id, resources in runs.items():
            if run_id in there and run_id not in found and _would_be_ours(neighbour.run(run_id), resources):
                found[run_id] = neighbour
    return found


def copy_results(store: StudyStore, missing: Iterable[RunRequest]) -> dict[str, str]:
    """Copy other studies' results of these runs; return the study's name by run id.

    Call it only while no other process runs the study. A run that has begun here is not copied, nor one that
    keeps its weights, because weights are not copied.
    """

    def has_begun(run_id: str) -> bool:
        return bool(Leases(store.run(run_id).attempts).latest())

    fresh = {run.run_id: run for run in missing if not run.keep_weights and not has_begun(run.run_id)}
    taken = {}
    for run_id, neighbour in find_elsewhere(
        store, {run_id: run.resources for run_id, run in fresh.items()}
    ).items():
        source, request = neighbour.run(run_id), fresh[run_id]
        alike = request.resources.gpus or source.environment().get("fingerprints") == [fingerprint("cpu")]
        # Another process may have begun the run during the copies.
        if alike and not has_begun(run_id) and _copy(source, store.run(run_id), request):
            taken[run_id] = neighbour.path.name
    return taken


def taken_text(taken: Mapping[str, str]) -> str:
    """Say how many results come from each other study. ``taken``: run id → study."""
    return ", ".join(f"{n} taken from {study}" for study, n in Counter(taken.values()).items())


def _would_be_ours(run: RunDir, resources: ResourcesConfig) -> bool:
    try:
        environment = run.environment()
        return (
            run.status().state in END_STATES
            and environment.get("code") == code_digest()
            and (environment.get("gpu") is not None) == (resources.gpus > 0)
            and environment.get("world_size") == resources.devices_per_run
            and run.state() in END_STATES  # last: it reads the run's files
        )
    except (OSError, ValueError, AttributeError):
        return False


def _copy(source: RunDir, target: RunDir, request: RunRequest) -> bool:
    """Copy a result; return False if it was not whole."""
    draft = RunDir(target.path.parent / _DRAFT / target.run_id)
    shutil.rmtree(draft.path.parent, ignore_errors=True)  # left by a killed driver
    try:
        shutil.copytree(source.path, draft.path, ignore=shutil.ignore_patterns(*_OWN))
        if draft.state() not in END_STATES:
            return False  # altered since it was found
        draft.create(asdict(request.config))  # the data may have other paths here
        draft.write_status(draft.status())
        shutil.rmtree(target.path, ignore_errors=True)  # the run was requested before, but never begun
        draft.path.rename(target.path)
        return True
    finally:
        shutil.rmtree(draft.path.parent, ignore_errors=True)


class Prefixes:
    """The prefixes of ``runs``, which are executed now, and of ``planned`` runs, which may follow later."""

    def __init__(
        self,
        store: StudyStore,
        runs: Sequence[RunRequest],
        planned: Sequence[tuple[str, RunConfig, ResourcesConfig]] = (),
    ) -> None:
        self._store, self._folder = store, store.prefixes.resolve()
        self._configs = {run.run_id: run.config for run in runs}
        here = [(run.run_id, run.config, run.resources) for run in runs]
        everyone = [*here, *(one for one in planned if one[0] not in self._configs)]
        self._found: dict[str, Prefix] = {}
        changes = any(config.fork is not None or config.recipe.later for _, config, _ in everyone)
        # Which layers are diagnosed depends on the whole recipe, even before its later phases begin.
        if changes and all(run.diagnostics is None for run in runs):
            found = shared_prefixes(
                everyone,
                salt=code_digest(),
                is_there=lambda key: (self._folder / key).exists(),
                can_hold=lambda run_id, step: run_id in self._configs and self._step(run_id) < step,
            )
            self._found = {run_id: prefix for run_id, prefix in found.items() if self._is_open(run_id)}
        self._kept: dict[str, dict[int, Path]] = {}
        for prefix in self._found.values():
            self._kept.setdefault(prefix.holder, {})[prefix.tokens] = self._folder / prefix.key
        self._begun = {run_id for run_id in self._found if self._step(run_id)}

    def _is_open(self, run_id: str) -> bool:
        return self._store.run(run_id).status().state not in END_STATES

    def _step(self, run_id: str) -> int:
        return newest_step(self._store.run(run_id).checkpoints)

    def filled_in(self, run: RunRequest) -> RunRequest:
        """Fill in the prefix that the run starts from, and those that it keeps for other runs."""
        prefix = self._found.get(run.run_id)
        begins_with = None if prefix is None else (self._folder / prefix.key, prefix.step)
        return replace(run, prefix=begins_with, prefixes=self._kept.get(run.run_id, {}))

    def waits_for(self, run_id: str) -> str | None:
        """Return the id of the run to wait for, or None."""
        prefix = self._found.get(run_id)
        if prefix is None or run_id in self._begun or (self._folder / prefix.key).exists():
            return None
        return prefix.holder

    def why_it_cannot_begin(self, run_id: str) -> str | None:
        """Say why a fork cannot begin: its parent diverged or failed before the fork. None if it can."""
        config, prefix = self._configs[run_id], self._found.get(run_id)
        if config.parent is None or config.fork is None or self._step(run_id):
            return None
        if prefix is not None and (self._folder / prefix.key).exists():
            return None
        forked = id_of(config.parent)
        status = self._store.run(forked).status()
        step = max(status.step, self._step(forked))
        # Without a prefix the fork trains the parent's steps itself, and may succeed where the parent failed.
        final = ("diverged",) if prefix is None else ("diverged", "failed")
        if (
            status.state not in final
            or step * plan_steps(config.training).tokens_per_step > config.fork.tokens
        ):
            return None
        return f"the run that it forks from, {forked}, {status.state} before the fork: {status.message}"

    def clean(self) -> None:
        """Keep the prefixes that runs without a result start from; remove the others."""
        needed = {prefix.key for run_id, prefix in self._found.items() if self._is_open(run_id)}
        for path in self._folder.glob("*") if needed else [self._folder]:
            if path.name not in needed:
                shutil.rmtree(path, ignore_errors=True)
