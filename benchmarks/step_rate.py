"""How much of the GEMM rate the trainer's bf16 step reaches, on one core.

    python benchmarks/step_rate.py --width 512

The rates are those of the model's own products in bf16 and in fp32, timed alone in the same process, by turns
with the steps; medians of this process's CPU time are printed. A step counts the operations of its products
(``ablate.run.architecture``).
"""

from __future__ import annotations

import statistics
import time

import torch
from machine import in_turns, options, prepare, small_run, step

from ablate.recipes import RecipeSpec, resolve
from ablate.run.architecture import block_layers, model_size
from ablate.train.step import assemble


def main() -> None:
    args = options(
        __doc__, width=512, layers=4, seq_len=128, batch_size=16, threads=1, repeats=7
    )
    machine = prepare(args.threads)
    sizes = {"seq_len": args.seq_len, "batch_size": args.batch_size}
    run = small_run(args.width, args.layers, resolve(RecipeSpec()), **sizes)
    trainee, tokens = assemble(run, "cpu"), args.batch_size * args.seq_len
    pairs = [
        tuple(
            torch.randn(rows, layer.inputs, dtype=torch.bfloat16)
            for rows in (tokens, layer.outputs)
        )
        for layer in block_layers(run.model)
    ]
    fp32_pairs = [(x.float(), w.float()) for x, w in pairs]
    work = {
        "step": lambda: step(trainee),
        "bf16": lambda: [x @ w.t() for x, w in pairs],
        "fp32": lambda: [x @ w.t() for x, w in fp32_pairs],
    }
    times = in_turns(work, args.repeats, clock=time.process_time)
    seconds = {name: statistics.median(taken) for name, taken in times.items()}
    operations = sum(2 * x.shape[0] * w.numel() for x, w in pairs)
    size = model_size(run.model, vocab_size=run.vocab_size, seq_len=args.seq_len)
    step_rate = tokens * size.flops_per_token / seconds["step"]
    print(
        f"width {args.width}, {args.layers} layers, {tokens} tokens a step; {machine}"
    )
    print(f"bf16 step      {step_rate / 1e9:6.1f} GFLOP/s")
    for dtype in ("bf16", "fp32"):
        rate = operations / seconds[dtype]
        print(
            f"{dtype} products  {rate / 1e9:6.1f} GFLOP/s: a step costs {rate / step_rate:.2f} x its own"
        )


if __name__ == "__main__":
    main()
