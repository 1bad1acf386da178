"""The lock of a running study, shared by its processes; the operating system drops it when one dies.

Several people may run a study on one storage and share its runs through leases. All must have the same plan:
a plan that differs from the running one is refused.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import time
from typing import TYPE_CHECKING, Any

from ablate.base.commands import command_line
from ablate.base.errors import UserError
from ablate.store.lock import LockedPlan, plan_to_json

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ablate.store.runs import StudyStore

_NAME = "executor.lock"
_LOOKS = 5


@contextlib.contextmanager
def running(store: StudyStore, plan: LockedPlan) -> Iterator[bool]:
    """Write the plan and hold the study's lock for the block; yields whether others run the study too.

    Raises:
        UserError: another process runs the study with another plan; the message names that process.
    """
    store.path.mkdir(parents=True, exist_ok=True)
    path = store.path / _NAME
    with path.open("a+", encoding="utf-8") as file:
        shared = not _alone(file)
        if shared:
            _refuse_another_plan(store, plan, file)
        else:
            store.write_plan(plan)
        fcntl.flock(file, fcntl.LOCK_SH)
        file.seek(0)
        file.truncate()
        file.write(f"process {os.getpid()} on {platform.node()}\n")
        file.flush()
        yield shared


def is_running(study_dir: Path) -> bool:
    """Whether a process runs the study now."""
    try:
        with (study_dir / _NAME).open("a", encoding="utf-8") as file:
            return not _try(file, fcntl.LOCK_EX)
    except OSError:
        return False


def _alone(file: Any) -> bool:
    """Take the exclusive lock. Several tries: ``is_running`` takes the lock for a moment."""
    for _ in range(_LOOKS):
        if _try(file, fcntl.LOCK_EX):
            return True
        time.sleep(0.02)
    return False


def _try(file: Any, kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _refuse_another_plan(store: StudyStore, plan: LockedPlan, file: Any) -> None:
    with contextlib.suppress(OSError, UserError):
        if plan_to_json(store.plan()) == plan_to_json(plan):
            return
    file.seek(0)
    holder = file.read().strip() or "another process"
    status = command_line("status", store.path.name, storage=store.path.parent)
    raise UserError(
        f"{store.path} is being run by {holder} with another plan (wait for it, or give this study another "
        f"name; follow it with: {status})"
    )
