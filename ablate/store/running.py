"""Who is running a study: a shared lock that the operating system drops when a holder dies.

Several people may run the same study on one storage, and share its runs by their leases. They must mean the
same study: a plan that differs from the one being run is refused.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import time
from typing import TYPE_CHECKING, Any

from ablate.base.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ablate.store.lock import LockedPlan
    from ablate.store.runs import StudyStore

_NAME = "executor.lock"
_LOOKS = 5


@contextlib.contextmanager
def running(store: StudyStore, plan: LockedPlan) -> Iterator[bool]:
    """Write the plan and hold the study for the time of the block; yields whether others run it, too.

    Raises:
        UserError: another process is running the study with another plan; names that process.
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
    """Return whether somebody runs the study now."""
    try:
        with (study_dir / _NAME).open("a", encoding="utf-8") as file:
            return not _try(file, fcntl.LOCK_EX)
    except OSError:
        return False


def _alone(file: Any) -> bool:
    """Take the lock for ourselves; who only looks whether somebody runs the study holds it for an instant."""
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
    from ablate.store.lock import plan_to_json

    with contextlib.suppress(OSError, UserError):
        if plan_to_json(store.plan()) == plan_to_json(plan):
            return
    file.seek(0)
    holder = file.read().strip() or "another process"
    raise UserError(
        f"{store.path} is being run by {holder} with another plan (wait for it, or give this study another "
        f"name; follow it with: ablate status {store.path.name})"
    )
