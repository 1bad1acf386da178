"""Folders of a study and of its runs. See the package's docstring for the layout.

How it fails: a truncated last line of ``metrics.jsonl`` (a crash during an append) is ignored. A run without
``status.json`` has not started; a run with a damaged one is run again.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, get_args

from ablate.base.errors import UserError
from ablate.base.files import append_line, parse_json, read_json, write_bytes_atomic, write_json_atomic
from ablate.store.checkpoints import hash_of_prefix

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ablate.store.lock import LockedPlan

State = Literal["pending", "running", "finished", "diverged", "failed", "interrupted", "stopped"]
"""``stopped``: ended because its result was no longer needed. It has no result, and keeps its checkpoint."""
STATES: tuple[State, ...] = get_args(State)
DAMAGED = "its status file is damaged"
_LARGEST = 1 << 62
END_STATES: frozenset[State] = frozenset({"finished", "diverged"})
"""States of runs that have a result and are never run again."""


@dataclass(frozen=True, kw_only=True)
class Status:
    """The state of a run. Times are Unix seconds; ``tokens`` counts training tokens seen.

    ``metrics_bytes`` and ``metrics_hash``: size and hash of an ended run's rows, to check them later.
    """

    state: State = "pending"
    attempt: int = 0
    tokens: int = 0
    step: int = 0
    message: str | None = None
    started_unix: float | None = None
    updated_unix: float | None = None
    ended_unix: float | None = None
    metrics_bytes: int | None = None
    metrics_hash: str | None = None


def _fits(key: str, value: object) -> bool:
    """Whether a value of a status file has the type of its key."""
    if key == "state":
        return value in STATES
    if key in ("attempt", "tokens", "step"):
        return type(value) is int and 0 <= value < _LARGEST
    if value is None or key in ("message", "metrics_hash"):
        return value is None or isinstance(value, str)
    return type(value) in (int, float) and abs(value) < _LARGEST  # type: ignore[arg-type]


@dataclass(frozen=True)
class RunDir:
    """One run's folder."""

    path: Path

    @property
    def run_id(self) -> str:
        """The run's id, which is the folder's name."""
        return self.path.name

    @property
    def metrics_path(self) -> Path:
        """The rows of metrics."""
        return self.path / "metrics.jsonl"

    @property
    def diagnostics_path(self) -> Path:
        """The rows of diagnostics, if the study asks for them."""
        return self.path / "diagnostics.jsonl"

    @property
    def system_path(self) -> Path:
        """Samples of the machine's use during the run."""
        return self.path / "system.jsonl"

    @property
    def stop_path(self) -> Path:
        """A file that asks the run's worker to end it; its content is the reason."""
        return self.path / "stop"

    @property
    def environment_path(self) -> Path:
        """Versions, hardware and back end of the last attempt."""
        return self.path / "environment.json"

    @property
    def checkpoints(self) -> Path:
        """The last checkpoints of a run that has not ended."""
        return self.path / "checkpoints"

    @property
    def attempts(self) -> Path:
        """The ledger: ``<n>.json`` (who executed attempt n and how it ended) and ``<n>.log``."""
        return self.path / "attempts"

    def attempt_log(self, attempt: int) -> Path:
        """Return the path of the log of attempt ``attempt`` (from 1)."""
        return self.path / "attempts" / f"{attempt}.log"

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
        config: dict[str, Any] = read_json(self.path / "config.json")
        return config

    def environment(self) -> dict[str, Any]:
        """Return the environment of the last attempt, empty before the first."""
        if not self.environment_path.exists():
            return {}
        environment: dict[str, Any] = read_json(self.environment_path)
        return environment

    def status(self) -> Status:
        """Return the status: pending without a status file, interrupted with a damaged one."""
        path = self.path / "status.json"
        if not path.exists():
            return Status()
        try:
            content = read_json(path)
        except ValueError:
            content = None
        known = {field.name for field in fields(Status)}
        if not isinstance(content, dict) or not all(
            _fits(key, value) for key, value in content.items() if key in known
        ):
            return Status(state="interrupted", message=DAMAGED)
        return Status(**{key: value for key, value in content.items() if key in known})

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

    def append_metric(self, row: dict[str, Any]) -> None:
        """Append one row: ``{"kind": "train" | "eval", "tokens", "step", …}`` with finite numbers only."""
        append_line(self.metrics_path, row)

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

    @property
    def plan_path(self) -> Path:
        """The plan that was run last."""
        return self.path / "plan.lock.json"

    @property
    def throughput_path(self) -> Path:
        """The last measurement of ``ablate throughput``."""
        return self.path / "throughput.json"

    def write_plan(self, plan: LockedPlan) -> None:
        """Replace the plan."""
        from ablate.store.lock import plan_to_json

        write_json_atomic(self.plan_path, plan_to_json(plan))

    def plan(self) -> LockedPlan:
        """Return the plan that was run last.

        Raises:
            FileNotFoundError: the study never ran here.
            UserError: the file is damaged.
        """
        from ablate.store.lock import plan_from_json

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
