"""MLflow's own server on loopback, for the pages of a database.

It is kept small: one worker and no job runner (2 processes instead of 15), no telemetry, and only 127.0.0.1.
It has no login, and other users of the machine reach that address as well. So it can be told to answer only
under one name that nobody can guess. MLflow checks the name that a browser asks for before anything else, and
browsers take every name that ends in ``.localhost`` for this machine.

How it fails: a taken port, and a server that ends or does not answer, are ``UserError``s that name the log.
"""

from __future__ import annotations

import contextlib
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
from ablate.track.sink import MLFLOW_ENVIRONMENT

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

DEFAULT_PORT = 5000
_START_SEC = 90.0
_STOP_SEC = 5.0


@contextmanager
def local_server(
    tracking_uri: str, artifacts: Path, log_path: Path, port: int, *, name: str | None = None
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Serve a database's pages for the block; yields the server's address and process.

    ``name``: the only host name under which it answers; None: those that every machine has.

    Raises:
        UserError: the server does not start.
    """
    environment = os.environ | MLFLOW_ENVIRONMENT
    environment |= {
        # In the environment, because every user of the machine can read a command line.
        "MLFLOW_BACKEND_STORE_URI": tracking_uri,
        "MLFLOW_ARTIFACTS_DESTINATION": artifacts.resolve().as_uri(),
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    }
    url = f"http://{name or '127.0.0.1'}:{port}"
    if name is not None:
        environment |= {
            "MLFLOW_SERVER_ALLOWED_HOSTS": f"{name}:{port}",
            "MLFLOW_SERVER_CORS_ALLOWED_ORIGINS": url,
        }
    environment.pop("MLFLOW_TRACKING_URI", None)
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1"]
    process = subprocess.Popen(
        [*command, "--port", str(port), "--workers", "1"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        env=environment,
    )

    def copy_redacted() -> None:
        assert process.stdout is not None
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with process.stdout as output, log_path.open("w", encoding="utf-8") as log:
            for line in output:
                log.write(redact(line.decode(errors="replace")))
                log.flush()

    copier = threading.Thread(target=copy_redacted, daemon=True)
    copier.start()
    try:
        _wait_until_up(f"http://127.0.0.1:{port}", process, log_path)
        yield url, process
    finally:
        with contextlib.suppress(ProcessLookupError):  # the server and its worker, first with SIGTERM
            os.killpg(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_SEC)
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        copier.join(_STOP_SEC)


def choose_port(port: int | None) -> int:
    """Choose ``port`` if it is free; without one, MLflow's usual port or any free one.

    Raises:
        UserError: the port is taken.
    """
    for candidate in (port,) if port else (DEFAULT_PORT, 0):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", candidate)) as probe:
            return int(probe.getsockname()[1])
    raise UserError(f"port {port} is in use (leave --port out to take a free one)")


def _wait_until_up(url: str, process: subprocess.Popen[bytes], log_path: Path) -> None:
    deadline = time.monotonic() + _START_SEC
    # Loopback needs no proxy, even if the environment sets one.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise UserError(f"MLflow's server ended at once (see {log_path})")
        with contextlib.suppress(OSError), opener.open(f"{url}/health", timeout=2) as answer:
            if answer.status == 200:
                return
        time.sleep(0.1)
    raise UserError(f"MLflow's server did not answer at {url} within {_START_SEC:.0f} s (see {log_path})")
