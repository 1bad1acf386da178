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
    trainee = assemble(run, "cpu")
    tokens = args.batch_size * args.seq_len
    operations = 0
    operands = []
    for layer in block_layers(run.model):
        x = torch.randn(tokens, layer.inputs, dtype=torch.bfloat16)
        w = torch.randn(layer.outputs, layer.inputs, dtype=torch.bfloat16)
        operands.append((x, w))
        operations += 2 * tokens * w.numel()
    fp32_operands = [(x.float(), w.float()) for x, w in operands]
    work = {
        "step": lambda: step(trainee),
        "bf16": lambda: multiply(operands),
        "fp32": lambda: multiply(fp32_operands),
    }
    seconds = {}
    for name, taken in in_turns(work, args.repeats, clock=time.process_time).items():
        seconds[name] = statistics.median(taken)
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


def multiply(operands: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for x, w in operands:
        x @ w.t()


if __name__ == "__main__":
    main()
