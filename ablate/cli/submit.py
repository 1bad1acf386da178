"""``ablate submit``: submit a study to a Ray cluster as a job."""

from __future__ import annotations

from pathlib import Path

import click

from ablate.base.errors import UserError


@click.command(
    epilog="Example:  ablate submit my-study.yaml --address http://head:8265 --storage /shared/ablate"
)
@click.argument("study")
@click.option("--address", required=True, metavar="URL", help="The cluster's dashboard, http://head:8265.")
@click.option(
    "--storage", required=True, type=click.Path(path_type=Path), help="A folder that all nodes share."
)
@click.option("--tracking-uri", metavar="URI", help="MLflow server (default: a database in the storage).")
@click.option("--no-follow", is_flag=True, help="Do not wait for it and show what it prints.")
def command(study: str, address: str, storage: Path, tracking_uri: str | None, *, no_follow: bool) -> int:
    """Run STUDY (a YAML file, or a shipped study's name) on a Ray cluster, as a job that lives there.

    The study file and this version of ablate travel with it; its packages must be there. Submitting the same
    study again follows the job that is there. Paths of data in the file must be absolute.
    """
    from ablate.execute.cluster import use_token
    from ablate.study import load_study
    from ablate.track.uri import redact

    if not storage.is_absolute():
        raise UserError(f"--storage: {storage} (expected an absolute path that all nodes share)")
    loaded = load_study(study)
    if loaded.search is not None:
        raise UserError(
            f"{study}: a search is no job yet (start it with: ablate search {study} --address ADDRESS)"
        )
    if warning := use_token():
        click.echo(warning, err=True)
    from ablate.execute.submit import submit

    if tracking_uri is not None and redact(tracking_uri) != tracking_uri:
        raise UserError(
            "--tracking-uri: Ray shows a job's settings to all who open its dashboard (leave the login out, "
            "and set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD where the head node is started)"
        )
    environment = {} if tracking_uri is None else {"MLFLOW_TRACKING_URI": tracking_uri}
    job, was_there = submit(address, loaded.path, loaded.name, str(storage), environment)
    click.echo(f"Job {job} {'is there already' if was_there else 'submitted'}.")
    if no_follow:
        click.echo(f"Follow it with the same command, or: ablate status {loaded.name} --storage {storage}")
        return 0
    return _follow(address, job)


def _follow(address: str, identity: str) -> int:
    import asyncio

    from ablate.execute.submit import end_of, follow

    async def show() -> None:
        async for text in follow(address, identity):
            click.echo(text, nl=False)

    try:
        asyncio.run(show())
    except KeyboardInterrupt:
        click.echo(f"\nThe job goes on; stop it with: ray job stop --address {address} {identity}")
        return 130
    state = end_of(address, identity)
    click.echo(f"Job {identity}: {state.lower()}")
    return 0 if state == "SUCCEEDED" else 1
