"""How much of the bf16 GEMM rate the trainer's bf16 step reaches, on one core.

    python benchmarks/step_rate.py --width 512

The rate is that of the model's own products, timed alone in the same process, by turns with the steps;
medians are printed. A step counts the operations of its products (``ablate.run.architecture``).
"""

from __future__ import annotations

import statistics

import torch
from machine import in_turns, options, small_run, step

from ablate.recipes import RecipeSpec, resolve
from ablate.run.architecture import block_layers, model_size
from ablate.train.loop import assemble


def main() -> None:
    args = options(__doc__, width=512, layers=4, seq_len=128, batch_size=16, threads=1, repeats=7)
    torch.set_num_threads(args.threads)
    sizes = {"seq_len": args.seq_len, "batch_size": args.batch_size}
    run = small_run(args.width, args.layers, resolve(RecipeSpec()), **sizes)
    trainee, tokens = assemble(run, "cpu"), args.batch_size * args.seq_len
    pairs = [
        tuple(torch.randn(rows, one.inputs, dtype=torch.bfloat16) for rows in (tokens, one.outputs))
        for one in block_layers(run.model)
    ]
    work = {"step": lambda: step(trainee), "products": lambda: [x @ w.t() for x, w in pairs]}
    step_sec, products_sec = map(statistics.median, in_turns(work, args.repeats).values())
    rate = sum(2 * x.shape[0] * w.numel() for x, w in pairs) / products_sec
    size = model_size(run.model, vocab_size=run.vocab_size, seq_len=args.seq_len)
    reached = tokens * size.flops_per_token / step_sec
    print(f"bf16 products  {rate / 1e9:6.1f} GFLOP/s")
    print(f"bf16 step      {reached / 1e9:6.1f} GFLOP/s, {reached / rate:.0%} of it")


if __name__ == "__main__":
    main()
