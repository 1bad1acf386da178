"""Leases: at most one worker executes a run, whoever started it, on any node of the shared storage.

A worker claims an attempt by creating ``attempts/<n>.json`` with all its content in one step; only one worker
can succeed. It touches the file to show that it lives. When it stops doing so, another worker may claim
attempt n + 1. A holder that sees a later claim has lost its run and must not write any more.

Clocks are never compared. A holder on the same machine is looked up as a process. A holder elsewhere counts
as dead when its file's time has not changed for ``STALE_SEC`` in which the observer ran.

How it fails: a lost claim raises nothing; a folder that cannot be written raises ``OSError``.
"""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import time
import uuid
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ablate.base.clock import running_clock, steady_time
from ablate.base.files import read_record, write_record
from ablate.store.records import Text, Time, Whole, checked

if TYPE_CHECKING:
    from collections.abc import Callable

STALE_SEC = 60.0


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One execution of a run, as the ledger holds it. ``outcome``: None while it lasts, or if it was lost.

    ``fingerprint``: of the arithmetic that it trained with, None before training.
    """

    attempt: Whole
    owner: Text
    host: Text
    machine: Text
    pid: Whole
    process_started: Text
    started_unix: Time
    resumed_from_step: Whole = 0
    fingerprint: Text | None = None
    ended_unix: Time | None = None
    outcome: Text | None = None
    message: Text | None = None


@dataclass
class Leases:
    """A run's attempts, seen from one process that may want to execute it.

    ``record``: of the attempt that ``claim`` has claimed; only then it is there. ``now``: its clock (Unix s).
    """

    folder: Path
    record: Attempt = field(init=False)
    now: Callable[[], float] = time.time
    _seen: dict[int, tuple[int, float]] = field(default_factory=dict)
    """By attempt: the file's time (ns), and the clock's (s) when it was first seen."""
    _clock: Callable[[], float] = field(default_factory=running_clock)

    def latest(self) -> int:
        """Find the number of the latest claimed attempt, 0 before the first."""
        latest = 0
        with contextlib.suppress(FileNotFoundError):
            for path in self.folder.iterdir():
                if path.suffix == ".json" and path.stem.isdecimal():
                    latest = max(latest, int(path.stem))
        return latest

    def path(self, attempt: int) -> Path:
        """Return the path of an attempt's record."""
        return self.folder / f"{attempt}.json"

    def read(self, attempt: int) -> Attempt | None:
        """Read an attempt's record, None if it is missing or damaged."""
        try:
            return checked(Attempt, read_record(self.path(attempt)))
        except (OSError, ValueError):
            return None

    def is_held(self, attempt: int | None = None) -> bool:
        """Whether a worker holds the attempt (default: the latest).

        A holder on another machine counts as alive until ``_stands_still`` says otherwise.
        """
        latest = self.latest() if attempt is None else attempt
        if not latest:
            return False
        if record := self.read(latest):
            if record.outcome is not None:
                return False
            if record.machine == this_machine():
                if _process_started(record.pid) != record.process_started:
                    return False
                if record.pid == os.getpid():
                    return record.owner in _held
        return not self._stands_still(latest)

    def claim(self, given_up: int = 0) -> Leases | None:
        """Claim the next attempt and return this object; None if another worker holds the run or was faster.

        ``given_up``: an attempt on another machine that the caller has already found dead. A new ``Leases``
        cannot know that from its first look.
        """
        # looked up once: the claim must follow the very attempt that was checked
        latest = self.latest()
        if latest != given_up and self.is_held(latest):
            return None
        self.now = steady_time()
        self.record = Attempt(
            attempt=latest + 1,
            owner=uuid.uuid4().hex,
            host=platform.node(),
            machine=this_machine(),
            pid=os.getpid(),
            process_started=_process_started(os.getpid()) or "",
            started_unix=self.now(),
        )
        self.folder.mkdir(parents=True, exist_ok=True)
        draft = self.folder / f".{latest + 1}.{self.record.owner}"
        write_record(draft, asdict(self.record))
        target = self.path(latest + 1)
        try:
            os.link(draft, target)
        except OSError:
            # taken, or a file system without hard links: created first, filled after
            try:
                with target.open("xb") as file:
                    file.write(draft.read_bytes())
            except FileExistsError:
                return None
        finally:
            draft.unlink(missing_ok=True)
        _held.add(self.record.owner)
        return self

    def _stands_still(self, attempt: int) -> bool:
        """Whether an attempt's file is gone, or unchanged for ``STALE_SEC`` since it was first seen so."""
        try:
            mtime_ns = self.path(attempt).stat().st_mtime_ns
        except FileNotFoundError:
            return True
        now_sec = self._clock()
        seen_ns, since = self._seen.get(attempt, (None, now_sec))
        if seen_ns != mtime_ns:
            self._seen[attempt] = (mtime_ns, now_sec)
            return False
        return now_sec - since >= STALE_SEC

    def is_mine(self) -> bool:
        """Whether nobody has claimed an attempt after this one's."""
        return not self.path(self.record.attempt + 1).exists()

    def beat(self) -> None:
        """Show that the holder lives; errors of the storage are ignored, since they may pass."""
        with contextlib.suppress(OSError):
            os.utime(self.path(self.record.attempt))

    def note(self, **changes: Any) -> None:
        """Change fields of the attempt's record."""
        self.record = replace(self.record, **changes)
        write_record(self.path(self.record.attempt), asdict(self.record))

    def end(self, outcome: str, message: str | None = None) -> None:
        """Release the run and record how the attempt ended."""
        _held.discard(self.record.owner)
        self.note(outcome=outcome, message=message, ended_unix=self.now())


_held: set[str] = set()
"""Owners of the leases that this process holds now: a live process may have released some of its claims."""


@functools.cache
def this_machine() -> str:
    """Identify this machine, boot and process namespace; within them a pid is unique."""
    parts = [platform.node()]
    for path in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid"):
        with contextlib.suppress(OSError):
            entry = Path(path)
            parts.append(
                str(entry.readlink())
                if entry.is_symlink()
                else entry.read_text().strip()
            )
    return " ".join(parts)


def _process_started(pid: int) -> str | None:
    """Return the time in the kernel's ticks, None if the process is gone or dying."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The bracketed name may hold anything: after it, the state is field 3 and the start field 22.
    rest = stat.rpartition(")")[2].split()
    return None if rest[0] in ("Z", "X") else rest[19]
