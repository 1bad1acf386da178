"""Real Ray tasks and a real run store under the driver; the rules of its queue: ``test_queue.py``."""

import dataclasses
import os
import signal
import threading

import pytest

from ablate.base.errors import UserError
from ablate.execute.driver import execute_study
from ablate.execute.pending_runs import missing_runs
from ablate.execute.progress import ProgressReader, count_states
from ablate.run.config import ResourcesConfig
from ablate.store.leases import Leases

pytestmark = pytest.mark.usefixtures("local_ray")


def execute(study, trainer, **options):
    store, requests = study
    return execute_study(store, requests, trainer=f"fake_trainers:{trainer}", **options)


def states(study):
    store, requests = study
    return [store.run(request.run_id).status().state for request in requests]


def test_every_run_is_executed_and_none_twice(study):
    store, requests = study
    assert len(missing_runs(store, requests)) == 4
    outcome = execute(study, "quick")
    assert not outcome.interrupted
    assert states(study) == ["finished"] * 4
    rows = list(store.run(requests[1].run_id).metrics())
    assert [row["val_loss"] for row in rows if row["kind"] == "eval"] == [4.0, 2.0, pytest.approx(4 / 3)]
    assert all(row["time_unix"] > 1e9 for row in rows)
    environment = store.run(requests[0].run_id).environment()
    assert environment["backend_mode"] == "emulated"
    assert environment["timing_valid"] is False
    assert missing_runs(store, requests) == []
    execute(study, "dies")  # handed over all the same, finished runs stay what they are
    assert states(study) == ["finished"] * 4
    assert store.run(requests[0].run_id).status().attempt == 1


def test_one_failing_run_does_not_stop_the_others(study):
    store, requests = study
    outcome = execute(study, "odd_seeds_fail")
    assert states(study) == ["finished", "failed", "finished", "failed"]
    assert sorted(outcome.states.values()) == ["failed", "failed", "finished", "finished"]
    failed = store.run(requests[1].run_id)
    assert failed.status().message == "RuntimeError: a bug in the trainer"
    log = failed.attempt_log(1).read_text()
    assert log.startswith("about to fail")
    assert "Traceback" in log
    assert missing_runs(store, requests) == []
    retried = missing_runs(store, requests, retry_failed=True)
    assert [request.config.seed for request in retried] == [1, 3]
    execute_study(store, retried, trainer="fake_trainers:quick")
    assert states(study) == ["finished"] * 4
    assert failed.status().attempt == 2


def test_a_divergence_is_a_result(study):
    execute(study, "diverges")
    assert states(study) == ["diverged"] * 4
    assert missing_runs(*study) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_stops_cleanly_and_leaves_the_rest_pending(study, number):
    store, requests = study
    reader = ProgressReader(store)
    sent = threading.Event()

    def interrupt_once_running():
        if not sent.is_set() and count_states(reader.read()).get("running", 0) == 2:
            sent.set()
            os.kill(os.getpid(), number)

    outcome = execute(study, "waits_for_the_stop", on_poll=interrupt_once_running)
    assert outcome.interrupted
    assert sorted(states(study)) == ["interrupted", "interrupted", "pending", "pending"]
    assert len(missing_runs(store, requests)) == 4
    assert not list(store.path.glob(".stop-*"))


def test_runs_that_nobody_needs_are_ended_and_go_on_when_they_are_needed(study):
    store, requests = study
    reader = ProgressReader(store)

    def unneeded():
        counts = count_states(reader.read())
        settled = counts.get("finished", 0) == 1 and counts.get("running", 0) == 2
        return {request.run_id: "it is settled" for request in requests[1:]} if settled else {}

    outcome = execute(study, "only_seed_0_ends", unneeded=unneeded)
    assert not outcome.interrupted
    assert states(study) == ["finished", "stopped", "stopped", "stopped"]
    assert sorted(outcome.states.values()) == ["finished", "stopped", "stopped", "stopped"]
    runs = [store.run(request.run_id) for request in requests]
    assert {run.status().message for run in runs[1:]} == {"it is settled"}
    begun = [Leases(run.attempts).read(1) for run in runs[1:]]
    assert sorted(record.outcome for record in begun if record is not None) == ["stopped", "stopped"]
    assert not any(run.stop_path.exists() for run in runs)
    assert [request.config.seed for request in missing_runs(store, requests)] == [1, 2, 3]
    outcome = execute_study(store, missing_runs(store, requests), trainer="fake_trainers:quick")
    assert states(study) == ["finished"] * 4


def test_resources_that_no_node_has_are_refused_before_anything_runs(study):
    store, requests = study
    greedy = [dataclasses.replace(requests[0], resources=ResourcesConfig(cpus=1000))]
    with pytest.raises(UserError, match="1000 CPUs and 0 GPUs, which no node has"):
        execute_study(store, greedy)
    assert states(study) == ["pending"] * 4
