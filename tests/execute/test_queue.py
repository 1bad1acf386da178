"""The rules of an execution, with a real run store, and workers and clock made up: no Ray, no waiting.

``test_queue.txt`` has what happens and what the queue does; ``REWRITE=1 pytest`` writes the latter anew.
"""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest

from ablate.base.files import append_line
from ablate.execute import queue
from ablate.execute.queue import ExecutionEnd, Queue
from ablate.execute.task_end import TaskEnd
from ablate.run.config import ResourcesConfig
from ablate.store import Status
from ablate.store.leases import Leases
from tests.golden import cases, check

ENDS = {
    "finished": TaskEnd(state="finished"),
    "failed": TaskEnd(state="failed"),
    "back": TaskEnd(state="pending"),
    "lost": TaskEnd(state="interrupted", transient=True, message="worker lost"),
    "elsewhere": TaskEnd(state="running"),
}


class Fake:
    """A queue of four runs, a to d, and workers that write down what they are asked to do.

    Of the runs, ``gangs`` train on several devices, each of ``holders`` begins with the state of another one,
    and ``refused`` cannot begin, for this reason.
    """

    def __init__(self, study, gangs="", holders=MappingProxyType({}), **options):
        store, requests = study
        self.done = []
        self.stop_path = store.path / "stop"
        self.names = {
            run.run_id: name for name, run in zip("abcd", requests, strict=True)
        }
        self.runs = {}
        for request in requests:
            name = self.names[request.run_id]
            run = replace(
                request, folder=store.run(request.run_id), stop_path=self.stop_path
            )
            if name in gangs:
                run = replace(run, resources=ResourcesConfig(devices_per_run=2))
            if holder := holders.get(name):
                run = replace(
                    run,
                    prefix=(self.stop_path, 1),
                    holder=f"{ord(holder) - ord('a'):016x}",
                )
            run.folder.attempts.mkdir(parents=True)
            self.runs[name] = run
        self.queue = Queue([*self.runs.values()], self, **options)

    def start(self, run):
        self.done.append(f"start {self.names[run.run_id]} after {run.given_up}")

    def cancel(self, run_id):
        self.done.append(f"cancel {self.names[run_id]}")

    def move(self, now):
        self.queue.move(float(now))

    def take(self, name, end, now):
        self.queue.take(self.runs[name].run_id, ENDS[end], float(now))

    def write(self, name, state):
        self.runs[name].folder.write_status(Status(state=state))

    def step(self, name, step):
        append_line(
            self.runs[name].folder.metrics_path, {"kind": "train", "step": int(step)}
        )

    def checkpoint(self, name, step):
        folder = self.runs[name].folder.checkpoints
        folder.mkdir(exist_ok=True)
        (folder / f"{step}.json").touch()

    def claim(self, name):
        self.lease = Leases(self.runs[name].folder.attempts).claim()

    def release(self):
        self.lease.end("interrupted")

    def ask(self, name):
        self.runs[name].folder.stop_path.touch()

    def unneeded(self, names):
        reasons = {self.runs[name].run_id: "it is settled" for name in names}
        self.queue.end_unneeded(reasons | {"x": "not ours"})

    def stop(self):
        self.queue.stop()
        assert self.stop_path.exists()

    def told(self):
        """What is known of each run."""
        for name, run in self.runs.items():
            state = self.queue.states.get(run.run_id, "open")
            message = run.folder.status().message
            yield f"{name}: {state}, {message}"
            if run.folder.stop_path.exists():
                yield f"{name} is asked to stop: {run.folder.stop_path.read_text()}"


@pytest.mark.parametrize("case", cases(Path(__file__).with_suffix(".txt")))
def test_what_a_queue_does(study, monkeypatch, case):
    options, *events = case[1].splitlines()[1:-1]
    options = json.loads(options)
    refused = options.pop("refused", {})
    fake = Fake(study, **options)
    monkeypatch.setattr(
        queue, "why_it_cannot_begin", lambda run: refused.get(fake.names[run.run_id])
    )
    said = []
    for event in events:
        name, *words = event.split()
        getattr(fake, name)(*words)
        said += [f"{event}: {action}" for action in fake.done or ["nothing"]]
        fake.done = []
    check(case, [*said, *fake.told()])


@pytest.mark.parametrize("again", [True, False])
def test_a_second_interrupt_or_a_deaf_worker_is_not_waited_for(
    study, monkeypatch, again
):
    if not again:
        monkeypatch.setattr(queue, "_STOP_GRACE_SEC", 0.0)

    def interrupted():
        raise KeyboardInterrupt

    fake = Fake(study)
    fake.collect = interrupted
    assert fake.queue.run(lambda: None) == ExecutionEnd(states={}, interrupted=True)


def test_ray_puts_a_share_on_one_gpu_and_no_process_stays_for_a_second(tmp_path):
    script = Path(__file__).with_name("shared_gpus.py")
    process = subprocess.run(
        [sys.executable, script, tmp_path], capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr
    *runs, machines = process.stdout.splitlines()[-9:]
    gpus, processes = zip(*map(str.split, runs), strict=True)
    assert set(gpus) == {"0", "1"}
    assert len(set(processes)) == 8
    machine = "Machine(cores=4, gpus=2, gpu_name='H200', gpu_bytes=141000000000)"
    assert machines == f"({machine},)"
