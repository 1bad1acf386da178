"""The Ray cluster that runs are executed on: connection, token, head node, what it can hold, and jobs.

A job of ``ablate submit`` runs a study's driver on the cluster. The study file and this package are sent with
it. Its id is a hash of both and of the storage, so submitting the same again follows the running job.

How it fails: a cluster that cannot be reached or refuses is a ``UserError``, and so is one that takes jobs
from everybody who reaches it.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import os
import re
import secrets
import shlex
import shutil
import signal
import socket
import stat
import tempfile
import time
from dataclasses import replace
from http import HTTPStatus
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from ablate.base.clock import running_clock
from ablate.base.errors import UserError, first_line
from ablate.base.files import changed_by_others, hash_of
from ablate.execute.environment import code_digest
from ablate.execute.orphans import start_watch
from ablate.execute.worker import on_signal
from ablate.modelled.hardware import peaks_of
from ablate.plan.shares import Machine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from ablate.execute.pending_runs import RunRequest

GONE_AFTER_SEC = 20.0
_LOOK_EVERY_SEC = 2.0
_PATIENCE_SEC = 2.0
_LONGEST_TEMP = 20
"""A socket's path has room for 107 letters, of which Ray's names take 65 and this process's folder 22."""
_MARK = "ABLATE_RAY"
"""The variable by which the processes of a local Ray are found after the end of the driver."""
_LIVE = ("PENDING", "RUNNING")
_AGENT_SEC = 60.0
_ANSWER_SEC = 10.0
_NOT_THERE = (HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED, HTTPStatus.NOT_IMPLEMENTED)


def use_token() -> str | None:
    """Let Ray send its token to an explicit address; return a warning if others can read the file.

    A cluster with Ray's defaults asks for this token. Ray sends it to an explicit address only if told so
    before it is imported. A cluster without authentication accepts it too.
    """
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    try:
        mode = path.stat().st_mode
    except OSError:
        return None
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        return f"Others on this machine can read Ray's token: chmod 600 {path}"
    return None


@functools.cache
def _private_folder() -> Path:
    """Make a private folder for the Ray that this process starts, and give that Ray a token of its own.

    Ray opens its own folders to everybody (mode 777) and follows links there, so whoever can write in them
    can run code as this user. Inside a folder that only this user can open, nobody else reaches them. Ray's
    loopback ports are open to every user of the machine, and its default token stays the same for ever and
    can be read by others under the usual umask.

    Raises:
        UserError: others could replace the folder.
    """
    shared = Path(tempfile.gettempdir())
    if len(str(shared)) > _LONGEST_TEMP:
        shared = Path("/tmp")  # noqa: S108 - what is made there is private
    folder = Path(tempfile.mkdtemp(prefix="ablate-ray-", dir=shared))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    start_watch(os.getpid(), _MARK, folder.name, folder)  # also removes it after a kill
    if problem := changed_by_others(folder):
        raise UserError(f"{problem}: Ray's files would not be safe (set TMPDIR to a folder of your own)")
    path = folder / "token"
    path.write_text(secrets.token_hex(32), encoding="ascii")
    os.environ.pop("RAY_AUTH_TOKEN", None)
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(path)}
    # Ray reads these variables when it is imported, and keeps them.
    from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()
    return folder


@contextlib.contextmanager
def connection(address: str | None, say: Callable[[str], None] = lambda _: None) -> Iterator[None]:
    """Connect to the cluster at ``address``, or start a local Ray on loopback alone, for the block.

    A connection that this process has already is used and left open. ``say`` takes a warning if others can
    read the token or write Ray's files.

    Raises:
        UserError: Ray cannot be started or reached.
    """
    if address is not None:
        if warning := use_token():
            say(warning)
    else:
        # Where no other machine can join, Ray listens on loopback alone, else on all interfaces. It reads
        # this when it is imported.
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    import ray

    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if ray.is_initialized():
        yield
        return
    options: dict[str, Any] = {"address": address}
    if address is None:  # Ray opens its temporary folder to everybody, so it is put into the private one
        folder = _private_folder()
        os.environ |= {_MARK: folder.name, "RAY_enable_metrics_collection": "0"}
        options = {"address": "local", "include_dashboard": False, "_temp_dir": str(folder / "r")}
    try:
        # A terminal that is closed stops the driver, and that stops Ray.
        with on_signal(signal.SIG_IGN, signal.SIGHUP):
            _start(**options)
    except Exception as error:  # Ray raises plain ones
        where = f"at {address}" if address else "on this machine"
        raise UserError(f"cannot start or reach Ray {where}: {first_line(error)}") from None
    finally:
        os.environ.pop(_MARK, None)
    try:
        if address is not None and (shared := _folder_open_to_others()):
            say(
                f"Others on this machine can write in {shared}, and so run code in this cluster: start Ray "
                "with --temp-dir in a folder of mode 700 (docs/reliability.md)"
            )
        yield
    finally:
        ray.shutdown()


def _start(**options: Any) -> None:
    """Connect to Ray or start a local one, with a second try if that is not up in Ray's 30 s."""
    import ray

    children, programs = set(psutil.Process().children()), str(Path(ray.__file__).parent)
    for again in (options["address"] == "local", False):
        try:
            ray.init(log_to_driver=False, logging_level="ERROR", **options)
        except Exception as error:
            if not (again and "timed out during startup" in str(error)):
                raise
            for child in set(psutil.Process().children()) - children:
                with contextlib.suppress(psutil.Error):  # it has ended
                    if any(word.startswith(programs) for word in child.cmdline()):
                        child.kill()  # not one of another thread's
        else:
            return


def _folder_open_to_others() -> Path | None:
    """Return the temporary folder of the connected Ray if others than its owner can write in it, or None."""
    import ray

    folder = Path(ray._private.worker._global_node.get_temp_dir_path())  # noqa: SLF001 - nothing public tells
    with contextlib.suppress(OSError):
        modes = [each.stat().st_mode for each in (folder, *folder.resolve().parents)]
        for write, enter in ((stat.S_IWGRP, stat.S_IXGRP), (stat.S_IWOTH, stat.S_IXOTH)):
            if modes[0] & write and all(mode & enter for mode in modes):
                return folder
    return None


class Head:
    """Checks now and then whether Ray's head node at ``address`` (``host:port``) still answers.

    Ray itself waits for a minute and then ends the driver's process without a useful message.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self._clock = running_clock()
        self._looked = 0.0
        self._answered: float | None = None

    def is_gone(self) -> bool:
        """Whether the head answered before, but not in the last ``GONE_AFTER_SEC`` seconds.

        A head that never answered is not called gone: Ray may reach it through a proxy. Connects once in two
        seconds at most; a call in between returns False.
        """
        now = self._clock()
        if now - self._looked < _LOOK_EVERY_SEC:
            return False
        self._looked = now
        host, _, port = self.address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=_PATIENCE_SEC).close()
        except OSError:
            return self._answered is not None and now - self._answered > GONE_AFTER_SEC
        self._answered = now
        return False


def machines_at(address: str) -> tuple[Machine, ...]:
    """Describe the nodes of the cluster at ``address``, whose GPUs Ray names by their kind.

    Raises:
        UserError: the cluster cannot be reached.
    """
    with connection(address):
        import ray

        return tuple(_machine(node["Resources"]) for node in ray.nodes() if node["Alive"])


def _machine(resources: Mapping[str, float]) -> Machine:
    machine = Machine(cores=int(resources.get("CPU", 0)), gpus=int(resources.get("GPU", 0)))
    for key in resources:
        name = key.removeprefix("accelerator_type:")
        if name != key and (peaks := peaks_of(name)):
            return replace(machine, gpu_name=name, gpu_bytes=round(peaks.capacity * 1e9))
    return machine


def gangs_at_once(runs: Sequence[RunRequest]) -> int:
    """Count how many runs on several devices the cluster can hold at once, at least one.

    Raises:
        UserError: the nodes can never hold one of the runs.
    """
    import ray

    nodes, at_once = [node["Resources"] for node in ray.nodes() if node["Alive"]], 1
    for one in (run.resources for run in runs):
        wanted = {"CPU": one.cpus, "GPU": one.num_gpus, **one.custom}
        places = sum(min(node.get(key, 0) // n for key, n in wanted.items() if n) for node in nodes)
        if places < one.devices_per_run:
            asked, *there = (
                ", ".join(f"{each.get(key, 0):g} {key}" for key in wanted) for each in (wanted, *nodes)
            )
            raise UserError(
                f"a run asks for {one.devices_per_run} × ({asked}), which the cluster does not have",
                hint=f"nodes: {'; '.join(there)}; change base.resources",
            )
        if one.devices_per_run > 1:
            at_once = max(at_once, int(places // one.devices_per_run))
    return at_once


def submit(
    address: str, path: Path, name: str, storage: str, environment: dict[str, str]
) -> tuple[str, bool]:
    """Submit a study to the cluster whose dashboard is at ``address``, unless its job is running there.

    ``environment``: variables for the job, such as MLFLOW_TRACKING_URI. Returns the job's id, and whether it
    was running already.

    Raises:
        UserError: the dashboard cannot be reached, or refuses the job.
    """
    client = client_at(address)
    text = path.read_bytes()
    digest = hash_of(b"\0".join((text, storage.encode(), code_digest().encode())))[:16]
    slug = re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-").lower()[:40] or "study"
    identity = f"ablate-{slug}-{digest}"
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
            command = f"python -m ablate run study.yaml --address auto --storage {shlex.quote(storage)}"
            sent = {"working_dir": str(work), "py_modules": [str(package)], "env_vars": environment}
            give_up = time.monotonic() + _AGENT_SEC
            while True:
                try:
                    client.submit_job(entrypoint=command, submission_id=identity, runtime_env=sent)
                    break
                except RuntimeError as error:  # a head node that has just started has no agent yet
                    if "No available agent" not in str(error) or time.monotonic() > give_up:
                        raise
                    time.sleep(1)
    except RuntimeError as error:  # Ray's client raises no other type
        raise UserError(f"{address}: the job was refused: {first_line(error)}") from None
    return identity, False


def check_server(address: str, *, insecure: bool) -> None:
    """Check that Ray's job server is at ``address``; Ray's own client would try for a minute.

    ``insecure``: accept a server that answers without a token.

    Raises:
        UserError: nothing answers there, or something else does, or the server is open to all.
    """
    import requests

    expected = "expected the dashboard of Ray's head node, as http://HOST:8265"
    if not address.startswith(("http://", "https://")):
        raise UserError(f"--address: {address} is no dashboard's address", hint=expected)
    try:
        answer = requests.get(f"{address.rstrip('/')}/api/jobs/", timeout=_ANSWER_SEC)
    except requests.RequestException as error:
        raise UserError(f"cannot reach Ray's dashboard at {address}: {first_line(error)}") from None
    if not answer.ok and answer.status_code not in _NOT_THERE:
        return  # it asks for a token, or is not ready: Ray's client will say so
    if not (answer.ok and answer.text.startswith("[")):
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
    """Connect Ray's job client to the cluster whose dashboard is at ``address``.

    Raises:
        UserError: the dashboard cannot be reached.
    """
    from ray.exceptions import RayError
    from ray.job_submission import JobSubmissionClient

    try:
        return JobSubmissionClient(address)
    except (ConnectionError, RuntimeError, ValueError, RayError) as error:
        raise UserError(f"cannot reach Ray's dashboard at {address}: {first_line(error)}") from None
