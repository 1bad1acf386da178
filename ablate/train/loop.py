"""The shared trainer: one run from its configuration to its last evaluation.

``train(config, on_metrics)`` also works alone in a notebook: it knows nothing of Ray, MLflow, YAML or the run
store. Four random streams have separate seeds (initial weights, data order, stochastic rounding, Hadamard
signs), so arms with the same seed share weights and data order, and the same configuration gives the same
bits on the same machine and number of threads.

How it fails: a non-finite loss or gradient, or a validation loss above a bound for several evaluations,
ends the run as *diverged*, with the tokens seen; that is a result, not an error. On a GPU the figures of a
step are read with the next row, evaluation or checkpoint, and after ``READ_EVERY`` steps at the latest, so
that no step waits. A step that diverged, and all after it, have left the weights as they were.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import platform
import sys
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ablate.backends.cpu_bf16 import multiply_in_fp32
from ablate.backends.select import Selection
from ablate.base.errors import UserError
from ablate.base.files import cache_folder
from ablate.data.batches import batch, sequence_starts, validation_batches
from ablate.layers.deoscillation import Deoscillation
from ablate.layers.linear import is_sharded, quantised_layers, weights_used_alone
from ablate.layers.state import EVAL_CALL, RecipeState
from ablate.models.custom_models import Loss, build_network, named
from ablate.models.decoder import Decoder
from ablate.recipes import LayerRecipe
from ablate.run.schedule import StepPlan, divergence_bound, learning_rate, plan_steps
from ablate.train.group import ONE_DEVICE, Layout, blocks, shard
from ablate.train.snapshot import Checkpoints, restore_snapshot, take_snapshot

if TYPE_CHECKING:
    from collections.abc import Callable

    from ablate.backends.protocol import Operand
    from ablate.recipes import Gemm, Recipe
    from ablate.run.config import RunConfig, TrainingConfig
    from ablate.train.group import Group

Metrics = dict[str, Any]
TokenArrays = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]
End = Literal["finished", "diverged", "interrupted"]
READ_EVERY = 16
"""Steps after which a GPU's losses and norms are read at the latest."""
_READ_LATE_ON = ("cuda",)
_CALL_IT = "call the layer, or give it a rule of the recipe: layers: [{match: …, recipe: bf16}]"


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """How a run ended. ``tokens``: training tokens seen; ``trainee``: what a finished run trained.

    ``recipe``: what the user's own training function trained with if it did not use ``apply_recipe``, for
    example by the flags of a command.
    """

    state: End
    tokens: int
    step: int
    message: str | None = None
    recipe: Recipe | None = None
    trainee: Trainee | None = field(default=None, repr=False, compare=False)


def stream_seed(seed: int, stream: str) -> int:
    """Derive the 63-bit seed of one of a run's streams."""
    digest = hashlib.blake2b(f"{stream}:{seed}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def train(
    config: RunConfig,
    on_metrics: Callable[[Metrics], None],
    *,
    tokens: TokenArrays | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    checkpoints: Checkpoints | None = None,
    device: str = "cpu",
    layout: Layout = ONE_DEVICE,
    observe: Callable[[Trainee], Observer | None] | None = None,
) -> TrainResult:
    """Train one run and return how it ended. A run resumed from a checkpoint gives the same bits.

    On several devices each process calls this with its place in the group. Every micro-batch is quantised as
    in a single process with the same micro-batches, so only the order of sums differs.

    Args:
        config: everything that can change the result.
        on_metrics: called with rows as in ``metrics.jsonl``, without the time: ``kind`` train
            (loss in nats per token, mean since the last row; lr; grad_norm; tokens_per_sec; with
            de-oscillation weights_reset, how many since the last row) or eval (as ``evaluate`` returns).
        tokens: training and validation tokens; by default the configured corpus, prepared in the cache.
        should_stop: called after every step; true ends the run as interrupted, with a checkpoint.
        checkpoints: where snapshots are kept and loaded; by default there are none.
        device: a torch device.
        layout: the processes that train this run together, and whether activations are recomputed;
            only the first process uses ``on_metrics``.
        observe: called once with the built model, before training. It may return an observer, such as
            ``ablate.diagnose.recorder.Recorder``, and record or replay the routes of a mixture
            (``ablate.train.routes``).

    A run that forks trains as its parent up to the fork, then evaluates and trains with its own recipe.

    Raises:
        ValueError: too few tokens for one sequence, or an operand that does not fit its policy.
        UserError: the run diverged before its fork; a model that is not built in reads weights of layers
            without calling the layers; or it replays routes without a good record of them.
    """
    from ablate.data import open_tokens, prepare

    keep_freed_memory()
    train_tokens, validation_tokens = tokens or open_tokens(prepare(config.data, cache_folder("tokens")))
    trainee = own = as_parent = assemble(config, device, layout)
    plan, state, group = own.plan, own.state, own.group
    model, optimizer = own.module, own.optimizer
    fork_step = 0
    if (fork := config.fork) is not None:
        fork_step = fork.tokens // plan.tokens_per_step
        as_parent = replace(own, settings=fork.training, plan=plan_steps(fork.training, group.size))
    observer = observe(own) if observe else None
    if config.replayed is not None and getattr(model, "choose", None) is None:
        raise UserError("model.routing: replay needs the record of another run: `ablate run` has it")
    first = above_bound = 0
    window = Counter[str]()  # sums since the last training row; ``reset``: weights that de-oscillation reset
    if checkpoints is not None and (snapshot := checkpoints.load()) is not None:
        first, window = snapshot.step, Counter(snapshot.numbers["window"])
        state.tokens = first * plan.tokens_per_step
        restore_snapshot(snapshot, model, optimizer, own.deoscillation)
        above_bound = snapshot.numbers["evaluations_above_bound"]

    def diverged(message: str, at: int, done: int) -> TrainResult:
        seen = done * plan.tokens_per_step
        if at < fork_step:
            raise UserError(f"what it forks from diverged after {seen:,} tokens, before the fork: {message}")
        return TrainResult(state="diverged", tokens=seen, step=done, message=message)

    unread: list[_Step] = []
    reads_late = observer is None and _can_read_late(own, config)

    def read() -> TrainResult | None:
        """Read the figures of all steps since the last reading; return how the run ended if one diverged."""
        for past, (loss, norm) in zip(unread, _read(own.group, unread), strict=True):
            if not (math.isfinite(loss) and math.isfinite(norm)):
                what = "loss" if not math.isfinite(loss) else "gradient norm"
                state.step, state.tokens = past.number, past.number * plan.tokens_per_step
                where = _first_bad_operand(past.trainee, past.sequences)
                return diverged(f"non-finite training {what}{where}", past.number, past.number + 1)
            window.update({"loss": loss, "norm": norm})
        unread.clear()
        return None

    for step in range(first, plan.steps):
        started = time.perf_counter()
        state.step, state.tokens = step, step * plan.tokens_per_step
        trainee = own if step >= fork_step else as_parent
        settings = trainee.settings
        rate = learning_rate(settings, step)
        _set_optimizer(optimizer, settings, rate)
        starts = sequence_starts(config.seed, step, settings.batch_size, settings.seq_len, len(train_tokens))
        sequences = batch(train_tokens, starts, settings.seq_len)
        if observer is not None:
            observer.before(step)
        figures = set_gradients(trainee, sequences, settings.grad_clip)
        unread.append(_Step(number=step, trainee=trainee, sequences=sequences, figures=figures))
        foreign = not config.model.is_built_in and group.size == 1  # an expert may run only elsewhere
        if step == first and foreign and (fault := weights_used_alone(state)) is not None:
            raise UserError(f"{named(config.model)}: {fault}", hint=_CALL_IT)
        done, seen = step + 1, (step + 1) * plan.tokens_per_step
        has_row = done % trainee.plan.log_every_steps == 0 or done == plan.steps
        is_evaluated = done % trainee.plan.eval_every_steps == 0 or done in (fork_step, plan.steps)
        is_read = not reads_late or has_row or is_evaluated or len(unread) == READ_EVERY
        if is_read and (end := read()) is not None:
            return end
        if observer is not None:
            stepped = time.perf_counter() - started
            observer.after()
            started = time.perf_counter() - stepped  # the observer's time does not count for the speed
        state.tokens = seen
        if reads_late:
            _skip_if_diverged(optimizer, figures)
        reset = take_step(trainee)
        sums: dict[str, Any] = {
            "steps": 1, "tokens": plan.tokens_per_step,
            "seconds": time.perf_counter() - started,
            "reset": 0 if reset is None else sum(group.gathered(reset)),
        }  # fmt: skip
        window.update(sums)

        if has_row:
            row = {
                "kind": "train", "tokens": seen, "step": done, "lr": rate,
                "loss": window["loss"] / window["steps"], "grad_norm": window["norm"] / window["steps"],
                "tokens_per_sec": window["tokens"] / window["seconds"],
            }  # fmt: skip
            if own.deoscillation is not None and own.deoscillation.followed is not None:
                row["weights_reset"] = window["reset"]
            on_metrics(row)
            window.clear()
        if is_evaluated:
            losses = evaluate(trainee, validation_tokens)
            if not math.isfinite(val_loss := losses["val_loss"]):
                return diverged("non-finite validation loss", done, done)
            finite = {name: loss for name, loss in losses.items() if math.isfinite(loss)}
            on_metrics({"kind": "eval", "tokens": seen, "step": done, **finite})
            bound = divergence_bound(settings.divergence_loss, config.vocab_size)
            above_bound = above_bound + 1 if val_loss > bound else 0
            if above_bound >= settings.divergence_evals:
                what = f"validation loss above {bound:.3g} nats/token for {above_bound} evaluations"
                return diverged(what, done, done)
        if done == plan.steps:
            break
        is_due = checkpoints is not None and group.first(checkpoints.due(seen))
        stops = any(group.gathered(should_stop()))
        if (is_due or stops) and (end := read()) is not None:
            return end
        if checkpoints is not None and (is_due or stops):
            numbers = {"evaluations_above_bound": above_bound, "window": dict(window)}
            checkpoints.save(take_snapshot(model, optimizer, own.deoscillation, step=done, numbers=numbers))
        if stops:
            return TrainResult(state="interrupted", tokens=seen, step=done, message="stopped on request")
    return TrainResult(state="finished", tokens=plan.tokens, step=plan.steps, trainee=own)


class Observer(Protocol):
    """Observes the steps of a run. It changes nothing that training reads, including random generators."""

    def before(self, step: int) -> None:
        """Observe a step, counted from 0, before its gradients are computed."""

    def after(self) -> None:
        """Observe the model with the step's gradients, before its weights change."""


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


def assemble(config: RunConfig, device: str, layout: Layout = ONE_DEVICE) -> Trainee:
    """Build the parts of a run, with initial weights.

    Raises:
        UserError: a model that is not built in cannot be used.
        ValueError: the layout needs blocks and the model has none.
    """
    multiply_in_fp32()
    settings, group = config.training, layout.group
    plan = plan_steps(settings, group.size)
    state = RecipeState(
        recipe=config.recipe, backend=Selection(config.backend), seed=config.seed,
        total_tokens=plan.tokens, fork=config.fork,
    )  # fmt: skip
    initial_seed = stream_seed(config.seed, "initial weights")
    with torch.device("meta" if group.size > 1 and config.model.is_built_in else "cpu"):
        module, loss = build_network(config, state, initial_seed=initial_seed)
    module.train()  # transformers loads a checkpoint in evaluation mode, without dropout
    if settings.master_weights == "bf16":
        for parameter in module.parameters():  # not the buffers: rotary frequencies, past magnitudes
            parameter.data = parameter.data.to(torch.bfloat16)
    if settings.compile:
        # A step's kernels must not depend on what was compiled before, here or by an earlier attempt: other
        # runs leave nothing, no block falls back to eager because there are others, and each shape has its
        # own kernels. The rows of experts differ with each step, and so may the shapes of foreign models.
        torch.compiler.reset()
        limits = torch._dynamo.config  # noqa: SLF001  there is no public way
        limits.cache_size_limit = limits.accumulated_cache_size_limit = sys.maxsize
        mixtures: list[Any] = module.mixtures if isinstance(module, Decoder) else []
        for mixture in mixtures:
            mixture.forward = torch.compiler.disable(mixture.forward)  # type: ignore[no-untyped-call]
        for block in blocks(module, needed_by="training.compile"):
            block.forward = torch.compile(block.forward, dynamic=False if config.model.is_built_in else None)
    if layout.checkpoint_activations:
        for block in blocks(module, needed_by="resources.activation_checkpointing"):
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    if group.size > 1:
        dense = config.model.is_built_in and config.model.experts is None
        shard(module, group, settings, gather_bf16=dense)
    if isinstance(module, Decoder) and group.size > 1:  # no process ever holds the whole model
        module.to_empty(device=device)
        module.initialise(torch.Generator().manual_seed(initial_seed))
    else:
        module.to(device)
    # Weight decay applies to matrices only.
    decayed = [[p for p in module.parameters() if (p.dim() >= 2) is matrix] for matrix in (True, False)]
    optimizer = torch.optim.AdamW([{"params": parameters} for parameters in decayed], fused=True)
    _set_optimizer(optimizer, settings, settings.learning_rate)
    return Trainee(
        settings=settings, plan=plan, state=state, module=module, loss=loss,
        optimizer=optimizer, device=device, group=group,
        deoscillation=Deoscillation(module, state) if state.deoscillates else None,
    )  # fmt: skip


def gradients(trainee: Trainee, window: np.ndarray[Any, Any], grad_clip: float | None) -> tuple[float, float]:
    """Set a step's clipped gradients; return the loss (nats per token) and the norm before clipping."""
    figures = set_gradients(trainee, window, grad_clip)
    step = _Step(number=trainee.state.step, trainee=trainee, sequences=window, figures=figures)
    return _read(trainee.group, [step])[0]


def set_gradients(trainee: Trainee, window: np.ndarray[Any, Any], grad_clip: float | None) -> Tensor:
    """Set a step's clipped gradients. Waits for no device.

    Returns fp64 [n + 1], on the device: the parts of the loss of this process's n micro-batches (nats per
    token), and the norm before clipping.
    """
    module, state, group, count = trainee.module, trainee.state, trainee.group, trainee.plan.micro_batches
    parts = np.split(window, count)
    figures: list[Tensor] = []
    for call in range(group.rank, count, group.size):
        state.call = call
        if not isinstance(module, Decoder):  # so that a resumed run has the dropout of an uninterrupted one
            torch.manual_seed(stream_seed(state.seed, f"dropout/{state.step}/{call}"))
        inputs, targets = _split(parts[call], trainee.device)
        trained, loss = trainee.loss(module, inputs, targets, "mean")
        (trained / count).backward()  # type: ignore[no-untyped-call]
        figures.append((loss / count).detach().double())
    norm: Any = torch.nn.utils.clip_grad_norm_(
        module.parameters(), math.inf if grad_clip is None else grad_clip
    )
    figures.append((norm.full_tensor() if is_sharded(norm) else norm).double())
    return torch.stack(figures)


@dataclass(frozen=True, kw_only=True)
class _Step:
    """A step whose ``figures`` (see ``set_gradients``) are not read yet, and what can replay it."""

    number: int
    trainee: Trainee
    sequences: np.ndarray[Any, Any]
    figures: Tensor


def _read(group: Group, steps: list[_Step]) -> list[tuple[float, float]]:
    """Return the loss and the norm of each step, with one wait for the device."""
    if not steps:
        return []
    figures = torch.cat([step.figures for step in steps]).tolist()
    found = []
    for step in steps:
        *losses, norm = figures[: len(step.figures)]
        del figures[: len(step.figures)]
        count = step.trainee.plan.micro_batches
        parts = dict(zip(range(group.rank, count, group.size), losses, strict=True))
        found.append((group.total(parts, count), norm))
    return found


def _can_read_late(trainee: Trainee, config: RunConfig) -> bool:
    """Whether a step can go on before its figures are known: a built-in model alone on a GPU."""
    alone = trainee.group.size == 1 and trainee.deoscillation is None
    return torch.device(trainee.device).type in _READ_LATE_ON and alone and config.model.is_built_in


def _skip_if_diverged(optimizer: Any, figures: Tensor) -> None:
    """Let the fused optimizer leave the weights as they are from the first figure on that is not finite."""
    is_bad = (~figures.isfinite()).any().to(torch.float32)
    before = getattr(optimizer, "found_inf", None)
    optimizer.found_inf = is_bad if before is None else torch.maximum(before, is_bad)


def take_step(trainee: Trainee) -> int | None:
    """Update the weights and clear the gradients; return how many weights de-oscillation reset.

    None if no window of de-oscillation ended.
    """
    trainee.optimizer.step()
    trainee.optimizer.zero_grad(set_to_none=True)
    return None if trainee.deoscillation is None else trainee.deoscillation.step()


def evaluate(trainee: Trainee, tokens: np.ndarray[Any, Any]) -> dict[str, float]:
    """Compute the validation losses that ``training.evaluate_in`` asks for, in nats per token.

    ``val_loss`` uses the recipe's own Fprop, or bf16 if only that is asked for. ``val_loss_bf16`` uses bf16
    in addition to the recipe's. If the recipe's Fprop is in bf16 anyway, one evaluation gives both.
    """
    layers, how = quantised_layers(trainee.module).values(), trainee.settings.evaluate_in
    own = {} if how == "bf16" else {"val_loss": _mean_loss(trainee, tokens)}
    if how == "recipe":
        return own
    name = "val_loss" if how == "bf16" else "val_loss_bf16"
    if own and all(layer.recipe_at(trainee.state.tokens).fprop.is_untouched for layer in layers):
        return own | {name: own["val_loss"]}
    for layer in layers:
        layer.override = LayerRecipe()
    try:
        return own | {name: _mean_loss(trainee, tokens)}
    finally:
        for layer in layers:
            layer.override = None


def _mean_loss(trainee: Trainee, tokens: np.ndarray[Any, Any]) -> float:
    """Compute the mean loss in nats per token on the fixed validation set."""
    module, state, group, settings = trainee.module, trainee.state, trainee.group, trainee.settings
    micro = settings.micro_batch_size or settings.batch_size // group.size
    windows = list(
        validation_batches(tokens, settings.seq_len, settings.eval_tokens, micro, which=settings.eval_windows)
    )
    sums: dict[int, Tensor] = {}
    training_call = state.call
    module.eval()
    with torch.no_grad():
        for index in range(group.rank, len(windows) + -len(windows) % group.size, group.size):
            # Gathering weights needs all processes: a process without a batch repeats the last one.
            taken = min(index, len(windows) - 1)
            state.call = EVAL_CALL + taken
            inputs, targets = _split(windows[taken], trainee.device)
            sums[index] = trainee.loss(module, inputs, targets, "sum")[1].double()
    module.train()
    state.call = training_call
    own = dict(zip(sums, torch.stack(list(sums.values())).tolist(), strict=True))
    return group.total(own, len(windows)) / sum(len(window) * settings.seq_len for window in windows)


def _first_bad_operand(trainee: Trainee, window: np.ndarray[Any, Any]) -> str:
    """Replay the step, which gives the same bits, and name the first operand of a GEMM that is not finite."""
    found: list[str] = []

    def watch(layer: str, gemm: Gemm, operand: str, done: Operand) -> None:
        if not found and not bool(torch.isfinite(done.values).all()):
            found.append(f": first in {gemm.capitalize()}'s {operand} of {layer}")

    trainee.state.watch = watch
    trainee.module.zero_grad(set_to_none=True)
    gradients(trainee, window, None)
    trainee.state.watch = None
    return next(filter(None, trainee.group.gathered("".join(found))), "")


def _split(window: np.ndarray[Any, Any], device: str) -> tuple[Tensor, Tensor]:
    """Split [sequences, seq_len + 1] tokens into inputs and next-token targets."""
    tensor = torch.from_numpy(window)
    if torch.device(device).type == "cuda":
        tensor = tensor.pin_memory()
    tensor = tensor.to(device, non_blocking=True)
    return tensor[:, :-1], tensor[:, 1:]


def _set_optimizer(optimizer: torch.optim.Optimizer, settings: TrainingConfig, rate: float) -> None:
    """Set what AdamW reads at a step: the settings may change at a fork."""
    decays = (settings.weight_decay, 0.0)  # of matrices, and of the rest, in the order of ``assemble``
    for parameters, decay in zip(optimizer.param_groups, decays, strict=True):
        betas = settings.beta1, settings.beta2
        parameters.update(lr=rate, betas=betas, eps=settings.adam_eps, weight_decay=decay)


def keep_freed_memory() -> None:
    """Keep the memory that a training step frees, because the next step asks for the same sizes again.

    By default glibc returns every freed block above a few MiB to the kernel, and the next step pays for each
    of its pages again: on tensors of 32 MiB that costs several times as much as quantising them.
    """
    if platform.libc_ver()[0] == "glibc":
        mallopt = ctypes.CDLL(None).mallopt
        # M_MMAP_THRESHOLD and M_TRIM_THRESHOLD of malloc.h; the second only if the first was accepted.
        mallopt(-3, 1 << 30) and mallopt(-1, 2**31 - 1)
