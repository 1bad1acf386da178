"""What diagnostics cost: a diagnosis over a training step, and their share of a run at the default interval.

    python benchmarks/diagnostics.py [--width 256] [--layers 4] [--threads 1]

Steps with and without are taken by turns in one process. Prints one line of JSON a recipe.
"""

from __future__ import annotations

import json
import statistics

import torch
from machine import in_turns, options, small_run, step

from ablate.diagnose.recorder import Recorder
from ablate.recipes import PRESETS, RecipeSpec, resolve
from ablate.run.diagnostics import DEFAULT_STEPS, Diagnostics
from ablate.train.step import assemble

ALL = ["fprop", "dgrad", "wgrad"]
RECIPES = {
    "mxfp4": resolve(RecipeSpec(gemms=ALL)),
    "mxfp4 sr+rht": resolve(RecipeSpec(gemms=ALL, stabiliser="sr+rht")),
    "tseng": PRESETS["tseng"].recipe,
}


def main() -> None:
    args = options(
        __doc__, width=256, layers=4, seq_len=128, batch_size=32, threads=1, repeats=5
    )
    torch.set_num_threads(args.threads)
    sizes = {"seq_len": args.seq_len, "batch_size": args.batch_size}
    for name, recipe in RECIPES.items():
        trainee = assemble(small_run(args.width, args.layers, recipe, **sizes), "cpu")
        rows: list[dict[str, object]] = []
        recorder = Recorder(trainee, Diagnostics(), rows.append)

        def diagnosed(trainee=trainee, recorder=recorder) -> None:  # noqa: ANN001
            recorder.before(0)
            step(trainee)
            recorder.after()

        work = {"plain": lambda trainee=trainee: step(trainee), "diagnosed": diagnosed}
        plain, more = map(statistics.median, in_turns(work, args.repeats).values())
        extra = more - plain
        line = {
            "recipe": name, "width": args.width, "layers": args.layers,
            "tokens_per_step": trainee.plan.tokens_per_step,
            "gemms_measured": len(rows) // (args.repeats + 1), "step_ms": round(1e3 * plain, 1),
            "diagnosis_ms": round(1e3 * extra, 1), "diagnosis_over_step": round(extra / plain, 2),
            "default_interval_steps": DEFAULT_STEPS,
            "share_at_the_default_interval": f"{extra / (DEFAULT_STEPS * plain + extra):.2%}",
        }  # fmt: skip
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
