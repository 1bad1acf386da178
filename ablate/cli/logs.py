"""``ablate logs``: the attempts of a run, and what they printed."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click

from ablate.base.errors import UserError, safe_text
from ablate.cli.common import storage_option

if TYPE_CHECKING:
    from pathlib import Path

    from ablate.store import RunDir
    from ablate.store.leases import Attempt

_LOOK_SEC = 0.3


@click.command(epilog="Examples:  ablate logs 3f0c   ·   ablate logs 3f0c --follow")
@click.argument("run")
@click.option("--study", help="Look in this study alone.")
@click.option("--attempt", type=click.IntRange(min=1), help="Show this attempt (default: the latest).")
@click.option("-f", "--follow", is_flag=True, help="Go on showing what is printed until the run ends.")
@storage_option
def command(run: str, study: str | None, attempt: int | None, *, follow: bool, storage: Path) -> None:
    """Show the attempts of RUN (the beginning of its id) and what the latest one printed."""
    found = _find(storage, run, study)
    from ablate.store.leases import Leases

    leases = Leases(found.attempts)
    latest = leases.latest()
    if not latest:
        raise UserError(f"run {found.run_id} has not been started yet")
    for number in range(1, latest + 1):
        click.echo(_line(number, leases.read(number)))
    chosen = attempt or latest
    if chosen > latest:
        raise UserError(f"--attempt: run {found.run_id} has {latest} (expected 1 to {latest})")
    click.echo()
    place = _print_from(found.attempt_log(chosen), 0)
    while follow:
        record = leases.read(chosen)
        place = _print_from(found.attempt_log(chosen), place)
        if record is not None and record.outcome is not None:
            return
        if leases.latest() > chosen:
            click.echo(f"-- attempt {chosen} ended without a word; another has begun --")
            chosen, place = leases.latest(), 0
        time.sleep(_LOOK_SEC)


def _find(storage: Path, start: str, study: str | None) -> RunDir:
    from ablate.store import StudyStore

    if not start.isalnum():
        raise UserError(f"'{safe_text(start)}' is no run's id (expected its first letters and digits)")
    pattern = f"{study or '*'}/runs/{start}*"
    if study is not None and not (storage / study / "runs").is_dir():
        raise UserError(f"--study: no study '{safe_text(study)}' in {storage}")
    found = sorted(path for path in storage.glob(pattern) if path.is_dir())
    if len(found) == 1:
        return StudyStore(found[0].parent.parent).run(found[0].name)
    if not found:
        raise UserError(f"no run '{start}' in {storage} (`ablate status STUDY --json` lists the ids)")
    raise UserError(f"'{start}' begins {len(found)} runs' ids: {', '.join(p.name for p in found[:4])} …")


def _line(number: int, record: Attempt | None) -> str:
    if record is None:
        return f"attempt {number}: its record is damaged"
    started = datetime.fromtimestamp(record.started_unix, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    parts = [f"attempt {number}: {record.outcome or 'running, or lost'}, {started} on {record.host}"]
    if record.ended_unix is not None:
        parts.append(f"{record.ended_unix - record.started_unix:.0f} s")
    if record.resumed_from_step:
        parts.append(f"from step {record.resumed_from_step}")
    if record.message:
        parts.append(record.message)
    return safe_text(", ".join(parts))


def _print_from(log: Path, place: int) -> int:
    """Print what a log holds from a place on; return the place after it."""
    try:
        with log.open("rb") as file:
            file.seek(place)
            content = file.read()
    except FileNotFoundError:
        return place
    click.echo(safe_text(content.decode("utf-8", errors="replace"), keep="\n\t"), nl=False)
    return place + len(content)
