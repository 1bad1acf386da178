"""How long from ``ablate run`` to a run's first step: cold, and for the next run of a warm worker.

Each run takes all cores, so that one worker executes them one after the other. Cold: from the start of the
command to the first row of the first run, with Ray's start, imports and tokens that lie in the cache. Warm:
from the end of a run to the first row of the next.

    python benchmarks/first_step.py
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

STUDY = """\
name: first-step
baseline: bf16
target: {{val_loss: 3.0}}
seeds: {seeds}
base:
  training: {{tokens: 40_960, batch_size: 32, eval_every_tokens: 20_480, eval_tokens: 4096}}
  resources: {{cpus: {cpus}}}
arms:
  bf16: {{recipe: bf16}}
  mxfp4: {{recipe: mxfp4}}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    cold, warm = [], []
    with tempfile.TemporaryDirectory() as folder:
        study = Path(folder) / "first-step.yaml"
        study.write_text(STUDY.format(seeds=args.seeds, cpus=os.cpu_count() or 1))
        # the first fills the caches of tokens and compiled kernels
        for repeat in range(args.repeats + 1):
            storage = Path(folder) / f"runs-{repeat}"
            (storage / "tokens").parent.mkdir()
            if repeat:
                (storage / "tokens").symlink_to(Path(folder) / "runs-0" / "tokens")
            started = time.time()
            subprocess.run(
                [sys.executable, "-m", "ablate", "run", str(study), "--storage", str(storage)],
                check=True, capture_output=True,
            )  # fmt: skip
            runs = sorted(map(times, (storage / "first-step" / "runs").iterdir()))
            if repeat:
                cold.append(runs[0][0] - started)
                warm += [
                    first - before_end
                    for (_, before_end), (first, _) in itertools.pairwise(runs)
                ]
    print(
        f"cold  {statistics.median(cold):5.1f} s from the command to the first step (n = {len(cold)})"
    )
    print(
        f"warm  {statistics.median(warm):5.1f} s from a run's end to the next one's first step "
        f"(n = {len(warm)}, longest {max(warm):.1f})"
    )


def times(run: Path) -> tuple[float, float]:
    """Return when the first row was written, and when the run ended."""
    first = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])
    status = json.loads((run / "status.json").read_text())
    return first["time_unix"], status["ended_unix"]


if __name__ == "__main__":
    main()
