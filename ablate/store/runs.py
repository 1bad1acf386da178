"""Folders of a study and of its runs. See the package's docstring for the layout.

How it fails: a truncated last line of ``metrics.jsonl`` (a crash during an append) is ignored. A run without
``status.json`` has not started; a run with a damaged one is run again.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from pydantic import Field

from ablate.base.errors import UserError
from ablate.base.files import parse_json, read_json, write_bytes_atomic, write_json_atomic
from ablate.store.checkpoints import hash_of_prefix
from ablate.store.fields import Number, Text, Tokens, checked
from ablate.store.lock import LockedPlan, plan_from_json, plan_to_json

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

State = Literal["pending", "running", "finished", "diverged", "failed", "interrupted", "stopped"]
"""``stopped``: ended because its result was no longer needed. It has no result, and keeps its checkpoint."""
STATES: tuple[State, ...] = get_args(State)
DAMAGED = "its status file is damaged"
END_STATES: frozenset[State] = frozenset({"finished", "diverged"})
"""States of runs that have a result and are never run again."""

_Seconds = Annotated[Number, Field(gt=-1 << 62, lt=1 << 62)]


@dataclass(frozen=True, kw_only=True)
class Status:
    """The state of a run. Times are Unix seconds; ``tokens`` counts training tokens seen.

    ``metrics_bytes`` and ``metrics_hash``: size and hash of an ended run's rows, to check them later.
    """

    state: State = "pending"
    attempt: Tokens = 0
    tokens: Tokens = 0
    step: Tokens = 0
    message: Text | None = None
    started_unix: _Seconds | None = None
    updated_unix: _Seconds | None = None
    ended_unix: _Seconds | None = None
    metrics_bytes: Tokens | None = None
    metrics_hash: Text | None = None


class _Inside:
    """The path of a file or folder within the folder of the object that has it."""

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

    metrics_path = _Inside("metrics.jsonl")
    """The rows of training steps and evaluations."""
    diagnostics_path = _Inside("diagnostics.jsonl")
    """The rows of diagnostics, if the study asks for them."""
    system_path = _Inside("system.jsonl")
    """Samples of the machine's use during the run."""
    stop_path = _Inside("stop")
    """A file that asks the run's worker to end it; its content is the reason."""
    environment_path = _Inside("environment.json")
    """Versions, hardware and back end of the last attempt."""
    checkpoints = _Inside("checkpoints")
    """The last checkpoints of a run that has not ended."""
    attempts = _Inside("attempts")
    """The ledger: ``<n>.json`` (who executed attempt n and how it ended) and ``<n>.log``."""

    def attempt_log(self, attempt: int) -> Path:
        """Return the path of the log of attempt ``attempt`` (from 1)."""
        return self.attempts / f"{attempt}.log"

    def create(self, config: dict[str, Any]) -> None:
        """Make the folder and write the configuration, unless it is there already."""
        self.attempts.mkdir(parents=True, exist_ok=True)
        try:
            there = self.config()
        except (OSError, ValueError):
            there = None
        if there != json.loads(json.dumps(config)):  # absent or damaged: the id is its content's hash
            write_json_atomic(self.path / "config.json", config)

    def config(self) -> dict[str, Any]:
        """Return the resolved configuration."""
        return read_json(self.path / "config.json")  # type: ignore[no-any-return]

    def environment(self) -> dict[str, Any]:
        """Return the environment of the last attempt, empty before the first."""
        there = self.environment_path.exists()
        return read_json(self.environment_path) if there else {}

    def status(self) -> Status:
        """Return the status: pending without a status file, interrupted with a damaged one."""
        try:
            return checked(Status, read_json(self.path / "status.json"))
        except FileNotFoundError:
            return Status()
        except ValueError:
            return Status(state="interrupted", message=DAMAGED)

    def state(self) -> State:
        """Return the state, with damage taken as not done: for deciding which runs to execute.

        A result whose rows do not match their hash counts as interrupted; its repeat gives the same bits.
        """
        status = self.status()
        if status.state not in END_STATES or status.metrics_bytes is None:
            return status.state
        try:
            whole = (
                self.metrics_path.stat().st_size == status.metrics_bytes
                and hash_of_prefix(self.metrics_path, status.metrics_bytes) == status.metrics_hash
            )
        except (OSError, ValueError):
            whole = False
        return status.state if whole else "interrupted"

    def ask_to_stop(self, reason: str) -> None:
        """Ask the run's worker to end it because its result is not needed."""
        write_bytes_atomic(self.stop_path, reason.encode())

    def stop_reason(self) -> str | None:
        """Return the reason why the run was asked to stop, None if it was not."""
        try:
            return self.stop_path.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None

    def write_status(self, status: Status) -> None:
        """Replace the status and set its time."""
        stamped = asdict(status) | {"updated_unix": time.time()}
        write_json_atomic(self.path / "status.json", stamped)

    def metrics(self) -> Iterator[dict[str, Any]]:
        """Yield the rows in the order written, without an incomplete last line."""
        if not self.metrics_path.exists():
            return
        with self.metrics_path.open("rb") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    return
                yield parse_json(line)


@dataclass(frozen=True)
class StudyStore:
    """One study's folder."""

    path: Path

    plan_path = _Inside("plan.lock.json")
    """The plan that was run last."""
    throughput_path = _Inside("throughput.json")
    """The last measurement of ``ablate throughput``."""

    def write_plan(self, plan: LockedPlan) -> None:
        """Replace the plan."""
        write_json_atomic(self.plan_path, plan_to_json(plan))

    def plan(self) -> LockedPlan:
        """Return the plan that was run last.

        Raises:
            FileNotFoundError: the study never ran here.
            UserError: the file is damaged.
        """
        try:
            plan = plan_from_json(read_json(self.plan_path))
            for _, run in plan.runs():
                self.run(run.id)
        except ValueError as error:
            raise UserError(f"{self.plan_path}: not a plan: {error}") from None
        return plan

    def run(self, run_id: str) -> RunDir:
        """Return the folder of a run, which need not exist.

        Raises:
            ValueError: the id is not a plain name and could lead out of the store.
        """
        # A plan from elsewhere may hold any type here, whatever the annotation says.
        text = str(run_id)
        if text is not run_id or not text or set(text) & set("/\\\0") or text[0] == ".":
            raise ValueError(f"{run_id!r} is no run's id")
        return RunDir(self.path / "runs" / run_id)


def study_at(folder: Path) -> StudyStore | None:
    """Return the store in a folder, None where no study has run in it."""
    store = StudyStore(folder)
    return store if store.plan_path.exists() else None


def study_named(storage: Path, name: str, *, start: str) -> StudyStore:
    """Return the store of a study that ran. ``start``: the command that would start it.

    Raises:
        UserError: nothing of that name has run here.
    """
    if store := study_at(storage / name):
        return store
    known = sorted(path.parent.name for path in storage.glob("*/plan.lock.json"))
    there = f"studies here: {', '.join(known)}" if known else "no study has run there yet"
    raise UserError(f"no study '{name}' in {storage} ({there}; start it with: {start})")
