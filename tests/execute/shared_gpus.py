"""Prints, as JSON, where Ray puts runs that share two GPUs, which no machine needs to have.

Ray counts GPUs as it is told, and sets ``CUDA_VISIBLE_DEVICES``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import ray

sys.path.insert(0, str(Path(__file__).parent))
from four_runs import requests_of

from ablate.execute import queue
from ablate.execute.cluster import gangs_at_once, machines_at
from ablate.execute.task_end import TaskEnd
from ablate.run.config import ResourcesConfig

if TYPE_CHECKING:
    from ablate.execute.pending_runs import RunRequest


def look_round(run: RunRequest) -> TaskEnd:
    """Stand in for a run: wait for another one on the same GPU; say which process had which GPU, and when."""
    begun = time.time()
    gpu = os.environ["CUDA_VISIBLE_DEVICES"]
    (run.stop_path.parent / f"{gpu}-{run.run_id}").touch()
    while (
        len(list(run.stop_path.parent.glob(f"{gpu}-*"))) < 2
        and time.time() < begun + 60
    ):
        time.sleep(0.1)
    seen = {"process": os.getpid(), "gpu": gpu, "begun": begun}
    return TaskEnd(state="finished", message=json.dumps(seen | {"ended": time.time()}))


def main(folder: Path) -> None:
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
    queue.execute_run = look_round  # type: ignore[assignment]
    _, requests = requests_of(folder)
    folder.joinpath("seen").mkdir()
    asked = {
        "resources": ResourcesConfig(gpus=0.5),
        "stop_path": folder / "seen" / "stop",
    }
    runs = [
        replace(run, run_id=f"{run.run_id}{turn}", **asked)
        for run in requests
        for turn in (0, 1)
    ]
    gangs_at_once(runs)
    workers = queue.Workers()
    for run in runs:
        workers.start(run)
    ends = []
    while len(ends) < len(runs):
        ends += [end.message for _, end in workers.collect()]
    machines = [vars(machine) for machine in machines_at("")]
    sys.stdout.write(
        json.dumps(
            {"runs": [json.loads(end or "") for end in ends], "machines": machines}
        )
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
