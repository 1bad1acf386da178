"""The runs of a plan to execute: those that are needed and have no result, here or in another study.

A run's id is a hash of the configuration that can change its result. So a result of another study in the
storage is copied, with its ledger and diagnostics, if it comes from the same sources, the same kind and
number of devices and, on a CPU, the same arithmetic. Of a command only code and devices are known.

How it fails: other studies that are damaged, incomplete or from other code are skipped. Writing into this
study may raise ``OSError``.
"""

from __future__ import annotations

import shutil
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ablate.execute.environment import code_of, fingerprint, read_otherwise
from ablate.run.command import Command, reading_of
from ablate.run.ids import run_id as id_of
from ablate.store import END_STATES, RunDir, StudyStore
from ablate.store.leases import Leases

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from ablate.data import TokenFiles
    from ablate.plan import Plan
    from ablate.run.config import ResourcesConfig, RunConfig
    from ablate.run.diagnostics import Diagnostics
    from ablate.store import State

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

    @property
    def bundle(self) -> dict[str, float]:
        """What each of the run's processes asks of Ray."""
        return {
            "CPU": self.resources.cpus,
            "GPU": self.resources.num_gpus,
            **self.resources.custom,
        }

    def folder_of(self, config: RunConfig) -> RunDir:
        """Return the folder of another run of the study."""
        return RunDir(self.folder.path.with_name(id_of(config)))


@dataclass(frozen=True, kw_only=True)
class Todo:
    """The runs to execute, in order, and how many requested runs are left out for which reason.

    ``taken``: run id → the study whose result was copied.
    """

    runs: tuple[RunRequest, ...]
    num_ended: int
    num_unneeded: int
    taken: Mapping[str, str]


def requests_of(
    plan: Plan, chosen: Collection[str], corpora: Mapping[str, TokenFiles]
) -> list[RunRequest]:
    """Make requests of the runs with the ids ``chosen``, seed by seed, so that early results can be compared.

    Of each seed, forks come last. ``corpora``: token files by the digest of their data.
    """
    originals = set()
    for arm, run in plan.runs():
        if arm.config.replayed is None:
            continue
        if (original := arm.config.with_seed(run.seed).original) is not None:
            originals.add(id_of(original))
    requests = []
    for arm, run in sorted(
        plan.runs(), key=lambda pair: (pair[1].seed, pair[0].config.fork is not None)
    ):
        if run.id not in chosen:
            continue
        files = corpora.get(arm.config.data_digest)
        request = RunRequest(
            run_id=run.id,
            config=arm.config.with_seed(run.seed),
            tokens_dir=None if files is None else files.folder.resolve(),
            resources=arm.resources,
            diagnostics=plan.diagnostics,
            keep_weights=plan.keep_weights,
            records=run.id in originals,
        )
        requests.append(request)
    return requests


def find_todo(
    store: StudyStore,
    requests: Sequence[RunRequest],
    unneeded: Callable[[], Mapping[str, str]] = dict,
    *,
    retry_failed: bool = False,
    take: bool = False,
) -> Todo:
    """Find the requests without a result, or whose logs are to be read again; failed runs only with ``retry_failed``.

    ``unneeded`` returns the ids of runs whose results are not needed, with the reasons. ``take``: copy
    results from other studies of the storage; only allowed while no other process runs the study.
    """
    ended: set[State] = {*END_STATES}
    if not retry_failed:
        ended.add("failed")
    missing = [
        run
        for run in requests
        if read_otherwise(store.run(run.run_id), run.config.trainer)
        or store.run(run.run_id).state() not in ended
    ]
    settled = unneeded()
    needed = [run for run in missing if run.run_id not in settled]
    taken = copy_results(store, needed) if take else {}
    return Todo(
        runs=tuple(run for run in needed if run.run_id not in taken),
        num_ended=len(requests) - len(missing),
        num_unneeded=len(missing) - len(needed),
        taken=taken,
    )


def stop_unneeded(
    store: StudyStore, requests: Iterable[RunRequest], reasons: Mapping[str, str]
) -> None:
    """Mark the pending runs among ``reasons`` (by run id) as stopped, each with its reason."""
    for request in requests:
        run = store.run(request.run_id)
        if request.run_id in reasons and run.state() == "pending":
            run.create(asdict(request.config))
            run.write_status(
                replace(run.status(), state="stopped", message=reasons[request.run_id])
            )


def _find_elsewhere(
    store: StudyStore, wanted: Mapping[str, RunRequest]
) -> dict[str, StudyStore]:
    """Find for each run another study of the storage that has the result which would be made here."""
    stores: dict[str, StudyStore] = {}
    waives_code = store.plan_path.exists() and "code" in store.plan().waive
    for folder in sorted(store.path.parent.glob("*/runs")):
        neighbour = StudyStore(folder.parent)
        if neighbour.path.name == store.path.name:
            continue
        begun = neighbour.begun()
        for run_id, request in wanted.items():
            if (
                run_id in begun
                and run_id not in stores
                and _has_result_of(
                    request, neighbour.run(run_id), waives_code=waives_code
                )
            ):
                stores[run_id] = neighbour
    return stores


def _has_result_of(request: RunRequest, run: RunDir, *, waives_code: bool) -> bool:
    """Whether a run of another study has the result that the request would have here.

    ``waives_code``: other code does not matter, if a command names the files that do.
    """
    resources = request.resources
    trainer = request.config.trainer
    has_gpu = resources.num_gpus > 0
    wanted: dict[str, object] = {"code": code_of(trainer)}
    if isinstance(trainer, Command):
        wanted["reading"] = reading_of(trainer)
        if waives_code and trainer.files:
            del wanted["code"]
    else:
        wanted["world_size"] = resources.devices_per_run
        if not has_gpu:
            wanted["fingerprints"] = [fingerprint("cpu", resources.cpus)]
    try:
        environment = run.environment()
        return (
            run.status().state in END_STATES
            and (environment.get("gpu") is not None) == has_gpu
            and wanted.items() <= environment.items()
            and run.state() in END_STATES  # last: it reads the run's files
        )
    except (OSError, ValueError, AttributeError):  # damaged
        return False


def copy_results(store: StudyStore, missing: Iterable[RunRequest]) -> dict[str, str]:
    """Copy other studies' results of these runs; return the study's name by run id.

    Only one process of a study may copy at a time. A run that has begun here is not copied, nor one that
    keeps its weights or routes, because those are not there. The ledger comes first, with a claim of this
    process: nobody can begin the run meanwhile. The status comes last.
    """
    wanted = {}
    for request in missing:
        has_begun = Leases(store.run(request.run_id).attempts).latest() > 0
        if not (request.keep_weights or request.records or has_begun):
            wanted[request.run_id] = request
    taken = {}
    drafts = store.path / "runs" / _DRAFT
    shutil.rmtree(drafts, ignore_errors=True)  # left by a killed driver
    try:
        for run_id, neighbour in _find_elsewhere(store, wanted).items():
            draft = RunDir(drafts / run_id)
            if _copy_result(
                wanted[run_id], neighbour.run(run_id), draft, store.run(run_id)
            ):
                taken[run_id] = neighbour.path.name
    finally:
        shutil.rmtree(drafts, ignore_errors=True)
    return taken


def _copy_result(
    request: RunRequest,
    source: RunDir,
    draft: RunDir,
    run: RunDir,
) -> bool:
    """Copy a result by way of ``draft``; tell whether it is there now."""
    shutil.copytree(source.path, draft.path, ignore=shutil.ignore_patterns(*_OWN))
    claim = Leases(draft.attempts)
    # altered since it was found
    if draft.state() not in END_STATES or not claim.claim(claim.latest()):
        return False
    draft.create(asdict(request.config))  # the data may have other paths here
    draft.write_status(draft.status())
    run.path.mkdir(parents=True, exist_ok=True)
    try:
        draft.attempts.rename(run.attempts)
    except OSError:  # not empty: the run has begun
        return False
    for path in sorted(
        draft.path.iterdir(), key=lambda path: path == draft.status_path
    ):
        path.rename(run.path / path.name)
    claim.folder = run.attempts
    claim.end("superfluous")
    return True
