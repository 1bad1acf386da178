"""The Ray cluster that runs are executed on: connection, token, head node, and what it can hold.

How it fails: a cluster that cannot be reached or cannot hold a run is a ``UserError``.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import secrets
import shutil
import signal
import socket
import stat
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from ablate.base.clock import running_clock
from ablate.base.errors import UserError, first_line
from ablate.base.files import changed_by_others
from ablate.execute.orphans import start_watch
from ablate.execute.worker import on_signal
from ablate.modelled.hardware import peaks_of
from ablate.plan.shares import Machine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from ablate.execute.pending_runs import RunRequest

GONE_AFTER_SEC = 20.0
_LOOK_EVERY_SEC = 2.0
_PATIENCE_SEC = 2.0
_LONGEST_TEMP = 20
"""A socket's path has room for 107 letters, of which Ray's names take 65 and this process's folder 22."""
_MARK = "ABLATE_RAY"
"""The variable by which the processes of a local Ray are found after the end of the driver."""


def use_token() -> str | None:
    """Let Ray send its token to an explicit address; return a warning if others can read the file.

    A cluster with Ray's defaults asks for this token. Ray sends it to an explicit address only if told so
    before it is imported. A cluster without authentication accepts it too.
    """
    path = Path(
        os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token"
    )
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
        raise UserError(
            f"{problem}: Ray's files would not be safe (set TMPDIR to a folder of your own)"
        )
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
def connection(
    address: str | None, say: Callable[[str], None] = lambda _: None
) -> Iterator[None]:
    """Connect to the cluster at ``address``, or start a local Ray on loopback alone, for the block.

    A connection that this process has already is used and left open. ``say`` takes a warning if others can
    read the token or write Ray's files.

    Raises:
        UserError: Ray cannot be started or reached.
    """
    if address is None:
        # Where no other machine can join, Ray listens on loopback alone, else on all interfaces. It reads
        # this when it is imported.
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    elif warning := use_token():
        say(warning)
    import ray

    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if ray.is_initialized():
        yield
        return
    try:
        # A terminal that is closed stops the driver, and that stops Ray.
        with on_signal(signal.SIG_IGN, signal.SIGHUP):
            if address is None:
                _start_local()
            else:
                _init(address=address)
    except UserError:
        raise
    except Exception as error:  # Ray raises plain ones
        place = f"at {address}" if address else "on this machine"
        raise UserError(
            f"cannot start or reach Ray {place}: {first_line(error)}"
        ) from None
    finally:
        os.environ.pop(_MARK, None)
    try:
        if address is not None and (folder := _folder_open_to_others()):
            say(
                f"Others on this machine can write in {folder}, and so run code in this cluster: start Ray "
                "with --temp-dir in a folder of mode 700 (docs/reliability.md)"
            )
        yield
    finally:
        ray.shutdown()


def _start_local() -> None:
    """Start a local Ray, a second time if it is not up in Ray's 30 s."""
    import ray

    folder = _private_folder()
    os.environ |= {_MARK: folder.name, "RAY_enable_metrics_collection": "0"}
    # Ray opens its temporary folder to everybody, so it is put into the private one.
    options = {
        "address": "local",
        "include_dashboard": False,
        "_temp_dir": str(folder / "r"),
    }
    children = set(psutil.Process().children())
    try:
        _init(**options)
    except Exception as error:
        if "timed out during startup" not in str(error):
            raise
    else:
        return
    programs = str(Path(ray.__file__).parent)
    for child in set(psutil.Process().children()) - children:
        with contextlib.suppress(psutil.Error):  # it has ended
            if any(word.startswith(programs) for word in child.cmdline()):
                child.kill()  # not one of another thread's
    _init(**options)


def _init(**options: Any) -> None:
    import ray

    ray.init(log_to_driver=False, logging_level="ERROR", **options)


def _folder_open_to_others() -> Path | None:
    """Return the temporary folder of the connected Ray if others than its owner can write in it, or None."""
    import ray

    folder = Path(ray._private.worker._global_node.get_temp_dir_path())  # noqa: SLF001 - nothing public tells
    with contextlib.suppress(OSError):
        mode = folder.stat().st_mode
        modes = [mode, *(parent.stat().st_mode for parent in folder.resolve().parents)]
        for write, enter in (
            (stat.S_IWGRP, stat.S_IXGRP),
            (stat.S_IWOTH, stat.S_IXOTH),
        ):
            if mode & write and all(mode & enter for mode in modes):
                return folder
    return None


class Head:
    """Checks now and then whether Ray's head node at ``address`` (``host:port``) still answers.

    Ray itself waits for a minute and then ends the driver's process without a useful message.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self._clock = running_clock()
        self._asked_sec = 0.0
        self._answered_sec: float | None = None

    def is_gone(self) -> bool:
        """Whether the head answered before, but not in the last ``GONE_AFTER_SEC`` seconds.

        A head that never answered is not called gone: Ray may reach it through a proxy. Connects once in two
        seconds at most; a call in between returns False.
        """
        now_sec = self._clock()
        if now_sec - self._asked_sec < _LOOK_EVERY_SEC:
            return False
        self._asked_sec = now_sec
        host, _, port = self.address.rpartition(":")
        try:
            socket.create_connection(
                (host.strip("[]"), int(port)), timeout=_PATIENCE_SEC
            ).close()
        except OSError:
            return (
                self._answered_sec is not None
                and now_sec - self._answered_sec > GONE_AFTER_SEC
            )
        self._answered_sec = now_sec
        return False


def machines_at(address: str) -> tuple[Machine, ...]:
    """Describe the nodes of the cluster at ``address``, whose GPUs Ray names by their kind.

    Raises:
        UserError: the cluster cannot be reached.
    """
    with connection(address):
        import ray

        return tuple(
            _machine(node["Resources"]) for node in ray.nodes() if node["Alive"]
        )


def _machine(resources: Mapping[str, float]) -> Machine:
    machine = Machine(
        cores=int(resources.get("CPU", 0)), gpus=int(resources.get("GPU", 0))
    )
    for key in resources:
        name = key.removeprefix("accelerator_type:")
        if name != key and (peaks := peaks_of(name)):
            return replace(
                machine, gpu_name=name, gpu_bytes=round(peaks.capacity * 1e9)
            )
    return machine


def gangs_at_once(runs: Sequence[RunRequest]) -> int:
    """Count how many runs on several devices the cluster can hold at once, at least one.

    Raises:
        UserError: the nodes can never hold one of the runs.
    """
    import ray

    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    most = 1
    for run in runs:
        bundle = run.bundle
        num_devices = run.resources.devices_per_run
        slots = 0
        for node in nodes:
            slots += min(
                node.get(key, 0) // amount for key, amount in bundle.items() if amount
            )
        if slots < num_devices:
            wanted = f"{num_devices} × ({_amounts(bundle, bundle)})"
            have = "; ".join(_amounts(node, bundle) for node in nodes)
            raise UserError(
                f"a run asks for {wanted}, which the cluster does not have",
                hint=f"nodes: {have}; change base.resources",
            )
        if num_devices > 1:
            most = max(most, int(slots // num_devices))
    return most


def _amounts(resources: Mapping[str, float], keys: Iterable[str]) -> str:
    return ", ".join(f"{resources.get(key, 0):g} {key}" for key in keys)
