"""A precision plug-in for Lightning: ``Trainer(plugins=[AblatePrecision("nvidia-nvfp4")])``.

It counts optimizer steps, not batches, and its state is part of Lightning's checkpoints.

How it fails: a resume from a checkpoint without the state is a ``RuntimeError`` before the first step.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.plugins.precision import Precision

from ablate.integrations import Stepper

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn


class AblatePrecision(Precision):
    """Makes the module follow a recipe, and autocasts the rest to bf16; arguments as of ``Stepper``."""

    precision = "ablate"

    def __init__(self, recipe: Any = None, **options: Any) -> None:
        self._recipe = recipe
        self._options = options
        self.stepper: Stepper | None = None
        self._checked = False

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Apply the recipe, before the optimizer is made."""
        if self.stepper is None:
            self.stepper = Stepper(module, self._recipe, **self._options)
        return module

    @contextlib.contextmanager
    def forward_context(self) -> Iterator[None]:
        """Compute in bf16 what no recipe reaches."""
        kind = "cuda" if torch.cuda.is_available() else "cpu"
        with torch.autocast(kind, dtype=torch.bfloat16):
            yield

    def optimizer_step(
        self, optimizer: Any, model: Any, closure: Any, **kwargs: Any
    ) -> Any:
        """Take the step and count it."""
        assert self.stepper is not None
        if not self._checked:
            self.stepper.check_resumed(model.trainer.global_step)
            self._checked = True
        result = super().optimizer_step(
            optimizer, model=model, closure=closure, **kwargs
        )
        self.stepper.step()
        if self.stepper.should_stop:
            model.trainer.should_stop = True
        return result

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint must hold."""
        return {} if self.stepper is None else self.stepper.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where the checkpoint was saved."""
        assert self.stepper is not None
        self.stepper.load_state_dict(state_dict)
