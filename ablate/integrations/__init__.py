"""Recipes inside of others' trainers: one module a trainer or library, each imported only when it is used.

They are thin layers over ``Stepper``; a loop of one's own may use it as it is. Inside
of a study (``trainer.command``, ``metrics: {preset: ablate}``) the recipe and the seed come from the
environment, rows go to ``$ABLATE_RUN_DIR/rows.jsonl``, and a request to stop sets ``should_stop``.

How it fails: a resume without the saved state is a ``RuntimeError``, because the recipe would draw other
noise from there on; so is an end without a single ``step``.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ablate.base.files import hash_of
from ablate.recipes import Recipe, read_recipe

if TYPE_CHECKING:
    from torch import nn


def recipe_of_environment() -> Recipe:
    """Read the arm's recipe from ``$ABLATE_RECIPE``, as a study writes it for its command.

    Raises:
        ValueError: there is none.
    """
    text = os.environ.get("ABLATE_RECIPE")
    if text is None:
        raise ValueError(
            "no recipe is given, and ABLATE_RECIPE is not set (a study sets it; alone: ABLATE_RECIPE=bf16)"
        )
    return read_recipe(text)


class Stepper:
    """Applies a recipe to ``model`` and follows its optimizer steps.

    ``recipe``, ``seed``: None takes those of the study that started the process. ``tokens_per_step``:
    training tokens of an optimizer step over all devices, for recipes that change after so many tokens; None
    takes the study's. ``options``: of ``apply_recipe``.

    >>> import torch
    >>> from ablate.integrations import Stepper
    >>> model = torch.nn.Linear(32, 32)
    >>> stepper = Stepper(model, "mxfp4", seed=0, tokens_per_step=64)
    Fprop, Dgrad, Wgrad: 1 of 1 matrix in low precision, 100.0% of the FLOPs
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> for _ in range(2):
    ...     model(torch.randn(64, 32)).square().mean().backward()
    ...     optimizer.step()
    ...     stepper.step()
    ...     optimizer.zero_grad()
    >>> stepper.state.tokens
    128
    """

    def __init__(
        self,
        model: nn.Module,
        recipe: Recipe | str | dict[str, Any] | None = None,
        *,
        seed: int | None = None,
        tokens_per_step: int | None = None,
        **options: Any,
    ) -> None:
        from ablate.layers.apply import apply_recipe

        folder = os.environ.get("ABLATE_RUN_DIR")
        if recipe is None:
            recipe = recipe_of_environment()
        elif not isinstance(recipe, Recipe):
            recipe = read_recipe(recipe)
        if folder is not None and recipe != recipe_of_environment():
            raise ValueError(
                "the study's arm has another recipe than this script (leave the script's out)"
            )
        self.tokens_per_step = int(
            tokens_per_step or os.environ.get("ABLATE_TOKENS_PER_STEP", "0")
        )
        if "ABLATE_TOKENS" in os.environ:
            options.setdefault("total_tokens", int(os.environ["ABLATE_TOKENS"]))
        own_seed = int(os.environ.get("ABLATE_SEED", "0")) if seed is None else seed
        self.state = apply_recipe(model, recipe, seed=own_seed, **options)
        self._rows = None if folder is None else Path(folder) / "rows.jsonl"
        self.should_stop = False
        if folder is not None:
            print(applied_line(recipe), flush=True)
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, self._stop)

    def _stop(self, *_: object) -> None:
        self.should_stop = True

    def step(self) -> None:
        """Count one optimizer step, which the optimizer has just taken."""
        self.state.advance(self.tokens_per_step)

    def row(self, step: int, **numbers: float | str) -> None:
        """Pass a row to the study: ``loss`` or ``val_loss``, and others by name; ``set`` is a text."""
        if self._rows is not None and int(os.environ.get("RANK", "0")) == 0:
            with self._rows.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": step, **numbers}) + "\n")

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint must hold."""
        return self.state.state_dict()

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Continue where a state was saved; load the model's weights first."""
        self.state.load_state_dict(saved)

    def check_resumed(self, step: int) -> None:
        """Check at the start of training at optimizer step ``step`` that the state came along.

        Raises:
            RuntimeError: it did not.
        """
        if step != self.state.step:
            raise RuntimeError(
                f"training goes on after step {step}, the recipe's state after {self.state.step}: its "
                "noise would differ (save and load it with the checkpoint, or start anew)"
            )

    def check_ended(self) -> None:
        """Check at the end of training that steps were counted.

        Raises:
            RuntimeError: the recipe stood still.
        """
        if not self.state.step:
            raise RuntimeError(
                "the recipe's state was never advanced: call step() after each optimizer step"
            )
        if (fault := self.state.fault()) is not None:
            raise RuntimeError(f"this trainer {fault}")


def applied_line(recipe: Recipe) -> str:
    """Return the line that says in a command's output that its model follows a recipe."""
    return f"ablate: the model follows recipe {hash_of(recipe.text.encode())[:12]}"
