"""The trainer's step with all three GEMMs in emulated MXFP4, over the same step in bf16, in one process.

    python benchmarks/train_step.py --width 512 --threads 1

Steps of the arms are interleaved, so that a busy machine slows all of them alike; the median is printed.
"""

from __future__ import annotations

import statistics
from functools import partial

from machine import in_turns, options, prepare, small_run, step

from ablate.recipes import RecipeSpec, resolve
from ablate.train.step import assemble

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
    args = options(
        __doc__, width=512, layers=2, seq_len=128, batch_size=16, threads=1, repeats=7
    )
    machine = prepare(args.threads)
    sizes = {"seq_len": args.seq_len, "batch_size": args.batch_size}
    steps = {
        name: partial(
            step,
            assemble(
                small_run(args.width, args.layers, resolve(recipe), **sizes), "cpu"
            ),
        )
        for name, recipe in ARMS.items()
    }
    medians = {
        name: statistics.median(taken)
        for name, taken in in_turns(steps, args.repeats).items()
    }
    tokens = args.batch_size * args.seq_len
    print(
        f"width {args.width}, {args.layers} layers, {tokens} tokens a step; {machine}"
    )
    for name, median in medians.items():
        over = median / medians["bf16"]
        print(
            f"{name:<12} {median * 1e3:8.1f} ms  {tokens / median:8.0f} tokens/s  {over:5.2f} x bf16"
        )


if __name__ == "__main__":
    main()
