"""How much of the bf16 GEMM rate the trainer's bf16 step reaches, on one core.

    python benchmarks/step_rate.py --width 512

The rate is that of the model's own products, each timed alone in the same process, by turns with the steps;
medians are printed. A step counts the operations of its products (``ablate.models.arithmetic``).
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import TYPE_CHECKING

import numpy as np
import torch

from ablate.models.arithmetic import model_size
from ablate.recipes import RecipeSpec, resolve
from ablate.run.architecture import block_layers
from ablate.run.config import DataConfig, ModelConfig, RunConfig, TrainingConfig
from ablate.train.loop import assemble, gradients

if TYPE_CHECKING:
    from collections.abc import Callable


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    ffn = args.width * 11 // 4 // 32 * 32
    config = ModelConfig(width=args.width, layers=args.layers, heads=args.width // 64, ffn=ffn)
    training = TrainingConfig(seq_len=args.seq_len, batch_size=args.batch_size)
    run = RunConfig(
        model=config, data=DataConfig(), data_digest="made up", vocab_size=256, training=training,
        recipe=resolve(RecipeSpec()), backend="emulated", seed=0,
    )  # fmt: skip
    trainee = assemble(run, "cpu")
    window = np.random.default_rng(0).integers(0, 256, (args.batch_size, args.seq_len + 1))
    tokens = args.batch_size * args.seq_len

    def step() -> None:
        gradients(trainee, window, 1.0)
        trainee.optimizer.step()
        trainee.optimizer.zero_grad(set_to_none=True)

    pairs = [
        (
            torch.randn(tokens, layer.inputs, dtype=torch.bfloat16),
            torch.randn(layer.outputs, layer.inputs, dtype=torch.bfloat16),
        )
        for layer in block_layers(config)
    ]
    operations = sum(2 * x.shape[0] * x.shape[1] * w.shape[0] for x, w in pairs)

    def products() -> None:
        for x, w in pairs:
            x @ w.t()

    step(), products()
    taken: dict[str, list[float]] = {"step": [], "products": []}
    for _ in range(args.repeats):
        taken["step"].append(seconds(step))
        taken["products"].append(seconds(products))
    step_sec, products_sec = (statistics.median(taken[name]) for name in ("step", "products"))
    flops = tokens * model_size(config, vocab_size=256, seq_len=args.seq_len).flops_per_token
    rate, reached = operations / products_sec, flops / step_sec
    print(f"bf16 products  {rate / 1e9:6.1f} GFLOP/s")
    print(f"bf16 step      {reached / 1e9:6.1f} GFLOP/s, {reached / rate:.0%} of it")


if __name__ == "__main__":
    main()
