"""Jobs in several processes, their results in the order of the jobs: the same on any number of workers.

Tokenising is limited by the processor, and beside the Rust of a tokeniser a corpus needs Python (JSON lines,
hashes), which threads do not run side by side. ``multiprocessing`` is not used: it would run the caller's
script again in every child, and wait for ever for a child that the system killed. A worker is a plain child
process that gets its jobs over a socket. Its end of the socket closes with the parent, however that ends, so
no worker is left behind; and it does not hear Ctrl-C, so that only the parent speaks.

Fails with whatever ``UserError`` or ``OSError`` a job raised, once the results before it were handed out, and
with a ``UserError`` when a worker was killed. Another exception is a bug: its traceback is printed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe, wait
from typing import TYPE_CHECKING, Any, Self

from ablate.base.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    Report = Callable[[int], None]

_REPORT_EVERY_SEC = 0.05
# How far workers may get ahead of the result that is wanted next, in jobs a worker: what is done too early
# lies on the disk, and with a limit on the text it was done for nothing.
_AHEAD = 2


@dataclass(frozen=True, kw_only=True)
class Job:
    """A function of a module and its arguments; it is called with one more, ``report``.

    ``report`` takes the units done of this job so far.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]


def num_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Workers:
    """Processes that do jobs; with ``num_workers`` 0 this one does them.

    They are started when there is work, and leaving the context ends them at once. The cores are
    shared out among them, for the threads that a tokeniser starts.
    """

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._running: list[_Worker] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self._end(self._running)

    def run(self, jobs: Sequence[Job], report: Report) -> Generator[Any]:
        """Yield each job's result, in order; ``report`` hears the units done of all jobs together.

        Whoever wants no more closes the generator; jobs that were begun are then given up.
        """
        return self._run_elsewhere(jobs, report) if self._num_workers else _run_here(jobs, report)

    def _run_elsewhere(self, jobs: Sequence[Job], report: Report) -> Generator[Any]:
        board = _Board(units=[0] * len(jobs))
        given = wanted = 0
        try:
            while wanted < len(jobs):
                soon = min(len(jobs), wanted + _AHEAD * self._num_workers)
                while given < soon and (worker := self._idle()):
                    worker.connection.send((jobs[given].function, jobs[given].arguments))
                    worker.job, given = given, given + 1
                for connection in wait([worker.connection for worker in self._running]):
                    _hear(next(worker for worker in self._running if worker.connection is connection), board)
                report(sum(board.units))
                while wanted in board.results:
                    yield board.results.pop(wanted)
                    wanted += 1
                if wanted in board.failures:
                    raise board.failures[wanted]
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
            worker.process.kill()  # what it was writing has no name yet
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
        yield job.function(*job.arguments, hear)
        before += done


@dataclass(kw_only=True, eq=False)
class _Worker:
    process: subprocess.Popen[bytes]
    connection: Connection[Any, Any]
    job: int | None = None


@dataclass(kw_only=True)
class _Board:
    """What is known of all jobs."""

    units: list[int]
    results: dict[int, Any] = field(default_factory=dict)
    failures: dict[int, Exception] = field(default_factory=dict)


def _start(num_threads: int) -> _Worker:
    ours, theirs = Pipe()
    environment = {
        "RAYON_NUM_THREADS": str(num_threads),  # unless the user has set it
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    with theirs:
        handle = theirs.fileno()
        process = subprocess.Popen(
            [sys.executable, "-m", "ablate.data.workers", str(handle)],
            pass_fds=[handle],
            process_group=0,  # the terminal sends Ctrl-C to the parent's group alone
            stdin=subprocess.DEVNULL,
            env=environment,
        )
    return _Worker(process=process, connection=ours)


def _hear(worker: _Worker, board: _Board) -> None:
    try:
        kind, value = worker.connection.recv()
    except (EOFError, ConnectionResetError):
        raise _ended(worker.process.wait()) from None
    job = worker.job
    assert job is not None
    if kind == "units":
        board.units[job] = value
        return
    worker.job = None
    if kind == "result":
        board.results[job] = value
    else:
        board.failures[job] = UserError(*value) if kind == "problems" else value


def _ended(code: int) -> Exception:
    if code < 0:
        return UserError(
            f"a process that prepares tokens was killed by signal {-code} (is memory short? "
            "finished parts are kept; fewer cores, as by taskset, need less)"
        )
    return RuntimeError(f"a worker ended with exit status {code}")


def _serve(connection: Connection[Any, Any]) -> None:
    """Do jobs until the parent has gone."""

    def send(kind: str, value: Any) -> None:
        try:
            connection.send((kind, value))
        except OSError:  # the parent has gone
            os._exit(1)

    sent = 0.0

    def report(units: int) -> None:
        nonlocal sent
        if time.monotonic() - sent >= _REPORT_EVERY_SEC:
            sent = time.monotonic()
            send("units", units)

    while True:
        try:
            function, arguments = connection.recv()
        except (EOFError, ConnectionResetError):
            return
        last = 0

        def hear(units: int) -> None:
            nonlocal last
            last = units
            report(units)

        try:
            result = function(*arguments, hear)
        except UserError as error:
            send("problems", error.problems)
        except OSError as error:
            send("error", error)
        else:
            send("units", last)
            send("result", result)


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])))
