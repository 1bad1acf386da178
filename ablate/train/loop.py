"""The shared trainer: one run from its configuration to its last evaluation.

``train(config, on_metrics)`` also works alone in a notebook: it knows nothing of Ray, MLflow, YAML or the run
store. Four random streams have separate seeds (initial weights, data order, stochastic rounding, Hadamard
signs), so arms with the same seed share weights and data order, and the same configuration gives the same
bits on the same machine and number of threads.

How it fails: a non-finite loss or gradient, or a validation loss above a bound for several evaluations,
ends the run as *diverged*, with the tokens seen; that is a result, not an error.
"""

from __future__ import annotations

import hashlib
import math
import time
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from ablate.backends.cpu_bf16 import multiply_in_fp32
from ablate.backends.select import Selection
from ablate.base.errors import UserError
from ablate.base.files import cache_folder
from ablate.data.batches import batch, sequence_starts, validation_batches
from ablate.layers.deoscillation import Deoscillation
from ablate.layers.linear import forward_in_bf16, is_forward_in_bf16, weights_used_alone
from ablate.layers.shards import is_sharded
from ablate.layers.state import EVAL_CALL, RecipeState
from ablate.models.custom_models import named
from ablate.models.decoder import Decoder
from ablate.models.network import Network, build_network
from ablate.run.schedule import StepPlan, divergence_bound, learning_rate, plan_steps
from ablate.train.group import ONE_DEVICE, Layout, compile_blocks, compute_twice, shard
from ablate.train.malloc import keep_freed_memory
from ablate.train.snapshot import Checkpoints, restore_deoscillation, restore_snapshot, take_snapshot

if TYPE_CHECKING:
    from collections.abc import Callable

    from ablate.backends.protocol import Operand
    from ablate.recipes import Gemm, Recipe
    from ablate.run.config import RunConfig, TrainingConfig
    from ablate.train.group import Group

Metrics = dict[str, Any]
TokenArrays = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]
End = Literal["finished", "diverged", "interrupted"]
_CALL_IT = "call the layer, or give it a rule of the recipe: layers: [{match: …, recipe: bf16}]"


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """How a run ended. ``tokens``: training tokens seen; ``trainee``: what a finished run trained.

    ``recipe``: what a training function of the user's own trained with, if not by ``apply_recipe``: by the
    flags of a command, say.
    """

    state: End
    tokens: int
    step: int
    message: str | None = None
    recipe: Recipe | None = None
    trainee: Trainee | None = field(default=None, repr=False, compare=False)


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
    layout: Layout = ONE_DEVICE,
    observe: Callable[[Trainee], Observer] | None = None,
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
        observe: makes an observer of the built model, such as ``ablate.diagnose.recorder.Recorder``.

    A run that forks trains as its parent up to the fork, then evaluates with its own recipe and goes on.

    Raises:
        ValueError: too few tokens for one sequence, or an operand that does not fit its policy.
        UserError: the run forks, and diverged before that; or a model that is not built in passes layers by.
    """
    from ablate.data import open_tokens, prepare

    keep_freed_memory()
    train_tokens, validation_tokens = tokens or open_tokens(prepare(config.data, cache_folder("tokens")))
    trainee, group = assemble(config, device, layout), layout.group
    plan, state, model, optimizer = trainee.plan, trainee.state, trainee.network.module, trainee.optimizer
    deoscillation = trainee.deoscillation
    own = as_parent = trainee
    fork_step = 0
    if (fork := config.fork) is not None:
        fork_step = fork.tokens // plan.tokens_per_step
        as_parent = replace(own, settings=fork.training, plan=plan_steps(fork.training, group.size))
    observer = observe(trainee) if observe else None
    guard, window, first = _DivergenceGuard(config.vocab_size), _Window(), 0
    if checkpoints is not None and (snapshot := checkpoints.load()) is not None:
        restore_snapshot(model, optimizer, snapshot)
        first, guard.above = snapshot.step, snapshot.numbers["evaluations_above_bound"]
        state.tokens = first * plan.tokens_per_step
        restore_deoscillation(deoscillation, snapshot)
        window = _Window(**snapshot.numbers["window"])

    def keep(step: int) -> None:
        if checkpoints is not None:
            numbers = {"evaluations_above_bound": guard.above, "window": asdict(window)}
            checkpoints.save(take_snapshot(model, optimizer, deoscillation, step=step, numbers=numbers))

    def diverged(message: str, *, as_parent: bool) -> TrainResult:
        if as_parent:
            raise UserError(f"what it forks from diverged after {seen:,} tokens, before the fork: {message}")
        return TrainResult(state="diverged", tokens=seen, step=done, message=message)

    for step in range(first, plan.steps):
        started = time.perf_counter()
        state.step, state.tokens = step, step * plan.tokens_per_step
        trainee = own if step >= fork_step else as_parent
        settings = trainee.settings
        rate = learning_rate(settings, step)
        _set_optimizer(optimizer, settings, rate)
        starts = sequence_starts(config.seed, step, settings.batch_size, settings.seq_len, len(train_tokens))
        window_tokens = batch(train_tokens, starts, settings.seq_len)
        if observer is not None:
            observer.before(step)
        loss, norm = gradients(trainee, window_tokens, settings.grad_clip)
        foreign = not config.model.is_built_in and group.size == 1  # an expert may run elsewhere alone
        if step == first and foreign and (fault := weights_used_alone(state)) is not None:
            raise UserError(f"{named(config.model)}: {fault}", hint=_CALL_IT)
        done, seen = step + 1, (step + 1) * plan.tokens_per_step
        if not (math.isfinite(loss) and math.isfinite(norm)):
            what = "loss" if not math.isfinite(loss) else "gradient norm"
            message = f"non-finite training {what}{_first_bad_operand(trainee, window_tokens)}"
            return diverged(message, as_parent=step < fork_step)
        if observer is not None:
            stepped = time.perf_counter() - started
            observer.after()
            started = time.perf_counter() - stepped  # the observer's time does not count for the speed
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        state.tokens = seen
        if deoscillation is not None and (reset := deoscillation.step()) is not None:
            window.reset += sum(group.gathered(reset))
        window.add(loss, norm, plan.tokens_per_step, time.perf_counter() - started)

        if done % trainee.plan.log_every_steps == 0 or done == plan.steps:
            row = {"kind": "train", "tokens": seen, "step": done, "lr": rate, **window.means()}
            if deoscillation is not None and deoscillation.has_begun:
                row["weights_reset"] = window.reset
            on_metrics(row)
            window = _Window()
        if done % trainee.plan.eval_every_steps == 0 or done in (fork_step, plan.steps):
            losses = evaluate(trainee, validation_tokens)
            if math.isfinite(losses["val_loss"]):
                finite = {name: loss for name, loss in losses.items() if math.isfinite(loss)}
                on_metrics({"kind": "eval", "tokens": seen, "step": done, **finite})
            if verdict := guard.verdict(losses["val_loss"], settings):
                return diverged(verdict, as_parent=done < fork_step)
        if done == plan.steps:
            break
        if checkpoints is not None and group.first(checkpoints.due(seen)):
            keep(done)
        if group.any(should_stop()):
            keep(done)
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
    network: Network
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
        network = build_network(config, state, initial_seed=initial_seed)
    module = network.module
    module.train()  # transformers loads a checkpoint in evaluation mode, without dropout
    if settings.master_weights == "bf16":
        for parameter in module.parameters():  # not the buffers: rotary frequencies, past magnitudes
            parameter.data = parameter.data.to(torch.bfloat16)
    if layout.checkpoint_activations:
        compute_twice(module)
    if settings.compile:
        compile_blocks(module)
    if group.size > 1:
        dense = config.model.is_built_in and config.model.experts is None
        shard(module, group, settings, gather_bf16=dense)
    if isinstance(module, Decoder) and group.size > 1:  # no process ever holds the whole model
        module.to_empty(device=device)
        module.initialise(torch.Generator().manual_seed(initial_seed))
    else:
        module.to(device)
    return Trainee(
        settings=settings, plan=plan, state=state, network=network,
        optimizer=build_optimizer(module, settings), device=device, group=group,
        deoscillation=Deoscillation(module, state) if state.deoscillates else None,
    )  # fmt: skip


def gradients(trainee: Trainee, window: np.ndarray[Any, Any], grad_clip: float | None) -> tuple[float, float]:
    """Set a step's clipped gradients; return the loss (nats per token) and the norm before clipping."""
    loss = _accumulate(trainee, window)
    bound = grad_clip if grad_clip is not None else math.inf
    norm = torch.nn.utils.clip_grad_norm_(trainee.network.module.parameters(), bound)
    return loss, (norm.full_tensor() if is_sharded(norm) else norm).item()  # type: ignore[attr-defined]


def take_step(trainee: Trainee) -> None:
    """Change the weights by the gradients, at the rate that the optimizer has, and move on by a step."""
    trainee.optimizer.step()
    trainee.optimizer.zero_grad(set_to_none=True)
    if trainee.deoscillation is not None:
        trainee.deoscillation.step()
    trainee.state.step += 1


def evaluate(trainee: Trainee, tokens: np.ndarray[Any, Any]) -> dict[str, float]:
    """Return what a row of an evaluation says: losses in nats per token, by ``training.evaluate_in``.

    ``val_loss`` is by the recipe's own Fprop, or by bf16; ``val_loss_bf16`` by bf16 beside the recipe's.
    Where the recipe's Fprop is in bf16 anyway, one evaluation is both.
    """
    module, how = trainee.network.module, trainee.settings.evaluate_in
    own = {} if how == "bf16" else {"val_loss": _mean_loss(trainee, tokens)}
    if how == "recipe":
        return own
    name = "val_loss" if how == "bf16" else "val_loss_bf16"
    if own and is_forward_in_bf16(module, trainee.state.tokens):
        return own | {name: own["val_loss"]}
    with forward_in_bf16(module):
        return own | {name: _mean_loss(trainee, tokens)}


def _mean_loss(trainee: Trainee, tokens: np.ndarray[Any, Any]) -> float:
    """Return the mean loss in nats per token on the fixed validation set."""
    network, state, group, settings = trainee.network, trainee.state, trainee.group, trainee.settings
    micro = settings.micro_batch_size or settings.batch_size // group.size
    windows = list(
        validation_batches(tokens, settings.seq_len, settings.eval_tokens, micro, which=settings.eval_windows)
    )
    own: dict[int, float] = {}
    training_call = state.call
    network.module.eval()
    with torch.no_grad():
        for index in range(group.rank, len(windows) + -len(windows) % group.size, group.size):
            # Gathering weights needs all processes: a process without a batch repeats the last one.
            taken = min(index, len(windows) - 1)
            state.call = EVAL_CALL + taken
            inputs, targets = _split(windows[taken], trainee.device)
            own[index] = network.loss(network.module, inputs, targets, "sum")[1].item()
    network.module.train()
    state.call = training_call
    return group.total(own, len(windows)) / sum(len(window) * settings.seq_len for window in windows)


def _accumulate(trainee: Trainee, window: np.ndarray[Any, Any]) -> float:
    """Run forward and backward over the micro-batches; return the mean loss in nats per token."""
    network, state, group, count = trainee.network, trainee.state, trainee.group, trainee.plan.micro_batches
    parts = np.split(window, count)
    own: dict[int, float] = {}
    for call in range(group.rank, count, group.size):
        state.call = call
        if network.draws:  # so that a resumed run has the dropout of an uninterrupted one
            torch.manual_seed(stream_seed(state.seed, f"dropout/{state.step}/{call}"))
        inputs, targets = _split(parts[call], trainee.device)
        trained, loss = network.loss(network.module, inputs, targets, "mean")
        (trained / count).backward()  # type: ignore[no-untyped-call]
        own[call] = (loss / count).item()
    return group.total(own, count)


def _first_bad_operand(trainee: Trainee, window: np.ndarray[Any, Any]) -> str:
    """Replay the step, which gives the same bits, and name the first operand of a GEMM that is not finite."""
    found: list[str] = []

    def watch(layer: str, gemm: Gemm, operand: str, done: Operand) -> None:
        if not found and not bool(torch.isfinite(done.values).all()):
            found.append(f": first in {gemm.capitalize()}'s {operand} of {layer}")

    trainee.state.watch = watch
    trainee.network.module.zero_grad(set_to_none=True)
    _accumulate(trainee, window)
    trainee.state.watch = None
    return next(filter(None, trainee.group.gathered("".join(found))), "")


def _split(window: np.ndarray[Any, Any], device: str) -> tuple[Tensor, Tensor]:
    """Split [sequences, seq_len + 1] tokens into inputs and next-token targets."""
    tensor = torch.from_numpy(window).to(device)
    return tensor[:, :-1], tensor[:, 1:]


def build_optimizer(model: nn.Module, settings: TrainingConfig) -> torch.optim.Optimizer:
    """Build a run's AdamW; weight decay applies to matrices only."""
    decays = {True: settings.weight_decay, False: 0.0}
    return torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if (p.dim() >= 2) is matrix], "weight_decay": decay}
            for matrix, decay in decays.items()
        ],
        lr=settings.learning_rate,
        betas=(settings.beta1, settings.beta2),
        eps=settings.adam_eps,
        fused=True,
    )


def _set_optimizer(optimizer: torch.optim.Optimizer, settings: TrainingConfig, rate: float) -> None:
    """Set what AdamW reads at a step: the settings may change at a fork."""
    decays = (settings.weight_decay, 0.0)  # of matrices, and of the rest, as it was built
    for parameters, decay in zip(optimizer.param_groups, decays, strict=True):
        betas = settings.beta1, settings.beta2
        parameters.update(lr=rate, betas=betas, eps=settings.adam_eps, weight_decay=decay)


class _DivergenceGuard:
    """Counts consecutive evaluations above the bound."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.above = 0

    def verdict(self, val_loss: float, settings: TrainingConfig) -> str | None:
        """Return why the run has diverged, or None."""
        if not math.isfinite(val_loss):
            return "non-finite validation loss"
        bound = divergence_bound(settings.divergence_loss, self.vocab_size)
        self.above = self.above + 1 if val_loss > bound else 0
        if self.above < settings.divergence_evals:
            return None
        return f"validation loss above {bound:.3g} nats/token for {self.above} evaluations"


@dataclass
class _Window:
    """Means since the last training row, and the weights that de-oscillation has reset."""

    steps: int = 0
    tokens: int = 0
    loss: float = 0.0
    norm: float = 0.0
    seconds: float = 0.0
    reset: int = 0

    def add(self, loss: float, norm: float, tokens: int, seconds: float) -> None:
        """Count one step."""
        self.steps += 1
        self.tokens += tokens
        self.loss += loss
        self.norm += norm
        self.seconds += seconds

    def means(self) -> Metrics:
        """Return the row's means."""
        return {
            "loss": self.loss / self.steps,
            "grad_norm": self.norm / self.steps,
            "tokens_per_sec": self.tokens / self.seconds,
        }
