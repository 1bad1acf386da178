"""Submit a study to a Ray cluster as a job: the driver then runs there, and this machine may disconnect.

The job's id is a hash of the study file, this package and the storage, and the first two travel with the job.
Submitting the same study twice therefore follows the existing job.

How it fails: a cluster that cannot be reached or refuses is a ``UserError``, and so is one that everybody who
reaches it may use.
"""

from __future__ import annotations

import asyncio
import hashlib
import http.client
import re
import shlex
import shutil
import tempfile
import time
import urllib.error
import urllib.request
from http import HTTPStatus
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ablate.base.errors import UserError, first_line
from ablate.base.files import parse_json
from ablate.execute.environment import code_digest

if TYPE_CHECKING:
    from collections.abc import Callable

_LIVE = ("PENDING", "RUNNING")
_AGENT_SEC = 60.0
_ANSWER_SEC = 10.0
_NOT_THERE = (HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED, HTTPStatus.NOT_IMPLEMENTED)


def job_id(name: str, text: bytes, storage: str) -> str:
    """Return the id of the job that runs this study file on this storage with this code."""
    digest = hashlib.blake2b(digest_size=8)
    for part in (text, storage.encode(), code_digest().encode()):
        digest.update(len(part).to_bytes(8, "little") + part)
    slug = re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-").lower()[:40] or "study"
    return f"ablate-{slug}-{digest.hexdigest()}"


def submit(
    address: str, path: Path, name: str, storage: str, environment: dict[str, str]
) -> tuple[str, bool]:
    """Submit a study to the cluster whose dashboard is at ``address``, unless its job is running there.

    ``environment`` holds variables for the job, such as MLFLOW_TRACKING_URI. Returns the job's id, and
    whether it was there.
    """
    client = client_at(address)
    text = path.read_bytes()
    identity = job_id(name, text, storage)
    try:
        if identity in {job.submission_id for job in client.list_jobs()}:
            if str(client.get_job_status(identity).value) in _LIVE:
                return identity, True
            client.delete_job(identity)  # it has ended; `ablate run` finds the runs that are left
        with tempfile.TemporaryDirectory() as folder:
            work, package = Path(folder) / "work", Path(folder) / "ablate"
            work.mkdir()
            (work / "study.yaml").write_bytes(text)
            # The package's links to backends, reports and studies become real folders.
            shutil.copytree(Path(str(files("ablate"))), package, ignore=shutil.ignore_patterns("__pycache__"))
            job: dict[str, Any] = {
                "entrypoint": shlex.join(
                    ["python", "-m", "ablate", "run", "study.yaml", "--address", "auto", "--storage", storage]
                ),
                "submission_id": identity,
                "runtime_env": {
                    "working_dir": str(work), "py_modules": [str(package)], "env_vars": dict(environment),
                },
                "metadata": {"ablate_study": name},
            }  # fmt: skip
            give_up = time.monotonic() + _AGENT_SEC
            while True:
                try:
                    client.submit_job(**job)
                    break
                except RuntimeError as error:  # a head node that has just started has no agent yet
                    if "No available agent" not in str(error) or time.monotonic() > give_up:
                        raise
                    time.sleep(1)
    except RuntimeError as error:  # Ray's client has no other
        raise UserError(f"{address}: the job was refused: {first_line(error)}") from None
    return identity, False


def check_server(address: str, *, insecure: bool) -> None:
    """Look whether Ray's server of jobs is at ``address``; its own client looks for a minute.

    ``insecure``: it may also answer somebody without a token.

    Raises:
        UserError: nobody, or somebody else, answers there, or it is open to all.
    """
    expected = "expected the dashboard of Ray's head node, as http://HOST:8265"
    if not address.startswith(("http://", "https://")):
        raise UserError(f"--address: {address} is no dashboard's address", hint=expected)
    try:
        with urllib.request.urlopen(f"{address.rstrip('/')}/api/jobs/", timeout=_ANSWER_SEC) as answer:  # noqa: S310
            is_ray = isinstance(parse_json(answer.read()), list)
    except urllib.error.HTTPError as error:
        if error.code not in _NOT_THERE:
            return  # it asks for a token, or is not ready: Ray's client tells the rest
        is_ray = False
    except (ValueError, http.client.HTTPException):
        is_ray = False
    except OSError as error:
        raise UserError(f"cannot reach Ray's dashboard at {address}: {first_line(error)}") from None
    if not is_ray:
        raise UserError(f"{address}: what answers there is no Ray dashboard that takes jobs", hint=expected)
    if not insecure:
        raise UserError(
            f"{address}: whoever reaches this cluster can run code on it (start it with RAY_AUTH_MODE=token, "
            "see docs/reliability.md, or take --insecure)"
        )


def follow(address: str, identity: str, show: Callable[[str], None]) -> str:
    """Show what a job prints until it ends; return its state, such as ``SUCCEEDED``."""
    client = client_at(address)

    async def tail() -> None:
        async for text in client.tail_job_logs(identity):
            show(text)

    asyncio.run(tail())
    return str(client.get_job_status(identity).value)


def client_at(address: str) -> Any:
    """Return Ray's client for jobs of the cluster whose dashboard is at ``address``."""
    from ray.exceptions import RayError
    from ray.job_submission import JobSubmissionClient

    try:
        return JobSubmissionClient(address)
    except (ConnectionError, RuntimeError, ValueError, RayError) as error:
        raise UserError(f"cannot reach Ray's dashboard at {address}: {first_line(error)}") from None
