"""A study as a job on a Ray cluster: ``ablate submit``.

The job runs the study's driver on the cluster. The study file and this package are sent with it. Its id is a
hash of both and of the storage, so submitting the same again follows the running job.

How it fails: a cluster that cannot be reached or refuses is a ``UserError``, and so is one that takes jobs
from everybody who reaches it.
"""

from __future__ import annotations

import asyncio
import re
import shlex
import shutil
import tempfile
import time
from http import HTTPStatus
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ablate.base.errors import UserError, first_line
from ablate.base.files import hash_of
from ablate.execute.environment import code_digest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_LIVE = ("PENDING", "RUNNING")
_AGENT_SEC = 60.0
_ANSWER_SEC = 10.0
_NOT_THERE = (
    HTTPStatus.NOT_FOUND,
    HTTPStatus.METHOD_NOT_ALLOWED,
    HTTPStatus.NOT_IMPLEMENTED,
)


def submit(
    address: str,
    path: Path,
    name: str,
    storage: str,
    environment: Mapping[str, str],
) -> tuple[str, bool]:
    """Submit a study to the cluster whose dashboard is at ``address``, unless its job is running there.

    ``environment``: variables for the job, such as MLFLOW_TRACKING_URI. Returns the job's id, and whether it
    was running already.

    Raises:
        UserError: the dashboard cannot be reached, or refuses the job.
    """
    client = client_at(address)
    study = path.read_bytes()
    digest = hash_of(b"\0".join((study, storage.encode(), code_digest().encode())))[:16]
    slug = re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-").lower()[:40] or "study"
    job = f"ablate-{slug}-{digest}"
    try:
        if any(known.submission_id == job for known in client.list_jobs()):
            if str(client.get_job_status(job).value) in _LIVE:
                return job, True
            # it has ended; `ablate run` finds the runs that are left
            client.delete_job(job)
        with tempfile.TemporaryDirectory() as folder:
            work = Path(folder) / "work"
            work.mkdir()
            (work / "study.yaml").write_bytes(study)
            # The package's links to backends, reports and studies become real folders.
            package = Path(folder) / "ablate"
            shutil.copytree(
                Path(str(files("ablate"))),
                package,
                ignore=shutil.ignore_patterns("__pycache__"),
            )
            _send(
                client,
                entrypoint=f"python -m ablate run study.yaml --address auto --storage {shlex.quote(storage)}",
                submission_id=job,
                runtime_env={
                    "working_dir": str(work), "py_modules": [str(package)], "env_vars": environment,
                },
            )  # fmt: skip
    except RuntimeError as error:  # Ray's client raises no other type
        raise UserError(
            f"{address}: the job was refused: {first_line(error)}"
        ) from None
    return job, False


def _send(client: Any, **job: Any) -> None:
    """Submit a job, again for a while if the head node has just started and has no agent yet."""
    deadline = time.monotonic() + _AGENT_SEC
    while True:
        try:
            client.submit_job(**job)
        except RuntimeError as error:
            if "No available agent" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(1)
        else:
            return


def check_server(address: str, *, insecure: bool) -> None:
    """Check that Ray's job server is at ``address``; Ray's own client would try for a minute.

    ``insecure``: accept a server that answers without a token.

    Raises:
        UserError: nothing answers there, or something else does, or the server is open to all.
    """
    import requests

    expected = "expected the dashboard of Ray's head node, as http://HOST:8265"
    if not address.startswith(("http://", "https://")):
        raise UserError(
            f"--address: {address} is no dashboard's address", hint=expected
        )
    try:
        answer = requests.get(f"{address.rstrip('/')}/api/jobs/", timeout=_ANSWER_SEC)
    except requests.RequestException as error:
        raise UserError(
            f"cannot reach Ray's dashboard at {address}: {first_line(error)}"
        ) from None
    if not answer.ok and answer.status_code not in _NOT_THERE:
        return  # it asks for a token, or is not ready: Ray's client will say so
    if not (answer.ok and answer.text.startswith("[")):
        raise UserError(
            f"{address}: what answers there is no Ray dashboard that takes jobs",
            hint=expected,
        )
    if not insecure:
        raise UserError(
            f"{address}: whoever reaches this cluster can run code on it (start it with RAY_AUTH_MODE=token, "
            "see docs/reliability.md, or take --insecure)"
        )


def follow(address: str, job: str, show: Callable[[str], None]) -> str:
    """Show what a job prints until it ends; return its state, such as ``SUCCEEDED``."""
    client = client_at(address)

    async def tail() -> None:
        async for text in client.tail_job_logs(job):
            show(text)

    asyncio.run(tail())
    return str(client.get_job_status(job).value)


def client_at(address: str) -> Any:
    """Connect Ray's job client to the cluster whose dashboard is at ``address``.

    Raises:
        UserError: the dashboard cannot be reached.
    """
    from ray.exceptions import RayError
    from ray.job_submission import JobSubmissionClient

    try:
        return JobSubmissionClient(address)
    except (ConnectionError, RuntimeError, ValueError, RayError) as error:
        raise UserError(
            f"cannot reach Ray's dashboard at {address}: {first_line(error)}"
        ) from None
