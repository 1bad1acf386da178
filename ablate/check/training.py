"""Whole layers: the gradients of a linear layer, and some steps of training beside the reference.

The inputs of each layer in a step (x, the weight, dy) also go through the reference's layer on the CPU. So
its operands must have the same bits, even if earlier layers added in another order. The first layer that
differs is named.
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from ablate.backends.select import Selection
from ablate.backends.testing import Check, FaultError
from ablate.backends.testing.suite import difference
from ablate.layers.apply import apply_recipe
from ablate.layers.linear import product, quantised_layers
from ablate.recipes import GEMMS, Recipe, read_recipe
from ablate.run.config import DataConfig, ModelConfig, RunConfig, TrainingConfig
from ablate.train.loop import Trainee, assemble, gradients, take_step

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

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


def _gradients(where: str, backend: str, recipe: Recipe) -> str:
    generator = torch.Generator().manual_seed(0)
    tokens, inputs, outputs = 100, 128, 256  # tokens that no block divides
    shapes = {"x": (tokens, inputs), "dy": (tokens, outputs), "weight": (outputs, inputs)}
    given = {
        name: torch.randn(shape, generator=generator).to(torch.bfloat16) for name, shape in shapes.items()
    }
    told = []
    ours, theirs = (_layer(*by, recipe, given) for by in ((where, backend), ("cpu", "reference")))
    for name, expected in theirs.items():
        distance = float((ours[name].double() - expected.double()).norm() / expected.double().norm())
        told.append(f"{name} is {distance:.3%} from the reference's")
        if not distance <= _APART:
            raise FaultError(f"{told[-1]} (at most {_APART:.2%})", given)
    return ", ".join(told)


def _layer(where: str, backend: str, recipe: Recipe, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """Run a quantised linear layer once; return y, dx and dw on the CPU."""
    outputs, inputs = given["weight"].shape
    linear = nn.Linear(inputs, outputs, bias=False)
    linear.weight.data.copy_(given["weight"])
    model = nn.Sequential(linear)
    with contextlib.redirect_stdout(None):
        apply_recipe(model, recipe, seed=1, backend=backend, total_tokens=100)
    model.to(where)
    x = given["x"].clone().to(where).requires_grad_()
    y = model(x)
    y.backward(given["dy"].to(where))
    found = {"y": y.detach(), "dx": x.grad, "dw": linear.weight.grad}
    return {name: one.cpu() for name, one in found.items() if one is not None}


def _train(where: str, backend: str, recipe: Recipe) -> str:
    settings = {"tokens": 128 * _STEPS, "seq_len": 32, "batch_size": 4, "learning_rate": 1e-3}
    trainee, reference = (
        assemble(config_of(_MODEL, recipe, name, _VOCABULARY, **settings), device)
        for name, device in ((backend, where), ("reference", "cpu"))
    )
    window = np.random.default_rng(0).integers(0, _VOCABULARY, (4, 33))
    losses = []
    for step in range(_STEPS):
        losses.append(_judged(f"step {step}", trainee, reference, window))
        take_step(trainee)
        trainee.state.step += 1
    detail = f"loss {losses[0]:.4f} → {losses[-1]:.4f} in {_STEPS} steps"
    assert losses[-1] < losses[0], detail
    return detail


def _judged(step: str, trainee: Trainee, reference: Trainee, window: np.ndarray[Any, Any]) -> float:
    """Compute a step's gradients, quantise each layer's inputs again by the reference; return the loss.

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
    layers = quantised_layers(reference.module)
    # Forward in the layers' order, then backward.
    order: list[tuple[str, Gemm]] = [(layer, "fprop") for layer in reversed(given)]
    order += [(layer, gemm) for layer in given for gemm in GEMMS[1:]]
    reference.state.watch = compare
    for layer, gemm in order:
        at, tensors = given[layer]
        product(layers[layer], gemm, at, **tensors)
    reference.state.watch = None
    return loss


def _of_recipes(run: Callable[[str, str, Recipe], str]) -> Callable[[Setup], Iterator[Check]]:
    """Make the part that runs a check for each back end and each recipe it supports."""

    def part(setup: Setup) -> Iterator[Check]:
        for backend, name, recipe in trained(setup):
            yield Check(backend=backend, of=name, run=partial(run, setup.where, backend, recipe))

    return part


linear_gradients = _of_recipes(_gradients)
"""Checks of one linear layer's output and gradients."""
training = _of_recipes(_train)
"""Checks of some steps of training."""
