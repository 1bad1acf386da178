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
from machine import prepare

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


def own_products(model: ModelConfig, args: argparse.Namespace) -> float:
    """Return the seconds of a step's matrix products alone, in fp32: the linear layers and attention."""
    tokens, heads, size = args.batch_size * args.seq_len, model.heads, model.width // model.heads
    qkv, out = (3 * model.width, model.width), (model.width, model.width)
    gate_up, down = (2 * model.ffn, model.width), (model.width, model.ffn)
    pairs = []
    for outputs, inputs in model.layers * (qkv, out, gate_up, down) + ((256, model.width),):
        x, w, dy = (torch.randn(shape) for shape in ((tokens, inputs), (outputs, inputs), (tokens, outputs)))
        pairs += [(x, w.t()), (dy, w), (dy.t(), x)]
    for _ in range(model.layers):
        q, p = (torch.randn(args.batch_size * heads, args.seq_len, n) for n in (size, args.seq_len))
        pairs += 2 * [(q, q.transpose(1, 2)), (p, q), (p.transpose(1, 2), q)]
    least = float("inf")
    for _ in range(args.repeats):
        start = time.perf_counter()
        for left, right in pairs:
            torch.matmul(left, right)
        least = min(least, time.perf_counter() - start)
    return least


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    machine = prepare(args.threads)
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
    print(f"width {args.width}, {args.layers} layers, {tokens} tokens a step; {machine}")
    products = own_products(model_config, args)
    print(f"the bf16 step takes {base / products:.2f} x its own products in fp32 ({products * 1e3:.1f} ms)")
    for name, values in seconds.items():
        median = statistics.median(values)
        print(
            f"{name:<12} {median * 1e3:8.1f} ms  {tokens / median:8.0f} tokens/s  {median / base:5.2f} x bf16"
        )


if __name__ == "__main__":
    main()
