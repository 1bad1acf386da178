"""Run jobs in several processes and yield their results in job order, equal for any number of workers.

The processor limits tokenising. Besides the Rust of a tokeniser a corpus needs Python (JSON lines, hashes),
which threads do not run in parallel. ``multiprocessing`` is not used: it would run the caller's script again
in every child, and wait forever for a child that the system killed. A worker is a plain child process that
receives its jobs over a socket. Its end of the socket closes when the parent ends in any way, so no worker
is left behind. It does not receive Ctrl-C, so only the parent reports it.

How it fails: with a job's ``UserError`` or ``OSError``, after the results before it were yielded, or with a
``UserError`` if a worker was killed. Another exception is a bug; its traceback is printed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from typing import TYPE_CHECKING, Any, Self

from ablate.base.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    Report = Callable[[int], None]
    """Takes the number of units of a job done so far."""
    Job = Callable[[Report], Any]
    """A module's function and its arguments but the last, ``report``, in a ``partial``."""

_REPORT_EVERY_SEC = 0.05
# How many jobs per worker may run ahead of the next result. Early results occupy the disk, and with a
# limit on the text they may be useless.
_AHEAD = 2


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Workers:
    """Processes that run jobs; with ``num_workers`` 0 this process runs them.

    They start when there is work, and end when the context is left. They share the cores evenly,
    for the threads of their tokenisers.
    """

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._running: list[_Worker] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self._end(self._running)

    def run(self, jobs: Sequence[Job], report: Report) -> Generator[Any]:
        """Yield each job's result in order; ``report`` receives the units done of all jobs together.

        Closing the generator ends the jobs that have begun.
        """
        return self._run_elsewhere(jobs, report) if self._num_workers else _run_here(jobs, report)

    def _run_elsewhere(self, jobs: Sequence[Job], report: Report) -> Generator[Any]:
        units = [0] * len(jobs)
        outcomes: dict[int, tuple[str, Any]] = {}
        given = wanted = 0
        try:
            while wanted < len(jobs):
                soon = min(len(jobs), wanted + _AHEAD * self._num_workers)
                while given < soon and (worker := self._idle()):
                    worker.connection.send(jobs[given])
                    worker.job, given = given, given + 1
                ready = wait([worker.connection for worker in self._running])
                for worker in [worker for worker in self._running if worker.connection in ready]:
                    kind, value = _hear(worker)
                    assert worker.job is not None  # an idle one is heard only when it was killed
                    if kind == "units":
                        units[worker.job] = value
                    else:
                        outcomes[worker.job], worker.job = (kind, value), None
                report(sum(units))
                while wanted in outcomes:
                    kind, value = outcomes.pop(wanted)
                    if kind == "error":
                        raise value
                    yield value
                    wanted += 1
        finally:
            self._end([worker for worker in self._running if worker.job is not None])

    def _idle(self) -> _Worker | None:
        for worker in self._running:
            if worker.job is None:
                return worker
        if len(self._running) == self._num_workers:
            return None
        worker = _start(max(1, num_cores() // self._num_workers))
        self._running.append(worker)
        return worker

    def _end(self, workers: Sequence[_Worker]) -> None:
        for worker in workers:
            worker.process.kill()  # unfinished output has no final name yet
        for worker in workers:
            worker.process.wait()
            worker.connection.close()
        self._running = [worker for worker in self._running if worker not in workers]


def _run_here(jobs: Sequence[Job], report: Report) -> Generator[Any]:
    before = done = 0

    def hear(units: int) -> None:
        nonlocal done
        done = units
        report(before + units)

    for job in jobs:
        done = 0
        yield job(hear)
        before += done


@dataclass(kw_only=True, eq=False)
class _Worker:
    process: subprocess.Popen[bytes]
    connection: Connection[Any, Any]
    job: int | None = None


def _start(num_threads: int) -> _Worker:
    ours, theirs = Pipe()
    environment = {
        "RAYON_NUM_THREADS": str(num_threads),  # the user's own value takes precedence
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    with theirs:
        handle = theirs.fileno()
        process = subprocess.Popen(
            [sys.executable, "-m", "ablate.data.workers", str(handle)],
            pass_fds=[handle],
            process_group=0,  # the terminal sends Ctrl-C to the parent's group only
            stdin=subprocess.DEVNULL,
            env=environment,
        )
    return _Worker(process=process, connection=ours)


def _hear(worker: _Worker) -> Any:
    try:
        return worker.connection.recv()
    except (EOFError, ConnectionResetError):
        code = worker.process.wait()
    if code < 0:
        raise UserError(
            f"a process that prepares tokens was killed by signal {-code} (is memory short? "
            "finished parts are kept; fewer cores, as by taskset, need less)"
        )
    raise RuntimeError(f"a worker ended with exit status {code}")


def _serve(connection: Connection[Any, Any]) -> None:
    """Run jobs until the parent has ended."""

    def send(kind: str, value: Any) -> None:
        try:
            connection.send((kind, value))
        except OSError:  # the parent has ended
            os._exit(1)

    while True:
        try:
            job = connection.recv()
        except (EOFError, ConnectionResetError):
            return
        done, sent = 0, 0.0

        def report(units: int) -> None:
            nonlocal done, sent
            done = units
            if time.monotonic() - sent >= _REPORT_EVERY_SEC:
                sent = time.monotonic()
                send("units", units)

        try:
            outcome = "result", job(report)
        except (UserError, OSError) as error:
            outcome = "error", error
        send("units", done)
        send(*outcome)


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])))
