"""Waiting for what has to come, however busy the machine is."""

import time

import psutil


def wait_until(condition, *processes, give_up_sec=900):
    """Wait until something holds; fail if it does not, or if a process ends that should go on."""
    give_up = time.monotonic() + give_up_sec
    while not (found := condition()):
        for process in processes:
            assert process.poll() is None, f"{process.args} has ended: {process.returncode}"
        assert time.monotonic() < give_up, "it never came"
        time.sleep(0.02)
    return found


def is_alive(pid):
    """Tell whether a process runs; one that has ended and that nobody has waited for does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
