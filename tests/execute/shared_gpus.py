"""Prints where Ray puts runs that share two GPUs, which no machine needs to have.

Ray counts GPUs as it is told, and sets ``CUDA_VISIBLE_DEVICES``.
"""

import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import ray

sys.path.insert(0, str(Path(__file__).parent))
from four_runs import requests_of

from ablate.execute import queue
from ablate.execute.cluster import gangs_at_once, machines_at
from ablate.execute.task_end import TaskEnd
from ablate.run.config import ResourcesConfig


def look_round(run):
    """Stand in for a run: wait for another one on the same GPU; say which process had which GPU."""
    gpu = os.environ["CUDA_VISIBLE_DEVICES"]
    folder = run.stop_path.parent
    (folder / f"{gpu}-{run.run_id}").touch()
    give_up = time.time() + 60
    while len(list(folder.glob(f"{gpu}-*"))) < 2 and time.time() < give_up:
        time.sleep(0.1)
    return TaskEnd(state="finished", message=f"{gpu} {os.getpid()}")


def main(folder):
    """Run eight runs of half a GPU each."""
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    kind = {"accelerator_type:H200": 1.0}
    ray.init(
        "local",
        num_cpus=4,
        num_gpus=2,
        resources=kind,
        include_dashboard=False,
        log_to_driver=False,
    )
    queue.execute_run = look_round
    _, requests = requests_of(folder)
    stop_path = folder / "seen" / "stop"
    stop_path.parent.mkdir()
    runs = []
    for run in requests * 2:
        run_id = f"{run.run_id}{len(runs)}"
        half = ResourcesConfig(gpus=0.5)
        runs.append(replace(run, run_id=run_id, resources=half, stop_path=stop_path))
    gangs_at_once(runs)
    workers = queue.Workers()
    for run in runs:
        workers.start(run)
    ends = []
    while len(ends) < len(runs):
        ends += [end.message for _, end in workers.collect()]
    print(*ends, machines_at(""), sep="\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
