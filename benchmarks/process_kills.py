"""Kill -9 of every kind of process that `ablate run` has, again and again, over a small study of real parts.

python benchmarks/process_kills.py [--kills 500]        prints what was killed, lost or changed, as JSON

`ablate run` is called until the study is done; meanwhile a process of a kind drawn by lot is killed: the
driver, a worker, Ray's GCS, raylet or another of Ray's, the mirror, MLflow's server, the compiler of the
kernel. Now and then the caches of tokens and kernels are removed, and whenever the study is done one of its
runs is, so that preparation, compiling and the writing of the report are hit as well. At the end: the states
and rows of all runs against those of a study that nobody disturbed, MLflow's points against the store, the
report's numbers against the undisturbed report's, and how long Ray's processes outlived a killed driver.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "execute"))

from kill import outcome_of
from kills import points_in_mlflow, points_in_store

from ablate.store import StudyStore

STUDY = """\
name: killed
baseline: bf16
target: {val_loss: 3.5}
seeds: 2
base:
  model: {width: 64, layers: 1, heads: 2, ffn: 96}
  data: {source: stdlib, tokenizer: bytes, max_bytes: 300_000}
  resources: {checkpoint_every_sec: 0}
  training: {tokens: 65_536, seq_len: 64, batch_size: 16, eval_every_tokens: 8192, eval_tokens: 4096}
arms:
  bf16: {recipe: bf16}
  all three: {recipe: {gemms: [fprop, dgrad, wgrad], stabiliser: sr+rht}}
"""
MARK = "ABLATE_PROCESS_KILLS"
KINDS = {
    "gcs": ("gcs_server",),
    "raylet": ("raylet/raylet", "ray::raylet"),
    "mirror": ("ablate.track.process",),
    "mlflow server": ("mlflow", "uvicorn"),
    "compiler": ("cc1plus", "g++", "c++"),
    "worker": ("ray::execute", "ray::IDLE", "default_worker.py"),
    "driver": ("ablate run",),
}
GONE_WITHIN_SEC = 30.0


def kind_of(process: psutil.Process) -> str:
    line = " ".join(process.cmdline())
    return next(
        (kind for kind, words in KINDS.items() if any(word in line for word in words)),
        "other",
    )


def marked(value: str) -> list[psutil.Process]:
    """Return the live processes that inherited this mark."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if (
                process.environ().get(MARK) == value
                and process.status() != psutil.STATUS_ZOMBIE
            ):
                found.append(process)
    return found


class Study:
    """A folder in which the study is run, by calls of `ablate run` that are told apart by a mark."""

    def __init__(self, folder: Path, tracking_uri: str | None = None) -> None:
        self.folder, self.cache = folder, folder / "cache"
        folder.mkdir()
        (folder / "killed.yaml").write_text(STUDY)
        self.store = StudyStore(folder / "runs" / "killed")
        self._tracking = (
            [] if tracking_uri is None else ["--tracking-uri", tracking_uri]
        )

    def start(self) -> tuple[subprocess.Popen[bytes], str]:
        """Call `ablate run`; return the process, and the mark of all that it starts."""
        mark = uuid.uuid4().hex
        command = [
            sys.executable,
            "-m",
            "ablate",
            "run",
            "killed.yaml",
            "--storage",
            "runs",
            *self._tracking,
        ]
        environment = os.environ | {MARK: mark, "ABLATE_CACHE": str(self.cache)}
        with (self.folder / "log").open("ab") as log:
            process = subprocess.Popen(
                command, cwd=self.folder, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip
        return process, mark

    def runs(self) -> list[str]:
        """Return the runs' ids."""
        return [run.id for _, run in self.store.plan().runs()]

    def states(self) -> Counter[str]:
        """Count the states."""
        with contextlib.suppress(Exception):
            return Counter(self.store.run(run_id).state() for run_id in self.runs())
        return Counter()

    def outcomes(self) -> dict[str, object]:
        """Return each run's end and rows."""
        return {run_id: outcome_of(self.store.run(run_id)) for run_id in self.runs()}

    def numbers(self) -> object:
        """Return the report's JSON without what differs from day to day."""
        report = json.loads((self.store.path / "report" / "report.json").read_text())
        return without_times(report)


def without_times(value: object) -> object:
    if isinstance(value, dict):
        odd = ("unix", "seconds", "tokens_per_sec", "environment", "ended")
        return {
            k: without_times(v)
            for k, v in value.items()
            if not any(word in k for word in odd)
        }
    return [without_times(one) for one in value] if isinstance(value, list) else value


class Server:
    """MLflow's server over a database, started anew whenever it was killed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        self.uri = f"http://127.0.0.1:{self._port}"
        self.mark = uuid.uuid4().hex
        self._process: subprocess.Popen[bytes] | None = None
        self.keep_up()

    def keep_up(self) -> None:
        """Start the server if it is not there."""
        if self._process is not None and self._process.poll() is None:
            return
        database = f"sqlite:///{self._folder}/mlflow.db"
        command = [
            sys.executable,
            "-m",
            "mlflow",
            "server",
            "--port",
            str(self._port),
            "--workers",
            "1",
        ]
        environment = os.environ | {
            MARK: self.mark, "MLFLOW_BACKEND_STORE_URI": database, "MLFLOW_DISABLE_TELEMETRY": "true",
            "MLFLOW_ARTIFACTS_DESTINATION": (self._folder / "artifacts").as_uri(),
            "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        }  # fmt: skip
        self._process = subprocess.Popen(
            command, cwd=self._folder, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip

    def end(self) -> None:
        """Kill it."""
        for process in marked(self.mark):
            with contextlib.suppress(psutil.Error):
                process.kill()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    draw = random.Random(arguments.seed)
    started = time.perf_counter()
    os.environ.pop("MLFLOW_TRACKING_URI", None)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        whole = Study(folder / "whole")
        first, _ = whole.start()
        assert first.wait() == 0, (whole.folder / "log").read_text()
        (folder / "mlflow").mkdir()
        server = Server(folder / "mlflow")
        study = Study(folder / "hunted", server.uri)
        kills: Counter[str] = Counter()
        failed = finished = 0
        outlived: list[tuple[float, str]] = []
        dead: dict[str, float] = {}
        run, mark = study.start()
        while sum(kills.values()) < arguments.kills:
            time.sleep(draw.uniform(0.05, 4.0))
            server.keep_up()
            for old, since in list(dead.items()):
                left = marked(old)
                if not left:
                    del dead[old]
                elif time.monotonic() - since > GONE_WITHIN_SEC:
                    outlived.append((time.monotonic() - since, kind_of(left[0])))
                    for process in left:
                        with contextlib.suppress(psutil.Error):
                            process.kill()
            if run.poll() is not None:
                failed += study.states()["failed"]
                if set(study.states()) == {"finished"}:
                    finished += 1
                    shutil.rmtree(study.store.run(draw.choice(study.runs())).path)
                if draw.random() < 0.3:
                    shutil.rmtree(study.cache, ignore_errors=True)
                if draw.random() < 0.3:
                    shutil.rmtree(study.folder / "runs" / "tokens", ignore_errors=True)
                run, mark = study.start()
                continue
            by_kind: dict[str, list[psutil.Process]] = {}
            for process in [*marked(mark), *marked(server.mark)]:
                with contextlib.suppress(psutil.Error):
                    kind = "driver" if process.pid == run.pid else kind_of(process)
                    by_kind.setdefault(kind, []).append(process)
            kind = draw.choice(sorted(by_kind))
            with contextlib.suppress(psutil.Error):
                draw.choice(by_kind[kind]).send_signal(signal.SIGKILL)
                kills[kind] += 1
            if kind == "driver":
                run.wait()
                dead[mark] = time.monotonic()
                run, mark = study.start()
        run.wait()
        for _ in range(5):
            server.keep_up()
            run, _ = study.start()
            if run.wait() == 0:
                break
        sync = [sys.executable, "-m", "ablate", "sync", "killed", "--storage", "runs"]
        subprocess.run(
            [*sync, "--tracking-uri", server.uri], cwd=study.folder, check=True
        )
        in_mlflow = points_in_mlflow(server.uri, "killed")
        runs = [study.store.run(run_id) for run_id in study.runs()]
        line = {
            "kills": dict(sorted(kills.items())),
            "studies_finished_meanwhile": finished,
            "runs_failed": failed,
            "states": dict(study.states()),
            "runs_not_bit_identical": sum(
                study.outcomes()[run_id] != outcome
                for run_id, outcome in whole.outcomes().items()
            ),
            "report_differs": study.numbers() != whole.numbers(),
            "runs_with_points_lost_or_doubled_in_mlflow": sum(
                in_mlflow.get(run.run_id) != points_in_store(run) for run in runs
            ),
            "outlived_a_killed_driver_by_30_s": outlived,
            "seconds": round(time.perf_counter() - started),
        }
        print(json.dumps(line))
        server.end()
        if os.environ.get("KEEP"):
            shutil.copytree(folder, os.environ["KEEP"])


if __name__ == "__main__":
    main()
