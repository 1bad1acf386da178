"""What diagnostics cost: a diagnosis over a training step, and their share of a run at the default interval.

    python benchmarks/diagnostics.py [--width 256] [--layers 4] [--threads 1] [--device cpu]

Steps with and without are taken by turns in one process. Prints one line of JSON a recipe.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import numpy as np
import torch

from ablate.diagnose.recorder import Recorder
from ablate.recipes import PRESETS, RecipeSpec, resolve
from ablate.run.config import DataConfig, ModelConfig, RunConfig, TrainingConfig
from ablate.run.diagnostics import DEFAULT_STEPS, Diagnostics
from ablate.train.loop import assemble, gradients

ALL = ["fprop", "dgrad", "wgrad"]
RECIPES = {
    "mxfp4": resolve(RecipeSpec(gemms=ALL)),
    "mxfp4 sr+rht": resolve(RecipeSpec(gemms=ALL, stabiliser="sr+rht")),
    "tseng": PRESETS["tseng"].recipe,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    window = np.random.default_rng(0).integers(0, 256, (args.batch_size, args.seq_len + 1))
    for name, recipe in RECIPES.items():
        config = RunConfig(
            model=ModelConfig(
                width=args.width, layers=args.layers, heads=args.width // 64,
                ffn=args.width * 11 // 4 // 64 * 64,
            ),
            data=DataConfig(), data_digest="made up", vocab_size=256,
            training=TrainingConfig(seq_len=args.seq_len, batch_size=args.batch_size),
            recipe=recipe, backend="auto", seed=0,
        )  # fmt: skip
        trainee = assemble(config, args.device)
        rows: list[dict[str, object]] = []
        recorder = Recorder(trainee, Diagnostics(), rows.append)
        plain, more = [], []
        for repeat in range(args.repeats + 1):
            for diagnosed in (False, True):
                started = time.perf_counter()
                if diagnosed:
                    recorder.before(0)
                gradients(trainee, window, 1.0)
                recorder.after()
                trainee.optimizer.step()
                trainee.optimizer.zero_grad()
                if args.device != "cpu":
                    torch.cuda.synchronize()
                if repeat:
                    (more if diagnosed else plain).append(time.perf_counter() - started)
        step = statistics.median(plain)
        extra = statistics.median(more) - step
        line = {
            "recipe": name,
            "width": args.width,
            "layers": args.layers,
            "tokens_per_step": trainee.plan.tokens_per_step,
            "gemms_measured": len(rows) // (args.repeats + 1),
            "step_ms": round(1e3 * step, 1),
            "diagnosis_ms": round(1e3 * extra, 1),
            "diagnosis_over_step": round(extra / step, 2),
            "default_interval_steps": DEFAULT_STEPS,
            "share_at_the_default_interval": f"{extra / (DEFAULT_STEPS * step + extra):.2%}",
        }
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
