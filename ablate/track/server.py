"""MLflow's own server on loopback, for the pages of a database.

It is kept small: one process and no job runner, no telemetry, and only the loopback addresses.
It has no login, and other users of the machine reach these addresses as well. So it can be told to answer
only under one name that nobody can guess. MLflow checks the name that a browser asks for before anything
else, and browsers take every name that ends in ``.localhost`` for this machine: for ``[::1]`` and for
127.0.0.1. Whoever listened on the other one would be told the name, so the server listens on both.

How it fails: a taken port, and a server that ends or does not answer, are ``UserError``s that name the log.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ablate.base.command_hints import redact
from ablate.base.errors import UserError
from ablate.base.files import open_private
from ablate.track.sink import MLFLOW_ENVIRONMENT

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path
    from typing import IO

DEFAULT_PORT = 5000
_START_SEC = 90.0
_STOP_SEC = 5.0
_HAS_NO_IPV6 = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


@contextmanager
def local_server(
    tracking_uri: str,
    artifacts: Path,
    log_path: Path,
    sockets: Sequence[socket.socket],
    *,
    name: str | None = None,
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Serve a database's pages for the block; yields the server's address and process.

    ``sockets``: those of ``listen``. They stay open here until the end of the block, so that nobody else can
    take the port if the server ends.
    ``name``: the only host name under which it answers; None: those that every machine has.

    Raises:
        UserError: the server does not start.
    """
    port = sockets[0].getsockname()[1]
    url = f"http://{name or '127.0.0.1'}:{port}"
    environment = os.environ | MLFLOW_ENVIRONMENT
    environment |= {
        # In the environment, because every user of the machine can read a command line.
        "MLFLOW_BACKEND_STORE_URI": tracking_uri,
        "ABLATE_ARTIFACTS": str(artifacts.resolve()),
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    }
    if name is not None:
        environment |= {
            "MLFLOW_SERVER_ALLOWED_HOSTS": f"{name}:{port}",
            "MLFLOW_SERVER_CORS_ALLOWED_ORIGINS": url,
        }
    environment.pop("MLFLOW_TRACKING_URI", None)
    descriptors = [listener.fileno() for listener in sockets]
    process = subprocess.Popen(
        [sys.executable, "-m", "ablate.track.pages", *map(str, descriptors)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        pass_fds=descriptors,
        env=environment,
    )
    copier = threading.Thread(
        target=_copy_redacted, args=(process.stdout, log_path, name), daemon=True
    )
    copier.start()
    try:
        _wait_until_up(f"http://127.0.0.1:{port}", process, log_path)
        yield url, process
    finally:
        _stop(process)
        for listener in sockets:
            listener.close()
        copier.join(_STOP_SEC)


def _copy_redacted(output: IO[bytes], log_path: Path, name: str | None) -> None:
    """Copy what the server prints into a private file, without logins and without its secret name."""
    with output, open_private(log_path, "w") as log:
        for line in output:
            text = redact(line.decode(errors="replace"))
            log.write(text.replace(name, "***") if name else text)
            log.flush()


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the server with all that it has started: first with SIGTERM."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_SEC)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def listen(port: int | None) -> list[socket.socket]:
    """Listen on ``port`` of each loopback address; without one, on MLflow's usual port or any free one.

    Nobody else can take the port as long as the sockets are open.

    Raises:
        UserError: the port is taken on one of them.
    """
    for candidate in (port,) if port else (DEFAULT_PORT, 0, 0, 0):
        with contextlib.suppress(OSError):
            return _listen_on_both(candidate)
    raise UserError(f"port {port} is in use (leave --port out to take a free one)")


def _listen_on_both(port: int) -> list[socket.socket]:
    sockets = [socket.create_server(("127.0.0.1", port))]
    try:
        address = ("::1", sockets[0].getsockname()[1])
        sockets.append(socket.create_server(address, family=socket.AF_INET6))
    except OSError as error:
        if error.errno not in _HAS_NO_IPV6:  # another program listens there
            sockets[0].close()
            raise
    return sockets


def _wait_until_up(url: str, process: subprocess.Popen[bytes], log_path: Path) -> None:
    deadline = time.monotonic() + _START_SEC
    # Loopback needs no proxy, even if the environment sets one.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise UserError(f"MLflow's server ended at once (see {log_path})")
        with (
            contextlib.suppress(OSError),
            opener.open(f"{url}/health", timeout=2) as answer,
        ):
            if answer.status == 200:
                return
        time.sleep(0.1)
    raise UserError(
        f"MLflow's server did not answer at {url} within {_START_SEC:.0f} s (see {log_path})"
    )
