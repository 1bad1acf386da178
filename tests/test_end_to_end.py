"""One life of a study through the command line, with real parts: Ray, training on real text, MLflow, report.

On one Ray cluster it is killed, run on by two at once, of whom one is stopped by Ctrl-C, and finished by the
other. Everything else here reads what that life left. A gate holds one of its runs, so that nothing depends
on the machine's speed. ``tests/test_security.py`` lets `ablate run` start its own Ray.
"""

import json
import signal
from collections import Counter
from types import SimpleNamespace

import pytest
import ray
import torch

from ablate.base.files import read_record
from ablate.run.config import config_from_json
from ablate.store import StudyStore
from tests.cli.command import ablate
from tests.curves import curve, losses
from tests.waiting import is_alive, start_ablate, wait_until

STUDY = """\
name: small
baseline: bf16
target: {val_loss: 3.5}
seeds: 2
base:
  model: {width: 64, layers: 1, heads: 2, ffn: 96}
  data: {source: stdlib, tokenizer: bytes, max_bytes: 1_000_000}
  resources: {checkpoint_every_sec: 0}
  training:
    tokens: 32_768
    seq_len: 64
    batch_size: 16
    warmup_tokens: 2048
    eval_every_tokens: 4096
    eval_tokens: 4096
arms:
  bf16: {recipe: bf16}
  all three: {recipe: {gemms: [fprop, dgrad, wgrad], stabiliser: sr+rht}}
  held: {recipe: bf16, trainer: gate.py:held}
"""
ARMS = ("bf16", "all three", "held")
GATE = '''\
"""The tool's own trainer; seed 0 waits after its second step for the file ``open`` beside this one."""

import os
import time
from pathlib import Path

from ablate.train import train

HERE = Path(__file__).parent


def held(config, on_metrics, *, should_stop, **options):
    steps = []

    def stop():
        steps.append(1)
        while config.seed == 0 and len(steps) > 1 and not (HERE / "open").exists():
            (HERE / f"waits-{os.getpid()}").touch()
            if should_stop():
                return True
            time.sleep(0.05)
        return should_stop()

    return train(config, on_metrics, should_stop=stop, **options)
'''


def is_held(folder):
    """Tell whether a process that lives holds its run at the gate."""
    return any(
        is_alive(int(path.name.removeprefix("waits-")))
        for path in folder.glob("waits-*")
    )


def states(folder):
    """Count the states of the runs."""
    store = StudyStore(folder / "runs/small")
    return Counter(store.run(path.name).state() for path in store.path.glob("runs/*"))


def evaluations(store):
    """Map every run's id to its validation losses."""
    paths = store.glob("runs/*/metrics.jsonl")
    return {
        path.parent.name: losses(map(json.loads, path.read_text().splitlines()))
        for path in paths
    }


def undisturbed(store):
    """Map the id of every run that is there to its losses, trained here in one go, without Ray."""
    found, threads = {}, torch.get_num_threads()
    torch.set_num_threads(1)  # as in a run of the study
    try:
        for path in store.glob("runs/*/config.json"):
            _, rows = curve(config_from_json(read_record(path)), None)
            found[path.parent.name] = losses(rows)
    finally:
        torch.set_num_threads(threads)
    return found


def ledgers(folder):
    return [json.loads(path.read_text()) for path in folder.rglob("attempts/*.json")]


@pytest.fixture(scope="module")
def life(local_ray, tmp_path_factory):
    """The folder of the study at its end, and what was seen on the way."""
    folder = tmp_path_factory.mktemp("life")
    (folder / "small.yaml").write_text(STUDY)
    (folder / "gate.py").write_text(GATE)
    seen, started = SimpleNamespace(folder=folder), []

    def start(name):
        """Start ``ablate run`` as a user does; what it says goes to a file of that name."""
        address = ray.get_runtime_context().gcs_address
        with (folder / name).open("wb") as said:
            started.append(
                start_ablate(
                    "run", "small.yaml", "--address", address, cwd=folder, stdout=said
                )
            )
        return started[-1]

    try:
        killed = start("killed.txt")
        wait_until(lambda: is_held(folder), killed)
        killed.kill()
        killed.wait()
        seen.left_by_the_killed = ledgers(folder)
        wait_until(
            lambda: not any(is_alive(one["pid"]) for one in seen.left_by_the_killed)
        )

        stopped = start("stopped.txt")
        wait_until(lambda: is_held(folder), stopped)
        other = start("other.txt")
        wait_until(
            lambda: "Starting Ray" in (folder / "other.txt").read_text(), stopped, other
        )
        wait_until(lambda: states(folder)["finished"] == 5, stopped, other)
        stopped.send_signal(signal.SIGINT)
        seen.stopped_code = stopped.wait()
        seen.stopped_said = (folder / "stopped.txt").read_text()
        seen.states_after_the_stop = states(folder)
        (folder / "open").touch()
        seen.other_code = other.wait()
        seen.other_said = (folder / "other.txt").read_text()
    finally:
        for process in started:
            process.kill()
            process.wait()
    return seen


def test_a_killed_driver_takes_its_workers_along_and_the_runs_go_on_from_their_checkpoints(
    life,
):
    assert [one["outcome"] for one in life.left_by_the_killed].count(None) >= 1
    assert any(record["resumed_from_step"] for record in ledgers(life.folder))


def test_ctrl_c_ends_one_of_two_and_says_how_to_go_on(life):
    assert life.stopped_code == 130, life.stopped_said
    assert "go on with: ablate run small.yaml" in life.stopped_said
    assert "Traceback" not in life.stopped_said
    assert life.states_after_the_stop["finished"] == 5
    assert "interrupted" in {record["outcome"] for record in ledgers(life.folder)}


def test_two_at_once_share_the_runs_and_none_is_finished_twice(life):
    assert life.other_code == 0, life.other_said
    assert "its runs are shared" in life.other_said
    assert states(life.folder) == {"finished": 6}
    for run in life.folder.glob("runs/small/runs/*"):
        outcomes = [record["outcome"] for record in ledgers(run)]
        # killed when its status was written
        assert outcomes.count("finished") == 1 or outcomes == [None]


def test_after_all_this_the_bits_are_those_of_undisturbed_runs(life):
    found = evaluations(life.folder / "runs/small")
    assert len(found) == 6
    assert found == undisturbed(life.folder / "runs/small")


def test_the_report_is_whole(life):
    assert "Report:" in life.other_said
    report = json.loads((life.folder / "runs/small/report/report.json").read_text())
    assert [arm["n"] for arm in report["arms"]] == [2, 2, 2]
    assert report["arms"][0]["tokens_to_target"]["estimate"] > 0
    assert "<svg" in (life.folder / "runs/small/report/report.html").read_text()


def test_the_same_command_again_runs_nothing(life):
    before = {
        path: path.stat().st_mtime_ns
        for path in life.folder.glob("runs/small/runs/*/metrics.jsonl")
    }
    again = ablate("run small.yaml", cwd=life.folder)
    assert again.code == 0, again
    assert "0 to run, 6 of those asked for have ended before" in again.out
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_status_and_logs_tell_what_became_of_the_runs(life):
    answer = json.loads(ablate("status small --json", cwd=life.folder).out)
    (held,) = [
        run["run_id"]
        for run in answer["runs"]
        if (run["arm"], run["seed"]) == ("held", 0)
    ]
    shown = ablate(f"logs {held}", cwd=life.folder).out
    first, second, third, *printed = shown.splitlines()
    # Killed with the driver, or asked to end by Ray just before.
    assert first.startswith(("attempt 1: running, or lost", "attempt 1: interrupted"))
    assert second.startswith("attempt 2: interrupted")
    assert third.startswith("attempt 3: finished")
    assert all("from step " in said for said in (second, third))
    assert printed[-1].startswith("going on from the checkpoint after step ")


def test_nothing_is_left_to_clean_but_what_the_kill_left(life):
    assert ablate("clean small --yes", cwd=life.folder).code == 0
    assert states(life.folder) == {"finished": 6}
    assert (
        ablate("clean small --dry-run", cwd=life.folder).out == "Nothing to remove.\n"
    )


def test_mlflow_holds_every_curve_over_tokens_once(life):
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{life.folder}/runs/mlflow.db")
    experiment = client.get_experiment_by_name("small")
    runs = client.search_runs([experiment.experiment_id], "tags.`ablate.arm` != ''")
    assert {run.info.run_name for run in runs} == {
        f"s{seed} {arm}" for arm in ARMS for seed in (0, 1)
    }
    values = []
    for run in runs:
        history = client.get_metric_history(run.info.run_id, "val_loss")
        points = sorted(history, key=lambda point: point.step)
        assert [point.step for point in points] == list(range(4096, 32_769, 4096))
        values.append([point.value for point in points])
    assert sorted(values) == sorted(evaluations(life.folder / "runs/small").values())
    assert (
        "0 metric points sent" in ablate("dashboard small --sync", cwd=life.folder).out
    )


def test_the_measured_speed_of_emulation_is_of_the_runs_code_and_makes_no_speed_up(
    life,
):
    command = "check steps small.yaml --steps 1 --repeats 1 --device cpu --arm bf16"
    assert ablate(command, cwd=life.folder).code == 0
    record = json.loads((life.folder / "runs/small/throughput.json").read_text())
    report = json.loads(ablate("report small --json", cwd=life.folder).out)
    assert report["throughput"]["not_used"]["bf16"] == "emulated arithmetic"
    # It is of what the runs are: by a native device's word for it, configuration, code and device would do.
    assert {one["environment"]["code"] for one in report["environments"]} == {
        record["code"]
    }
