"""Creates MLflow's sqlite file: complete or not at all, and fast to write where the file system allows it.

MLflow's migrations take seconds and do not survive a kill, so they run on a temporary file that is renamed at
the end. On a local disk the file uses write-ahead mode: a commit waits for one disk write instead of three or
four, and readers of the pages do not lock the mirror out. The mode needs shared memory, which network file
systems lack, so it is used only if the disk is known to be local.

How it fails: it raises the file system's errors and leaves no file. A database that another process created
first is kept.
"""

from __future__ import annotations

import contextlib
import sqlite3
import tempfile
from pathlib import Path

_LOCAL = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "tmpfs", "overlay", "bcachefs"})


def make_database(path: Path, artifacts: Path) -> None:
    """Create MLflow's database at ``path``; ``artifacts`` is the default folder of its experiments."""
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".mlflow-") as folder:
        fresh = Path(folder) / "mlflow.db"
        store = SqlAlchemyStore(f"sqlite:///{fresh}", artifacts.as_uri())
        store.engine.dispose()
        if is_local(path.parent, _mounts()):
            with contextlib.closing(sqlite3.connect(fresh)) as connection:
                connection.execute("PRAGMA journal_mode=WAL")
        try:
            path.hardlink_to(fresh)
        except FileExistsError:
            return
        except OSError:  # the file system has no hard links
            fresh.replace(path)


def is_local(folder: Path, mounts: str) -> bool:
    """Whether a folder lies on a local disk, given the text of ``/proc/self/mounts``."""
    resolved = folder.resolve()
    best: tuple[int, str] = (0, "")
    for line in mounts.splitlines():
        _, point, kind, *_ = line.split()
        place = Path(point.replace("\\040", " "))
        if resolved.is_relative_to(place):
            best = max(best, (len(place.parts), kind), key=lambda found: found[0])
    return best[1] in _LOCAL


def _mounts() -> str:
    try:
        return Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
