"""A synthetic study with real files, and real MLflow parts that are made once."""

import json
import math
import shutil
from pathlib import Path

import pytest
from mlflow import MlflowClient

from ablate.base.files import append_line, write_record
from ablate.store import Status, StudyStore
from ablate.store.plan_file import plan_from_json
from ablate.track.describe import RESULTS, points
from ablate.track.server import listen, local_server
from ablate.track.sink import Sink
from tests.gateway import gateway

__all__ = ["gateway"]

START_UNIX = 1_700_000_000.25
ARMS = ("bf16", "fprop", "all three")
PLAN = Path(__file__).with_name("plan.json").read_text()


class Study:
    """Writes what the executor and the trainer would write."""

    def __init__(self, storage, name="synthetic", arms=("bf16", "fprop"), seeds=(0, 1)):
        self.store = StudyStore(storage / name)
        self.runs = {}
        self.plan = json.loads(PLAN) | {"study": name}
        self.plan["arms"] = [self.plan["arms"][ARMS.index(arm)] for arm in arms]
        for arm in self.plan["arms"]:
            for seed in seeds:
                run_id = f"{arm['name'].replace(' ', '')}{seed:012d}"
                self.runs[arm["name"], seed] = run_id
                arm["runs"].append({"id": run_id, "seed": seed})
        self.write_plan()

    def write_plan(self):
        plan = plan_from_json(self.plan)
        self.store.write_plan(plan)
        return plan

    def run(self, arm="bf16", seed=0):
        return self.store.run(self.runs[arm, seed])

    def start(self, arm="bf16", seed=0, attempt=1):
        run = self.run(arm, seed)
        model = {"width": 64, "heads": None}
        run.create({"model": model, "training": {"learning_rate": 4e-3}, "seed": seed})
        run.write_status(
            Status(state="running", attempt=attempt, started_unix=START_UNIX)
        )
        record = {"backend_mode": "emulated", "fingerprints": ["a1", "b2"]}
        write_record(run.environment_path, record)
        return run

    def train(
        self,
        steps,
        arm="bf16",
        seed=0,
        late_sec=0.0,
        files="metrics diagnostics system",
    ):
        """Append rows: four figures and two more, with an evaluation of two figures every fourth step."""
        run = self.run(arm, seed)
        shift = 0.02 * seed + 0.1 * ARMS.index(arm)
        for step in steps:
            place = {
                "tokens": 4096 * step,
                "step": step,
                "time_unix": START_UNIX + step + late_sec,
            }
            loss = 2.0 + shift + 3.5 * math.exp(-step / 20)
            rows = {
                "system": {"kind": "system", "cpu_utilization_percentage": 1.5 * step},
                "diagnostics": {"kind": "diagnosis", "layer": "blocks.0.ffn.down", "gemm": "wgrad", "gain": loss},
                "metrics": {
                    "kind": "train", "loss": loss, "lr": 4e-3, "grad_norm": 1.0 / step,
                    "tokens_per_sec": 31000.0 + step,
                },
            }  # fmt: skip
            for file in files.split():
                append_line(run.path / f"{file}.jsonl", rows[file] | place)
            if step % 4 == 0 and "metrics" in files:
                append_line(
                    run.metrics_path, place | {"kind": "eval", "val_loss": loss + 0.05}
                )

    def end(self, arm="bf16", seed=0, state="finished", message=None):
        times = {"started_unix": START_UNIX, "ended_unix": START_UNIX + 100}
        status = Status(state=state, attempt=1, tokens=4096, message=message, **times)
        self.run(arm, seed).write_status(status)

    def whole(self, steps=8, since=0, *, is_last=True, **more):
        """Write every run from start to end, or a part of it."""
        for key in self.runs:
            if not since:
                self.start(*key)
            self.train(range(since + 1, steps + 1), *key, **more)
            if is_last:
                self.end(*key)
        return self

    def held(self, uri):
        """What MLflow holds: (arm, seed), or ``summary`` for the report -> its run, with all points."""
        client = MlflowClient(uri)
        runs = {}
        keys = {run_id: key for key, run_id in self.runs.items()}
        experiment = client.get_experiment_by_name(self.plan["study"])
        for run in client.search_runs([experiment.experiment_id], max_results=1000):
            key = keys.get(run.data.tags.get("ablate.run_id"), "summary")
            assert key not in runs, f"{key} is there twice"
            runs[key] = run
            run.points = []
            for name in run.data.metrics:
                for point in client.get_metric_history(run.info.run_id, name):
                    run.points.append((name, point.step, point.value, point.timestamp))
        return runs

    def check(self, uri):
        """See that MLflow holds every point of every file once, and no other; return the study's runs.

        What it shows of a report is left out: it is of no file of a run.
        """
        there = self.held(uri)
        expected = {"summary": []}
        for key in self.runs:
            run = self.run(*key)
            if run.status_path.exists():
                expected[key] = []
            for path in run.path.glob("*.jsonl"):
                for line in path.read_text().splitlines():
                    for at in points(json.loads(line)):
                        expected[key].append(
                            (at.key, at.step, at.value, at.timestamp_ms)
                        )
        assert there.keys() == expected.keys()
        for key, run in there.items():
            shown = [point for point in run.points if point[0] not in RESULTS]
            assert sorted(shown) == sorted(expected[key])
        del there["summary"]
        return there


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory):
    """An MLflow database without runs: making one takes seconds, copying it none."""
    folder = tmp_path_factory.mktemp("empty")
    Sink(f"sqlite:///{folder / 'mlflow.db'}", folder).experiment("nothing")
    return folder / "mlflow.db"


@pytest.fixture
def storage(tmp_path, empty_database):
    """A storage folder, with a blank in its name, that holds MLflow's database."""
    folder = tmp_path / "my runs"
    folder.mkdir()
    shutil.copy(empty_database, folder / "mlflow.db")
    return folder


@pytest.fixture
def uri(storage):
    return f"sqlite:///{storage / 'mlflow.db'}"


@pytest.fixture
def make_study(storage):
    return lambda **kwargs: Study(storage, **kwargs)


@pytest.fixture
def study(make_study):
    return make_study()


@pytest.fixture(scope="session")
def server(tmp_path_factory, empty_database):
    """The address of a real MLflow server on loopback."""
    folder = tmp_path_factory.mktemp("server")
    shutil.copy(empty_database, folder / "mlflow.db")
    uri = f"sqlite:///{folder / 'mlflow.db'}"
    with pytest.MonkeyPatch.context() as patch:
        # minutes on a busy machine
        patch.setattr("ablate.track.server._START_SEC", 500.0)
        with local_server(
            uri, folder / "mlartifacts", folder / "log" / "log", listen(None)
        ) as (url, _):
            yield url
