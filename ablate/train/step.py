"""The objects of a training step, and the step itself: gradients, clipping, AdamW.

On one GPU nothing of a step waits for the device. The learning rate, the step's figures, and whether one of
them was not finite, stay there, so that the whole step can be a CUDA graph (``ablate.train.graphed``).
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import math
import platform
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ablate.backends.cpu_bf16 import multiply_in_fp32
from ablate.backends.select import Selection
from ablate.base.files import refuse_open_folder
from ablate.layers.deoscillation import Deoscillation
from ablate.layers.linear import is_sharded
from ablate.layers.state import RecipeState
from ablate.models.custom_models import Loss, build_network
from ablate.models.decoder import Decoder
from ablate.run.schedule import StepPlan, plan_steps
from ablate.train.group import ONE_DEVICE, Group, Layout, blocks, shard

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ablate.backends.protocol import Operand
    from ablate.recipes import Gemm
    from ablate.run.config import RunConfig, TrainingConfig

_GRAPHS_ON = ("cuda",)


def has_graphs(device: str) -> bool:
    """Whether a step on this torch device can be a CUDA graph."""
    return torch.device(device).type in _GRAPHS_ON


@dataclass(frozen=True, kw_only=True)
class Trainee:
    """The objects of a training step: settings, arithmetic, recipe state, model and optimizer."""

    settings: TrainingConfig
    plan: StepPlan
    state: RecipeState
    module: nn.Module
    loss: Loss
    optimizer: torch.optim.Optimizer
    device: str
    group: Group
    deoscillation: Deoscillation | None = None


def stream_seed(seed: int, stream: str) -> int:
    """Derive the 63-bit seed of one of a run's streams."""
    digest = hashlib.blake2b(f"{stream}:{seed}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def assemble(config: RunConfig, device: str, layout: Layout = ONE_DEVICE) -> Trainee:
    """Build the parts of a run, with initial weights.

    Raises:
        UserError: a model that is not built in cannot be used.
        ValueError: the layout needs blocks and the model has none.
    """
    multiply_in_fp32()
    settings = config.training
    group = layout.group
    plan = plan_steps(settings, group.size)
    state = RecipeState(
        recipe=config.recipe,
        backend=Selection(config.backend),
        seed=config.seed,
        total_tokens=plan.tokens,
        fork=config.fork,
    )
    initial_seed = stream_seed(config.seed, "initial weights")
    no_process_holds_it = group.size > 1 and config.model.is_built_in
    with torch.device("meta" if no_process_holds_it else "cpu"):
        module, loss = build_network(config, state, initial_seed=initial_seed)
    module.train()  # transformers loads a checkpoint in evaluation mode, without dropout
    if settings.master_weights == "bf16":
        # not the buffers: rotary frequencies, past magnitudes
        for parameter in module.parameters():
            parameter.data = parameter.data.to(torch.bfloat16)
    if settings.compile:
        _compile_blocks(module, is_dynamic=False if config.model.is_built_in else None)
    if layout.checkpoint_activations:
        for block in blocks(module, needed_by="resources.activation_checkpointing"):
            # A built-in block uses no generator, and within a CUDA graph none can be set back.
            uses_generator = not isinstance(module, Decoder)
            block.forward = partial(
                checkpoint,
                block.forward,
                use_reentrant=False,
                preserve_rng_state=uses_generator,
            )
    if group.size > 1:
        is_dense = config.model.is_built_in and config.model.experts is None
        shard(module, group, settings, gather_bf16=is_dense)
    if isinstance(module, Decoder) and no_process_holds_it:
        module.to_empty(device=device)
        module.initialise(torch.Generator().manual_seed(initial_seed))
    else:
        module.to(device)
    optimizer = _adamw(
        module, device, is_capturable=has_graphs(device) and group.size == 1
    )
    set_optimizer(optimizer, settings, settings.learning_rate)
    return Trainee(
        settings=settings,
        plan=plan,
        state=state,
        module=module,
        loss=loss,
        optimizer=optimizer,
        device=device,
        group=group,
        deoscillation=Deoscillation(module, state) if state.deoscillates else None,
    )


def _compile_blocks(module: nn.Module, *, is_dynamic: bool | None) -> None:
    """Compile a model's blocks; ``is_dynamic`` as of ``torch.compile``.

    A step's kernels must not depend on what was compiled before, here or by an earlier attempt: other runs
    leave nothing, no block falls back to eager because there are others, and each shape has its own kernels.
    The rows of experts differ with each step, and so may the shapes of foreign models.
    """
    from torch._inductor.runtime.runtime_utils import cache_dir  # type: ignore[attr-defined]

    # usually in /tmp, by the user's name; code is loaded from it
    refuse_open_folder(Path(cache_dir()))
    torch.compiler.reset()
    limits = torch._dynamo.config  # noqa: SLF001  there is no public way
    limits.cache_size_limit = sys.maxsize
    limits.accumulated_cache_size_limit = sys.maxsize
    if isinstance(module, Decoder):
        for mixture in module.mixtures:
            mixture.forward = torch.compiler.disable(mixture.forward)  # type: ignore[method-assign,no-untyped-call]
    for block in blocks(module, needed_by="training.compile"):
        block.forward = torch.compile(block.forward, dynamic=is_dynamic)


def _adamw(module: nn.Module, device: str, *, is_capturable: bool) -> torch.optim.AdamW:
    """Make the optimizer with two groups: matrices, which have weight decay, and the rest.

    ``is_capturable``: a CUDA graph can hold its step, so the learning rate lies on the device.
    """
    matrices: list[Tensor] = []
    rest: list[Tensor] = []
    for parameter in module.parameters():
        if parameter.dim() >= 2:
            matrices.append(parameter)
        else:
            rest.append(parameter)
    optimizer = torch.optim.AdamW([{"params": matrices}, {"params": rest}], fused=True)
    if is_capturable:
        for parameters in optimizer.param_groups:
            rate = torch.empty((), dtype=torch.float32, device=device)
            parameters.update(capturable=True, lr=rate)
        optimizer.found_inf = torch.zeros((), dtype=torch.float32, device=device)  # type: ignore[attr-defined]
    return optimizer


def set_optimizer(
    optimizer: torch.optim.Optimizer, settings: TrainingConfig, rate: float
) -> None:
    """Set what AdamW reads at a step: the settings may change at a fork."""
    # of matrices, and of the rest, in the order of ``_adamw``
    decays = (settings.weight_decay, 0.0)
    betas = (settings.beta1, settings.beta2)
    for parameters, decay in zip(optimizer.param_groups, decays, strict=True):
        parameters.update(betas=betas, eps=settings.adam_eps, weight_decay=decay)
        if isinstance(parameters["lr"], Tensor):
            parameters["lr"].fill_(rate)
        else:
            parameters["lr"] = rate


def gradients(
    trainee: Trainee, window: NDArray[Any], grad_clip: float | None = None
) -> tuple[float, float]:
    """Set a step's clipped gradients; return the loss (nats per token) and the norm before clipping."""
    figures = set_gradients(trainee, on_device(window, trainee.device), grad_clip)
    step = TakenStep(trainee.state.step, trainee, window, figures)
    return read_figures(trainee.group, [step])[0]


def set_gradients(
    trainee: Trainee, sequences: Tensor, grad_clip: float | None
) -> Tensor:
    """Set a step's clipped gradients for [sequences, seq_len + 1] tokens. Waits for no device.

    Returns fp64 [n + 1], on the device: the parts of the loss of this process's n micro-batches (nats per
    token), and the norm before clipping.
    """
    module = trainee.module
    state = trainee.state
    group = trainee.group
    count = trainee.plan.micro_batches
    parts = sequences.reshape(count, -1, sequences.shape[1])
    figures: list[Tensor] = []
    for call in range(group.rank, count, group.size):
        state.call = call
        # so that a resumed run has the dropout of an uninterrupted one
        if not isinstance(module, Decoder):
            torch.manual_seed(stream_seed(state.seed, f"dropout/{state.step}/{call}"))
        inputs, targets = inputs_and_targets(parts[call])
        trained, loss = trainee.loss(module, inputs, targets, "mean")
        (trained / count).backward()  # type: ignore[no-untyped-call]
        figures.append((loss / count).detach().double())
    largest_norm = math.inf if grad_clip is None else grad_clip
    norm: Any = torch.nn.utils.clip_grad_norm_(module.parameters(), largest_norm)
    if is_sharded(norm):
        norm = norm.full_tensor()
    figures.append(norm.double())
    return torch.stack(figures)


def on_device(window: NDArray[Any], device: str) -> Tensor:
    """Copy [sequences, seq_len + 1] tokens to a device, without waiting for it."""
    tensor = torch.from_numpy(window)
    if torch.device(device).type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def inputs_and_targets(sequences: Tensor) -> tuple[Tensor, Tensor]:
    """Split [sequences, seq_len + 1] tokens into inputs and next-token targets."""
    return sequences[:, :-1], sequences[:, 1:]


def take_whole_step(trainee: Trainee, sequences: Tensor) -> Tensor:
    """Take a step; return its figures (see ``set_gradients``). Waits for no device.

    On one GPU the optimizer leaves the weights as they are from the first figure on that is not finite.
    """
    figures = set_gradients(trainee, sequences, trainee.settings.grad_clip)
    skip_if_diverged(trainee.optimizer, figures)
    take_step(trainee)
    return figures


def skip_if_diverged(optimizer: Any, figures: Tensor) -> None:
    """Let the fused optimizer of a GPU skip this step and all later ones if a figure is not finite."""
    found_inf = getattr(optimizer, "found_inf", None)
    if found_inf is not None:
        is_bad = (~figures.isfinite()).any().to(torch.float32)
        torch.maximum(found_inf, is_bad, out=found_inf)


def take_step(trainee: Trainee) -> int | None:
    """Update the weights and clear the gradients; return how many weights de-oscillation reset.

    None if no window of de-oscillation ended.
    """
    trainee.optimizer.step()
    trainee.optimizer.zero_grad(set_to_none=True)
    if trainee.deoscillation is None:
        return None
    return trainee.deoscillation.step()


class TakenStep(NamedTuple):
    """A step whose ``figures`` (see ``set_gradients``) are not read yet, and what can replay it."""

    number: int
    trainee: Trainee
    window: NDArray[Any]
    figures: Tensor


def read_figures(group: Group, steps: list[TakenStep]) -> list[tuple[float, float]]:
    """Return the loss and the norm of each step, with one wait for the device."""
    if not steps:
        return []
    figures = iter(torch.cat([step.figures for step in steps]).tolist())
    losses_and_norms = []
    for step in steps:
        count = step.trainee.plan.micro_batches
        parts = {call: next(figures) for call in range(group.rank, count, group.size)}
        losses_and_norms.append((group.total(parts, count), next(figures)))
    return losses_and_norms


def first_bad_operand(trainee: Trainee, window: NDArray[Any]) -> str:
    """Replay the step, which gives the same bits, and name the first operand of a GEMM that is not finite."""
    names: list[str] = []

    def watch(layer: str, gemm: Gemm, operand: str, quantised: Operand) -> None:
        if not torch.isfinite(quantised.values).all():
            names.append(f": first in {gemm.capitalize()}'s {operand} of {layer}")

    trainee.state.watch = watch
    trainee.module.zero_grad(set_to_none=True)
    gradients(trainee, window)
    trainee.state.watch = None
    first_names = itertools.chain(*trainee.group.gathered(names[:1]))
    return next(first_names, "")


def keep_freed_memory() -> None:
    """Keep the memory that a training step frees, because the next step asks for the same sizes again.

    By default glibc returns every freed block above a few MiB to the kernel, and the next step pays for each
    of its pages again: on tensors of 32 MiB that costs several times as much as quantising them.
    """
    if platform.libc_ver()[0] == "glibc":
        mallopt = ctypes.CDLL(None).mallopt
        # M_MMAP_THRESHOLD and M_TRIM_THRESHOLD of malloc.h; the second only if the first was accepted.
        mallopt(-3, 1 << 30) and mallopt(-1, 2**31 - 1)
