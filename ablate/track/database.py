"""Making MLflow's sqlite file: whole or not at all, and quick to write where the file system allows it.

MLflow's migrations take seconds and survive no kill, so they run on a temporary file that is then given its
name. On a local disk the file is put into write-ahead mode: a commit waits for one write to the disk instead
of three or four, and whoever looks at the pages does not lock the mirror out. That mode needs shared memory,
which network file systems do not have, so it is chosen only where the disk is known to be local.

How it fails: with the errors of the file system, and no file is left. A database that another process made
first is taken as it is.
"""

from __future__ import annotations

import contextlib
import sqlite3
import tempfile
from pathlib import Path

_LOCAL = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "tmpfs", "overlay", "bcachefs"})


def make_database(path: Path, artifacts: Path) -> None:
    """Make MLflow's database at ``path``, with ``artifacts`` for experiments that name no place."""
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
        except OSError:  # a file system without hard links
            fresh.replace(path)


def is_local(folder: Path, mounts: str) -> bool:
    """Return whether a folder lies on a local disk, given the text of ``/proc/self/mounts``."""
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
