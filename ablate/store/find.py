"""A study's folder by its name.

How it fails: ``UserError`` of one line, which names the studies that are there.
"""

from __future__ import annotations

import os
from pathlib import Path

from ablate.base.errors import UserError
from ablate.store.runs import StudyStore


def default_storage() -> Path:
    """Return the folder that holds studies: $ABLATE_STORAGE, else ./ablate-runs."""
    return Path(os.environ.get("ABLATE_STORAGE", "ablate-runs"))


def study_at(folder: Path) -> StudyStore | None:
    """Return the store in a folder, None where no study has run in it."""
    store = StudyStore(folder)
    return store if store.plan_path.exists() else None


def study_named(storage: Path, name: str, *, start: str) -> StudyStore:
    """Return the store of a study that ran. ``start``: the command that would start it.

    Raises:
        UserError: nothing of that name has run here.
    """
    if store := study_at(storage / name):
        return store
    known = sorted(path.parent.name for path in storage.glob("*/plan.lock.json"))
    there = f"studies here: {', '.join(known)}" if known else "no study has run there yet"
    raise UserError(f"no study '{name}' in {storage} ({there}; start it with: {start})")
