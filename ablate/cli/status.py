"""``ablate status``: how far a study is, from the run store alone."""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from ablate.base.errors import safe_text
from ablate.cli.common import find_study, storage_option, trials_of

if TYPE_CHECKING:
    from pathlib import Path

    from ablate.store import StudyStore


@click.command("status", epilog="Example:  ablate status quickstart --json")
@click.argument("study")
@storage_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for scripts.")
@click.option("--watch", is_flag=True, help="Go on showing it until it ends; Ctrl-C ends the showing alone.")
def command(study: str, storage: Path, as_json: bool, watch: bool) -> None:
    """Show how far STUDY (a name or its YAML file) is, at any time, also while it runs."""
    from ablate.cli.display import progress_table, summary
    from ablate.execute.progress import ProgressReader, count_states
    from ablate.store.running import is_running

    store = find_study(storage, study)
    if watch:
        _watch(store)
    running = is_running(store.path)
    runs = ProgressReader(store, executor_alive=running).read()
    trials = trials_of(store)
    tried = [] if trials is None else ProgressReader(trials, executor_alive=is_running(trials.path)).read()
    if as_json:
        answer = {
            "study": store.path.name,
            "running": running,
            "states": count_states(runs),
            "runs": [asdict(run) for run in runs],
            "tuning": None if trials is None else {"study": trials.path.name, "states": count_states(tried)},
        }
        click.echo(json.dumps(answer, indent=1))
        return
    from rich.console import Console

    console = Console()
    console.print(progress_table(runs))
    console.print(
        f"{store.path.name}: {summary(runs)}{' · being run now' if running else ''}", highlight=False
    )
    if trials is not None:
        now = " · being run now" if is_running(trials.path) else ""
        console.print(
            f"{trials.path.name}: {summary(tried)}{now}, of the trials asked so far", highlight=False
        )
    alike: dict[tuple[str, str, str], list[str]] = {}
    for run in runs:
        if run.message and run.state in ("failed", "diverged", "interrupted", "stopped"):
            alike.setdefault((run.arm, run.state, run.message), []).append(str(run.seed))
    for (arm, state, message), seeds in alike.items():
        line = safe_text(f"{arm} seed{'s' * (len(seeds) > 1)} {', '.join(seeds)} {state}: {message}")
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _watch(store: StudyStore) -> None:
    """Redraw the table several times a second while a process runs the study."""
    from rich.console import Console

    from ablate.cli.display import LiveDisplay
    from ablate.execute.progress import ProgressReader
    from ablate.store.running import is_running

    reader = ProgressReader(store)
    ids = [run.run_id for run in reader.read()]
    with (
        contextlib.suppress(KeyboardInterrupt),
        LiveDisplay(reader, ids, Console(highlight=False)) as display,
    ):
        while is_running(store.path):
            display.update()
            time.sleep(0.3)
