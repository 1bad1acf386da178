"""``ablate status``, ``logs``, ``cancel`` and ``clean``: to look after a study in its storage."""

from __future__ import annotations

import codecs
import re
import shutil
import time
from collections import defaultdict
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from itertools import groupby
from typing import TYPE_CHECKING, Any

import click

from ablate.base.command_hints import command_line, redact
from ablate.base.errors import UserError, as_user_error, safe_text
from ablate.cli.common import (
    count_option,
    deliver,
    find_run,
    find_study,
    flag,
    json_option,
    storage_option,
    study_argument,
    table_of,
    tracking_option,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ablate.execute.progress import RunProgress
    from ablate.store import StudyStore

_LOOK_SEC = 0.3
_MOST_RUNS = 40
"""A study with more runs is shown arm by arm."""
_RUNS = {
    "run": "{of.run_id:.8}", "arm": "{of.arm}", "seed": "{of.seed}", "state": "{of.state}",
    "tokens": "{of.tokens:count}/{of.budget:count}", "train": "{of.loss:.4f}", "val": "{of.val_loss:.4f}",
    "tok/s": "{of.tokens_per_sec:count}", "left": "{of.seconds_left:time}",
}  # fmt: skip
"""The first letters of an id are enough for ``ablate logs``."""
_ARMS = {"arm": "{arm}", "runs": "{runs}", "tokens": "{tokens:count}/{budget:count}"}
_RUN_NOW = {
    True: "being run now",
    False: "not being run",
    None: "whether it is being run cannot be seen",
}
_OF_A_STUDY = {
    "plan.lock.json", "source", "throughput.json", "executor.lock", "cancel", "runs", "report",
    "mirror", "mirror.id",
    "search", "search.lock.json", "optuna.log", "prefixes",
    "report/report.html", "report/report.md", "report/report.json", "report/tables", "report/figures",
}  # fmt: skip
_DRAFTS = (
    ".config.json.", ".status.json.", ".environment.json.", ".metrics.jsonl.", ".diagnostics.jsonl.",
    ".routes.jsonl.", ".stop.", ".weights.",
)  # fmt: skip


def _trials_of(store: StudyStore) -> StudyStore | None:
    """Return the store of a study's tuning trials; None if it does not tune, or has none yet."""
    from ablate.store.runs import study_at

    tuning = store.plan().tuning
    if tuning is None:
        return None
    return study_at(store.path.parent / tuning.study)


@click.command(
    "status",
    epilog="Examples:  ablate status quickstart   ·   ablate status quickstart --runs",
)
@study_argument
@storage_option
@json_option
@flag(
    "--runs",
    "all_runs",
    help="Show each run with its id, also in a large study.",
)
def status(study: str, storage: Path, *, as_json: bool, all_runs: bool) -> None:
    """Show the progress of STUDY (a name or its YAML file), also while it runs.

    A large study is shown arm by arm.
    """
    from ablate.cli.display import end_text, summary
    from ablate.execute.progress import count_states, read_progress, seconds_to_end
    from ablate.store.study_lock import is_running

    def read(of: StudyStore) -> tuple[bool | None, list[RunProgress]]:
        running = is_running(of.path)
        return running, read_progress(
            of, of.plan(), executor_alive=running, examines_files=True
        )

    store = find_study(storage, study)
    plan = store.plan()
    running, runs = read(store)
    trials = _trials_of(store)
    tuning = None
    if trials is not None:
        trials_run, tried = read(trials)
        tuning = {"study": trials.path.name, "states": count_states(tried)}
    ends = None
    if (seconds_left := seconds_to_end(runs)) is not None:
        end_local = datetime.now().astimezone() + timedelta(seconds=seconds_left)
        ends = end_local.isoformat(timespec="seconds")
    content = {
        "study": store.path.name,
        "loss_unit": plan.unit,
        "running": running,
        "states": count_states(runs),
        "ends": ends,
        "runs": [asdict(run) for run in runs],
        "tuning": tuning,
    }

    def lines() -> Iterator[str]:
        if all_runs or len(runs) <= _MOST_RUNS:
            yield table_of(_RUNS, ({"of": run} for run in runs))
        else:
            yield table_of(_ARMS, _rows_by_arm(runs))
        end = end_text(runs, at_most=plan.stop is not None) or _RUN_NOW[running]
        yield f"{store.path.name}: {summary(runs)} · {end}"
        if trials is not None:
            yield f"{trials.path.name}: {summary(tried)} · {_RUN_NOW[trials_run]}, of the trials asked so far"
        yield from _remarks(runs)

    deliver(content, lines(), as_json=as_json)


def _rows_by_arm(runs: list[RunProgress]) -> Iterator[dict[str, Any]]:
    from ablate.cli.display import summary

    for arm, group in groupby(runs, key=lambda run: run.arm):
        arm_runs = list(group)
        yield {
            "arm": arm,
            "runs": summary(arm_runs),
            "tokens": sum(run.tokens for run in arm_runs),
            "budget": sum(run.budget for run in arm_runs),
        }


def _remarks(runs: list[RunProgress]) -> Iterator[str]:
    """Say why runs ended early and why their steps are eager, once for the seeds that have it in common."""
    seeds: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for run in runs:
        if run.message and run.state not in ("running", "finished"):
            seeds[run.arm, run.state, run.message].append(str(run.seed))
        if run.eager:
            why = f"eager, because {run.eager}"
            seeds[run.arm, "step", why].append(str(run.seed))
    for (arm, state, message), alike in seeds.items():
        yield f"{arm} seed {', '.join(alike)} {state}: {message}"


@click.command(
    "logs", epilog="Examples:  ablate logs 3f0c   ·   ablate logs 3f0c --follow"
)
@click.argument("run")
@click.option("--study", help="Look only in this study.")
@count_option("--attempt", help="Show this attempt (default: the latest).")
@flag(
    "-f",
    "--follow",
    help="Keep showing what the run prints until it ends.",
)
@storage_option
def logs(
    run: str, study: str | None, attempt: int | None, *, follow: bool, storage: Path
) -> None:
    """Show the attempts of RUN (the beginning of its id) and what the latest one printed."""
    from ablate.store.leases import Leases

    directory = find_run(storage, run, study)
    leases = Leases(directory.attempts)
    latest = leases.latest()
    if not latest:
        raise UserError(f"run {directory.run_id} has not been started yet")
    chosen = attempt or latest
    if chosen > latest:
        raise UserError(
            f"--attempt: run {directory.run_id} has {latest} (expected 1 to {latest})"
        )
    for number in range(1, latest + 1):
        record = leases.read(number)
        if record is None:
            click.echo(f"attempt {number}: its record is damaged")
            continue
        started = datetime.fromtimestamp(record.started_unix, UTC)
        parts = [
            f"attempt {number}: {record.outcome or 'running, or lost'}",
            f"{started:%Y-%m-%d %H:%M:%S UTC} on {record.host}",
        ]
        if record.ended_unix:
            parts.append(f"{record.ended_unix - record.started_unix:.0f} s")
        if record.resumed_from_step:
            parts.append(f"from step {record.resumed_from_step}")
        if record.fingerprint:
            parts.append(f"arithmetic {record.fingerprint}")
        if record.message:
            parts.append(record.message)
        click.echo(safe_text(", ".join(parts)))
    click.echo()
    place = 0
    while True:
        record = leases.read(chosen)
        log = directory.attempt_log(chosen)
        if log.exists():
            place = _show_new(log, place)
        if not follow or (record and record.outcome):
            break
        if leases.latest() > chosen:
            click.echo(
                f"-- attempt {chosen} ended without a word; another has begun --"
            )
            chosen = leases.latest()
            place = 0
        time.sleep(_LOOK_SEC)
    if not place:
        click.echo(f"Attempt {chosen} printed nothing.")


def _show_new(log: Path, place: int) -> int:
    """Show what a log holds from a place on; return its end. Parts that were left out are a line."""
    left_out = 0
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    with log.open("rb") as file:
        file.seek(place)
        while piece := file.read(1 << 20):
            place += len(piece)
            text = piece.replace(b"\0", b"")
            left_out += len(piece) - len(text)
            if text and left_out >= 1 << 20:
                click.echo(f"\n[… {left_out >> 20:,} MiB left out …]")
                left_out = 0
            click.echo(safe_text(decoder.decode(text), keep="\n\t"), nl=False)
    return place


@click.command("cancel", epilog="Example:  ablate cancel my-study")
@study_argument
@storage_option
def cancel(study: str, storage: Path) -> None:
    """Stop STUDY wherever it is being run from this storage, as Ctrl-C would.

    Running runs end with a checkpoint; `ablate run` continues from it.
    """
    from ablate.store.study_lock import is_running

    store = find_study(storage, study)
    if is_running(store.path) is False:
        click.echo(f"{store.path.name} is not being run.")
        return
    from ablate.execute.driver import request_stop

    store.refuse_unsafe()
    request_stop(store.path)
    if (trials := _trials_of(store)) is not None and is_running(trials.path):
        request_stop(trials.path)
    status = command_line("status", store.path.name, storage=storage)
    click.echo(f"Asked to stop: {store.path.name} (follow it with: {status})")


@click.command(
    "clean",
    epilog="Examples:  ablate clean my-study --dry-run   ·   ablate clean my-study --whole",
)
@study_argument
@flag("--whole", help="Remove the study with all its results.")
@flag("--weights", help="Also remove the weights that the runs have kept.")
@flag("--dry-run", help="Only show what would be removed.")
@flag("--yes", help="Remove without asking.")
@flag(
    "--mlflow",
    help="With --whole: also move the study's runs in MLflow to MLflow's bin.",
)
@tracking_option
@storage_option
def clean(
    study: str, *, whole: bool, weights: bool, dry_run: bool, yes: bool, mlflow: bool, storage: Path,
    tracking_uri: str | None,
) -> None:  # fmt: skip
    """Remove runs of STUDY that its plan no longer has, checkpoints of ended runs and leftover files.

    It never touches what ablate has not made: other files, links, and everything outside the study.
    """
    from ablate.store.study_lock import kept_still
    from ablate.track.cursor import load_cursor
    from ablate.track.sink import Away, Refused, Sink, resolve_tracking_uri

    if mlflow and not whole:
        raise UserError("--mlflow: only with --whole")
    store = find_study(storage, study)
    uri = resolve_tracking_uri(storage, tracking_uri)
    store.refuse_unsafe()
    sent = load_cursor(store, uri).runs if whole else {}
    with kept_still(store.path) as is_alone:
        if not is_alone:
            stop = command_line("cancel", store.path.name, storage=storage)
            raise UserError(f"{store.path} is being run (stop it first: {stop})")
        removed = _whole(store) if whole else _leftovers(store, weights=weights)
        if not removed:
            click.echo("Nothing to remove.")
            return
        for path, why in removed.items():
            files = [file for file in [path, *path.rglob("*")] if not file.is_dir()]
            size = sum(file.lstat().st_size for file in files)
            click.echo(f"{path}  ({why}, {size / 2**20:.1f} MiB)")
        if sent:
            go = "go to its bin" if mlflow else "stay there (--mlflow removes them)"
            click.echo(
                f"MLflow at {redact(uri)} has {len(sent)} runs of it, which {go}"
            )
        if dry_run:
            return
        if not yes and not click.confirm(f"Remove these ({len(removed)})?"):
            return
        if mlflow:
            sink = Sink(uri, storage)
            for entry in sent.values():
                try:
                    sink.delete_run(entry.mlflow_id)
                except (Refused, Away) as error:
                    # it is in the bin already, or MLflow does not answer
                    click.echo(f"MLflow: {error}", err=True)
        for path in removed:
            with as_user_error(f"cannot remove {path} (its owner can)"):
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)
    click.echo(f"Removed {len(removed)}.")


def _whole(store: StudyStore) -> dict[Path, str]:
    """Return the study's folder; refuse one with files that are not ablate's, hidden ones included."""
    folder = store.path
    if folder.is_symlink():
        raise UserError(f"{folder} is a link: remove it by hand")
    for pattern in ("*", "runs/*", "report/*"):
        for path in folder.glob(pattern):
            is_known = str(path.relative_to(folder)) in _OF_A_STUDY
            if not (is_known or _is_run(path) or _is_stop(path)):
                raise UserError(f"{path} is not ablate's: move it away first")
    return {folder: "the study with all its results"}


def _is_run(path: Path) -> bool:
    is_named_so = re.fullmatch(r"runs/[0-9a-f]{16}", f"{path.parent.name}/{path.name}")
    return (
        bool(is_named_so) and not path.is_symlink() and (path / "config.json").is_file()
    )


def _is_stop(path: Path) -> bool:
    return path.name.startswith(".stop-") and path.is_file() and not path.is_symlink()


def _leftovers(store: StudyStore, *, weights: bool) -> dict[Path, str]:
    from ablate.store import END_STATES

    has_ended = {}
    for _, planned in store.plan().runs():
        has_ended[planned.id] = store.run(planned.id).state() in END_STATES
    killed = "left by an executor that was killed"
    reasons = dict.fromkeys(filter(_is_stop, sorted(store.path.glob("*"))), killed)
    for folder in filter(_is_run, sorted(store.path.glob("runs/*"))):
        if folder.name not in has_ended:
            reasons[folder] = "a run that the plan no longer has"
            continue
        run = store.run(folder.name)
        if has_ended[folder.name]:
            reasons[run.checkpoints] = "checkpoints of a run that has ended"
        reasons[run.stop_path] = killed
        if weights:
            reasons[run.weights] = "the weights of a run"
        for path in sorted(folder.glob(".*")):
            if path.name.startswith(_DRAFTS):
                reasons[path] = "left by a write that was cut off"
    if all(has_ended.values()):
        reasons[store.prefixes] = "states that runs had in common, which have ended"
    return {
        path: why
        for path, why in reasons.items()
        if path.exists() and not path.is_symlink()
    }
