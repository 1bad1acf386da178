"""What a small process beside a worker does; tests/execute/test_driver.py has the rest."""

import os
import signal
import subprocess
import sys
import time

import pytest

from ablate.execute.orphans import start_watch
from tests.waiting import wait_until

HANGS = """
import ctypes, math, sys, time
from ablate.execute.orphans import end_after

log = open(sys.argv[1], "a")
end_after(float(sys.argv[2]), log)
last = time.monotonic()
print("armed", flush=True)
while time.monotonic() - last < 3:
    last = time.monotonic()
    time.sleep(0.1)
end_after(math.inf, log)  # it was stopped, and goes on
"""


@pytest.mark.exhaustive
@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux 5.3")
def test_seconds_in_which_a_process_was_stopped_are_no_hang(tmp_path):
    def start(seconds):
        command = [sys.executable, "-c", HANGS, str(tmp_path / "log"), seconds]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        process.stdout.readline()
        return process

    with start("10") as process:
        process.send_signal(signal.SIGSTOP)
        time.sleep(13)
        process.send_signal(signal.SIGCONT)
        assert process.wait() == 0
    assert (tmp_path / "log").read_text() == ""
    with start("1") as process:  # the test can fail
        assert process.wait() == -signal.SIGUSR2
    assert "Timeout (1.0)!\n" in (tmp_path / "log").read_text()


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux 5.3")
def test_the_folder_of_a_process_that_has_ended_before_it_was_watched_goes(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    ended = subprocess.Popen(["true"])
    ended.wait()
    os.close(start_watch(ended.pid, "ABLATE_NONE", "none", folder))
    wait_until(lambda: not folder.exists())
