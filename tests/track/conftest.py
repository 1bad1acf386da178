"""A synthetic study with real files, and real MLflow parts that are made once."""

import contextlib
import json
import math
import shutil
import socket
import threading
import time

import pytest

from ablate.base.files import append_line, write_record
from ablate.store import Status, StudyStore
from ablate.store.plan_file import plan_from_json
from ablate.track.describe import points
from ablate.track.server import local_server
from ablate.track.sink import Sink

START_UNIX = 1_700_000_000.25
ARMS = {
    "bf16": ("bf16", {}),
    "fprop": ("Fprop mxfp4; Dgrad+Wgrad bf16", {"recipe.gemms": ["fprop"]}),
    "all three": ("mxfp4 DHT16", {"recipe.gemms": ["fprop", "dgrad", "wgrad"], "recipe.stabiliser": "dht"}),
}


class Study:
    """Writes what the executor and the trainer would write."""

    def __init__(self, storage, name="synthetic", arms=("bf16", "fprop"), seeds=(0, 1)):
        self.store = StudyStore(storage / name)
        self.runs = {(arm, seed): f"{arm.replace(' ', '')}{seed:012d}" for arm in arms for seed in seeds}
        self.plan = {
            "format": 1,
            "study": name,
            "description": "Which GEMM *suffers*?",
            "baseline": "bf16",
            "target": {"kind": "val_loss", "value": 2.1, "crossing": "confirmed"},
            "paired_seeds": False,
            "training": {"schedule": "constant"},
            "arms": [
                {
                    "name": arm,
                    "description": None,
                    "recipe": ARMS[arm][0],
                    "factors": ARMS[arm][1],
                    "differs": {key: [[], value] for key, value in ARMS[arm][1].items()},
                    "folded": [],
                    "runs": [{"id": self.runs[arm, seed], "seed": seed} for seed in seeds],
                }
                for arm in arms
            ],
            "dropped": [{"name": "x", "reason": "y"}],
        }
        self.write_plan()

    def write_plan(self):
        self.store.write_plan(self.typed_plan())

    def typed_plan(self):
        return plan_from_json(self.plan)

    def run(self, arm="bf16", seed=0):
        return self.store.run(self.runs[arm, seed])

    def start(self, arm="bf16", seed=0, attempt=1):
        run = self.run(arm, seed)
        config = {"model": {"width": 64, "heads": None}, "training": {"learning_rate": 4e-3}, "seed": seed}
        run.create(config)
        run.write_status(Status(state="running", attempt=attempt, started_unix=START_UNIX))
        environment = {"python": "3.11", "backend": "emulated", "backend_mode": "emulated"}
        environment["fingerprints"] = ["a1", "b2"]
        write_record(run.environment_path, environment)
        return run

    def train(self, steps, arm="bf16", seed=0, late_sec=0.0):
        """Append rows: an evaluation every fourth step, losses that differ a little by arm and seed."""
        run = self.run(arm, seed)
        shift = 0.02 * seed + 0.1 * list(ARMS).index(arm)
        for step in steps:
            common = {"tokens": 4096 * step, "step": step, "time_unix": START_UNIX + step + late_sec}
            loss = 2.0 + shift + 3.5 * math.exp(-step / 20)
            rates = {"lr": 4e-3, "grad_norm": 1.0 / step, "tokens_per_sec": 31000.0 + step}
            append_line(run.metrics_path, {"kind": "train", **common, "loss": loss, **rates})
            if step % 4 == 0:
                append_line(run.metrics_path, {"kind": "eval", **common, "val_loss": loss + 0.05})

    def sample(self, steps, arm="bf16", seed=0):
        """Append what the machine was asked for."""
        for step in steps:
            row = {"kind": "system", "tokens": 4096 * step, "time_unix": START_UNIX + step}
            append_line(self.run(arm, seed).system_path, row | {"cpu_utilization_percentage": 1.5 * step})

    def end(self, arm="bf16", seed=0, state="finished", message=None):
        times = {"started_unix": START_UNIX, "ended_unix": START_UNIX + 100}
        self.run(arm, seed).write_status(
            Status(state=state, attempt=1, tokens=4096, message=message, **times)
        )

    def whole(self, steps=8, state="finished"):
        """Write every run from start to end."""
        for arm, seed in self.runs:
            self.start(arm, seed)
            self.train(range(1, steps + 1), arm, seed)
            self.end(arm, seed, state)
        return self


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory):
    """An MLflow database without runs: making one takes seconds, copying it none."""
    folder = tmp_path_factory.mktemp("empty")
    Sink(f"sqlite:///{folder / 'mlflow.db'}", folder).experiment("nothing", "nobody")
    return folder / "mlflow.db"


@pytest.fixture
def storage(tmp_path, empty_database):
    """A storage folder, with a blank in its name, that holds MLflow's database."""
    folder = tmp_path / "my runs"
    folder.mkdir()
    shutil.copy(empty_database, folder / "mlflow.db")
    return folder


@pytest.fixture
def make_study(storage):
    return lambda **kwargs: Study(storage, **kwargs)


@pytest.fixture
def study(make_study):
    return make_study()


@pytest.fixture(scope="session", autouse=True)
def patient():
    """MLflow's server takes seconds to start on an idle machine, and minutes on a busy one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ablate.track.server._START_SEC", 500.0)
        yield


@pytest.fixture(scope="session")
def server(tmp_path_factory, empty_database):
    """The address of a real MLflow server on loopback."""
    folder = tmp_path_factory.mktemp("server")
    shutil.copy(empty_database, folder / "mlflow.db")
    uri = f"sqlite:///{folder / 'mlflow.db'}"
    with local_server(uri, folder / "mlartifacts", folder / "log", _free_port()) as (url, _):
        yield url


class Door:
    """The way to a server on this machine. Shut, it ends every connection; it can make answers wait."""

    def __init__(self, port):
        self.port, self.wait_sec, self.is_open = port, 0.0, True
        self._inside = []
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        threading.Thread(target=self._let_in, daemon=True).start()

    def _let_in(self):
        with contextlib.suppress(OSError):
            while True:
                guest, _ = self._socket.accept()
                if not self.is_open:
                    guest.close()
                    continue
                host = socket.create_connection(("127.0.0.1", self.port))
                self._inside += [guest, host]
                for pair in ((guest, host, False), (host, guest, True)):
                    threading.Thread(target=self._carry, args=pair, daemon=True).start()

    def _carry(self, source, target, is_answer):
        with contextlib.suppress(OSError):
            while piece := source.recv(1 << 16):
                time.sleep(self.wait_sec * is_answer)
                target.sendall(piece)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def shut(self):
        self.is_open = False
        for one in self._inside:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        self._inside.clear()

    def open(self):
        self.is_open = True

    def remove(self):
        self.shut()
        self._socket.close()


@pytest.fixture
def door(server):
    """A way to the session's server that a test can shut: an outage without another server's start."""
    made = Door(int(server.rpartition(":")[2]))
    yield made
    made.remove()


@pytest.fixture
def free_port():
    return _free_port()


def _free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def held():
    """What MLflow holds of a study: run id -> its run with all points."""

    def read(study, uri):
        found = {}
        for run in _in_mlflow(study, uri):
            if "ablate.summary" in run.data.tags:
                continue
            key = run.data.tags["ablate.run_id"]
            assert key not in found, f"{key} is there twice"
            found[key] = run
        return found

    return read


@pytest.fixture
def summary():
    """The one run of MLflow's that holds a study's report."""

    def read(study, uri):
        [run] = [run for run in _in_mlflow(study, uri) if "ablate.summary" in run.data.tags]
        return run

    return read


def _in_mlflow(study, uri):
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name(study.plan["study"])
    runs = client.search_runs([experiment.experiment_id], max_results=1000)
    for run in runs:
        history = {name: client.get_metric_history(run.info.run_id, name) for name in run.data.metrics}
        run.points = {
            name: sorted((point.step, point.value, point.timestamp) for point in points)
            for name, points in history.items()
        }
        run.artifacts = sorted(
            item.path
            for folder in (None, "report")
            for item in client.list_artifacts(run.info.run_id, folder)
            if not item.is_dir
        )
    return runs


@pytest.fixture
def assert_same():
    """Whether MLflow holds every point of every file once, and no other."""

    def check(study, held):
        assert {key: run.points for key, run in held.items()} == {
            run_id: _in_file(study.store.run(run_id))
            for run_id in study.runs.values()
            if study.store.run(run_id).path.exists()
        }

    return check


def _in_file(run):
    """Return what MLflow must hold of a run: metric -> sorted (step, value, time stamp)."""
    expected = {}
    for row in (*run.metrics(), *_samples(run)):
        for point in points(row):
            expected.setdefault(point.key, []).append((point.step, point.value, point.timestamp_ms))
    return {key: sorted(values) for key, values in expected.items()}


def _samples(run):
    if not run.system_path.exists():
        return []
    return [json.loads(line) for line in run.system_path.read_text().splitlines()]
