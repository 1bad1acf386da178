"""The trainer's step with all three GEMMs in emulated MXFP4, over the same step in bf16, in one process.

    python benchmarks/train_step.py --width 512 --threads 1

Steps of the arms are interleaved, so that a busy machine slows all of them alike; the median is printed.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
import torch

from ablate.recipes import RecipeSpec, resolve
from ablate.run.config import DataConfig, ModelConfig, RunConfig, TrainingConfig
from ablate.train.loop import assemble, gradients

ALL = ["fprop", "dgrad", "wgrad"]
ARMS = {
    "bf16": RecipeSpec(),
    "fp8": RecipeSpec(rest="fp8"),
    "mxfp4": RecipeSpec(gemms=ALL),
    "mxfp4 dht16": RecipeSpec(gemms=ALL, stabiliser="dht"),
    "mxfp4 rht16": RecipeSpec(gemms=ALL, stabiliser="rht"),
    "mxfp4 sr": RecipeSpec(gemms=ALL, stabiliser="sr"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    ffn = args.width * 11 // 4 // 32 * 32
    model_config = ModelConfig(width=args.width, layers=args.layers, heads=args.width // 64, ffn=ffn)
    training = TrainingConfig(seq_len=args.seq_len, batch_size=args.batch_size)
    window = np.random.default_rng(0).integers(0, 256, (args.batch_size, args.seq_len + 1))

    steps = {}
    for name, recipe in ARMS.items():
        config = RunConfig(
            model=model_config, data=DataConfig(), data_digest="made up", vocab_size=256, training=training,
            recipe=resolve(recipe), backend="emulated", seed=0,
        )  # fmt: skip
        steps[name] = assemble(config, "cpu")

    seconds: dict[str, list[float]] = {name: [] for name in ARMS}
    for repeat in range(args.repeats + 1):
        for name, trainee in steps.items():
            start = time.perf_counter()
            gradients(trainee, window, 1.0)
            trainee.optimizer.step()
            trainee.optimizer.zero_grad()
            if repeat:
                seconds[name].append(time.perf_counter() - start)
    tokens = args.batch_size * args.seq_len
    base = statistics.median(seconds["bf16"])
    print(f"width {args.width}, {args.layers} layers, {tokens} tokens a step, {args.threads} thread(s)")
    for name, values in seconds.items():
        median = statistics.median(values)
        print(
            f"{name:<12} {median * 1e3:8.1f} ms  {tokens / median:8.0f} tokens/s  {median / base:5.2f} x bf16"
        )


if __name__ == "__main__":
    main()
