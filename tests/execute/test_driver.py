"""Real Ray tasks and a real run store: what dies, hangs or fills up costs an attempt and nothing more.

The rules of the queue: ``test_queue.py``.
"""

import json
import os
import signal
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
from fake_trainers import HANG_AFTER_SEC

from ablate.base.errors import UserError
from ablate.execute import queue
from ablate.execute.driver import execute_study, request_stop
from ablate.execute.pending_runs import find_todo
from ablate.execute.progress import count_states, read_progress
from ablate.recipes import RecipeSpec, resolve
from ablate.run.config import Fork, ModelConfig, ResourcesConfig, TrainingConfig
from ablate.store.leases import Leases
from tests.exhaustive import rest_exhaustive
from tests.waiting import is_alive, wait_until

HERE = Path(__file__).parent
FINISHED = ["finished"] * 4
HANG = "no progress for"

LONG = pytest.mark.exhaustive
local = pytest.mark.usefixtures("local_ray")


@pytest.fixture
def no_pauses(monkeypatch):
    monkeypatch.setattr(queue, "PAUSES_SEC", (0.1, 0.1, 0.1))


def execute(study, trainer, requests=None, **options):
    requests = study[1] if requests is None else requests
    trained = [
        replace(request, trainer=f"fake_trainers:{trainer}") for request in requests
    ]
    return execute_study(study[0], trained, **options)


def ends(*asked):
    return set(execute(*asked).states.values())


def runs_of(study):
    return [study[0].run(request.run_id) for request in study[1]]


def states(study):
    return [run.state() for run in runs_of(study)]


def ledger(run):
    leases = Leases(run.attempts)
    return [leases.read(number) for number in range(1, leases.latest() + 1)]


def steps(run):
    return [row["step"] for row in run.metrics("train")]


@local
def test_every_run_is_executed_once_and_a_failing_one_stops_no_other(study):
    store, requests = study
    end = execute(study, "one_fails_and_one_diverges")
    assert not end.interrupted
    runs = runs_of(study)
    assert states(study) == ["finished", "failed", "diverged", "failed"]
    assert [end.states[run.run_id] for run in runs] == states(study)
    assert [row["val_loss"] for row in runs[0].metrics("eval")] == [3.0, 1.5, 1.0]
    assert runs[0].environment()["backend_mode"] == "emulated"
    assert runs[1].status().message == "RuntimeError: a bug in the trainer"
    log = runs[1].attempt_log(1).read_text()
    assert log.startswith("about to fail")
    assert "Traceback" in log
    assert "a smaller training.micro_batch_size needs less" in runs[3].status().message
    assert find_todo(store, requests).runs == ()
    retried = find_todo(store, requests, retry_failed=True).runs
    execute(study, "quick", [*retried, requests[0]])  # a finished run stays as it is
    assert states(study) == ["finished", "finished", "diverged", "finished"]
    assert [len(ledger(run)) for run in runs] == [1, 2, 1, 2]


def is_midway(store):
    counts = count_states(read_progress(store, store.plan()))
    return counts == {"finished": 1, "running": 2, "pending": 1}


@local
@pytest.mark.parametrize(
    "how", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, "request"]
)
def test_an_interrupt_stops_cleanly_and_leaves_the_rest_pending(study, how):
    if how == signal.SIGHUP:  # else nohup's, under which the tests may run, would stand
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    store, requests = study
    request_stop(store.path)  # one of before it began, which is none of its
    sent = []

    def interrupt_once_running():
        if sent or not is_midway(store):
            return
        sent.append(how)
        if how == "request":
            request_stop(store.path)
        else:
            os.kill(os.getpid(), how)

    end = execute(study, "only_seed_0_ends", on_poll=interrupt_once_running)
    assert end.interrupted
    left = ["interrupted", "interrupted", "pending"]
    assert sorted(states(study)) == ["finished", *left]
    assert len(find_todo(store, requests).runs) == 3
    assert not list(store.path.glob(".stop-*"))


@local
def test_runs_that_nobody_needs_are_ended_and_go_on_when_they_are_needed(study):
    store, requests = study
    reasons = {request.run_id: "it is settled" for request in requests[1:]}

    def unneeded():
        return reasons if is_midway(store) else {}

    assert not execute(study, "only_seed_0_ends", unneeded=unneeded).interrupted
    assert states(study) == ["finished", "stopped", "stopped", "stopped"]
    runs = runs_of(study)
    assert {run.status().message for run in runs[1:]} == {"it is settled"}
    assert not any(run.stop_path.exists() for run in runs)
    execute(study, "quick", find_todo(store, requests).runs)
    assert states(study) == FINISHED


@local
def test_resources_that_no_node_has_are_refused_before_anything_runs(study):
    for asked, amounts in (
        ({"cpus": 1000}, r"1 × \(1000 CPU, 0 GPU\)"),
        ({"devices_per_run": 64}, r"64 × \(1 CPU, 0 GPU\)"),
        ({"custom": {"mi355x": 8.0}}, r"1 × \(1 CPU, 0 GPU, 8 mi355x\)"),
    ):
        run = replace(study[1][0], resources=ResourcesConfig(**asked))
        fault = f"{amounts}, which the cluster does not have"
        with pytest.raises(UserError, match=fault):
            execute(study, "quick", [run])
    assert states(study) == ["pending"] * 4


FAULTS = {
    "dies_once": "",
    "disk_is_full_once": "no space left on the storage",
    "gpu_fails_once": "the GPU failed: CUDA error: an illegal",
    "hangs_once": HANG,
    "asks_on_once": HANG,
    "never_returns_to_python_once": HANG,
}


@pytest.mark.parametrize(
    "trainer", rest_exhaustive(FAULTS, ("dies_once", "disk_is_full_once").__contains__)
)
@pytest.mark.usefixtures("local_ray", "no_pauses")
def test_what_may_pass_is_tried_again(study, trainer):
    message = FAULTS[trainer]
    resources = ResourcesConfig(hang_after_sec=HANG_AFTER_SEC)
    todo = [replace(request, resources=resources) for request in study[1][:2]]
    assert ends(study, trainer, todo) == {"finished"}
    for run in runs_of(study)[:2]:
        fault, last = ledger(run)
        assert fault.outcome == ("interrupted" if message else None)
        assert last.outcome == "finished"
        assert message in (fault.message or "")
        log = run.attempt_log(fault.attempt).read_text()
        assert message != HANG or "fake_trainers.py" in log  # the stack says where
        assert steps(run) == [1, 2, 3]


@LONG
@local
def test_what_a_training_function_leaves_ends_with_its_run(study):
    first, *_ = study[1]
    run, *_ = runs_of(study)
    config = replace(first.config, trainer="fake_trainers:leaves_a_child")
    assert ends(study, "quick", [replace(first, config=config)]) == {"finished"}
    wait_until(lambda: not is_alive(int((run.path / "started").read_text())))


def start(study, script, **variables):
    script = textwrap.dedent(script.format(storage=str(study[0].path)))
    variables["PYTHONPATH"] = os.pathsep.join([str(HERE), *sys.path])
    return subprocess.Popen(
        [sys.executable, "-c", script], env=os.environ | variables, stdout=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip


DRIVER = """
    from four_runs import requests_of
    from ablate.execute.driver import execute_study
    from pathlib import Path

    begun = []

    def say_so():
        if not begun:
            begun.append(print("begun", flush=True))

    store, requests = requests_of(Path({{storage!r}}), "fake_trainers:{trainer}")
    outcome = execute_study(store, requests, on_poll=say_so)
    print(sorted(outcome.states.values()), flush=True)
"""


def start_driver(study, trainer="slow"):
    return start(study, DRIVER.format(trainer=trainer))


@LONG
def test_what_a_run_started_ends_with_its_worker_however_that_dies_and_the_next_driver_goes_on(
    study,
):
    process = start_driver(study, "starts_others")
    started = [run.path / "started.json" for run in runs_of(study)[:2]]
    wait_until(lambda: all(path.exists() for path in started), process)
    by_killed, by_killed_driver = (json.loads(path.read_text()) for path in started)
    wait_until(lambda: not any(is_alive(pid) for pid in by_killed))
    assert all(is_alive(pid) for pid in by_killed_driver)
    process.kill()
    process.wait()
    held = [record.pid for run in runs_of(study) for record in ledger(run)]
    wait_until(lambda: not any(map(is_alive, by_killed_driver + held)))
    assert start_driver(study).communicate()[0].strip().endswith(str(FINISHED))
    assert [steps(run) for run in runs_of(study)] == [[1, 2, 3]] * 4


@LONG
def test_two_who_start_the_same_study_share_its_runs_and_hear_a_request_to_stop(study):
    both = [start_driver(study, "only_seed_0_ends") for _ in range(2)]
    for process in both:
        assert process.stdout.readline() == "begun\n"
    wait_until(lambda: states(study).count("running") == 2, *both)
    request_stop(study[0].path)
    for process in both:
        process.communicate()
    assert set(states(study)[1:]) <= {"interrupted", "pending"}
    both = [start_driver(study) for _ in range(2)]
    for process in both:
        assert process.communicate()[0].strip().endswith(str(FINISHED))
    runs = runs_of(study)
    assert [steps(run) for run in runs[1:]] == [[1, 2, 3]] * 3
    assert [ledger(run)[-1].outcome for run in runs] == FINISHED
    assert len({ledger(run)[-1].pid for run in runs}) > 1


NODES = """
    import dataclasses
    from pathlib import Path

    from four_runs import requests_of
    from ray.cluster_utils import Cluster

    from ablate.run.config import ResourcesConfig
    from ablate.execute import queue
    from ablate.execute.driver import execute_study

    queue.PAUSES_SEC = (0.5, 0.5, 0.5)
    store, requests = requests_of(Path({storage!r}), "fake_trainers:waits_for_another_node")
    cluster = Cluster(initialize_head=True, head_node_args={{"num_cpus": 0, "include_dashboard": False}})
    first = cluster.add_node(num_cpus=2, resources={{"mi355x": 2}})
    own = ResourcesConfig(custom={{"mi355x": 1.0}})
    done = []

    def watch():
        if not done and any(store.run(request.run_id).metrics_path.exists() for request in requests):
            done.append(1)
            cluster.remove_node(first, allow_graceful=False)
            cluster.add_node(num_cpus=2, resources={{"mi355x": 2}})
            (store.path / "another-node").touch()

    outcome = execute_study(
        store, [dataclasses.replace(request, resources=own) for request in requests],
        address=cluster.address, on_poll=watch,
    )
    print(sorted(outcome.states.values()), len(done))
    cluster.shutdown()
"""


@LONG
def test_a_node_is_killed_in_the_middle_and_another_joins(study):
    process = start(study, NODES, RAY_AUTH_MODE="disabled", RAY_USAGE_STATS_ENABLED="0")
    assert f"{FINISHED} 1" in process.communicate()[0]
    lost = 0
    for run in runs_of(study):
        assert steps(run) == [1, 2, 3]
        outcomes = [record.outcome for record in ledger(run)]
        assert outcomes.count("finished") == 1
        lost += outcomes.count(None)
    assert lost >= 1, "no run was on the node that was killed"


@pytest.fixture
def on_two(study):
    """A run on two devices."""
    store, (request, *_) = study
    training = TrainingConfig(tokens=40_000, eval_every_tokens=8192, eval_tokens=4096)
    model = ModelConfig(width=64, heads=2, ffn=96, layers=2)
    config = replace(request.config, training=training, model=model)
    resources = ResourcesConfig(devices_per_run=2, checkpoint_every_sec=0.0)
    return store, [replace(request, resources=resources, config=config)]


def check_whole(run, *began):
    """See that a run of two processes has ended well in its last attempt; ``began``: at which steps."""
    assert [record.resumed_from_step for record in ledger(run)] == [*began]
    assert ledger(run)[-1].outcome == "finished"
    assert run.environment()["world_size"] == 2
    rows = [(row["kind"], row["step"]) for row in run.metrics()]
    assert len(rows) == len(set(rows)), "no row twice"
    assert rows[-1][0] == "eval"
    assert not list(run.path.glob(".*")), "nothing of Ray Train's is left"


@LONG
@local
def test_a_fork_on_two_devices_begins_with_the_state_of_both(on_two):
    store, (request,) = on_two
    config = request.config
    fork = Fork(tokens=6 * 4096, recipe=config.recipe, training=config.training)
    config = replace(config, recipe=resolve(RecipeSpec(gemms=["fprop"])), fork=fork)
    forked = replace(request, run_id="f" * 16, config=config)
    assert ends(on_two, "together", [request, forked]) == {"finished"}
    check_whole(store.run(request.run_id), 0)
    check_whole(store.run(forked.run_id), 5)
    assert not store.prefixes.exists()


@LONG
@pytest.mark.usefixtures("local_ray", "no_pauses")
def test_the_other_process_is_killed_and_the_run_goes_on_from_the_checkpoint_of_both(
    on_two,
):
    assert ends(on_two, "second_process_dies_once") == {"finished"}
    check_whole(runs_of(on_two)[0], 0, 2)


@LONG
@pytest.mark.parametrize("which", ["first", "second"])
@pytest.mark.usefixtures("local_ray", "no_pauses")
def test_a_fault_of_one_process_ends_the_other_and_is_not_repeated(on_two, which):
    assert ends(on_two, f"{which}_process_fails") == {"failed"}
    run, *_ = runs_of(on_two)
    assert run.status().message == f"ValueError: a bug in the {which} process"
    assert len(ledger(run)) == 1
