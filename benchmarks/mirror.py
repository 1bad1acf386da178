"""How fast the mirror writes to MLflow's default store, against a plain loop of ``log_metric``.

``python benchmarks/mirror.py`` prints metrics per second of both, their ratio, and the mirror's time per run
over 200 small runs (made, described, ended, with two artifacts each). Both use one sqlite file each, made
beforehand, in this process. Ratios are safer than absolute times.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from ablate.base.files import append_line, write_record
from ablate.store import Status, StudyStore
from ablate.store.plan_file import plan_from_json
from ablate.track.mirror import Mirror
from ablate.track.sink import Sink, default_tracking_uri

TARGET_MS_PER_RUN = 50.0
SMALL_ROWS = 4


def write_study(storage: Path, runs: int, rows: int) -> StudyStore:
    store = StudyStore(storage / "benchmark")
    planned = [{"id": f"{seed:016x}", "seed": seed} for seed in range(runs)]
    store.write_plan(
        plan_from_json(
            {
                "format": 1,
                "study": "benchmark",
                "description": "",
                "baseline": "bf16",
                "target": {"kind": "val_loss", "value": 2.0},
                "arms": [{"name": "bf16", "recipe": "bf16", "runs": planned}],
            }
        )
    )
    for entry in planned:
        run = store.run(entry["id"])
        run.create({"seed": entry["seed"], "model": {"width": 64}})
        write_record(
            run.environment_path, {"backend": "emulated", "backend_mode": "emulated"}
        )
        for step in range(1, rows + 1):
            common = {"tokens": 4096 * step, "step": step, "time_unix": 1.7e9 + step}
            rates = {"lr": 0.004, "grad_norm": 1.0 / step, "tokens_per_sec": 31000.0}
            append_line(
                run.metrics_path,
                {"kind": "train", **common, "loss": 2.0 + 1.0 / step, **rates},
            )
        run.write_status(
            Status(state="finished", started_unix=1.7e9, ended_unix=1.7e9 + rows)
        )
    return store


def mirror_seconds(storage: Path, runs: int, rows: int) -> tuple[float, float, int]:
    """Return elapsed seconds, CPU seconds and metrics sent of one pass over a whole study."""
    store = write_study(storage, runs, rows)
    uri = default_tracking_uri(storage)
    # migrations and import are paid once a storage
    Sink(uri, storage).experiment("opened")
    began, began_cpu = time.perf_counter(), time.process_time()
    report = Mirror(store, uri).sync_once()
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - began_cpu
    assert report.problem is None, report.problem
    return seconds, cpu_seconds, report.metrics_sent


def loop_seconds(storage: Path, metrics: int) -> float:
    from mlflow import MlflowClient

    uri = default_tracking_uri(storage)
    Sink(uri, storage).experiment("opened")
    client = MlflowClient(uri)
    run_id = client.create_run(client.create_experiment("loop")).info.run_id
    began = time.perf_counter()
    for step in range(metrics):
        client.log_metric(
            run_id, "train_loss", 2.0 + 1.0 / (step + 1), timestamp=step, step=step
        )
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--rows", type=int, default=5000, help="rows of the long run, four metrics each"
    )
    parser.add_argument("--runs", type=int, default=200, help="number of small runs")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        seconds, _, metrics = mirror_seconds(Path(folder) / "long", 1, arguments.rows)
        mirrored = metrics / seconds
        looped_metrics = max(200, metrics // 50)
        looped = looped_metrics / loop_seconds(Path(folder) / "loop", looped_metrics)
        small, small_cpu, _ = mirror_seconds(
            Path(folder) / "small", arguments.runs, SMALL_ROWS
        )
    ms_per_run = 1000 * small / arguments.runs
    print(
        f"mirror               {mirrored:9.0f} metrics/s  ({metrics} metrics of one run)"
    )
    print(
        f"loop of log_metric   {looped:9.0f} metrics/s  ({looped_metrics} metrics of one run)"
    )
    print(f"ratio                {mirrored / looped:9.1f} ×")
    print(
        f"small runs           {ms_per_run:9.1f} ms/run     ({arguments.runs} runs, {SMALL_ROWS} rows each)"
    )
    cpu_ms_per_run = 1000 * small_cpu / arguments.runs
    print(
        f"  of it CPU          {cpu_ms_per_run:9.1f} ms/run     (the rest waits for disk and processor)"
    )
    verdict = "met" if ms_per_run < TARGET_MS_PER_RUN else "MISSED"
    print(f"target               {TARGET_MS_PER_RUN:9.0f} ms/run     {verdict}")


if __name__ == "__main__":
    main()
