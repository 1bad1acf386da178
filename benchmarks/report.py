"""Time of a report and of `ablate status` after imports, from the quickstart's size to 20,000 runs.

python benchmarks/report.py        prints one line a size, as JSON
"""

from __future__ import annotations

import json
import math
import random
import resource
import tempfile
import time
from functools import partial
from pathlib import Path

from ablate.base.files import write_record
from ablate.execute.progress import read_progress
from ablate.reports import analyse, load_frames, write_report
from ablate.store import Status, StudyStore
from ablate.store.plan_file import plan_from_json

# name -> (arms, seeds, evaluations a run, training rows for each evaluation[, seeds that have ended])
SIZES = {
    "quickstart: 6 arms x 2 seeds, 25 evaluations": (6, 2, 25, 10),
    "large: 10 arms x 10 seeds, 500 evaluations": (10, 10, 500, 4),
    "thousand: 20 arms x 50 seeds, 1000 evaluations": (20, 50, 1000, 1),
    "huge: 200 arms x 100 seeds, of which 25 have ended, 50 evaluations": (
        200,
        100,
        50,
        4,
        25,
    ),
}


def write_study(
    folder: Path, arms: int, seeds: int, evals: int, rows: int, ended: int | None = None
) -> StudyStore:
    """Write a study of falling curves with noise, and a cost that grows with the arm."""
    draw = random.Random(0)
    store = StudyStore(folder / "bench")
    plan_arms = []
    for arm in range(arms):
        runs = []
        for seed in range(seeds):
            run = store.run(f"{arm:03d}{seed:03d}")
            runs.append({"id": run.run_id, "seed": seed})
            if ended is not None and seed >= ended:
                continue
            run.create(
                {
                    "training": {"tokens": evals * 1000, "schedule": "constant"},
                    "recipe": {},
                }
            )
            pace = math.exp(draw.gauss(0, 0.02)) / (1 + 0.03 * arm)
            lines = []
            for step in range(1, evals * rows + 1):
                tokens = step * 1000 // rows
                loss = (
                    1.3
                    + 4 * (1 + tokens * pace / (20 * evals)) ** -0.45
                    + draw.gauss(0, 0.001)
                )
                row = {
                    "kind": "train",
                    "tokens": tokens,
                    "step": step,
                    "time_unix": 1.7e9,
                    "loss": loss,
                }
                lines.append(
                    row | {"lr": 0.004, "grad_norm": 1.0, "tokens_per_sec": 3e4}
                )
                if step % rows == 0:
                    lines.append(
                        {
                            "kind": "eval",
                            "tokens": tokens,
                            "step": step,
                            "val_loss": loss,
                        }
                    )
            text = "\n".join(json.dumps(line, separators=(",", ":")) for line in lines)
            run.metrics_path.write_text(text + "\n")
            write_record(run.environment_path, {"backend_mode": "emulated"})
            run.write_status(Status(state="finished", tokens=evals * 1000))
        plan_arms.append({"name": f"arm {arm}", "recipe": "", "runs": runs})
    target = {"kind": "val_loss", "value": 2.1, "crossing": "confirmed"}
    store.write_plan(
        plan_from_json(
            {
                "format": 1,
                "study": "bench",
                "baseline": "arm 0",
                "target": target,
                "arms": plan_arms,
            }
        )
    )
    return store


def timed(function, *arguments):  # noqa: ANN001, ANN002, ANN201  any call
    start = time.perf_counter()
    result = function(*arguments)
    return time.perf_counter() - start, result


def main() -> None:
    for name, size in SIZES.items():
        with tempfile.TemporaryDirectory() as folder:
            store = write_study(Path(folder), *size)
            repeats = 3 if size[0] * size[1] <= 100 else 1
            status, _ = timed(
                partial(read_progress, store, store.plan(), examines_files=True)
            )
            whole = min(timed(write_report, store)[0] for _ in range(repeats))
            load, frames = timed(load_frames, store)
            numbers, _ = timed(analyse, frames)
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        line = {
            "size": name,
            "report_sec": round(whole, 2),
            "load_sec": round(load, 2),
            "status_sec": round(status, 2),
            "analyse_sec": round(numbers, 3),
            "peak_mib": round(memory),
        }
        print(json.dumps(line))


if __name__ == "__main__":
    main()
