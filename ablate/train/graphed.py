"""The steps of a run, each as one CUDA graph: a replay costs the host one launch, not some thousand.

The first steps of a phase are eager: they compile the kernels and give the optimizer its state. Then the same
work is captured on buffers that stay where they are: tokens, position of the random streams, learning rate,
figures. A replay has the bits of the eager step, so a run may be resumed, and captured anew, at any step.

No device is trusted. Before the first such run of a recipe a tiny model takes some steps either way; losses,
weights and moments must be equal to the bit. What passed is known from then on, as with the self-test.

How it fails: where a step cannot be captured, or a device does not prove it, steps are eager, and
``WholeSteps.eager`` says why.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ablate.backends.select import known_or_tested
from ablate.base.errors import with_type
from ablate.layers.linear import quantised_layers
from ablate.layers.plan import work_of_the_host
from ablate.recipes import LayerRecipe, Recipe
from ablate.run.config import TrainingConfig
from ablate.train.snapshot import model_tensors
from ablate.train.step import Trainee, assemble, has_graphs, on_device, set_optimizer, take_whole_step

if TYPE_CHECKING:
    from collections.abc import Callable

    from ablate.run.config import ArmConfig, RunConfig
    from ablate.train.group import Layout

WARM_UP = 3
"""Steps of each phase before one is captured."""
_PROOF_STEPS = WARM_UP + 3
_BACKENDS = ("auto", "emulated", "torch", "triton")
_ROOMS = ("backends", "layers", "models", "numerics", "recipes", "train")
"""Whose sources a proof depends on."""


def why_read_at_once(
    config: ArmConfig, device: str, *, devices: int = 1, observed: bool = False
) -> str | None:
    """Say why the figures of a step are read before the next; None if the device can go on without that.

    The torch device is not touched. ``devices``: how many train the run. ``observed``: whether an observer
    sees each step.
    """
    reasons = {
        "there is no GPU": not has_graphs(device),
        "several devices train the run": devices > 1,
        "the model is not built in": not config.model.is_built_in,
        "de-oscillation resets weights": any(recipe.deoscillate is not None for recipe in _recipes(config)),
        "diagnostics observe the steps": observed,
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


def why_eager(config: ArmConfig, device: str, **options: Any) -> str | None:
    """Say why no step of a run can be a CUDA graph; None if it can. Parameters as of ``why_read_at_once``."""
    if (reason := why_read_at_once(config, device, **options)) is not None:
        return reason
    if config.model.experts is not None:
        return "the routes of experts depend on the data"
    if config.backend not in _BACKENDS:
        return f"back end '{config.backend}' may wait for the host"
    for recipe in _recipes(config):
        for part in recipe.parts:
            if (work := work_of_the_host(part)) is not None:
                return work
    return None


def _recipes(config: ArmConfig) -> list[Recipe]:
    return [config.recipe] if config.fork is None else [config.recipe, config.fork.recipe]


class WholeSteps:
    """Takes the steps of a run: after the first of a phase as one CUDA graph, or eager.

    ``eager``: why no step is a graph; None if steps are. ``on_eager`` is called with it, now or later.
    """

    def __init__(
        self, trainee: Trainee, eager: str | None, on_eager: Callable[[str], None] = lambda _: None
    ) -> None:
        self._layers = quantised_layers(trainee.module).values()
        self._phase: tuple[object, ...] = ()
        self._on_eager = on_eager
        self.eager = eager
        self.forget()
        if eager is None:
            self._stream = torch.cuda.Stream(trainee.device)  # type: ignore[no-untyped-call]
        else:
            on_eager(eager)

    def forget(self) -> None:
        """Drop the graph with its memory; steps that follow begin with those that warm up."""
        self._graph: torch.cuda.CUDAGraph | None = None
        self._buffers: tuple[Tensor, ...] = ()
        self._warmed = 0

    def take(self, trainee: Trainee, sequences: Tensor) -> Tensor:
        """Take a step, as ``take_whole_step``."""
        if self.eager is None:
            self._prepare(trainee, sequences)
        if self.eager is not None:
            return take_whole_step(trainee, sequences)
        if self._graph is None:
            return self._warm_up(trainee, sequences)
        static_sequences, positions, figures = self._buffers
        static_sequences.copy_(sequences)
        positions[:, 0].fill_(trainee.state.step)
        self._graph.replay()
        return figures.clone()

    def _prepare(self, trainee: Trainee, sequences: Tensor) -> None:
        """Begin anew in a new phase; capture the step if the phase is warm."""
        tokens = trainee.state.tokens
        phase = (trainee.settings, *(layer.recipe_at(tokens) for layer in self._layers))
        if phase != self._phase:
            self._phase = phase
            self.forget()
        if self._graph is None and self._warmed == WARM_UP:
            self._capture(trainee, sequences)

    def _warm_up(self, trainee: Trainee, sequences: Tensor) -> Tensor:
        """Take an eager step on the stream of the capture, where torch asks for it."""
        self._warmed += 1
        current = torch.cuda.current_stream(trainee.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            figures = take_whole_step(trainee, sequences)
        current.wait_stream(self._stream)
        return figures

    def _capture(self, trainee: Trainee, sequences: Tensor) -> None:
        """Capture a step, without taking it; give up if that fails."""
        state, graph = trainee.state, torch.cuda.CUDAGraph()
        static_sequences = sequences.clone()
        calls = torch.arange(trainee.plan.micro_batches, device=sequences.device)
        state.positions = torch.stack((torch.zeros_like(calls), calls), dim=1)
        try:
            # Other threads of the process may use the device meanwhile.
            with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
                figures = take_whole_step(trainee, static_sequences)
            self._graph, self._buffers = graph, (static_sequences, state.positions, figures)
        except Exception as error:  # of torch, Triton or a library, each with its own types
            trainee.optimizer.zero_grad(set_to_none=True)  # they lie in the memory of the graph
            first = error.__context__ or error  # that which ended the capture, not the end itself
            self.eager = f"the capture failed: {with_type(first)}"
            self._on_eager(self.eager)
        finally:
            state.positions = None


def unproven(config: RunConfig, device: str, layout: Layout) -> str | None:
    """Let a device prove what a run needs, unless it has; say what a graphed step did otherwise, or None."""
    parts = [part for recipe in _recipes(config) for part in recipe.parts]
    for part in parts:
        tiny = _tiny(config, part)
        decisive = (tiny.model, tiny.training, tiny.recipe.text, tiny.backend, layout.checkpoint_activations)
        (result,) = known_or_tested(decisive, device, _ROOMS, partial(proof, tiny, device, layout))
        if not result["passed"]:
            return str(result["detail"])
    return None


def _tiny(config: RunConfig, part: LayerRecipe) -> RunConfig:
    """Make a small run in which every layer of the blocks follows one recipe."""
    recipe = Recipe(fprop=part.fprop, dgrad=part.dgrad, wgrad=part.wgrad)
    model = replace(config.model, width=128, layers=1, heads=2, kv_heads=None, ffn=256)
    settings = config.training
    training = TrainingConfig(
        tokens=4 * 32 * _PROOF_STEPS, seq_len=32, batch_size=4, micro_batch_size=2,
        grad_clip=settings.grad_clip, master_weights=settings.master_weights, compile=settings.compile,
    )  # fmt: skip
    return replace(
        config, model=model, training=training, recipe=recipe,
        vocab_size=256, fork=None,
    )  # fmt: skip


def proof(config: RunConfig, device: str, layout: Layout) -> list[dict[str, Any]]:
    """Take the same steps eager and graphed; return whether all that they leave is equal, as a self-test."""
    try:
        eager, _ = _steps_of(config, device, layout, "it is compared with")
        graphed, fault = _steps_of(config, device, layout, None)
        if fault is None and not all(map(torch.equal, eager, graphed)):
            fault = "graphed steps have other bits here than eager ones"
    except Exception as error:  # as in a capture
        fault = f"the proof failed: {with_type(error)}"
    return [{"passed": fault is None, "detail": fault}]


def _steps_of(
    config: RunConfig, device: str, layout: Layout, eager: str | None
) -> tuple[list[Tensor], str | None]:
    """Take the steps of a proof; return figures, weights and moments, and why steps were no graphs."""
    trainee, settings = assemble(config, device, layout), config.training
    steps = WholeSteps(trainee, eager)
    shape = (settings.batch_size, settings.seq_len + 1)
    draw = np.random.default_rng(0)
    found = []
    for step in range(_PROOF_STEPS):
        trainee.state.step = step
        set_optimizer(trainee.optimizer, settings, 1e-3 / (1 + step))
        window = draw.integers(0, config.vocab_size, shape)
        found.append(steps.take(trainee, on_device(window, device)))
    found += [tensor for _, tensor in model_tensors(trainee.module)]
    for moments in trainee.optimizer.state.values():
        found += moments.values()
    return found, steps.eager
