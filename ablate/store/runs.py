"""Folders of a study and of its runs. See the package for the layout.

The status of a run with a result holds the hashes of its other files, so that a reader can tell whether they
have changed since its end. Of any other run, its newest checkpoint vouches for the rows before it.

How it fails: a truncated last line of ``metrics.jsonl`` (a crash during an append) is ignored. A run whose
files were altered is ``damaged``: it is run again, and its numbers count for nothing until then.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from pydantic import Field

from ablate.base.command_hints import command_line
from ablate.base.errors import UserError, likely
from ablate.base.files import (
    hash_of,
    read_record,
    record_text,
    refuse_open_folder,
    restrict_umask,
    write_record,
)
from ablate.store.checkpoints import checkpointed_rows
from ablate.store.metrics import new_lines, parse_rows, rows_of
from ablate.store.plan_file import LockedPlan, plan_from_json, plan_to_json
from ablate.store.records import Number, Text, Tokens, checked

if TYPE_CHECKING:
    from pathlib import Path

State = Literal[
    "pending",
    "running",
    "finished",
    "diverged",
    "failed",
    "interrupted",
    "stopped",
    "damaged",
]
"""``stopped``: ended because its result was no longer needed. It has no result, and keeps its checkpoint.
``damaged``: its files have changed. This state is never written, only found."""
STATES: tuple[State, ...] = get_args(State)
END_STATES: frozenset[State] = frozenset({"finished", "diverged"})
"""States of runs that have a result and are never run again."""

_SEALED = (
    "config.json",
    "environment.json",
    "metrics.jsonl",
    "diagnostics.jsonl",
    "routes.jsonl",
)
_OF_THE_END = ("ended_unix", "outcome", "message")

_Seconds = Annotated[Number, Field(gt=-1 << 62, lt=1 << 62)]


@dataclass(frozen=True, kw_only=True)
class Status:
    """The state of a run. Times are Unix seconds; ``tokens`` counts training tokens seen.

    ``files``: the hashes of the other files that belong to a result, by path in the run's folder; None
    without a result.
    """

    state: State = "pending"
    attempt: Tokens = 0
    tokens: Tokens = 0
    step: Tokens = 0
    message: Text | None = None
    started_unix: _Seconds | None = None
    updated_unix: _Seconds | None = None
    ended_unix: _Seconds | None = None
    files: dict[Text, Text] | None = None


class _Inside:
    """The path of a file or folder in the folder of the object that has this attribute."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, owner: RunDir | StudyStore, _class: type) -> Path:
        return owner.path / self._name


@dataclass(frozen=True)
class RunDir:
    """One run's folder."""

    path: Path

    @property
    def run_id(self) -> str:
        """The run's id, which is the folder's name."""
        return self.path.name

    config_path = _Inside("config.json")
    """The resolved configuration."""
    status_path = _Inside("status.json")
    """The state, and the hashes of the other files once there is a result."""
    metrics_path = _Inside("metrics.jsonl")
    """The rows of training steps and evaluations."""
    diagnostics_path = _Inside("diagnostics.jsonl")
    """The rows of diagnostics, if the study asks for them."""
    routes_path = _Inside("routes.jsonl")
    """The routes of a mixture's tokens, if another arm replays them."""
    system_path = _Inside("system.jsonl")
    """Samples of the machine's use during the run."""
    stop_path = _Inside("stop")
    """A file that asks the run's worker to end it; its content is the reason."""
    environment_path = _Inside("environment.json")
    """Versions, hardware and back end of the last attempt."""
    checkpoints = _Inside("checkpoints")
    """The last checkpoints of a run that has not ended."""
    weights = _Inside("weights")
    """The final weights in Hugging Face's layout, if the study keeps them."""
    attempts = _Inside("attempts")
    """The ledger: ``<n>.json`` (who executed attempt n and how it ended) and ``<n>.log``."""

    def attempt_log(self, attempt: int, node: int = 0) -> Path:
        """Return the path of an attempt's log on a node; attempts count from 1, nodes from 0."""
        return self.attempts / (
            f"{attempt}.node{node}.log" if node else f"{attempt}.log"
        )

    def create(self, config: dict[str, Any]) -> None:
        """Make the folder and write the configuration."""
        self.attempts.mkdir(parents=True, exist_ok=True)
        write_record(self.config_path, config)

    def config(self) -> dict[str, Any]:
        """Read the resolved configuration; raises ``ValueError`` if its file was altered."""
        return read_record(self.config_path)

    def environment(self) -> dict[str, Any]:
        """Read the environment of the last attempt, empty before the first.

        Raises:
            ValueError: the file was altered.
        """
        if self.environment_path.exists():
            return read_record(self.environment_path)
        return {}

    def recorded(self) -> dict[str, Any]:
        """Read the environment, as far as it can be read: a damaged one is empty."""
        try:
            return self.environment()
        except (OSError, ValueError):
            return {}

    def status(self) -> Status:
        """Read the status: ``pending`` before the run begins, ``damaged`` if the status file is bad or gone.

        Other files are not checked: ``examined`` does that.
        """
        try:
            return checked(Status, read_record(self.status_path))
        except FileNotFoundError:
            if self.metrics_path.exists():
                return Status(state="damaged", message="status.json is gone")
            return Status()
        except ValueError as error:
            return Status(state="damaged", message=f"status.json: {error}")

    def examined(self) -> Status:
        """Read the status; only ``damaged`` if another file has changed since the run had its result."""
        status = self.status()
        if status.state not in END_STATES:
            return status
        sealed = status.files or {}
        hashes = self._hashes(status.attempt)
        for name in (*sealed, *hashes):
            if name not in hashes:
                message = f"{name} is gone"
            elif hashes[name] != sealed.get(name):
                message = f"{name}: altered or cut since the run ended"
            else:
                continue
            return Status(state="damaged", attempt=status.attempt, message=message)
        return status

    def state(self) -> State:
        """Read the state and check the files as ``examined`` does, to decide which runs to execute."""
        return self.examined().state

    def rows(self, path: Path, status: Status) -> tuple[bytes, list[str]]:
        """Read the rows of a file that can be trusted; return them and a line for each fault.

        ``status``: from ``examined``. These are all rows of a run with a result, no rows of a damaged run,
        and of any other run the rows before its newest checkpoint.
        """
        if status.state == "damaged":
            return b"", []
        if status.state not in END_STATES:
            return checkpointed_rows(self.checkpoints, path.name)
        try:
            return path.read_bytes(), []
        except FileNotFoundError:
            return b"", []

    def _hashes(self, attempt: int) -> dict[str, str]:
        """Hash the files that belong to a result, as far as they are there, by path in the run's folder."""
        hashes = {}
        folder = str(self.path)  # Path is slow for thousands of runs
        for name in _SEALED:
            with (
                contextlib.suppress(FileNotFoundError),
                open(f"{folder}/{name}", "rb") as file,  # noqa: PTH123
            ):
                hashes[name] = hash_of(file.read())
        ledger = f"attempts/{attempt}.json"
        try:
            record = read_record(self.path / ledger)
            # How the attempt ended is written after the status, so it is not hashed.
            begun = {
                key: value for key, value in record.items() if key not in _OF_THE_END
            }
            hashes[ledger] = hash_of(record_text(begun))
        except FileNotFoundError:
            pass
        except ValueError:
            hashes[ledger] = "damaged"
        return hashes

    def write_status(self, status: Status, rows: dict[str, str] | None = None) -> None:
        """Replace the status with the present time and, for a run with a result, its other files' hashes.

        ``rows``: the hashes, by name, of files of rows that the caller wrote itself. They are used whatever
        the disk holds now.
        """
        sealed = None
        if status.state in END_STATES:
            sealed = self._hashes(status.attempt) | (rows or {})
        write_record(
            self.status_path,
            asdict(status) | {"updated_unix": time.time(), "files": sealed},
        )

    def metrics(self, kind: str | None = None) -> list[dict[str, Any]]:
        """Read the rows, or those of a kind, in the order written; damaged rows are left out."""
        lines, _ = new_lines(self.metrics_path)
        if kind is not None:
            return rows_of(lines, kind)
        return [row for row in parse_rows(lines) if isinstance(row, dict)]


@dataclass(frozen=True)
class StudyStore:
    """One study's folder."""

    path: Path

    plan_path = _Inside("plan.lock.json")
    """The plan that was run last."""
    throughput_path = _Inside("throughput.json")
    """The last measurement of ``ablate check steps STUDY``."""
    prefixes = _Inside("prefixes")
    """States that runs have in common, for those that still begin with them."""

    def refuse_unsafe(self) -> None:
        """Raise ``UserError`` if others could lead what is written into this store to another place.

        From now on the group can write new files only if it shares the storage.
        """
        refuse_open_folder(self.path.parent)
        refuse_open_folder(self.path, with_links=False)
        restrict_umask(self.path.parent)

    def write_plan(self, plan: LockedPlan) -> None:
        """Replace the plan."""
        write_record(self.plan_path, plan_to_json(plan))

    def plan(self) -> LockedPlan:
        """Read the plan that was run last.

        Raises:
            FileNotFoundError: the study never ran here.
            UserError: the file is damaged.
        """
        try:
            plan = plan_from_json(read_record(self.plan_path))
            for _, run in plan.runs():
                self.run(run.id)
        except ValueError as error:
            start = command_line("run", self.path.name, storage=self.path.parent)
            hint = f"write it again with: {start}, or import it again"
            raise UserError(
                f"{self.plan_path}: not a plan: {error}", hint=hint
            ) from None
        return plan

    def begun(self) -> set[str]:
        """List the ids of the runs that have a folder."""
        try:
            return {entry.name for entry in os.scandir(self.path / "runs")}
        except OSError:
            return set()

    def runs_lost_by(self, plan: LockedPlan) -> int:
        """Count the runs that have begun and that the study would lose with this plan.

        Raises:
            UserError: the plan has values of ``--set`` and would replace a plan that differs. An edited study
                file is accepted, but these values are in no such file, and the earlier results would be gone
                from the study's pages.
        """
        try:
            earlier = self.plan()
        except (OSError, UserError):
            return 0
        run_ids = {run.id for _, run in plan.runs()}
        lost = {
            run.id for _, run in earlier.runs() if run.id not in run_ids
        } & self.begun()
        if plan.settings and (lost or plan.differs_from(earlier)):
            name = shlex.quote(f"name={plan.study}-2")
            hint = f"give this one a name of its own, such as --set {name}"
            raise UserError(
                f"--set: {self.path} holds this study with other settings", hint=hint
            )
        return len(lost)

    def run(self, run_id: str) -> RunDir:
        """Return the folder of a run, which need not exist.

        Raises:
            ValueError: the id is not a plain name and could lead out of the store.
        """
        if not run_id or set(run_id) & set("/\\\0") or run_id[0] == ".":
            raise ValueError(f"{run_id!r} is no run's id")
        return RunDir(self.path / "runs" / run_id)


def study_at(folder: Path) -> StudyStore | None:
    """Open the store in a folder, None if no study has run in it."""
    store = StudyStore(folder)
    return store if store.plan_path.exists() else None


def study_named(storage: Path, name: str, *, start: str | None = None) -> StudyStore:
    """Open the store of a study that ran. ``start``: the command that would start it, if it is known.

    Raises:
        UserError: nothing of that name has run here.
    """
    if store := study_at(storage / name):
        return store
    if (storage / name / "runs").is_dir():
        start = start or command_line("run", "ITS_FILE", storage=storage)
        fault = f"{storage / name / 'plan.lock.json'} is gone"
        raise UserError(fault, hint=f"write it again with: {start}")
    names = sorted(path.parent.name for path in storage.glob("*/plan.lock.json"))
    if names:
        hint = f"studies here: {', '.join(names)}"
    else:
        hint = "no study has run there yet"
    if start:
        hint += f"; start it with: {start}"
    else:
        hint = likely(name, names, hint)
    raise UserError(f"no study '{name}' in {storage}", hint=hint)
