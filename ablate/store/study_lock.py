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

from ablate.base.command_hints import command_line
from ablate.base.errors import UserError
from ablate.store.plan_file import LockedPlan, plan_to_json

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ablate.store.runs import StudyStore

_NAME = "executor.lock"
_LOOKS = 5
_PAUSE_SEC = 0.02


@contextlib.contextmanager
def running(store: StudyStore, plan: LockedPlan) -> Iterator[bool]:
    """Write the plan and hold the study's lock for the block; yields whether others run the study too.

    A plan is written under the exclusive lock and compared under the shared one, so nobody reads a plan that
    another is about to replace. Waits while another writes its plan or cleans the study.

    Raises:
        UserError: another process runs the study with another plan; the message names that process.
    """
    holder = ""
    for _ in range(_LOOKS):
        store.path.mkdir(parents=True, exist_ok=True)
        with (store.path / _NAME).open("a+", encoding="utf-8") as file:
            alone = _alone(file)
            if alone:
                store.write_plan(plan)
            fcntl.flock(file, fcntl.LOCK_SH)
            if not _is_there(store.path / _NAME, file):
                continue  # the study was removed while this process waited
            if _has_plan(store, plan):
                file.seek(0)
                file.truncate()
                file.write(f"process {os.getpid()} on {platform.node()}\n")
                file.flush()
                yield not alone
                return
            file.seek(0)
            holder = file.read().strip()
        time.sleep(_PAUSE_SEC)
    status = command_line("status", store.path.name, storage=store.path.parent)
    raise UserError(
        f"{store.path} is being run by {holder or 'another process'} with another plan (wait for it, or give "
        f"this study another name; follow it with: {status})"
    )


@contextlib.contextmanager
def kept_still(study_dir: Path) -> Iterator[bool]:
    """Keep others from running the study for the block; yields False where a process runs it now."""
    with (study_dir / _NAME).open("a+", encoding="utf-8") as file:
        yield _alone(file)


def is_running(study_dir: Path) -> bool | None:
    """Whether a process runs the study now; None where this user may not look."""
    try:
        with (study_dir / _NAME).open("rb") as file:
            return not _try(file, fcntl.LOCK_EX)
    except FileNotFoundError:
        return False
    except OSError:
        return None


def _alone(file: Any) -> bool:
    """Take the exclusive lock. Several tries: ``is_running`` takes the lock for a moment."""
    for _ in range(_LOOKS):
        if _try(file, fcntl.LOCK_EX):
            return True
        time.sleep(_PAUSE_SEC)
    return False


def _try(file: Any, kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_there(path: Path, file: Any) -> bool:
    """Whether the open file is still the one at the path."""
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def _has_plan(store: StudyStore, plan: LockedPlan) -> bool:
    try:
        return plan_to_json(store.plan()) == plan_to_json(plan)
    except (OSError, UserError):
        return False
