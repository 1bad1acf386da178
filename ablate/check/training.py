"""Whole layers: the gradients of a linear layer, and some steps of training beside the reference.

A step is judged layer by layer. What a layer was given (x, the weight, dy) goes through the reference's layer
on the CPU as well, so that its operands must have the same bits, whatever earlier layers added up in another
order. The first layer that differs is named. Beside that the same run is trained by the reference alone:
where its bits first differ is told, and how far the losses come apart.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from ablate.backends.testing.check import Check, FaultError, smallest
from ablate.backends.testing.suite import difference, operand_fault
from ablate.check.setup import config_of
from ablate.layers.apply import apply_recipe
from ablate.layers.linear import product, quantised_layers
from ablate.recipes import GEMMS, OPERANDS
from ablate.recipes.policy import contracted_axis
from ablate.run.config import ModelConfig
from ablate.train.loop import Trainee, assemble, gradients, take_step

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ablate.backends.protocol import Operand
    from ablate.backends.testing.check import Cut
    from ablate.check.setup import Setup
    from ablate.layers.position import Position
    from ablate.recipes import Gemm, Recipe

_STEPS = 10
_GRAIN = 64
"""Features that every block and Hadamard group of the recipes divides."""
SHARE_APART = 0.02
"""Largest allowed distance between two loss curves, as a fraction of the first loss: far above the effect of
another accumulation order in ten steps, far below that of a wrong operand."""
_APART = 2.0**-7
"""Largest allowed distance of a product from the reference's, over its norm: two roundings to bf16."""
_MODEL = ModelConfig(
    width=128, layers=2, heads=2, ffn=256, tied_head=False
)  # else its gradient has two parts
VOCABULARY = 256


def linear_gradients(setup: Setup) -> Iterator[Check]:
    """Yield a check of one linear layer's output and gradients for each back end and recipe."""
    for backend, name, recipe in setup.trained():
        yield Check(backend=backend, of=name, run=partial(_gradients, setup.where, backend, recipe))


def _gradients(where: str, backend: str, recipe: Recipe) -> str:
    generator = torch.Generator().manual_seed(0)
    tokens, inputs, outputs = 100, 128, 256  # tokens that no block divides
    x, dy, weight = (
        torch.randn(shape, generator=generator).to(torch.bfloat16)
        for shape in ((tokens, inputs), (tokens, outputs), (outputs, inputs))
    )

    apart = _distances(where, backend, recipe, x, dy, weight)
    for name, distance in apart.items():
        if distance > _APART:
            raise FaultError(
                f"{name} is {distance:.2%} from the reference's (at most {_APART:.2%})",
                _smallest_layer(where, backend, recipe, {"x": x, "dy": dy, "weight": weight}, name),
                result=name,
            )
    return ", ".join(f"{name} {distance:.3%}" for name, distance in apart.items()) + " from the reference's"


def _distances(
    where: str, backend: str, recipe: Recipe, x: Tensor, dy: Tensor, weight: Tensor
) -> dict[str, float]:
    ours = _layer(where, backend, recipe, x, dy, weight)
    theirs = _layer("cpu", "reference", recipe, x, dy, weight)
    return {name: _distance(ours[name], theirs[name]) for name in theirs}


def _smallest_layer(
    where: str, backend: str, recipe: Recipe, tensors: dict[str, Tensor], result: str
) -> dict[str, Tensor]:
    """Cut x, dy and the weight of a layer whose y, dx or dw is wrong, along tokens and features."""
    cuts: tuple[Cut, ...] = (
        (1, ((0, 0), (1, 0))), (_GRAIN, ((0, 1), (2, 1))), (_GRAIN, ((1, 1), (2, 0))),
    )  # fmt: skip
    names = ("x", "dy", "weight")
    part = smallest(
        [tensors[name] for name in names],
        cuts,
        lambda *cut: _distances(where, backend, recipe, *cut)[result] > _APART,
    )
    return dict(zip(names, part, strict=True))


def _layer(
    where: str, backend: str, recipe: Recipe, x: Tensor, dy: Tensor, weight: Tensor
) -> dict[str, Tensor]:
    """Return the output and gradients of a linear layer, on the CPU."""
    linear = nn.Linear(x.shape[1], dy.shape[1], bias=False)
    linear.weight.data.copy_(weight)
    model = nn.Sequential(linear)
    apply_recipe(model, recipe, seed=1, backend=backend, total_tokens=len(x), quiet=True)
    model.to(where)
    given = x.clone().to(where).requires_grad_()
    y = model(given)
    y.backward(dy.to(where))
    found = {"y": y.detach(), "dx": given.grad, "dw": linear.weight.grad}
    return {name: tensor.cpu() for name, tensor in found.items() if tensor is not None}


def _distance(ours: Tensor, theirs: Tensor) -> float:
    """Return the norm of the difference over that of the reference; NaN is as far as can be."""
    ours, theirs = ours.double(), theirs.double()
    distance = float((ours - theirs).norm() / theirs.norm())
    return distance if distance == distance else float("inf")  # noqa: PLR0124  NaN


def training(setup: Setup) -> Iterator[Check]:
    """Yield some steps of training beside the reference for each back end and recipe."""
    for backend, name, recipe in setup.trained():
        yield Check(backend=backend, of=name, run=partial(_train, setup.where, backend, recipe))


_RESULTS = {"fprop": "y", "dgrad": "dx", "wgrad": "dw"}
Key = tuple[str, str, str]
"""A layer's name, GEMM and operand."""


@dataclass(kw_only=True)
class _Trace:
    """What the layers of a model did in one step: operands, what each was given and gave."""

    operands: dict[Key, Operand] = field(default_factory=dict)
    given: dict[str, tuple[Position, dict[str, Tensor]]] = field(default_factory=dict)
    products: dict[tuple[str, Gemm], Tensor] = field(default_factory=dict)

    def watch(self, layer: str, gemm: Gemm, operand: str, done: Operand) -> None:
        """Take in an operand, as ``RecipeState.watch``."""
        self.operands[layer, gemm, operand] = done

    def tap(self, layer: str, at: Position, dy: Tensor, x: Tensor, weight: Tensor) -> None:
        """Take in what a layer was given, as ``RecipeState.tap``."""
        given = {"dy": dy, "x": x, "weight": weight}
        self.given[layer] = at, {name: one.detach().to("cpu", copy=True) for name, one in given.items()}

    def output(self, layer: nn.Module, _given: Any, y: Tensor) -> None:
        """Take in a layer's output, as a forward hook."""
        self.products[layer.name, "fprop"] = y.detach().flatten(0, -2).cpu()  # type: ignore[index]


def _train(where: str, backend: str, recipe: Recipe) -> str:
    settings = {"tokens": 128 * _STEPS, "seq_len": 32, "batch_size": 4, "learning_rate": 1e-3}
    ours, theirs = (
        assemble(config_of(_MODEL, recipe, name, VOCABULARY, **settings), device)
        for name, device in ((backend, where), ("reference", "cpu"))
    )
    window = np.random.default_rng(0).integers(0, VOCABULARY, (4, 33))
    losses: list[tuple[float, float]] = []
    first = None
    for step in range(_STEPS):
        own, beside = _Trace(), _Trace()
        losses.append((_traced(ours, own, window), _traced(theirs, beside, window)))
        _judge(f"step {step}", own, ours, theirs)
        if first is None:
            apart = (key for key, one in own.operands.items() if difference(one, beside.operands[key]))
            first = next((f"step {step}, {_named(*key)}" for key in apart), None)
        for trainee in (ours, theirs):
            take_step(trainee)
    start, end = losses[0][0], losses[-1][0]
    apart_by = max(abs(one - other) for one, other in losses)
    detail = f"loss {start:.4f} → {end:.4f} in {_STEPS} steps, at most {apart_by:.5f} from the reference's"
    assert apart_by < SHARE_APART * losses[0][1], detail
    assert end < start, detail
    return f"{detail}; the two runs' bits differ {'nowhere' if first is None else f'from {first} on'}"


def _traced(trainee: Trainee, trace: _Trace, window: np.ndarray[Any, Any]) -> float:
    """Compute a step's gradients, with the weights' in the trace, too; return the loss."""
    layers = quantised_layers(trainee.network.module)
    hooks = [layer.register_forward_hook(trace.output) for layer in layers.values()]
    trainee.state.watch, trainee.state.tap = trace.watch, trace.tap
    loss, _ = gradients(trainee, window, None)
    trainee.state.watch = trainee.state.tap = None
    for hook in hooks:
        hook.remove()
    for name, layer in layers.items():
        assert layer.weight.grad is not None
        trace.products[name, "wgrad"] = layer.weight.grad.detach().to("cpu", copy=True)
    return loss


def _judge(step: str, trace: _Trace, trained: Trainee, reference: Trainee) -> None:
    """Do each product of a step again by the reference, from what its layer was given.

    Raises:
        FaultError: names the first layer that differs, with the smallest tensor that shows it.
    """
    layers, own = (quantised_layers(one.network.module) for one in (reference, trained))
    done: list[tuple[str, Gemm]] = [(layer, "fprop") for layer in reversed(trace.given)]
    done += [(layer, gemm) for layer in trace.given for gemm in GEMMS if gemm != "fprop"]
    for layer, gemm in done:
        at, given = trace.given[layer]
        again = _Trace()
        reference.state.watch = again.watch
        expected = product(layers[layer], gemm, at, **given)
        reference.state.watch = None
        for operand in OPERANDS[gemm]:
            key = (layer, gemm, operand)
            if fault := difference(trace.operands[key], again.operands[key]):
                x = given["weight" if operand == "w" else operand].to(torch.bfloat16)
                backend = own[layer].backend(gemm, at, own[layer].weight)
                draw, axis = layers[layer].draw(x, gemm, operand, at), contracted_axis(gemm, operand)
                what = f"{step}, {_named(*key)}: {fault}"
                raise operand_fault(what, backend, trained.device, draw, x, axis)
        ours = trace.products.get((layer, gemm))
        if ours is not None and (distance := _distance(ours, expected)) > _APART:
            what = f"{step}, {gemm.capitalize()}'s product of {layer}: {distance:.2%} from the reference's"
            state, result = trained.state, _RESULTS[gemm]
            shown = _smallest_layer(trained.device, state.backend.name, state.recipe, given, result)
            raise FaultError(what, shown, result=result)


def _named(layer: str, gemm: str, operand: str) -> str:
    return f"{gemm.capitalize()}'s {operand} of {layer}"
