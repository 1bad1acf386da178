"""Whole layers: some steps of training beside the reference.

The inputs of each layer in a step (x, the weight, dy) also go through the reference's layer on the CPU. So
its operands must have the same bits, even if earlier layers added in another order, and y, dx and dw lie
within two roundings of the reference's. The first layer that differs is named.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ablate.backends.select import Selection
from ablate.backends.testing import Check, FaultError
from ablate.backends.testing.suite import difference
from ablate.layers.linear import product, quantised_layers
from ablate.recipes import GEMMS, Recipe, read_recipe
from ablate.run.config import DataConfig, ModelConfig, RunConfig, TrainingConfig
from ablate.train.step import Trainee, assemble, gradients, take_step

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from ablate.backends.protocol import Operand
    from ablate.check import Setup
    from ablate.recipes import Gemm

RECIPES: dict[str, Recipe] = {
    "mxfp4": read_recipe({"gemms": list(GEMMS), "stabiliser": "sr+rht"}),
    "nvfp4": read_recipe({"preset": "nvidia-nvfp4", "layers": []}),
    "mxfp8": read_recipe("mxfp8"),
    "fp8": read_recipe("fp8"),
}
"""MXFP4 with stochastic rounding and random Hadamard in all three GEMMs, and the presets of other formats."""
_STEPS = 10
_APART = 2.0**-7
"""Largest allowed distance of a product from the reference's, relative to its norm: two roundings to bf16."""
_PRODUCTS = {"fprop": "y", "dgrad": "dx", "wgrad": "dw"}
_MODEL = ModelConfig(
    width=128, layers=2, heads=2, ffn=256, tied_head=False
)  # else its gradient has two parts
_VOCABULARY = 256


def trained(setup: Setup) -> Iterator[tuple[str, str, Recipe]]:
    """Yield (back end, recipe's name, recipe) where the back end supports all GEMMs of the recipe here."""
    for backend in setup.backends:
        for name, recipe in RECIPES.items():
            try:
                Selection(backend).choices(recipe, setup.device)
            except ValueError:
                continue
            yield backend, name, recipe


def config_of(
    model: ModelConfig, recipe: Recipe, backend: str, vocab_size: int, **training: Any
) -> RunConfig:
    """Configure a run that reads no data; ``training``: fields of its ``TrainingConfig``."""
    return RunConfig(
        model=model, data=DataConfig(), data_digest="none", vocab_size=vocab_size, recipe=recipe,
        training=TrainingConfig(**training), backend=backend, seed=0,
    )  # fmt: skip


def _train(where: str, backend: str, recipe: Recipe) -> str:
    # 100 tokens a step, which no block divides.
    settings = {"tokens": 100 * _STEPS, "seq_len": 25, "batch_size": 4, "learning_rate": 1e-3}
    trainee, reference = (
        assemble(config_of(_MODEL, recipe, name, _VOCABULARY, **settings), device)
        for name, device in ((backend, where), ("reference", "cpu"))
    )
    window = np.random.default_rng(0).integers(0, _VOCABULARY, (4, 26))
    losses, farthest = [], 0.0
    for step in range(_STEPS):
        loss, apart = _judged(f"step {step}", trainee, reference, window)
        losses.append(loss)
        farthest = max(farthest, apart)
        take_step(trainee)
        trainee.state.step += 1
    detail = f"loss {losses[0]:.4f} → {losses[-1]:.4f} in {_STEPS} steps"
    assert losses[-1] < losses[0], detail
    return f"{detail}; products up to {farthest:.3%} from the reference's"


def _judged(
    step: str, trainee: Trainee, reference: Trainee, window: np.ndarray[Any, Any]
) -> tuple[float, float]:
    """Compute a step's gradients, and each layer's products again by the reference.

    Return the loss, and the largest distance of a product from the reference's, relative to its norm.

    Raises:
        FaultError: names the first layer that differs.
    """
    done: dict[tuple[str, ...], Operand] = {}
    given: dict[str, tuple[Any, dict[str, Tensor]]] = {}

    def watch(layer: str, gemm: str, operand: str, one: Operand) -> None:
        done[layer, gemm, operand] = one

    def tap(layer: str, at: Any, dy: Tensor, x: Tensor, weight: Tensor) -> None:
        tensors = {"dy": dy, "x": x, "weight": weight}
        given[layer] = at, {name: one.detach().to("cpu", copy=True) for name, one in tensors.items()}

    def compare(layer: str, gemm: str, operand: str, theirs: Operand) -> None:
        if fault := difference(done[layer, gemm, operand], theirs):
            what = f"{step}, {gemm.capitalize()}'s {operand} of {layer}: {fault}"
            raise FaultError(what, given[layer][1])

    trainee.state.watch, trainee.state.tap = watch, tap
    loss, _ = gradients(trainee, window, None)
    trainee.state.watch = trainee.state.tap = None
    ours, theirs = (quantised_layers(one.module) for one in (trainee, reference))
    # Forward in the layers' order, then backward.
    order: list[tuple[str, Gemm]] = [(layer, "fprop") for layer in reversed(given)]
    order += [(layer, gemm) for layer in given for gemm in GEMMS[1:]]
    reference.state.watch, farthest = compare, 0.0
    for layer, gemm in order:
        at, tensors = given[layer]
        expected = product(theirs[layer], gemm, at, **tensors).double()
        there = {name: one.to(ours[layer].weight.device) for name, one in tensors.items()}
        found = product(ours[layer], gemm, at, **there).cpu().double()
        apart = float((found - expected).norm() / expected.norm())
        if not apart <= _APART:
            what = f"{step}, {_PRODUCTS[gemm]} of {layer} is {apart:.3%} from the reference's"
            raise FaultError(f"{what} (at most {_APART:.2%})", tensors)
        farthest = max(farthest, apart)
    reference.state.watch = None
    return loss, farthest


def training(setup: Setup) -> Iterator[Check]:
    """Yield a check of some steps of training for each back end and each recipe it supports."""
    for backend, name, recipe in trained(setup):
        yield Check(backend=backend, of=name, run=partial(_train, setup.where, backend, recipe))
