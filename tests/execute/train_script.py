"""A training script as users have it: Megatron's lines, checkpoints of its own, SIGTERM saves. No torch.

It fits one number by noisy gradient steps; options make it fail in the ways of real trainers.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

# --crash-at: exit 1 there, once for each checkpoint folder; --exit-at: exit 0 from there on. Of several nodes
# the last prints evaluations, as in Megatron; --meet: a name under which all nodes wait for each other.
OPTIONS = {
    "seed": 0, "steps": 0, "save": Path(), "sleep": 0.0, "crash-at": -1, "always-crash-at": -1, "exit-at": -1,
    "nan-at": -1, "hang-at": -1, "node": 0, "nodes": 1, "meet": "",
}  # fmt: skip
# --other-noise: draw other noise after a resume; --child: leave a process in a session of its own; --deaf:
# ignore SIGTERM.
FLAGS = ("other-noise", "child", "deaf")
parser = argparse.ArgumentParser()
for name, default in OPTIONS.items():
    parser.add_argument(f"--{name}", type=type(default), default=default)
for name in FLAGS:
    parser.add_argument(f"--{name}", action="store_true")
options = parser.parse_args()

asked_to_end = []
signal.signal(
    signal.SIGTERM,
    signal.SIG_IGN if options.deaf else lambda number, _: asked_to_end.append(number),
)
options.save.mkdir(parents=True, exist_ok=True)
state = options.save / "state.txt"
begin = 0
weight = 3.0
if state.exists():
    words = state.read_text().split()
    begin = int(words[0])
    weight = float(words[1])


def meet(step):
    """Wait until all nodes are there, as a collective operation does."""
    (options.save / f"{options.meet} {options.node} {step}").touch()
    while not all(
        (options.save / f"{options.meet} {node} {step}").exists()
        for node in range(options.nodes)
    ):
        if asked_to_end:
            sys.exit(0)
        time.sleep(0.01)


if options.child:
    sleeper = [sys.executable, "-c", "import time; time.sleep(600)"]
    subprocess.Popen(sleeper, start_new_session=True, stdout=subprocess.DEVNULL)
print(
    "arithmetic: FP4 e2m1" if "NOISY" in os.environ else "arithmetic: bf16", flush=True
)
for step in range(begin + 1, options.steps + 1):
    if options.nodes > 1:
        meet(step)
    noise = random.Random(
        f"{options.seed} {step} {begin if options.other_noise else 0}"
    ).gauss(0, 0.01)
    weight -= 0.02 * weight + 0.05 * noise
    loss = 2 + weight * weight + noise
    if step == options.nan_at:
        loss = float("nan")
    if step == options.hang_at and not (options.save / "hung").exists():
        (options.save / "hung").touch()
        time.sleep(600)
    if (step % 5 == 0 or step == options.nan_at) and options.node == 0:
        print(
            f" [2026-11-25 12:00:00] iteration {step:8d}/{options.steps:8d} | "
            f"consumed samples: {4 * step:12d} | "
            "elapsed time per iteration (ms): 10.0 | learning rate: 1.000000E-03 | global batch size:  4 | "
            f"lm loss: {loss:.6E} | loss scale: 1.0 | grad norm: 1.234 |",
            flush=True,
        )
    if step % 10 == 0 and options.node == options.nodes - 1:
        print(
            f" validation loss at iteration {step} | lm loss value: {2 + weight * weight:.6E} | ",
            flush=True,
        )
    if (step % 15 == 0 or asked_to_end) and options.node == 0:
        draft = state.with_suffix(".new")
        draft.write_text(f"{step} {weight!r}")
        draft.replace(state)
    if asked_to_end or 0 < options.exit_at <= step:
        sys.exit(0)
    if step == options.always_crash_at or (
        step == options.crash_at and not (options.save / "crashed").exists()
    ):
        (options.save / "crashed").touch()
        sys.exit("something went wrong")
    time.sleep(options.sleep)
