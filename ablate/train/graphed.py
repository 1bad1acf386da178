"""The steps and evaluations of a run as CUDA graphs: a replay costs the host one launch, not some thousand.

The first steps of a phase are eager: they compile the kernels and give the optimizer its state. Then the same
work is captured on buffers that stay where they are: tokens, position of the random streams, learning rate,
figures. A replay has the bits of the eager step, so a run may be resumed, and captured anew, at any step. Of
an evaluation the first batch of each recipe and shape is eager, and the next is captured.

No device is trusted. Before the first such run of a recipe a tiny model takes some steps and evaluates either
way; losses, weights and moments must be equal to the bit. What passed is known from then on, as with the
self-test.

How it fails: where a step or an evaluation cannot be captured, or a device does not prove it, all is eager,
and ``WholeSteps.eager`` says why.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ablate.backends.select import known_or_tested
from ablate.base.errors import with_type
from ablate.layers.linear import quantised_layers
from ablate.layers.plan import work_of_the_host
from ablate.recipes import LayerRecipe, Recipe
from ablate.run.config import ArmConfig, RunConfig, TrainingConfig
from ablate.train.evaluation import summed_loss, summed_losses
from ablate.train.snapshot import model_tensors
from ablate.train.step import (
    Trainee,
    assemble,
    has_graphs,
    on_device,
    set_optimizer,
    take_whole_step,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ablate.train.group import Layout

WARM_UP = 3
"""Steps of each phase before one is captured."""
_PROOF_STEPS = WARM_UP + 3
_PROOF_EVALUATIONS = 3
"""The first is eager, the second is captured, the third shows whether its graph reads the call."""
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
    if not has_graphs(device):
        return "there is no GPU"
    if devices > 1:
        return "several devices train the run"
    if not config.model.is_built_in:
        return "the model is not built in"
    if any(recipe.deoscillate is not None for recipe in _recipes(config)):
        return "de-oscillation resets weights"
    if observed:
        return "diagnostics observe the steps"
    return None


def why_eager(config: ArmConfig, device: str, **options: Any) -> str | None:
    """Say why no step of a run can be a CUDA graph; None if it can. Parameters as of ``why_read_at_once``."""
    reason = why_read_at_once(config, device, **options)
    if reason is not None:
        return reason
    if config.model.experts is not None:
        return "the routes of experts depend on the data"
    if config.backend not in _BACKENDS:
        return f"back end '{config.backend}' may wait for the host"
    for part in _parts(config):
        reason = work_of_the_host(part)
        if reason is not None:
            return reason
    return None


def _recipes(config: ArmConfig) -> list[Recipe]:
    if config.fork is None:
        return [config.recipe]
    return [config.recipe, config.fork.recipe]


def _parts(config: ArmConfig) -> Iterable[LayerRecipe]:
    return chain.from_iterable(recipe.parts for recipe in _recipes(config))


class WholeSteps:
    """Takes the steps of a run, and evaluates: each as one CUDA graph once it has run eager, or always eager.

    ``eager``: why nothing is a graph; None if steps and evaluations are. ``on_eager`` is called with it, now
    or later.
    """

    def __init__(
        self,
        trainee: Trainee,
        eager: str | None,
        on_eager: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._layers = quantised_layers(trainee.module).values()
        self._on_eager = on_eager
        self.eager = eager
        self.forget()
        if eager is None:
            self._stream = torch.cuda.Stream(trainee.device)  # type: ignore[no-untyped-call]
        else:
            on_eager(eager)

    def forget(self) -> None:
        """Drop the graphs with their memory; what follows warms up again."""
        self._step: _Graph | None = None
        self._evaluations: dict[tuple[object, ...], _Graph] = {}

    def take(self, trainee: Trainee, sequences: Tensor) -> Tensor:
        """Take a step, as ``take_whole_step``."""
        if self.eager is not None:
            return take_whole_step(trainee, sequences)
        phase = (trainee.settings, *self._recipes(trainee))
        if self._step is None or self._step.phase != phase:
            self.forget()
            self._step = _Graph(
                take_whole_step,
                phase,
                turns_to_warm_up=WARM_UP,
                calls=trainee.plan.micro_batches,
            )
        trainee.state.call = 0
        return self._run(self._step, trainee, sequences)

    def summed_loss(self, trainee: Trainee, sequences: Tensor) -> Tensor:
        """Evaluate sequences by the state's call, as ``evaluation.summed_loss``."""
        if self.eager is not None:
            return summed_loss(trainee, sequences)
        phase = (sequences.shape, *self._recipes(trainee))
        if phase not in self._evaluations:
            graph = _Graph(summed_loss, phase, turns_to_warm_up=1, calls=1)
            self._evaluations[phase] = graph
        return self._run(self._evaluations[phase], trainee, sequences)

    def _recipes(self, trainee: Trainee) -> list[LayerRecipe]:
        return [layer.recipe_at(trainee.state.tokens) for layer in self._layers]

    def _run(self, graph: _Graph, trainee: Trainee, sequences: Tensor) -> Tensor:
        """Do a graph's work: eager, on the stream of the capture as torch asks for it, or by a replay."""
        if not graph.turns_to_warm_up and graph.captured is None:
            try:
                graph.capture(trainee, sequences, self._stream)
            except Exception as error:
                # they lie in the memory of the graph
                # of torch, Triton or a library, each with its own types
                trainee.optimizer.zero_grad(set_to_none=True)
                # that which ended the capture, not the end itself
                first = error.__context__ or error
                self.eager = f"the capture failed: {with_type(first)}"
                self._on_eager(self.eager)
                self.forget()
                return graph.work(trainee, sequences)
        if graph.captured is not None:
            return graph.replay(trainee, sequences)
        current = torch.cuda.current_stream(trainee.device)
        self._stream.wait_stream(current)
        graph.turns_to_warm_up -= 1
        with torch.cuda.stream(self._stream):
            result = graph.work(trainee, sequences)
        current.wait_stream(self._stream)
        return result


@dataclass
class _Graph:
    """Work on [sequences, seq_len + 1] tokens that is captured as a CUDA graph after some eager turns.

    ``phase``: what it depends on besides the values in tensors. ``calls``: its passes, from the state's call
    on; only a graph of one pass may begin at another call than in its capture.
    """

    work: Callable[[Trainee, Tensor], Tensor]
    phase: tuple[object, ...]
    turns_to_warm_up: int
    calls: int
    captured: torch.cuda.CUDAGraph | None = None

    def capture(
        self, trainee: Trainee, sequences: Tensor, stream: torch.cuda.Stream
    ) -> None:
        """Capture the work, without doing it."""
        state = trainee.state
        first_call = state.call
        assert first_call is not None
        graph = torch.cuda.CUDAGraph()
        self._sequences = sequences.clone()
        end = first_call + self.calls
        calls = torch.arange(first_call, end, device=sequences.device)
        self._positions = torch.stack((torch.zeros_like(calls), calls), dim=1)
        state.positions = dict(enumerate(self._positions, first_call))
        try:
            # Other threads of the process may use the device meanwhile.
            mode = "thread_local"
            with torch.cuda.graph(graph, stream=stream, capture_error_mode=mode):
                self._result = self.work(trainee, self._sequences)
        finally:
            state.positions = None
            state.call = first_call
        self.captured = graph

    def replay(self, trainee: Trainee, sequences: Tensor) -> Tensor:
        """Do the captured work on other tokens, at the state's step and call."""
        assert self.captured is not None
        assert trainee.state.call is not None
        self._sequences.copy_(sequences)
        self._positions[:, 0].fill_(trainee.state.step)
        self._positions[0, 1].fill_(trainee.state.call)
        self.captured.replay()
        return self._result.clone()


def unproven(config: RunConfig, device: str, layout: Layout) -> str | None:
    """Let a device prove what a run needs, unless it has; say what a graphed step did otherwise, or None."""
    for part in _parts(config):
        tiny = _tiny(config, part)
        decisive = (
            tiny.model,
            tiny.training,
            tiny.recipe.text,
            tiny.backend,
            layout.checkpoint_activations,
        )
        prove = partial(proof, tiny, device, layout)
        (result,) = known_or_tested(decisive, device, _ROOMS, prove)
        if not result["passed"]:
            return str(result["detail"])
    return None


def _tiny(config: RunConfig, part: LayerRecipe) -> RunConfig:
    """Make a small run in which every layer of the blocks follows one recipe."""
    recipe = Recipe(fprop=part.fprop, dgrad=part.dgrad, wgrad=part.wgrad)
    model = replace(config.model, width=128, layers=1, heads=2, kv_heads=None, ffn=256)
    settings = config.training
    training = TrainingConfig(
        tokens=4 * 32 * _PROOF_STEPS,
        seq_len=32,
        batch_size=4,
        micro_batch_size=2,
        grad_clip=settings.grad_clip,
        master_weights=settings.master_weights,
        compile=settings.compile,
    )
    return replace(
        config, model=model, training=training, recipe=recipe, vocab_size=256, fork=None
    )


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
    trainee = assemble(config, device, layout)
    settings = config.training
    steps = WholeSteps(trainee, eager)
    shape = (settings.batch_size, settings.seq_len + 1)
    draw = np.random.default_rng(0)
    results = []
    for step in range(_PROOF_STEPS):
        trainee.state.step = step
        set_optimizer(trainee.optimizer, settings, 1e-3 / (1 + step))
        window = draw.integers(0, config.vocab_size, shape)
        results.append(steps.take(trainee, on_device(window, device)))
    trainee.state.step = _PROOF_STEPS
    windows = draw.integers(0, config.vocab_size, (_PROOF_EVALUATIONS, *shape))
    losses = summed_losses(trainee, dict(enumerate(windows)), steps.summed_loss)
    results.append(torch.tensor(list(losses.values())))
    results += [tensor for _, tensor in model_tensors(trainee.module)]
    for moments in trainee.optimizer.state.values():
        results += moments.values()
    return results, steps.eager
