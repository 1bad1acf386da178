"""Ray head nodes as a user starts them, with token authentication, which may be killed."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.waiting import wait_until


def free_port():
    with contextlib.closing(socket.socket()) as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def environment_with_token(folder):
    """Return the environment of a user whose token lies in ``folder``."""
    secret = folder / "token"
    secret.write_text("0123456789abcdef0123456789abcdef")
    secret.chmod(0o600)
    return os.environ | {
        "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(secret), "RAY_USAGE_STATS_ENABLED": "0",
        # A job's `python` is the one that the head node's PATH leads to.
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }  # fmt: skip


@contextlib.contextmanager
def ray_head(environment, port, dashboard=None, num_cpus=2):
    """Start a head node; give a function that kills all its processes with kill -9."""
    # a socket's path has room for 107 letters
    short = tempfile.mkdtemp(prefix="ray", dir="/tmp")
    pages = (
        [f"--dashboard-port={dashboard}", "--dashboard-host=127.0.0.1"]
        if dashboard
        else []
    )
    command = [
        sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", f"--port={port}",
        f"--include-dashboard={str(bool(dashboard)).lower()}", *pages,
        # Another Ray on this machine has the usual ports.
        f"--dashboard-agent-listen-port={free_port()}", f"--dashboard-agent-grpc-port={free_port()}",
        f"--ray-client-server-port={free_port()}",
        f"--num-cpus={num_cpus}", f"--temp-dir={short}", "--node-ip-address=127.0.0.1",
    ]  # fmt: skip
    printed = Path(short) / "printed"
    with printed.open("wb") as output:
        head = subprocess.Popen(
            command,
            env=environment | {"PYTHONUNBUFFERED": "1"},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def kill():
        for process in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError):
                if (
                    int(process.name) != os.getpid()
                    and short.encode() in (process / "cmdline").read_bytes()
                ):
                    os.kill(int(process.name), signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(head.pid, signal.SIGKILL)

    # its port answers earlier than its node is there
    def has_started():
        return b"Ray runtime started" in printed.read_bytes()

    try:
        wait_until(has_started, head)
        yield kill
    finally:
        kill()
        head.wait()
        shutil.rmtree(short, ignore_errors=True)
