"""``ablate clean``: remove what a study no longer needs, after asking."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from ablate.base.errors import UserError
from ablate.cli.common import find_study, storage_option

if TYPE_CHECKING:
    from pathlib import Path

    from ablate.store import StudyStore

_RUN_ID = re.compile(r"[0-9a-f]{16}")
_OF_A_STUDY = {
    "plan.lock.json", "throughput.json", "executor.lock", "cancel", "runs", "report", "mirror", "mirror.id",
    "search", "search.lock.json", "optuna.log",
}  # fmt: skip
_OF_A_REPORT = {"report.html", "report.md", "report.json", "tables", "figures"}
_DRAFTS = tuple(
    f".{name}."
    for name in (
        "config.json",
        "status.json",
        "environment.json",
        "metrics.jsonl",
        "diagnostics.jsonl",
        "stop",
    )
)


@dataclass(frozen=True)
class _Leftover:
    path: Path
    why: str


@click.command(epilog="Examples:  ablate clean my-study --dry-run   ·   ablate clean my-study --whole")
@click.argument("study")
@click.option("--whole", is_flag=True, help="Remove the study with all its results.")
@click.option("--dry-run", is_flag=True, help="Only say what would be removed.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@storage_option
def command(study: str, *, whole: bool, dry_run: bool, yes: bool, storage: Path) -> None:
    """Remove runs of STUDY that its plan no longer has, checkpoints of ended runs and leftover files.

    Never touches what ablate has not made: other files, links, and whatever lies outside the study.
    """
    from ablate.store.running import is_running

    store = find_study(storage, study)
    if is_running(store.path):
        raise UserError(f"{store.path} is being run (stop it first: ablate cancel {store.path.name})")
    found = _whole(store) if whole else _leftovers(store)
    if not found:
        click.echo("Nothing to remove.")
        return
    for one in found:
        click.echo(f"{one.path}  ({one.why}, {_size(one.path) / 2**20:.1f} MiB)")
    if dry_run:
        return
    if not yes and not click.confirm(f"Remove {len(found)} of them?" if len(found) > 1 else "Remove it?"):
        return
    for one in found:
        if one.path.is_dir():
            shutil.rmtree(one.path)
        else:
            one.path.unlink(missing_ok=True)
    click.echo(f"Removed {len(found)}.")


def _whole(store: StudyStore) -> list[_Leftover]:
    """Return the study's folder, unless it holds other files than ablate's own, hidden ones included."""
    if store.path.is_symlink():
        raise UserError(f"{store.path} is a link: remove it by hand")
    odd = [path for path in _entries(store.path) if path.name not in _OF_A_STUDY and not _is_stop(path)]
    odd += [path for path in _entries(store.path / "runs") if not _is_run(path)]
    odd += [path for path in _entries(store.path / "report") if path.name not in _OF_A_REPORT]
    if odd:
        raise UserError(f"{odd[0]} is not ablate's: move it away first")
    return [_Leftover(store.path, "the study with all its results")]


def _entries(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _is_run(path: Path) -> bool:
    """Whether ablate made this folder for a run."""
    return (
        not path.is_symlink()
        and _RUN_ID.fullmatch(path.name) is not None
        and (path / "config.json").is_file()
    )


def _is_stop(path: Path) -> bool:
    return path.name.startswith(".stop-") and path.is_file() and not path.is_symlink()


def _leftovers(store: StudyStore) -> list[_Leftover]:
    planned = {run.id for _, run in store.plan().runs()}
    found = []
    for path in _entries(store.path / "runs"):
        if not _is_run(path):
            continue
        if path.name not in planned:
            found.append(_Leftover(path, "a run that the plan no longer has"))
            continue
        run = store.run(path.name)
        if run.state() in ("finished", "diverged") and run.checkpoints.is_dir():
            found.append(_Leftover(run.checkpoints, "checkpoints of a run that has ended"))
        if run.stop_path.is_file():
            found.append(_Leftover(run.stop_path, "left by an executor that was killed"))
        found += [
            _Leftover(left, "left by a write that was cut off")
            for left in _entries(path)
            if left.name.startswith(_DRAFTS) and left.is_file() and not left.is_symlink()
        ]
    found += [
        _Leftover(left, "left by an executor that was killed")
        for left in _entries(store.path)
        if _is_stop(left)
    ]
    return found


def _size(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.lstat().st_size for file in files if not file.is_dir())
