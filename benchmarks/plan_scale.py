"""Time to load and plan 10,000 runs: 100 named arms × 100 seeds, and a grid of 5,000 arms × 2 seeds.

Target: under 2 s each, validation included. Run: ``python benchmarks/plan_scale.py``; exits with 1 if missed.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from ablate.data import DataIdentity
from ablate.plan import build_plan
from ablate.store.plan_file import plan_to_json
from ablate.study import load_study

if TYPE_CHECKING:
    from ablate.run.config import DataConfig

TARGET_SEC = 2.0


def named_arms() -> str:
    """Return a study of 100 arms that differ in two sections."""
    arms = "".join(
        f"  arm {i}:\n    training: {{learning_rate: {(i + 1) / 10_000}}}\n    recipe: {{gemms: [fprop]}}\n"
        for i in range(100)
    )
    return f"name: named\nbaseline: arm 0\ntarget: {{val_loss: 2}}\nseeds: 100\narms:\n{arms}"


def grid() -> str:
    """Return a study of 5,000 arms in a grid of four factors."""
    rates = ", ".join(str((i + 1) / 10_000) for i in range(50))
    return f"""\
name: grid
baseline: fprop none learning_rate=0.0001 layers=1
target: {{val_loss: 2}}
seeds: 2
grid:
  factors:
    recipe.gemms: [[fprop], [dgrad], [wgrad], [fprop, dgrad], [fprop, dgrad, wgrad]]
    recipe.stabiliser: [none, sr, rht, dht]
    training.learning_rate: [{rates}]
    model.layers: [1, 2, 3, 4, 5]
"""


def identify(data: DataConfig) -> DataIdentity:
    """Stand in for the corpus, whose hashing is not what is timed."""
    del data
    return DataIdentity(digest="0" * 64, vocab_size=256, num_bytes=1)


def main() -> int:
    slowest = 0.0
    with tempfile.TemporaryDirectory() as folder:
        for name, text in (("named", named_arms()), ("grid", grid())):
            path = Path(folder) / f"{name}.yaml"
            path.write_text(text)
            times = []
            for _ in range(3):
                start = time.perf_counter()
                plan = build_plan(load_study(path), identify)
                times.append(time.perf_counter() - start)
            start = time.perf_counter()
            plan_to_json(plan)
            lock_sec = time.perf_counter() - start
            size = f"{len(plan.arms):,} arms, {sum(len(arm.runs) for arm in plan.arms):,} runs"
            print(f"{name}: {size}: {min(times):.2f} s, lock file {lock_sec:.2f} s")
            slowest = max(slowest, min(times))
    print(f"slowest {slowest:.2f} s, target {TARGET_SEC} s")
    return int(slowest > TARGET_SEC)


if __name__ == "__main__":
    sys.exit(main())
