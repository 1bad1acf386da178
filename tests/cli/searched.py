"""A search, and a trainer for it: a known loss for every recipe, and a wait where one is asked for."""

import time
from pathlib import Path

from ablate.train import TrainResult

SEARCH = """\
name: s
description: A "search" with <odd> characters | and a bar
baseline: bf16
target: {val_loss: 2.0}
base:
  model: {width: 64, layers: 2, heads: 2, ffn: 192}
  training: {eval_every_tokens: 20_000, eval_tokens: 8192}
arms:
  bf16: {recipe: bf16}
  tseng: {recipe: tseng}
grid:
  senseless: drop
  factors:
    recipe.gemms: {none: [], F: [fprop], D: [dgrad], F+D+W: [fprop, dgrad, wgrad]}
    recipe.stabiliser: [none, sr]
search: {hardware: B200, shapes: llama-8b, trials: 8, budgets: [40_000, 80_000], at_once: 3}
"""


def harm(policy):
    """Return what a GEMM's policy adds to the loss: in FP4 some, with stochastic rounding less."""
    if policy.left.format == "bf16":
        return 0.0
    return 0.1 if policy.left.rounding == "stochastic" else 0.2


def run(config, on_metrics, *, tokens, should_stop, checkpoints, device):
    here, recipe, total = Path(__file__).parent, config.recipe, config.training.tokens
    for _ in range(20 if (here / "slow").exists() else 0):
        if should_stop():
            return TrainResult(
                state="interrupted", tokens=0, step=0, message="stopped on request"
            )
        time.sleep(0.05)
    with (here / "trained").open("a") as file:
        file.write(f"{recipe.fprop} {recipe.dgrad} {recipe.wgrad} {total}\n")
    loss = 2.0 + harm(recipe.fprop) + 2 * harm(recipe.dgrad) + 3 * harm(recipe.wgrad)
    for step, share in enumerate((0.5, 1.0), 1):
        row = {
            "kind": "eval",
            "tokens": int(total * share),
            "step": step,
            "val_loss": loss / share**0.1,
        }
        on_metrics(row)
    return TrainResult(state="finished", tokens=total, step=2, recipe=recipe)
