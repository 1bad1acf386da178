"""One executor a study: a lock that the operating system drops when its holder dies."""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
from typing import TYPE_CHECKING

from ablate.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_NAME = "executor.lock"


@contextlib.contextmanager
def executor_lock(study_dir: Path) -> Iterator[None]:
    """Hold the study for the time of the block.

    Raises:
        UserError: another process is running it; names that process.
    """
    study_dir.mkdir(parents=True, exist_ok=True)
    path = study_dir / _NAME
    with path.open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "another process"
            raise UserError(
                f"{study_dir} is being run by {holder} (follow it with: ablate status {study_dir.name})"
            ) from None
        file.seek(0)
        file.truncate()
        file.write(f"process {os.getpid()} on {platform.node()}\n")
        file.flush()
        yield


def is_running(study_dir: Path) -> bool:
    """Return whether an executor holds the study now."""
    try:
        with (study_dir / _NAME).open("a", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
