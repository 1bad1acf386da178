"""An override for torchtitan: ``--override.imports ablate.integrations.torchtitan.apply``, within a study.

It takes the place of the optimizers, which are built when the model is parallelised: there the recipe is
applied, each ``step`` is counted, and the recipe's state is part of the checkpoint. torchtitan's own linear
layers follow the recipe if they compute as torch's, which is tested. Read and run at torchtitan 0.3.0, on a
CPU, at the level of modules.

How it fails: pipeline stages and recipes with de-oscillation are a ``ValueError``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from torch import nn
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.config import derive, override

from ablate.integrations import Stepper

_KEY = "ablate"


class AblateOptimizers(OptimizersContainer):
    """torchtitan's optimizers, and the recipe of the model that they train."""

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        """As of torchtitan's optimizers."""

    def __init__(
        self, config: Config, *, model_parts: list[nn.Module], **rest: Any
    ) -> None:
        if len(model_parts) > 1:
            raise ValueError(
                "a recipe's state is of one model: pipeline stages have one each (set their degree to 1)"
            )
        (model,) = model_parts
        kinds = {
            type(module) for module in model.modules() if isinstance(module, nn.Linear)
        } - {nn.Linear}
        self.stepper = Stepper(model, reach=kinds)
        if self.stepper.state.deoscillates:
            raise ValueError(
                "torchtitan's checkpoints do not hold what de-oscillation needs"
            )
        super().__init__(config, model_parts=model_parts, **rest)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Take the step and count it."""
        super().step(*args, **kwargs)
        self.stepper.step()

    def state_dict(self) -> dict[str, Any]:
        """Return torchtitan's state, with the recipe's as one text: its keys change while it trains."""
        saved: dict[str, Any] = super().state_dict()
        return {**saved, _KEY: json.dumps(self.stepper.state_dict())}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where the checkpoint was saved."""
        saved = dict(state_dict)
        self.stepper.load_state_dict(json.loads(saved.pop(_KEY)))
        super().load_state_dict(saved)


@override(
    target=OptimizersContainer.Config,
    description="the model follows a recipe of ablate's",
)
def apply(config: OptimizersContainer.Config) -> AblateOptimizers.Config:
    """Replace torchtitan's optimizers."""
    derived: AblateOptimizers.Config = derive(config, AblateOptimizers.Config)
    return derived
