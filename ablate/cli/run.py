"""``ablate run``: plan, execute what is missing, mirror to MLflow, report.

Exit codes: 0 every run asked for has a result; 1 one of them failed; 2 bad input; 130 interrupted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ablate.base.errors import UserError
from ablate.cli.common import storage_option, tracking_option

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

    from ablate.workflow.end import StudyEnd

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
@click.option("--address", metavar="ADDRESS", help="A running Ray cluster (default: Ray on this machine).")
@tracking_option
@storage_option
def command(
    study: str,
    *,
    only: tuple[str, ...],
    seeds: tuple[int, ...] | None,
    retry_failed: bool,
    address: str | None,
    tracking_uri: str | None,
    storage: Path,
) -> int:
    """Run STUDY (a YAML file, or the name of a shipped study): what is missing of it, then its report.

    The same command goes on after an interruption and never repeats a finished run.

    \b
    Examples:
      ablate run quickstart
      ablate run my-study.yaml --only fprop --seeds 0,1
      ablate run my-study.yaml --address ray://head:10001 --tracking-uri http://mlflow:5000
    """  # noqa: D301  \b is click's mark for a paragraph that keeps its line breaks
    from rich.console import Console

    from ablate.cli.display import ConsoleListener
    from ablate.execute.cluster import use_token
    from ablate.workflow.run import run_study
    from ablate.workflow.where import Where

    listener = ConsoleListener(Console(highlight=False))
    if address is not None and (warning := use_token()):
        listener.say(warning)
    where = Where(storage=storage, address=address, tracking_uri=tracking_uri)
    end = run_study(study, where, listener, only=only, seeds=seeds, retry_failed=retry_failed)
    return _conclude(listener.console, end, study)


def _conclude(console: Console, end: StudyEnd, study: str) -> int:
    """Show failed runs with their last lines, say how to resume, and return the exit code."""
    for run in end.failed:
        console.print(
            f"\nFailed: {run.arm} seed {run.seed}: {run.message}  (log: {run.log})",
            markup=False,
            soft_wrap=True,
        )
        if run.log.exists():
            for line in run.log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_LINES:]:
                console.print(f"    {line}", markup=False, soft_wrap=True)
    lines = []
    if end.problem:
        lines.append(f"{end.problem}; what it ran goes on from its checkpoints.")
    if end.interrupted:
        lines.append(f"Stopped. Finished runs are kept; go on with: ablate run {study}")
    elif end.num_failed:
        runs = "1 run" if end.num_failed == 1 else f"{end.num_failed} runs"
        lines.append(f"{runs} failed; try again with: ablate run {study} --retry-failed")
    if end.num_missing and not end.interrupted:
        runs = "1 run has" if end.num_missing == 1 else f"{end.num_missing} runs have"
        lines.append(f"{runs} no result yet; go on with: ablate run {study}")
    for line in lines:
        console.print(f"\n{line}", markup=False)
    if end.interrupted:
        return 130
    return 0 if end.is_done else 1
