"""A configuration for torchao's ``quantize_``: ``quantize_(model, AblateConfig("mxfp4"), filter_fn=root)``.

Only the whole model may be given: by module, each layer would have a state of its own, all would draw the
same noise, and nobody could advance them.

How it fails: another module than the root is a ``ValueError``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torchao.core.config import AOBaseConfig
from torchao.quantization.transform_module import register_quantize_module_handler

from ablate.integrations import Stepper


@dataclass
class AblateConfig(AOBaseConfig):
    """Arguments as of ``Stepper``; ``stepper`` is there after ``quantize_``: call its ``step``."""

    recipe: Any = None
    options: dict[str, Any] = field(default_factory=dict)
    stepper: Stepper | None = None


def root(_: nn.Module, name: str) -> bool:
    """Choose the whole model; for ``filter_fn``."""
    return name == ""


@register_quantize_module_handler(AblateConfig)
def _apply(module: nn.Module, config: AblateConfig) -> nn.Module:
    if config.stepper is not None or isinstance(module, nn.Linear):
        raise ValueError(
            "AblateConfig takes the whole model: quantize_(model, config, filter_fn=root)"
        )
    config.stepper = Stepper(module, config.recipe, **config.options)
    return module
