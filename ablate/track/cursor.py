"""Records what was sent: one file for each study and tracking address, ``<study>/mirror/<digest>.json``.

The cursor only saves work: without it everything is sent again, which changes nothing in MLflow. It is
written atomically after MLflow has accepted its content, so a crash can only cause repeated sending.

How it fails: an unreadable or foreign file counts as lost. ``pending`` compares files alone, so it can report
what is unsent even when MLflow is broken.
"""

from __future__ import annotations

import hashlib
import os
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ablate.base.command_hints import redact
from ablate.base.errors import UserError
from ablate.base.files import locked, read_json, write_bytes_atomic
from ablate.store.metrics import new_lines
from ablate.track.describe import SUMMARY

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from pathlib import Path

    from ablate.store import RunDir, Status, StudyStore

REWOUND = ("metrics.jsonl", "diagnostics.jsonl")
"""Files whose last rows a resumed run cuts off."""
FILES = (*REWOUND, "system.jsonl")
"""The files of a run whose rows are sent."""
_FORMAT = 4
_LOCK_PATIENCE_SEC = 30.0
_CHUNK_BYTES = 1 << 16
_TAIL_BYTES = 512


@dataclass(frozen=True, kw_only=True)
class MirrorReport:
    """What one pass of the mirror has sent, and what is left.

    ``unsent``: ids of runs that are not fully sent, and ``report``; ``problem``: one line without secrets.
    """

    runs_sent: int = 0
    metrics_sent: int = 0
    unsent: tuple[str, ...] = ()
    problem: str | None = None
    experiment_id: str | None = None

    @property
    def complete(self) -> bool:
        """Whether MLflow holds everything."""
        return not self.unsent and self.problem is None


@dataclass(kw_only=True)
class RunCursor:
    """What MLflow has accepted of one run, or of the run that holds the report (``SUMMARY``).

    ``offsets`` and ``tails``: by file; a tail that differs shows that the file was rewound. ``sent``: digests
    of its tags, parameters, state and artifacts, by name.
    """

    mlflow_id: str
    mlflow_status: str = "RUNNING"
    offsets: dict[str, int] = field(default_factory=lambda: dict.fromkeys(FILES, 0))
    tails: dict[str, str] = field(default_factory=lambda: dict.fromkeys(REWOUND, ""))
    sent: dict[str, str] = field(default_factory=dict)


@dataclass(kw_only=True)
class Cursor:
    """What one tracking store has accepted of one study, as the cursor's file holds it."""

    format: int = _FORMAT
    experiment_id: str | None = None
    note: str = ""
    runs: dict[str, RunCursor] = field(default_factory=dict)
    problem: str | None = None


def mirror_dir(store: StudyStore) -> Path:
    """Return the folder of the mirror's own files."""
    return store.path / "mirror"


def private_dir(store: StudyStore) -> Path:
    """Return the folder of what this user's mirror and server print, which is for nobody else's eyes."""
    return mirror_dir(store) / f"logs-{os.geteuid()}"


def cursor_path(store: StudyStore, tracking_uri: str) -> Path:
    """Return the path of the cursor's file, which is the same for every password in the address."""
    return mirror_dir(store) / f"{digest(redact(tracking_uri))}.json"


def load_cursor(store: StudyStore, tracking_uri: str) -> Cursor:
    """Read the cursor; it is empty if the file is missing, damaged or of another format."""
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        content = read_json(cursor_path(store, tracking_uri))
        if content["format"] == _FORMAT:
            cursor = Cursor(**content)
            for run_id, entry in content["runs"].items():
                cursor.runs[run_id] = RunCursor(**entry)
            return cursor
    return Cursor()


def cursor_lock(store: StudyStore, tracking_uri: str) -> AbstractContextManager[bool]:
    """Hold the cursor's lock for the block.

    Raises:
        TimeoutError: another mirror of the study has held it for half a minute.
    """
    path = cursor_path(store, tracking_uri).with_suffix(".lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + _LOCK_PATIENCE_SEC

    def wait() -> None:
        if time.monotonic() > deadline:
            raise TimeoutError("another mirror of this study is at work")

    return locked(path, wait)


def store_id(store: StudyStore) -> str:
    """Read the identity of this study's folder; it is made on first use.

    Two people may run the same study with one server. Equal configurations have equal run ids, so without
    this identity one MLflow run would mix their curves. The file is outside ``mirror/``, so that nothing is
    sent twice after that folder was deleted.
    """
    path = store.path / "mirror.id"
    if not path.exists():
        write_bytes_atomic(path, f"{uuid.uuid4().hex}\n".encode())
    return path.read_text(encoding="utf-8").strip()


def state_key(status: Status) -> str:
    """Hash the part of a status that MLflow gets, without the counters that change at every step."""
    return digest(
        f"{status.state} {status.attempt} {status.ended_unix} {status.message}"
    )


def digest(content: Any) -> str:
    """Hash bytes, or the text of another value, to 16 hexadecimal digits."""
    if not isinstance(content, bytes):
        content = str(content).encode()
    return hashlib.sha256(content).hexdigest()[:16]


def content_digest(path: Path) -> str:
    """Hash a file, or the path and the content of every file under a folder."""
    if path.is_file():
        return digest(path.read_bytes())
    lines = [
        f"{file.relative_to(path)} {digest(file.read_bytes())}"
        for file in sorted(path.rglob("*"))
        if file.is_file()
    ]
    return digest("\n".join(lines))


def pending(store: StudyStore, tracking_uri: str) -> MirrorReport:
    """List the runs with unsent parts, and the report if it is unsent, from the files alone."""
    cursor = load_cursor(store, tracking_uri)
    unsent = []
    with suppress(OSError, UserError):
        for _, planned in store.plan().runs():
            if _run_pending(store.run(planned.id), cursor.runs.get(planned.id)):
                unsent.append(planned.id)
    report = store.path / "report"
    if (report / "report.html").exists():
        summary = cursor.runs.get(SUMMARY)
        if summary is None or summary.sent.get("report") != content_digest(report):
            unsent.append("report")
    return MirrorReport(unsent=tuple(unsent), problem=cursor.problem)


def tail_digest(path: Path, offset: int) -> str | None:
    """Hash the bytes just before ``offset``; empty at offset 0, None if the file is shorter.

    A file that was rewound and grew again past the offset has other bytes there, since every row holds its
    own time.
    """
    if offset == 0:
        return ""
    if not path.exists() or path.stat().st_size < offset:
        return None
    start = max(0, offset - _TAIL_BYTES)
    with path.open("rb") as file:
        file.seek(start)
        return digest(file.read(offset - start))


def is_rewound(run: RunDir, entry: RunCursor) -> bool:
    """Whether the run's files no longer hold the rows that were sent."""
    for file, tail in entry.tails.items():
        if tail_digest(run.path / file, entry.offsets[file]) != tail:
            return True
    return False


def _run_pending(run: RunDir, entry: RunCursor | None) -> bool:
    try:
        if entry is None:
            return run.metrics_path.exists() or run.status().state != "pending"
        if is_rewound(run, entry) or state_key(run.status()) != entry.sent.get("state"):
            return True
        for file in REWOUND:
            sent = entry.offsets[file]
            if new_lines(run.path / file, sent, _CHUNK_BYTES)[1] > sent:
                return True
    except (OSError, ValueError):
        return True  # an unreadable run counts as unsent
    return False
