"""The shared trainer: one run from its configuration to its last evaluation.

``train(config, on_metrics)`` works by itself in a notebook: it knows nothing of Ray, MLflow, YAML or the run
store. Four random streams are seeded apart (initial weights, data order, stochastic rounding, Hadamard
signs), so arms with the same seed share weights and data order, and the same configuration gives the same
bits on the same machine and number of threads.

How it fails: a non-finite loss or gradient, or a validation loss above a bound for several evaluations,
ends the run as *diverged*, with the tokens seen; that is a result, not an error.
"""

from __future__ import annotations

import hashlib
import math
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ablate.backends.select import Selection
from ablate.data.batches import batch, sequence_starts, validation_batches
from ablate.numerics.state import EVAL_CALL, RecipeState
from ablate.schedule import StepPlan, learning_rate, plan_steps
from ablate.train.heap import keep_freed_memory
from ablate.train.model import Llama
from ablate.train.snapshot import Checkpoints, restore_snapshot, take_snapshot

if TYPE_CHECKING:
    from collections.abc import Callable

    from ablate.backends.protocol import Operand
    from ablate.config import RunConfig, TrainingConfig
    from ablate.recipes import Gemm

Metrics = dict[str, Any]
TokenArrays = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """How a run ended. ``tokens`` counts the training tokens seen."""

    state: Literal["finished", "diverged", "interrupted"]
    tokens: int
    step: int
    message: str | None = None


def stream_seed(seed: int, stream: str) -> int:
    """Return the 63-bit seed of one of a run's streams."""
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
) -> TrainResult:
    """Train one run and return how it ended. From a checkpoint it goes on to the same bits.

    Args:
        config: everything that can change the result.
        on_metrics: called with rows as ``metrics.jsonl`` holds them, without the time: ``kind`` train
            (loss in nats per token, mean since the last row; lr; grad_norm; tokens_per_sec) or eval
            (val_loss).
        tokens: training and validation tokens; by default the configured corpus, prepared in the cache.
        should_stop: asked after every step; true ends the run as interrupted, with a checkpoint.
        checkpoints: where snapshots are kept and a run goes on from; by default none are.
        device: a torch device.

    Raises:
        ValueError: too few tokens for one sequence, or an operand that its policy cannot take.
    """
    keep_freed_memory()
    train_tokens, validation_tokens = tokens if tokens is not None else _prepared_tokens(config)
    settings = config.training
    plan, state, model, optimizer = assemble(config, device)
    guard = _DivergenceGuard(settings, config.vocab_size)
    window = _Window()
    first = 0
    if checkpoints is not None and (snapshot := checkpoints.load()) is not None:
        restore_snapshot(model, optimizer, snapshot)
        first, guard.above = snapshot.step, snapshot.numbers["evaluations_above_bound"]
        window = _Window(**snapshot.numbers["window"])

    def keep(step: int) -> None:
        if checkpoints is not None:
            numbers = {"evaluations_above_bound": guard.above, "window": asdict(window)}
            checkpoints.save(take_snapshot(model, optimizer, step=step, numbers=numbers))

    for step in range(first, plan.steps):
        started = time.perf_counter()
        state.step, state.tokens = step, step * plan.tokens_per_step
        rate = learning_rate(settings, step)
        for group in optimizer.param_groups:
            group["lr"] = rate
        starts = sequence_starts(config.seed, step, settings.batch_size, settings.seq_len, len(train_tokens))
        window_tokens = batch(train_tokens, starts, settings.seq_len)
        loss, norm = gradients(model, state, window_tokens, plan, settings, device)
        done = step + 1
        seen = done * plan.tokens_per_step
        if not (math.isfinite(loss) and math.isfinite(norm)):
            what = "loss" if not math.isfinite(loss) else "gradient norm"
            where = _first_bad_operand(model, state, window_tokens, plan, device)
            return TrainResult(
                state="diverged", tokens=seen, step=done, message=f"non-finite training {what}{where}"
            )
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        state.tokens = seen
        window.add(loss, norm, plan.tokens_per_step, time.perf_counter() - started)

        if done % plan.log_every_steps == 0 or done == plan.steps:
            on_metrics({"kind": "train", "tokens": seen, "step": done, "lr": rate, **window.flush()})
        if done % plan.eval_every_steps == 0 or done == plan.steps:
            val_loss = evaluate(model, state, validation_tokens, settings, device)
            if math.isfinite(val_loss):
                on_metrics({"kind": "eval", "tokens": seen, "step": done, "val_loss": val_loss})
            if message := guard.verdict(val_loss):
                return TrainResult(state="diverged", tokens=seen, step=done, message=message)
        if done == plan.steps:
            break
        if checkpoints is not None and checkpoints.due(seen):
            keep(done)
        if should_stop():
            keep(done)
            return TrainResult(state="interrupted", tokens=seen, step=done, message="stopped on request")
    return TrainResult(state="finished", tokens=plan.steps * plan.tokens_per_step, step=plan.steps)


def assemble(config: RunConfig, device: str) -> tuple[StepPlan, RecipeState, Llama, torch.optim.Optimizer]:
    """Return a run's step arithmetic, recipe state, model with initial weights, and optimizer."""
    plan = plan_steps(config.training)
    state = RecipeState(
        recipe=config.recipe,
        backend=Selection(config.backend),
        seed=config.seed,
        total_tokens=plan.steps * plan.tokens_per_step,
    )
    model = Llama(config.model, config.vocab_size, state)
    model.initialise(torch.Generator().manual_seed(stream_seed(config.seed, "initial weights")))
    model.to(device)
    return plan, state, model, build_optimizer(model, config.training)


def gradients(
    model: Llama,
    state: RecipeState,
    window: np.ndarray[Any, Any],
    plan: StepPlan,
    settings: TrainingConfig,
    device: str,
) -> tuple[float, float]:
    """Leave a step's clipped gradients in the model; return the loss (nats per token) and the norm before."""
    loss = _accumulate(model, state, window, plan, device)
    bound = settings.grad_clip if settings.grad_clip is not None else math.inf
    return loss, torch.nn.utils.clip_grad_norm_(model.parameters(), bound).item()


def evaluate(
    model: Llama,
    state: RecipeState,
    tokens: np.ndarray[Any, Any],
    settings: TrainingConfig,
    device: str = "cpu",
) -> float:
    """Return the mean loss in nats per token on the fixed validation set, with the recipe's own Fprop."""
    micro = settings.micro_batch_size or settings.batch_size
    total, count = 0.0, 0
    training_call = state.call
    with torch.no_grad():
        windows = validation_batches(
            tokens, settings.seq_len, settings.eval_tokens, micro, which=settings.eval_windows
        )
        for index, window in enumerate(windows):
            state.call = EVAL_CALL + index
            inputs, targets = _split(window, device)
            total += _loss(model, inputs, targets, reduction="sum").item()
            count += targets.numel()
    state.call = training_call
    return total / count


def _accumulate(
    model: Llama, state: RecipeState, window: np.ndarray[Any, Any], plan: StepPlan, device: str
) -> float:
    """Run forward and backward over the micro-batches; return the mean loss in nats per token."""
    total = 0.0
    for call, part in enumerate(np.split(window, plan.micro_batches)):
        state.call = call
        inputs, targets = _split(part, device)
        loss = _loss(model, inputs, targets, reduction="mean") / plan.micro_batches
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.item()
    return total


def _first_bad_operand(
    model: Llama, state: RecipeState, window: np.ndarray[Any, Any], plan: StepPlan, device: str
) -> str:
    """Replay the step and name the first operand of a GEMM that is not finite.

    The weights have not moved and the streams are counted, so the replay has the same bits; healthy steps pay
    nothing.
    """
    found: list[str] = []

    def watch(layer: str, gemm: Gemm, operand: str, done: Operand) -> None:
        if not found and not bool(torch.isfinite(done.values).all()):
            found.append(f": first in {gemm.capitalize()}'s {operand} of {layer}")

    state.watch = watch
    model.zero_grad(set_to_none=True)
    _accumulate(model, state, window, plan, device)
    state.watch = None
    return found[0] if found else ""


def _loss(model: Llama, inputs: Tensor, targets: Tensor, *, reduction: str) -> Tensor:
    logits = model(inputs)
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction=reduction)


def _split(window: np.ndarray[Any, Any], device: str) -> tuple[Tensor, Tensor]:
    """Split [sequences, seq_len + 1] tokens into inputs and next-token targets."""
    tensor = torch.from_numpy(window).to(device)
    return tensor[:, :-1], tensor[:, 1:]


def build_optimizer(model: Llama, settings: TrainingConfig) -> torch.optim.Optimizer:
    """Return a run's AdamW; weight decay is for matrices."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    return torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": settings.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ],
        lr=settings.learning_rate,
        betas=(settings.beta1, settings.beta2),
        eps=settings.adam_eps,
        fused=True,
    )


def _prepared_tokens(config: RunConfig) -> TokenArrays:
    from ablate.cache import cache_folder
    from ablate.data import open_tokens, prepare

    return open_tokens(prepare(config.data, cache_folder("tokens")))


class _DivergenceGuard:
    """Counts evaluations in a row above the bound."""

    def __init__(self, settings: TrainingConfig, vocab_size: int) -> None:
        self.bound = settings.divergence_loss or 1.5 * math.log(vocab_size)
        self.patience = settings.divergence_evals
        self.above = 0

    def verdict(self, val_loss: float) -> str | None:
        """Return why the run has diverged, or None."""
        if not math.isfinite(val_loss):
            return "non-finite validation loss"
        self.above = self.above + 1 if val_loss > self.bound else 0
        if self.above < self.patience:
            return None
        return f"validation loss above {self.bound:.3g} nats/token for {self.above} evaluations"


@dataclass
class _Window:
    """Means since the last training row."""

    steps: int = 0
    tokens: int = 0
    loss: float = 0.0
    norm: float = 0.0
    seconds: float = 0.0

    def add(self, loss: float, norm: float, tokens: int, seconds: float) -> None:
        """Count one step."""
        self.steps += 1
        self.tokens += tokens
        self.loss += loss
        self.norm += norm
        self.seconds += seconds

    def flush(self) -> Metrics:
        """Return the row's means and start anew."""
        row = {
            "loss": self.loss / self.steps,
            "grad_norm": self.norm / self.steps,
            "tokens_per_sec": self.tokens / self.seconds,
        }
        self.__init__()  # type: ignore[misc]
        return row
