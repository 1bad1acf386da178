"""The lock of a study: who runs it now, and with which plan.

Several people may run a study on one storage and share its runs through leases. All must have the same plan:
one that differs from the running one is refused. The operating system drops the lock when a process dies.
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
from ablate.base.files import open_unlinked
from ablate.store.plan_file import LockedPlan, plan_to_json

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ablate.store.runs import StudyStore

_LOCK = "executor.lock"
_LOOKS = 5
_PAUSE_SEC = 0.02


@contextlib.contextmanager
def running(store: StudyStore, plan: LockedPlan) -> Iterator[bool]:
    """Write the plan and hold the study's lock for the block; yields whether others run the study too.

    A plan is written under the exclusive lock and compared under the shared one, so nobody reads a plan that
    another process is about to replace. Waits while another writes its plan or cleans the study.

    Raises:
        UserError: as ``refuse_unsafe``, or another process runs the study with another plan; the message
            names that process.
    """
    store.refuse_unsafe()
    holder = "another process"
    lock = store.path / _LOCK
    for _ in range(_LOOKS):
        store.path.mkdir(parents=True, exist_ok=True)
        with open_unlinked(lock, "ab") as file:
            is_alone = _lock_alone(file)
            if is_alone:
                store.write_plan(plan)
            fcntl.flock(file, fcntl.LOCK_SH)
            is_same = False
            # the study may have been removed meanwhile
            with contextlib.suppress(OSError, UserError):
                holder = lock.read_text(encoding="utf-8").strip() or holder
                is_there = os.path.samestat(lock.stat(), os.fstat(file.fileno()))
                is_same = is_there and plan_to_json(store.plan()) == plan_to_json(plan)
            if is_same:
                lock.write_text(
                    f"process {os.getpid()} on {platform.node()}\n", encoding="utf-8"
                )
                yield not is_alone
                return
        time.sleep(_PAUSE_SEC)
    status = command_line("status", store.path.name, storage=store.path.parent)
    raise UserError(
        f"{store.path} is being run by {holder} with another plan",
        hint=f"wait for it, or give this study another name; follow it with: {status}",
    )


@contextlib.contextmanager
def kept_still(study_dir: Path) -> Iterator[bool]:
    """Keep others from running the study for the block; yields False if a process runs it now."""
    with open_unlinked(study_dir / _LOCK, "ab") as file:
        yield _lock_alone(file)


def is_running(study_dir: Path) -> bool | None:
    """Whether a process runs the study now; None if this user may not look."""
    try:
        with (study_dir / _LOCK).open("rb") as file:
            return not _lock_alone(file, looks=1)
    except FileNotFoundError:
        return False
    except OSError:
        return None


def _lock_alone(file: Any, looks: int = _LOOKS) -> bool:
    """Try to take the exclusive lock, several times, because ``is_running`` takes it for a moment."""
    for look in range(looks):
        time.sleep(_PAUSE_SEC if look else 0.0)
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
    return False
