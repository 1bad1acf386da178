"""What a checkpoint costs: its time over a step's, and the share of a run at the default interval.

python benchmarks/checkpoint.py [--width 128]        prints one line of JSON
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
from machine import options, small_run

from ablate.execute.side_tasks import Keeper
from ablate.recipes import PRESETS
from ablate.run.config import ResourcesConfig
from ablate.store.metrics import MetricsWriter
from ablate.train import train
from ablate.train.group import ALONE


def main() -> None:
    width = options(__doc__, width=128).width
    config = small_run(
        width,
        2,
        PRESETS["tseng"].recipe,
        tokens=2048 * 60,
        eval_every_tokens=10**9,
        eval_tokens=128,
    )
    tokens = np.random.default_rng(0).integers(0, 256, 400_000, dtype=np.uint16)
    steps, saves = [], []
    with tempfile.TemporaryDirectory() as folder:
        with MetricsWriter(Path(folder) / "metrics.jsonl") as metrics:
            keeper = Keeper(
                Path(folder) / "c", (metrics,), None, every_sec=0.0, group=ALONE
            )
            ended = [time.perf_counter()]

            class Timed:
                load = staticmethod(lambda: None)

                @staticmethod
                def due(_tokens: int) -> bool:
                    steps.append(time.perf_counter() - ended[0])
                    return True

                @staticmethod
                def save(snapshot) -> None:  # noqa: ANN001
                    begun = time.perf_counter()
                    keeper.save(snapshot)
                    ended[0] = time.perf_counter()
                    saves.append(ended[0] - begun)

            train(
                config, lambda _row: None, tokens=(tokens, tokens), checkpoints=Timed()
            )
        size = (
            sum(
                path.stat().st_size
                for path in (Path(folder) / "c").glob("*.safetensors")
            )
            / 2
        )
    step, save = statistics.median(steps[5:]), statistics.median(saves[5:])
    every = ResourcesConfig().checkpoint_every_sec
    line = {
        "width": width,
        "checkpoint_mib": round(size / 2**20, 1),
        "step_ms": round(1e3 * step, 1),
        "checkpoint_ms": round(1e3 * save, 1),
        "checkpoint_over_step": round(save / step, 2),
        "default_interval_sec": every,
        "share_at_the_default_interval": f"{save / (every + save):.3%}",
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
