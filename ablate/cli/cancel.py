"""``ablate cancel``: ask those who run a study to stop."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ablate.cli.common import find_study, storage_option, trials_of

if TYPE_CHECKING:
    from pathlib import Path


@click.command(epilog="Example:  ablate cancel my-study")
@click.argument("study")
@storage_option
def command(study: str, storage: Path) -> None:
    """Stop STUDY wherever it is being run on this storage, as Ctrl-C would there.

    Running runs end with a checkpoint; `ablate run` goes on from it.
    """
    from ablate.execute.driver import request_stop
    from ablate.store.running import is_running

    store = find_study(storage, study)
    if not is_running(store.path):
        click.echo(f"{store.path.name} is not being run.")
        return
    request_stop(store.path)
    if (trials := trials_of(store)) is not None and is_running(trials.path):
        request_stop(trials.path)
    click.echo(f"Asked to stop: {store.path.name} (follow it with: ablate status {store.path.name})")
