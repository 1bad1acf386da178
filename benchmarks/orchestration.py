"""What the tool itself costs a run: 200 empty runs through Ray, run store, MLflow mirror and report.

    python benchmarks/orchestration.py --runs 200

"Amortised" leaves out what a study pays once, and prints it beside: Ray's start and its first workers.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ablate.execute.driver import execute_study
from ablate.execute.pending_runs import RunRequest
from ablate.recipes import Recipe
from ablate.reports import write_report
from ablate.run.config import (
    DataConfig,
    ModelConfig,
    ResourcesConfig,
    RunConfig,
    TrainingConfig,
)
from ablate.store import StudyStore
from ablate.store.plan_file import plan_from_json
from ablate.track.mirror import Mirror
from ablate.track.process import start_mirror
from ablate.track.sink import resolve_tracking_uri
from ablate.train.loop import TrainResult


def empty(config: RunConfig, on_metrics: Any, **_options: Any) -> TrainResult:
    """Train nothing and report one evaluation."""
    on_metrics({"kind": "eval", "tokens": 1, "step": 1, "val_loss": 1.0 + config.seed})
    return TrainResult(state="finished", tokens=1, step=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=200)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        store = StudyStore(Path(folder) / "empty")
        requests = []
        for seed in range(args.runs):
            config = RunConfig(
                model=ModelConfig(), data=DataConfig(), data_digest="x", vocab_size=256,
                training=TrainingConfig(), recipe=Recipe(), backend="emulated", seed=seed,
            )  # fmt: skip
            requests.append(
                RunRequest(
                    run_id=f"{seed:016x}",
                    config=config,
                    tokens_dir=None,
                    resources=ResourcesConfig(),
                    trainer="orchestration:empty",
                )
            )
        runs = [
            {"id": request.run_id, "seed": request.config.seed} for request in requests
        ]
        arm = {
            "name": "empty", "description": None, "recipe": "bf16", "tokens": 1, "factors": {}, "differs": {},
            "folded": [], "runs": runs,
        }  # fmt: skip
        store.write_plan(
            plan_from_json(
                {
                    "format": 1,
                    "study": "empty",
                    "description": None,
                    "baseline": "empty",
                    "target": {
                        "kind": "val_loss",
                        "value": 1.0,
                        "crossing": "confirmed",
                    },
                    "paired_seeds": False,
                    "training": asdict(TrainingConfig()),
                    "arms": [arm],
                    "dropped": [],
                }
            )
        )
        first_poll: list[float] = []

        def on_poll() -> None:
            if not first_poll:
                first_poll.append(time.perf_counter())

        # A new database runs all of MLflow's migrations: once a storage, so not a run's cost.
        uri = resolve_tracking_uri(Path(folder))
        Mirror(store, uri).sync_once()
        start = time.perf_counter()
        mirror = start_mirror(store.path, uri)
        execute_study(store, requests, on_poll=on_poll)
        executed = time.perf_counter()
        mirrored = mirror.stop()
        end = time.perf_counter()
        memory_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        write_report(store)
        reported = time.perf_counter()
    assert mirrored.complete, (
        f"{len(mirrored.unsent)} runs not sent: {mirrored.problem}"
    )
    per_run = (end - first_poll[0]) / args.runs
    print(
        f"{args.runs} empty runs: Ray's start and the first workers {first_poll[0] - start:.1f} s"
    )
    print(
        f"after that {end - first_poll[0]:.1f} s, of which the mirror's last pass {end - executed:.1f} s"
    )
    print(f"amortised {per_run * 1e3:.1f} ms a run")
    print(f"driver's peak memory {memory_gib:.2f} GiB")
    print(f"report {reported - end:.1f} s")


if __name__ == "__main__":
    import os

    # Workers import this file as a module for its empty trainer.
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    main()
