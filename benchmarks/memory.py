"""Peak memory of the trainer's step under a recipe, over the same step in bf16: one process for each.

    python benchmarks/memory.py --width 512

What a process holds before its model exists (torch itself) is taken off; the compiled quantiser is loaded
before that.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys

ARMS = {
    "bf16": {},
    "fp8": {"rest": "fp8"},
    "mxfp4": {"preset": "amd-fdw"},
    "mxfp4 dht16": {"preset": "amd-fdw-dht16"},
    "mxfp4 sr+rht16": {"gemms": ["fprop", "dgrad", "wgrad"], "stabiliser": "sr+rht"},
    "tseng": {"preset": "tseng"},
    "tetrajet (double quantisation)": {"preset": "tetrajet"},
    "quartet (mask)": {"preset": "quartet"},
    "nvidia-nvfp4, no layer exempt": {"preset": "nvidia-nvfp4", "layers": []},
}


def peak_mib(width: int, layers: int, recipe: dict[str, object]) -> float:
    import torch
    from machine import small_run, step
    from pydantic import TypeAdapter

    from ablate.backends.select import load_backend
    from ablate.recipes import RecipeSpec, resolve
    from ablate.train.step import assemble

    torch.set_num_threads(1)
    load_backend("emulated").detail()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    spec = TypeAdapter(RecipeSpec).validate_python(recipe)
    trainee = assemble(small_run(width, layers, resolve(spec)), "cpu")
    for _ in range(3):
        step(trainee)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--recipe", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.recipe is not None:
        print(peak_mib(args.width, args.layers, json.loads(args.recipe)))
        return
    base = 0.0
    for name, recipe in ARMS.items():
        command = [
            sys.executable,
            __file__,
            "--width",
            str(args.width),
            "--layers",
            str(args.layers),
        ]
        process = subprocess.run(
            [*command, "--recipe", json.dumps(recipe)],
            capture_output=True,
            text=True,
            check=True,
        )
        mib = float(process.stdout.splitlines()[-1])
        base = base or mib
        print(f"{name:<32} {mib:8.0f} MiB  {mib / base:5.2f} x bf16", flush=True)


if __name__ == "__main__":
    main()
