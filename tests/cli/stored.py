"""A study with a finished run, of two attempts, and one that was never started."""

from ablate.base.files import append_line
from ablate.store import Status, StudyStore
from ablate.store.leases import Leases
from tests.execute.four_runs import write_plan

IDS = ["00aa000000000000", "00bb000000000000"]


def make_store(storage, name="s"):
    store = StudyStore(storage / name)
    write_plan(store, name, IDS, 10)
    store.run(IDS[1]).create({})
    run = store.run(IDS[0])
    run.create({"model": {}, "training": {}, "seed": 0})
    first = Leases(run.attempts).claim()
    run.attempt_log(1).write_text("first\n")
    first.end("interrupted", "preempted (SIGTERM)")
    second = Leases(run.attempts).claim()
    second.note(fingerprint="a1b2", resumed_from_step=40)
    run.attempt_log(2).write_text("second\x1b[31m\n")
    row = {"kind": "eval", "tokens": 10, "step": 1, "time_unix": 1.7e9, "val_loss": 1.5}
    append_line(run.metrics_path, row)
    second.end("finished")
    run.write_status(
        Status(
            state="finished", attempt=2, tokens=10, started_unix=1.7e9, ended_unix=1.7e9
        )
    )
    return store
