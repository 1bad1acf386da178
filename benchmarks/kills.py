"""Kill -9 at random, hundreds of times, over a small study; then compare with one that nobody disturbed.

python benchmarks/kills.py [--kills 500]        prints what was lost, doubled or changed, as JSON

Two workers at a time execute four runs, each in a process that is killed after a random while; checkpoints
after every step. A mirror sends to MLflow all the while, and is told nothing of the kills. At the end: every
run's state and rows against the undisturbed ones, and every metric point in MLflow against the store.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "execute"))

from kill import in_child, make_run, outcome_of, task_of, wait_for

from ablate.execute.worker import execute_run
from ablate.store import StudyStore
from ablate.store.leases import Leases
from ablate.store.plan_file import plan_from_json
from ablate.track.mirror import Mirror

SEEDS = range(4)


def make_study(folder: Path, steps: int) -> tuple[StudyStore, dict[int, Any]]:
    store = StudyStore(folder)
    runs = {seed: make_run(store.run(f"{seed:016x}"), seed, steps) for seed in SEEDS}
    store.write_plan(plan_from_json(
        {
            "format": 1, "study": folder.name, "description": None, "baseline": "tseng",
            "target": {"kind": "val_loss", "value": 3.0, "crossing": "confirmed"}, "paired_seeds": False,
            "training": {}, "dropped": [],
            "arms": [
                {
                    "name": "tseng", "description": None, "recipe": "tseng", "factors": {}, "differs": {},
                    "folded": [], "tokens": 64 * steps,
                    "runs": [{"id": run.run_id, "seed": seed} for seed, run in runs.items()],
                }
            ],
        }
    ))  # fmt: skip
    return store, runs


def kill_until_done(
    tasks: dict[int, Any],
    runs: dict[int, Any],
    wanted: int,
    look,  # noqa: ANN001
) -> tuple[int, int]:
    """Execute the runs two at a time, killing each attempt; once enough were killed, let them end."""
    draw = random.Random(0)
    live: dict[int, tuple[int, float]] = {}
    kills = attempts = 0
    while any(run.state() != "finished" for run in runs.values()):
        for seed in SEEDS:
            if len(live) < 2 and seed not in live and runs[seed].state() != "finished":
                attempts += 1
                live[seed] = (
                    in_child(lambda seed=seed: execute_run(tasks[seed])),
                    time.monotonic()
                    + (draw.uniform(0.02, 0.35) if kills < wanted else 1e9),
                )
        for seed, (pid, due) in list(live.items()):
            ended_pid, _ = os.waitpid(pid, os.WNOHANG)
            if not ended_pid and time.monotonic() < due:
                continue
            if not ended_pid:
                os.kill(pid, signal.SIGKILL)
                wait_for(pid)
                kills += 1
            del live[seed]
        look(kills)
        time.sleep(0.002)
    return kills, attempts


def points_in_mlflow(uri: str, study: str) -> dict[str, list[tuple[str, int, float]]]:
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name(study)
    ends = {}
    for run in client.search_runs([experiment.experiment_id]):
        key = run.data.tags.get("ablate.run_id")
        if key is None:
            continue
        assert key not in ends, "a run is in MLflow twice"
        ends[key] = sorted(
            (name, point.step, point.value)
            for name in ("train_loss", "val_loss")
            for point in client.get_metric_history(run.info.run_id, name)
        )
    return ends


def points_in_store(run) -> list[tuple[str, int, float]]:  # noqa: ANN001
    return sorted(
        ("val_loss", row["tokens"], row["val_loss"])
        if row["kind"] == "eval"
        else ("train_loss", row["tokens"], row["loss"])
        for row in run.metrics()
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=500)
    kills_wanted = parser.parse_args().kills
    steps = max(40, kills_wanted * 2)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        storage = Path(folder)
        _, whole = make_study(storage / "whole", steps)
        for run in whole.values():
            assert (
                wait_for(in_child(lambda run=run: execute_run(task_of(run, storage))))
                == 0
            )
        store, runs = make_study(storage / "killed", steps)
        tasks = {seed: task_of(run, storage) for seed, run in runs.items()}
        uri = f"sqlite:///{storage}/mlflow.db"
        mirror = Mirror(store, uri)
        sent_at = [0]

        def look(kills: int) -> None:
            if kills >= sent_at[0]:
                mirror.sync_once()
                sent_at[0] = kills + 20

        kills, attempts = kill_until_done(tasks, runs, kills_wanted, look)
        mirror.sync_once()
        in_mlflow = points_in_mlflow(uri, "killed")
        ledgers = {seed: Leases(run.attempts) for seed, run in runs.items()}
        line = {
            "kills": kills,
            "attempts": attempts,
            "claimed_in_the_ledgers": sum(ledger.latest() for ledger in ledgers.values()),
            "runs": len(runs),
            "steps_a_run": steps,
            "runs_lost": sum(run.state() != "finished" for run in runs.values()),
            "runs_not_bit_identical": sum(
                outcome_of(runs[seed]) != outcome_of(whole[seed]) for seed in SEEDS
            ),
            "runs_finished_more_than_once": sum(
                sum(
                    (record := ledger.read(n)) is not None and record.outcome == "finished"
                    for n in range(1, ledger.latest() + 1)
                ) != 1
                for ledger in ledgers.values()
            ),
            "metric_points": sum(len(points_in_store(run)) for run in runs.values()),
            "runs_with_points_lost_or_doubled_in_mlflow": sum(
                in_mlflow.get(run.run_id) != points_in_store(run) for run in runs.values()
            ),
            "seconds": round(time.perf_counter() - started),
        }  # fmt: skip
        print(json.dumps(line))


if __name__ == "__main__":
    main()
