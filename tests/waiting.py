"""Processes of their own, and waiting for what has to come, however busy the machine is."""

import contextlib
import os
import socket
import subprocess
import sys
import time

import psutil


def wait_until(condition, *processes, give_up_sec=900):
    """Wait until something holds; fail if it does not, or if a process ends that should go on."""
    give_up = time.monotonic() + give_up_sec
    while not (found := condition()):
        for process in processes:
            assert process.poll() is None, (
                f"{process.args} has ended: {process.returncode}"
            )
        assert time.monotonic() < give_up, "it never came"
        time.sleep(0.02)
    return found


def run_python(code, *words, check=True, **options):
    """Run code in a Python of its own; what it prints is kept as text."""
    command = [sys.executable, "-c", code, *words]
    return subprocess.run(
        command, capture_output=True, text=True, check=check, **options
    )


def start_ablate(
    *words, env=os.environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options
):
    """Start the command line on the storage ``runs``; its errors go where its output goes."""
    return subprocess.Popen(
        [sys.executable, "-m", "ablate", *words], env=env | {"ABLATE_STORAGE": "runs"}, stdout=stdout,
        stderr=stderr, text=True, **options,
    )  # fmt: skip


def is_alive(pid):
    """Tell whether a process runs; one that has ended and that nobody has waited for does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def has_ipv6():
    """Tell whether this machine has the address [::1]."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6) as probe:
        probe.bind(("::1", 0))
        return True
    return False
