"""The runs of a plan to execute: those that are needed and have no result, here or in another study.

A run's id is a hash of the configuration that can change its result. So a result of another study in the
storage is copied, with its ledger and diagnostics, if it comes from the same sources, the same kind and
number of devices and, on a CPU, the same arithmetic.

Several runs may begin with the same steps (a prefix): one trains them, the others wait for its state. A
prefix is kept in ``<study>/prefixes/<key>``. The key is a hash of all that its steps use and of the code that
trains them, so it does not matter which run has put it there, and when.

How it fails: other studies that are damaged, incomplete or from other code are skipped. A prefix is only a
short cut: a run whose prefix never comes, or is damaged, trains those steps itself, to the same bits. A fork
is not started if its parent diverged or failed before the fork, and a run that replays the routes of another
not before that one has finished. Writing into this study may raise ``OSError``.
"""

from __future__ import annotations

import contextlib
import shutil
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

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

_DRAFT = ".taken"
_OWN = ("checkpoints", "stop", "weights", ".*")
"""Files that are not copied with a result: those of the process that executes the run, and large ones."""


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """A run to execute. ``tokens_dir``: None for a trainer that reads no tokens.

    ``keep_weights``: leave the final weights in the run's folder. ``records``: and its routes. ``trainer``: a
    function in place of the shared trainer, where the configuration names none. The driver sets the fields
    from ``folder`` on, for the worker; their paths are on the shared storage. ``given_up``: the attempt whose
    holder was found dead, or 0. ``secrets``: variables that a command needs, which are written nowhere.
    ``prefix``: folder and step of the state that a fresh run starts from; ``holder``: the run that trains it.
    ``prefixes``: the folders for states that other runs start from, by the number of tokens before the state.
    """

    run_id: str
    config: RunConfig
    tokens_dir: Path | None
    resources: ResourcesConfig
    diagnostics: Diagnostics | None = None
    keep_weights: bool = False
    records: bool = False
    trainer: str | None = None
    folder: RunDir = field(default_factory=lambda: RunDir(Path()))
    stop_path: Path = Path("stop")
    device: str = "cpu"
    git_commit: str | None = None
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    given_up: int = 0
    prefix: tuple[Path, int] | None = None
    holder: str | None = None
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
    configs = (arm.config.with_seed(run.seed) for arm, run in plan.runs() if arm.config.replayed)
    originals = {id_of(config.original) for config in configs if config.original}
    return [
        RunRequest(
            run_id=run.id,
            config=arm.config.with_seed(run.seed),
            tokens_dir=files.folder.resolve() if (files := corpora.get(arm.config.data_digest)) else None,
            resources=arm.resources,
            diagnostics=plan.diagnostics,
            keep_weights=plan.keep_weights,
            records=run.id in originals,
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


def _find_elsewhere(store: StudyStore, wanted: Mapping[str, RunRequest]) -> dict[str, StudyStore]:
    """Find for each run another study of the storage that has the result which would be made here."""
    found: dict[str, StudyStore] = {}
    for folder in sorted(store.path.parent.glob("*/runs")):
        neighbour = StudyStore(folder.parent)
        there = neighbour.begun() if neighbour.path.name != store.path.name else ()
        for run_id, request in wanted.items():
            if run_id in there and run_id not in found:
                run, resources = neighbour.run(run_id), request.resources
                own = [fingerprint("cpu", resources.cpus)]
                with contextlib.suppress(OSError, ValueError, AttributeError):  # damaged
                    environment = run.environment()
                    if (
                        run.status().state in END_STATES
                        and environment.get("code") == code_digest()
                        and (environment.get("gpu") is not None) == (resources.num_gpus > 0)
                        and environment.get("world_size") == resources.devices_per_run
                        and (resources.num_gpus or environment.get("fingerprints") == own)
                        and run.state() in END_STATES  # last: it reads the run's files
                    ):
                        found[run_id] = neighbour
    return found


def copy_results(store: StudyStore, missing: Iterable[RunRequest]) -> dict[str, str]:
    """Copy other studies' results of these runs; return the study's name by run id.

    Only one process of a study may copy at a time. A run that has begun here is not copied, nor one that
    keeps its weights or routes, because those are not there. The ledger comes first, with a claim of this
    process: nobody can begin the run meanwhile. The status comes last.
    """
    wanted = {
        run.run_id: run
        for run in missing
        if not (run.keep_weights or run.records) and not Leases(store.run(run.run_id).attempts).latest()
    }
    taken, drafts = {}, store.path / "runs" / _DRAFT
    shutil.rmtree(drafts, ignore_errors=True)  # left by a killed driver
    try:
        for run_id, neighbour in _find_elsewhere(store, wanted).items():
            request, source = wanted[run_id], neighbour.run(run_id)
            run, draft = store.run(run_id), RunDir(drafts / run_id)
            shutil.copytree(source.path, draft.path, ignore=shutil.ignore_patterns(*_OWN))
            claim = Leases(draft.attempts)
            if draft.state() not in END_STATES or not claim.claim(
                claim.latest()
            ):  # altered since it was found
                continue
            draft.create(asdict(request.config))  # the data may have other paths here
            draft.write_status(draft.status())
            run.path.mkdir(parents=True, exist_ok=True)
            try:
                draft.attempts.rename(run.attempts)
            except OSError:  # not empty: the run has begun
                continue
            for path in sorted(draft.path.iterdir(), key=lambda path: path == draft.status_path):
                path.rename(run.path / path.name)
            claim.folder = run.attempts
            claim.end("superfluous")
            taken[run_id] = neighbour.path.name
    finally:
        shutil.rmtree(drafts, ignore_errors=True)
    return taken


def share_prefixes(
    store: StudyStore,
    runs: Sequence[RunRequest],
    planned: Sequence[tuple[str, RunConfig, ResourcesConfig]] = (),
) -> tuple[list[RunRequest], dict[str, str]]:
    """Fill in the prefixes that runs start from and keep; return also the key of each run's prefix.

    ``planned``: runs that may follow later, with configuration and resources.
    """
    folder, here = store.prefixes, {run.run_id for run in runs}
    everyone = [(run.run_id, run.config, run.resources) for run in runs]
    everyone += [one for one in planned if one[0] not in here]
    # Which layers are diagnosed depends on the whole recipe, even before its later phases begin; a record of
    # routes has every step.
    if any(run.diagnostics is not None for run in runs) or any(one.replayed for _, one, _ in everyone):
        return list(runs), {}
    found = shared_prefixes(
        everyone,
        salt=code_digest(),
        is_there=lambda key: (folder / key).exists(),
        can_hold=lambda run_id, step: run_id in here and newest_step(store.run(run_id).checkpoints) < step,
    )
    found = {run_id: prefix for run_id, prefix in found.items() if _is_open(store, run_id)}
    kept: dict[str, dict[int, Path]] = {}
    for prefix in found.values():
        kept.setdefault(prefix.holder, {})[prefix.tokens] = folder / prefix.key
    start: dict[str, Any] = {
        run_id: {"prefix": (folder / own.key, own.step), "holder": own.holder}
        for run_id, own in found.items()
    }
    filled = [replace(run, prefixes=kept.get(run.run_id, {}), **start.get(run.run_id, {})) for run in runs]
    return filled, {run_id: prefix.key for run_id, prefix in found.items()}


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
    return None if run.holder is None or _has_state(run) else run.holder


def why_it_cannot_begin(run: RunRequest) -> str | None:
    """Say why a run cannot begin: what it forks from or replays did not come so far. None if it can."""
    if (original := run.config.original) is not None:
        source = RunDir(run.folder.path.with_name(id_of(original)))
        said: str = source.examined().state
        if said == "finished" and not source.routes_path.exists():
            said += " before they were asked for; under another study name it is trained again"
        return None if said == "finished" else f"no record of the routes of {source.run_id}: it is {said}"
    fork, parent = run.config.fork, run.config.parent
    if fork is None or parent is None or _has_state(run):
        return None
    forked = RunDir(run.folder.path.with_name(id_of(parent)))
    status = forked.status()
    tokens = (
        max(status.step, newest_step(forked.checkpoints)) * plan_steps(run.config.training).tokens_per_step
    )
    # Without a prefix the fork trains the parent's steps itself, and may succeed where the parent failed.
    final = ("diverged",) if run.prefix is None else ("diverged", "failed")
    if status.state not in final or tokens > fork.tokens:
        return None
    return f"the run that it forks from, {forked.run_id}, {status.state} before the fork: {status.message}"
