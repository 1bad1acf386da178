"""The Ray cluster that runs are executed on: connection, token, head node, and what it can hold."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import secrets
import shutil
import socket
import stat
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from ablate.base.errors import UserError, first_line
from ablate.base.files import changed_by_others

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ablate.execute.pending_runs import RunRequest

GONE_AFTER_SEC = 20.0
_LOOK_EVERY_SEC = 2.0
_PATIENCE_SEC = 2.0
_PREFIX = "ablate-ray-"
_LONGEST_TEMP = 20
"""A socket's path has room for 107 letters, of which Ray's names take 65 and this process's folder 22."""


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
    """Make the folder of a Ray that this process starts, and let that Ray ask for a token of its own.

    Ray gives its own folders to everybody (mode 777) and follows links there: who can write in them runs code
    as this user. In a folder that only this user can open, nobody else comes so far. Ray's default token is
    one for all time, which others can read under the usual umask, and its loopback ports are open to every
    user of the machine.

    Raises:
        UserError: others could replace the folder.
    """
    shared = Path(tempfile.gettempdir())
    if len(str(shared)) > _LONGEST_TEMP:
        shared = Path("/tmp")  # noqa: S108 - what is made there is private
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=shared))
    if problem := changed_by_others(folder):
        raise UserError(f"{problem}: Ray's files would not be safe (set TMPDIR to a folder of your own)")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = folder / "token"
    path.write_text(secrets.token_hex(32), encoding="ascii")
    os.environ.pop("RAY_AUTH_TOKEN", None)
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(path)}
    # Ray looks when it is imported, and keeps what it found.
    from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()
    return folder


@contextlib.contextmanager
def connection(address: str | None, say: Callable[[str], None] = lambda _: None) -> Iterator[None]:
    """Connect to a cluster, or start a local Ray, on loopback alone, for the time of the block.

    ``say`` takes a warning where others can read the token or write Ray's files.
    """
    if address is not None:
        if warning := use_token():
            say(warning)
    else:
        # Ray takes a machine whose cluster can hold no other for one that nobody else need reach. It looks
        # when it is imported; without this it listens on all interfaces.
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    import ray

    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    already = ray.is_initialized()
    if not already:
        folder = _private_folder() if address is None else None
        try:
            _start(address, folder)
        except Exception as error:  # Ray raises plain ones
            where = f"at {address}" if address else "on this machine"
            raise UserError(f"cannot start or reach Ray {where}: {first_line(error)}") from None
        if address is not None and (folder := _folder_open_to_others()):
            say(
                f"Others on this machine can write in {folder}, and so run code in this cluster: start Ray "
                "with --temp-dir in a folder of mode 700 (docs/reliability.md)"
            )
    try:
        yield
    finally:
        if not already:
            ray.shutdown()


def _start(address: str | None, folder: Path | None) -> None:
    """Connect to ``address``, or start a local Ray: twice if the machine is too busy for Ray's 30 s."""
    import ray

    children, programs = set(psutil.Process().children()), str(Path(ray.__file__).parent)
    for again in (address is None, False):
        try:
            ray.init(
                address=address or "local",
                include_dashboard=False if address is None else None,
                log_to_driver=False,
                logging_level="ERROR",
                # Ray opens this folder to everybody, so it lies within the private one.
                **({} if folder is None else {"_temp_dir": str(folder / "r")}),
            )
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
    """Return the temporary folder of the connected Ray if others than its owner can write in it here."""
    import ray

    folder = Path(ray._private.worker._global_node.get_temp_dir_path())  # noqa: SLF001 - nothing public tells
    with contextlib.suppress(OSError):
        modes = [each.stat().st_mode for each in (folder, *folder.resolve().parents)]
        for write, enter in ((stat.S_IWGRP, stat.S_IXGRP), (stat.S_IWOTH, stat.S_IXOTH)):
            if modes[0] & write and all(mode & enter for mode in modes):
                return folder
    return None


class Head:
    """The head at ``address`` (``host:port``), checked now and then.

    Ray itself waits for a minute and then ends the driver's process without a useful message.
    """

    def __init__(self, address: str, *, gone_after_sec: float = GONE_AFTER_SEC) -> None:
        host, _, port = address.rpartition(":")
        self.address = address
        self._where = (host.strip("[]"), int(port))
        self._gone_after_sec = gone_after_sec
        self._looked = time.monotonic()
        self._answered: float | None = None

    def is_gone(self) -> bool:
        """Whether the head answered before, but has not for too long to come back by itself.

        A head that never answers may be behind a proxy through which Ray itself reaches it.
        """
        now = time.monotonic()
        if now - self._looked < _LOOK_EVERY_SEC:
            return False
        self._looked = now
        try:
            socket.create_connection(self._where, timeout=_PATIENCE_SEC).close()
        except OSError:
            return self._answered is not None and now - self._answered > self._gone_after_sec
        self._answered = now
        return False


def gangs_at_once(runs: Sequence[RunRequest]) -> int:
    """Return how many runs on several devices the cluster holds at once, at least one.

    Raises:
        UserError: the nodes can never hold one of the runs.
    """
    import ray

    nodes, at_once = [node["Resources"] for node in ray.nodes() if node["Alive"]], 1
    for one in (run.resources for run in runs):
        wanted = {"CPU": one.cpus, "GPU": one.gpus, **one.custom}
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
