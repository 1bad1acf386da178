"""What is proven: a device, the back ends that claim it, and the recipes that they train."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ablate.backends.select import Selection, load_backend
from ablate.backends.testing.check import Check, Skip
from ablate.backends.testing.suite import POLICIES, both
from ablate.recipes import GEMMS, Recipe, read_recipe
from ablate.run.backends import backend_names
from ablate.run.config import DataConfig, ModelConfig, RunConfig, TrainingConfig

if TYPE_CHECKING:
    from ablate.backends.device import Device
    from ablate.backends.protocol import Backend

RECIPES: dict[str, Recipe] = {
    "mxfp4": read_recipe({"gemms": list(GEMMS), "stabiliser": "sr+rht"}),
    "nvfp4": read_recipe({"preset": "nvidia-nvfp4", "layers": []}),
    "mxfp8": read_recipe("mxfp8"),
    "fp8": read_recipe("fp8"),
}
"""MXFP4 with stochastic rounding and random Hadamard in all three GEMMs, and the presets of other formats."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A torch device, what it is, the back ends that claim it, and why others do not."""

    where: str
    device: Device
    backends: dict[str, Backend]
    refused: dict[str, str] = field(default_factory=dict)

    @property
    def on_gpu(self) -> bool:
        """Whether the device is a GPU."""
        return self.device.kind != "cpu"

    def trained(self) -> Iterator[tuple[str, str, Recipe]]:
        """Yield (back end, recipe's name, recipe) for each recipe whose every GEMM a back end does here."""
        for backend in self.backends:
            for name, recipe in RECIPES.items():
                try:
                    Selection(backend).choices(recipe, self.device)
                except ValueError:
                    continue
                yield backend, name, recipe


Checks = Callable[[Setup], Iterator[Check]]
"""A part: it yields its checks in the same order each time, and does no work between them."""


def skipped(name: str, why: str, backend: str = "") -> Check:
    """Return a check that says why there is nothing to test."""

    def run() -> str:
        raise Skip(why)

    return Check(backend=backend, of=name, run=run)


def setup_of(where: str, device: Device) -> Setup:
    """Ask every back end but the reference, with which they are compared, whether it claims the device."""
    claim: dict[str, Backend] = {}
    refused: dict[str, str] = {}
    for name in backend_names():
        if name in ("auto", "reference"):
            continue
        try:
            backend = load_backend(name)
        except ValueError as error:
            refused[name] = str(error)
            continue
        supports = [backend.support(both(policy), device) for policy in POLICIES]
        if any(one.mode != "no" for one in supports):
            claim[name] = backend
        else:
            refused[name] = supports[[policy.format for policy in POLICIES].index("mxfp4")].detail
    return Setup(where=where, device=device, backends=claim, refused=refused)


def config_of(
    model: ModelConfig, recipe: Recipe, backend: str, vocab_size: int, **training: Any
) -> RunConfig:
    """Return the configuration of a run that reads no data."""
    return RunConfig(
        model=model, data=DataConfig(), data_digest="none", vocab_size=vocab_size, recipe=recipe,
        training=TrainingConfig(**training), backend=backend, seed=0,
    )  # fmt: skip
