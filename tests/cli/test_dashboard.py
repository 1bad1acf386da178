"""``ablate dashboard`` as a user starts it."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import pytest

from ablate.store import Status, StudyStore
from ablate.store.lock import plan_from_json

PLAN = {
    "format": 1,
    "study": "small",
    "description": "A small study",
    "baseline": "bf16",
    "target": {"kind": "val_loss", "value": 2.0},
    "training": {"schedule": "constant"},
    "arms": [{"name": "bf16", "recipe": "bf16", "runs": [{"id": "aaaa", "seed": 0}]}],
    "dropped": [],
}


@pytest.fixture
def storage(tmp_path):
    store = StudyStore(tmp_path / "runs" / "small")
    store.write_plan(plan_from_json(PLAN))
    run = store.run("aaaa")
    run.create({"seed": 0})
    row = {"tokens": 4096, "step": 1, "time_unix": 1.7e9}
    run.append_metric({"kind": "eval", "val_loss": 5.0, **row})
    run.write_status(Status(state="finished", started_unix=1.7e9, ended_unix=1.7e9 + 1))
    return tmp_path / "runs"


def start(storage, *arguments, study="small"):
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MLFLOW")}
    command = [sys.executable, "-m", "ablate", "dashboard", study, "--storage", str(storage), "--no-browser"]
    return subprocess.Popen(
        [*command, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


def fails(storage, *arguments, **kwargs):
    process = start(storage, *arguments, **kwargs)
    out, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert out == ""
    return [line for line in errors.splitlines() if not line.startswith("Sending")]


def processes_of_group_leaders(children):
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            group = int(path.read_text().rpartition(")")[2].split()[2])
        except OSError:
            continue
        if group in children:
            found.append(path.parent.name)
    return found


def children_of(pid):
    return {int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}


def test_shows_the_experiment_and_leaves_no_process(storage):
    process = start(storage)
    killer = threading.Timer(90, process.kill)
    killer.start()
    url = process.stdout.readline().strip()
    base, _, rest = url.partition("/#/")
    assert rest.startswith("experiments/1/runs?")
    assert base.startswith("http://127.0.0.1:")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    query = f"{base}/api/2.0/mlflow/experiments/get?experiment_id=1"
    with opener.open(query) as answer:
        assert json.load(answer)["experiment"]["name"] == "small"
    servers = children_of(process.pid)
    assert len(processes_of_group_leaders(servers)) == 2
    process.send_signal(signal.SIGINT)
    out, errors = process.communicate(timeout=30)
    killer.cancel()
    assert process.returncode == 0, errors
    assert out == ""
    assert "Traceback" not in errors
    deadline = time.monotonic() + 5
    while processes_of_group_leaders(servers) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert processes_of_group_leaders(servers) == []


def test_unknown_study(storage):
    [line] = fails(storage, study="smal")
    assert "no study 'smal'" in line
    assert "small" in line


def test_port_in_use(storage):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        [line] = fails(storage, "--port", str(port))
    assert f"port {port} is in use" in line


def test_missing_database(storage, tmp_path):
    [line] = fails(storage, "--tracking-uri", f"sqlite:///{tmp_path}/gone.db")
    assert f"no MLflow database {tmp_path}/gone.db" in line


def test_server_away(storage):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    [line] = fails(storage, "--tracking-uri", f"http://ann:s3cret@127.0.0.1:{port}")
    assert f"MLflow at http://***@127.0.0.1:{port} cannot be used" in line
    assert "s3cret" not in line


def test_plain_folder(storage):
    [line] = fails(storage, "--tracking-uri", "./mlruns")
    assert "keeps no runs in plain files" in line
