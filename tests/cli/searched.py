"""A trainer for tests of a search: a known loss for every recipe, and a wait where one is asked for."""

import time
from pathlib import Path

from ablate.train import TrainResult


def harm(policy):
    """Return what a GEMM's policy adds to the loss: in FP4 some, with stochastic rounding less."""
    if policy.left.format == "bf16":
        return 0.0
    return 0.1 if policy.left.rounding == "stochastic" else 0.2


def run(config, on_metrics, *, tokens, should_stop, checkpoints, device):
    here = Path(__file__).parent
    recipe = config.recipe
    if (here / "broken").exists() and recipe.dgrad.left.format != "bf16":
        raise ValueError("no such luck")
    for _ in range(20 if (here / "slow").exists() else 0):
        if should_stop():
            return TrainResult(state="interrupted", tokens=0, step=0, message="stopped on request")
        time.sleep(0.05)
    with (here / "trained").open("a") as file:
        file.write(f"{recipe.fprop} {recipe.dgrad} {recipe.wgrad} {config.training.tokens}\n")
    loss = 2.0 + harm(recipe.fprop) + 2 * harm(recipe.dgrad) + 3 * harm(recipe.wgrad)
    total = config.training.tokens
    for step, share in enumerate((0.5, 1.0), 1):
        on_metrics(
            {"kind": "eval", "tokens": int(total * share), "step": step, "val_loss": loss / share**0.1}
        )
    return TrainResult(state="finished", tokens=total, step=2, recipe=recipe)
