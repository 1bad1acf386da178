"""The mirror as a process of its own."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ablate.track.cursor import load_cursor
from ablate.track.process import start_mirror
from ablate.track.uri import default_tracking_uri
from tests.waiting import is_alive, wait_until


@pytest.fixture
def uri(storage):
    return default_tracking_uri(storage)


def test_sigterm_sends_all(study, uri, held):
    study.start()
    mirror = start_mirror(study.store.path, uri)
    try:
        wait_until(lambda: load_cursor(study.store, uri).runs)
        assert os.getpriority(os.PRIO_PROCESS, mirror.process.pid) >= 10
        study.whole(40)
    finally:
        report = mirror.stop(300)
    assert report.complete
    assert mirror.process.returncode == 0
    assert len(held(study, uri)[study.runs["fprop", 1]].points["train_loss"]) == 40


@pytest.mark.exhaustive
def test_sigterm_before_it_is_up_sends_all(study, uri, held):
    """A short study ends before MLflow is even imported."""
    study.whole(4)
    mirror = start_mirror(study.store.path, uri)
    assert mirror.stop(300).complete
    assert len(held(study, uri)) == 4


def test_parent_death(study, uri, held):
    study.whole(4)
    code = f"""
import os, signal, sys
from pathlib import Path
from ablate.track.process import start_mirror
print(start_mirror(Path({str(study.store.path)!r}), {uri!r}).process.pid, flush=True)
sys.stdin.read(1)
os.kill(os.getpid(), signal.SIGKILL)
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        pid = int(parent.stdout.readline())
        wait_until(lambda: len(load_cursor(study.store, uri).runs) == 5)  # the report's, too
        study.train([5])
        study.end()
        parent.stdin.close()
    wait_until(lambda: not is_alive(pid))
    assert len(held(study, uri)[study.runs["bf16", 0]].points["train_loss"]) == 5


@pytest.mark.exhaustive
def test_server_away(study, free_port):
    study.whole(4)
    secret = f"http://ann:s3cret@127.0.0.1:{free_port}"
    mirror = start_mirror(study.store.path, secret)
    wait_until(lambda: load_cursor(study.store, secret).problem)
    command_line = Path(f"/proc/{mirror.process.pid}/cmdline").read_bytes()
    report = mirror.stop(300)
    assert mirror.process.returncode == 0  # it has ended by itself
    assert len(report.unsent) == 4
    assert "refused" in report.problem
    log = (study.store.path / "mirror" / "mirror.log").read_bytes()
    assert b"will try again" in log
    assert b"ended with 4 unsent" in log
    assert b"s3cret" not in log + command_line + report.problem.encode()


def test_a_mirror_that_hangs_is_killed(study, uri):
    study.whole(4)
    mirror = start_mirror(study.store.path, uri)
    os.kill(mirror.process.pid, signal.SIGSTOP)
    report = mirror.stop(0.2)
    assert not is_alive(mirror.process.pid)
    assert len(report.unsent) == 4
