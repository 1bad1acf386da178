"""Whole layers: some steps of training beside the reference.

The inputs of each layer in a step (x, the weight, dy) also go through the reference's layer on the CPU. So
its operands must have the same bits, even if earlier layers added in another order, and y, dx and dw lie
within two roundings of the reference's. The first layer that differs is named.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ablate.backends.select import Selection
from ablate.backends.testing import Check, FaultError
from ablate.backends.testing.suite import difference
from ablate.layers.linear import Pass, quantised_layers
from ablate.recipes import GEMMS, Gemm, Recipe, read_recipe
from ablate.run.config import DataConfig, ModelConfig, RunConfig, TrainingConfig
from ablate.train.step import Trainee, assemble, gradients, take_step

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray
    from torch import Tensor

    from ablate.backends.protocol import Operand
    from ablate.check import Setup

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
# else its gradient has two parts
_MODEL = ModelConfig(width=128, layers=2, heads=2, ffn=256, tied_head=False)
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
        model=model,
        data=DataConfig(),
        data_digest="none",
        vocab_size=vocab_size,
        recipe=recipe,
        training=TrainingConfig(**training),
        backend=backend,
        seed=0,
    )


def _train(where: str, backend: str, recipe: Recipe) -> str:
    # 100 tokens a step, which no block divides.
    config = config_of(
        _MODEL,
        recipe,
        backend,
        _VOCABULARY,
        tokens=100 * _STEPS,
        seq_len=25,
        batch_size=4,
        learning_rate=1e-3,
    )
    trainee = assemble(config, where)
    reference = assemble(replace(config, backend="reference"), "cpu")
    window = np.random.default_rng(0).integers(0, _VOCABULARY, (4, 26))
    losses = []
    farthest = 0.0
    for step in range(_STEPS):
        loss, distance = _compare_step(f"step {step}", trainee, reference, window)
        losses.append(loss)
        farthest = max(farthest, distance)
        take_step(trainee)
        trainee.state.step += 1
    detail = f"loss {losses[0]:.4f} → {losses[-1]:.4f} in {_STEPS} steps"
    assert losses[-1] < losses[0], detail
    return f"{detail}; products up to {farthest:.3%} from the reference's"


def _compare_step(
    step: str, trainee: Trainee, reference: Trainee, window: NDArray[Any]
) -> tuple[float, float]:
    """Compute a step's gradients, and each layer's products again by the reference.

    Return the loss, and the largest distance of a product from the reference's, relative to its norm.

    Raises:
        FaultError: names the first layer that differs.
    """
    operands: dict[tuple[str, ...], Operand] = {}
    # of each layer: its position, and tensors
    inputs: dict[str, tuple[Any, dict[str, Tensor]]] = {}

    def watch(layer: str, gemm: str, name: str, operand: Operand) -> None:
        operands[layer, gemm, name] = operand

    def tap(layer: str, at: Any, *tensors: Tensor) -> None:
        copies = [tensor.detach().to("cpu", copy=True) for tensor in tensors]
        inputs[layer] = at, dict(zip(("dy", "x", "weight"), copies, strict=True))

    def compare(layer: str, gemm: str, name: str, expected: Operand) -> None:
        if fault := difference(operands[layer, gemm, name], expected):
            message = f"{step}, {gemm.capitalize()}'s {name} of {layer}: {fault}"
            raise FaultError(message, inputs[layer][1])

    trainee.state.watch = watch
    trainee.state.tap = tap
    loss, _ = gradients(trainee, window)
    trainee.state.watch = trainee.state.tap = None
    layers = quantised_layers(trainee.module)
    reference_layers = quantised_layers(reference.module)
    # Forward in the layers' order, then backward.
    order: list[tuple[str, Gemm]] = [(layer, "fprop") for layer in reversed(inputs)]
    order += [(layer, gemm) for layer in inputs for gemm in GEMMS[1:]]
    reference.state.watch = compare
    farthest = 0.0
    for layer, gemm in order:
        at, tensors = inputs[layer]
        expected = Pass(reference_layers[layer], at, **tensors).product(gemm).double()
        device = layers[layer].weight.device
        there = {name: tensor.to(device) for name, tensor in tensors.items()}
        result = Pass(layers[layer], at, **there).product(gemm).cpu().double()
        distance = float((result - expected).norm() / expected.norm())
        if not distance <= _APART:
            fault = f"{step}, {_PRODUCTS[gemm]} of {layer} is {distance:.3%} from the reference's"
            raise FaultError(f"{fault} (at most {_APART:.2%})", tensors)
        farthest = max(farthest, distance)
    reference.state.watch = None
    return loss, farthest


def training(setup: Setup) -> Iterator[Check]:
    """Yield a check of some steps of training for each back end and each recipe it supports."""
    for backend, name, recipe in trained(setup):
        yield Check(
            backend=backend, of=name, run=partial(_train, setup.where, backend, recipe)
        )
