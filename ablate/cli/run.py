"""``ablate run``: plan, execute what is missing, mirror to MLflow, report. ``ablate submit``: as a Ray job.

Exit codes: 0 every run asked for has a result; 1 one of them failed; 2 bad input; 130 interrupted.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ablate.base.command_hints import command_line, redact, set_words
from ablate.base.errors import UserError
from ablate.cli.common import (
    Place,
    address_option,
    ended_by_ctrl_c,
    set_option,
    storage_option,
    tracking_option,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import Console

    from ablate.workflow import StudyEnd

_LOG_LINES = 6


def _seeds(_context: click.Context, _option: click.Parameter, text: str | None) -> tuple[int, ...] | None:
    """Read a list of seeds such as ``0,1,4``."""
    try:
        return None if text is None else tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UserError(f"--seeds: '{text}' is no list of seeds (expected such as 0,1,4)") from None


@click.command("run")
@click.argument("study")
@click.option("--only", multiple=True, metavar="ARM", help="Run this arm alone (may be repeated).")
@click.option(
    "--seeds", metavar="LIST", callback=_seeds, help="Run these seeds of the study alone, such as 0,1,4."
)
@click.option("--retry-failed", is_flag=True, help="Run failed runs again, too.")
@set_option
@address_option
@tracking_option
@storage_option
def command(study: str, storage: Path, address: str | None, tracking_uri: str | None, **which: Any) -> int:
    """Run STUDY (a YAML file, or the name of a shipped study): what is missing of it, then its report.

    The same command goes on after an interruption and never repeats a finished run.

    \b
    Examples:
      ablate run quickstart
      ablate run my-study.yaml --only fprop --seeds 0,1
      ablate run my-study.yaml --set base.training.learning_rate=1e-3 --set name=my-study-lr
      ablate run my-study.yaml --address ray://head:10001 --tracking-uri http://mlflow:5000
    """  # noqa: D301  \b is click's mark for a paragraph that keeps its line breaks
    place = {"address": address, "tracking_uri": tracking_uri}
    again = command_line("run", study, *_chosen(**which), storage=storage, **place)
    with ended_by_ctrl_c(again):
        from ablate.cli.display import console_listener
        from ablate.workflow import Where
        from ablate.workflow.run import run_study

        listener = console_listener()
        where = Where(storage=storage, address=address, tracking_uri=tracking_uri)
        end = run_study(study, where, listener, **which)
        return conclude(listener.console, end, again)


def _chosen(
    only: Sequence[str], seeds: Sequence[int] | None, settings: Sequence[str], **_retry: bool
) -> Iterator[str]:
    """Yield the options that choose runs and change the study, for the command that goes on."""
    yield from set_words(settings)
    for name in only:
        yield from ("--only", name)
    if seeds is not None:
        yield from ("--seeds", ",".join(map(str, seeds)))


def conclude(console: Console, end: StudyEnd, again: str) -> int:
    """Show failed runs with their last lines, say ``again``, how to resume, and return the exit code."""
    for run in end.failed:
        text = f"\nFailed: {run.arm} seed {run.seed}: {run.message}  (log: {run.log})"
        log = run.log.read_text(encoding="utf-8", errors="replace") if run.log.exists() else ""
        for line in (text, *(f"    {line}" for line in log.splitlines()[-_LOG_LINES:])):
            console.print(line, markup=False, soft_wrap=True)
    lines = []
    if end.problem:
        lines.append(f"{end.problem}; what it ran goes on from its checkpoints.")
    if end.interrupted:
        lines.append(f"Stopped. Finished runs are kept; go on with: {again}")
    elif end.num_failed:
        runs = "1 run" if end.num_failed == 1 else f"{end.num_failed} runs"
        lines.append(f"{runs} failed; try again with: {again} --retry-failed")
    if end.num_missing and not end.interrupted:
        runs = "1 run has" if end.num_missing == 1 else f"{end.num_missing} runs have"
        lines.append(f"{runs} no result yet; go on with: {again}")
    for line in lines:
        console.print(f"\n{line}", markup=False, soft_wrap=True)
    if end.interrupted:
        return 130
    return 0 if end.is_done else 1


@click.command(
    "submit",
    epilog="Example:  ablate submit my-study.yaml --address http://head:8265 --storage /shared/ablate",
)
@click.argument("study")
@click.option("--address", required=True, metavar="URL", help="The cluster's dashboard, http://head:8265.")
@click.option("--storage", required=True, type=Place(path_type=Path), help="A folder that all nodes share.")
@click.option("--tracking-uri", metavar="URI", help="MLflow server (default: a database in the storage).")
@click.option("--no-follow", is_flag=True, help="Do not wait for it and show what it prints.")
@click.option("--insecure", is_flag=True, help="Also to a cluster that asks nobody for a token.")
def submit(
    study: str, address: str, storage: Path, tracking_uri: str | None, *, no_follow: bool, insecure: bool
) -> int:
    """Run STUDY (a YAML file, or a shipped study's name) on a Ray cluster, as a job that lives there.

    The study file and this version of ablate travel with it; its packages must be there. Submitting the same
    study again follows the job that is there. Paths of data in the file must be absolute.
    """
    from ablate.execute import submit as jobs
    from ablate.execute.cluster import use_token
    from ablate.study import load_study

    if not storage.is_absolute():
        raise UserError(f"--storage: {storage} (expected an absolute path that all nodes share)")
    loaded = load_study(study)
    if loaded.search is not None:
        start = command_line("search", study, storage=storage, address="ADDRESS")
        raise UserError(f"{study}: a search is no job yet (start it with: {start})")
    if warning := use_token():
        click.echo(warning, err=True)
    if tracking_uri is not None and redact(tracking_uri) != tracking_uri:
        raise UserError(
            "--tracking-uri: Ray shows a job's settings to all who open its dashboard (leave the login out, "
            "and set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD where the head node is started)"
        )
    jobs.check_server(address, insecure=insecure)
    environment = {} if tracking_uri is None else {"MLFLOW_TRACKING_URI": tracking_uri}
    job, was_there = jobs.submit(address, loaded.path, loaded.name, str(storage), environment)
    click.echo(f"Job {job} {'is there already' if was_there else 'submitted'}.")
    if no_follow:
        status = command_line("status", loaded.name, storage=storage)
        click.echo(f"Follow it with the same command, or: {status}")
        return 0
    return _follow(address, job)


def _follow(address: str, identity: str) -> int:
    import asyncio

    from ablate.execute.submit import client_at

    async def show() -> None:
        async for text in client.tail_job_logs(identity):
            click.echo(text, nl=False)

    try:
        client = client_at(address)
        asyncio.run(show())
    except KeyboardInterrupt:
        click.echo(f"\nThe job goes on; stop it with: ray job stop --address {address} {identity}")
        return 130
    state = str(client.get_job_status(identity).value)
    click.echo(f"Job {identity}: {state.lower()}")
    return 0 if state == "SUCCEEDED" else 1
