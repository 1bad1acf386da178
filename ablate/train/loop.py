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

import math
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

from numpy.typing import NDArray

from ablate.base.errors import UserError
from ablate.base.files import cache_folder
from ablate.data.batches import batch, sequence_starts
from ablate.layers.linear import weights_used_beside
from ablate.models.custom_models import named
from ablate.run.schedule import divergence_bound, learning_rate, plan_steps
from ablate.train.evaluation import evaluate
from ablate.train.graphed import WholeSteps, unproven, why_eager, why_read_at_once
from ablate.train.group import ONE_DEVICE, Layout
from ablate.train.snapshot import Checkpoints, restore_snapshot, take_snapshot
from ablate.train.step import (
    TakenStep,
    Trainee,
    assemble,
    first_bad_operand,
    keep_freed_memory,
    on_device,
    read_figures,
    set_gradients,
    set_optimizer,
    take_step,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from ablate.recipes import Recipe
    from ablate.run.config import RunConfig

Metrics = dict[str, Any]
Tokens = NDArray[Any]
End = Literal["finished", "diverged", "interrupted"]
READ_EVERY = 16
"""Steps after which a GPU's losses and norms are read at the latest."""


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


def train(
    config: RunConfig,
    on_metrics: Callable[[Metrics], None],
    *,
    tokens: tuple[Tokens, Tokens] | None = None,
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
    if tokens is None:
        tokens = open_tokens(prepare(config.data, cache_folder("tokens")))
    trainee = assemble(config, device, layout)
    observer = observe(trainee) if observe else None
    if config.replayed is not None and getattr(trainee.module, "choose", None) is None:
        fault = "replay needs the record of another run: `ablate run` has it"
        raise UserError(f"model.routing: {fault}")
    run = _Run(config, trainee, layout, on_metrics, observer, checkpoints)
    try:
        train_tokens, validation_tokens = tokens
        return run.train(train_tokens, validation_tokens, should_stop)
    except _DivergedError as divergence:
        steps = divergence.steps
        seen = steps * trainee.plan.tokens_per_step
        if divergence.in_step < run.fork_step:
            message = f"what it forks from diverged after {seen:,} tokens, before the fork: {divergence}"
            raise UserError(message) from None
        return TrainResult(
            state="diverged", tokens=seen, step=steps, message=str(divergence)
        )


class Observer(Protocol):
    """Observes the steps of a run. It changes nothing that training reads, including random generators."""

    def before(self, step: int) -> None:
        """Observe a step, counted from 0, before its gradients are computed."""

    def after(self) -> None:
        """Observe the model with the step's gradients, before its weights change."""


class _DivergedError(Exception):
    """Training or validation diverged. ``in_step``: counted from 0; ``steps``: how many were taken."""

    def __init__(self, message: str, *, in_step: int, steps: int) -> None:
        super().__init__(message)
        self.in_step = in_step
        self.steps = steps


@dataclass
class _Run:
    """A run on its way: what it trains, and the figures that no row has yet."""

    config: RunConfig
    after_fork: Trainee
    layout: Layout
    on_metrics: Callable[[Metrics], None]
    observer: Observer | None
    checkpoints: Checkpoints | None

    def __post_init__(self) -> None:
        config = self.config
        trainee = self.after_fork
        self.before_fork = trainee
        self.fork_step = 0
        self.group = trainee.group
        self.unread: list[TakenStep] = []
        # Since the last training row; ``reset``: weights that de-oscillation reset.
        self.sums = Counter[str]()
        self.evaluations_above_bound = 0
        if config.fork is not None:
            settings = config.fork.training
            self.fork_step = config.fork.tokens // trainee.plan.tokens_per_step
            plan = plan_steps(settings, self.group.size)
            self.before_fork = replace(trainee, settings=settings, plan=plan)
        self.first_step = self._resume()
        conditions: dict[str, Any] = {
            "devices": self.group.size,
            "observed": self.observer is not None,
        }
        device = trainee.device
        self.reads_late = why_read_at_once(config, device, **conditions) is None
        eager = why_eager(config, device, **conditions)
        eager = eager or unproven(config, device, self.layout)
        self.whole_steps = WholeSteps(trainee, eager, self.layout.on_eager)

    def _resume(self) -> int:
        """Restore the last snapshot, if there is one; return the number of steps already taken."""
        if self.checkpoints is None:
            return 0
        snapshot = self.checkpoints.load()
        if snapshot is None:
            return 0
        trainee = self.after_fork
        trainee.state.tokens = snapshot.step * trainee.plan.tokens_per_step
        restore_snapshot(
            snapshot, trainee.module, trainee.optimizer, trainee.deoscillation
        )
        self.sums = Counter(snapshot.numbers["window"])
        self.evaluations_above_bound = snapshot.numbers["evaluations_above_bound"]
        return snapshot.step

    def train(
        self,
        train_tokens: Tokens,
        validation_tokens: Tokens,
        should_stop: Callable[[], bool],
    ) -> TrainResult:
        """Take all steps that are left; ``_DivergedError`` where one diverged."""
        plan = self.after_fork.plan
        for step in range(self.first_step, plan.steps):
            trainee = self.after_fork if step >= self.fork_step else self.before_fork
            self._take_step(trainee, step, train_tokens)
            if self._has_row(trainee, step):
                self._write_row(trainee, step)
            if self._is_evaluated(trainee, step):
                self._evaluate(trainee, step, validation_tokens)
            if step + 1 == plan.steps:
                break
            stops = any(self.group.gathered(should_stop()))
            self._save_if_due(step, stops=stops)
            if stops:
                return TrainResult(
                    state="interrupted",
                    tokens=trainee.state.tokens,
                    step=step + 1,
                    message="stopped on request",
                )
        return TrainResult(
            state="finished",
            tokens=plan.tokens,
            step=plan.steps,
            trainee=self.after_fork,
        )

    def _has_row(self, trainee: Trainee, step: int) -> bool:
        steps = step + 1
        last = self.after_fork.plan.steps
        return steps % trainee.plan.log_every_steps == 0 or steps == last

    def _is_evaluated(self, trainee: Trainee, step: int) -> bool:
        steps = step + 1
        ends = (self.fork_step, self.after_fork.plan.steps)
        return steps % trainee.plan.eval_every_steps == 0 or steps in ends

    def _take_step(self, trainee: Trainee, step: int, tokens: Tokens) -> None:
        started = time.perf_counter()
        state = trainee.state
        settings = trainee.settings
        tokens_per_step = self.after_fork.plan.tokens_per_step
        self._move_to(step)
        set_optimizer(trainee.optimizer, settings, learning_rate(settings, step))
        starts = sequence_starts(
            self.config.seed, step, settings.batch_size, settings.seq_len, len(tokens)
        )
        window = batch(tokens, starts, settings.seq_len)
        if self.observer is not None:
            self.observer.before(step)
        sequences = on_device(window, trainee.device)
        if self.reads_late:
            figures = self.whole_steps.take(trainee, sequences)
        else:
            figures = set_gradients(trainee, sequences, settings.grad_clip)
        self.unread.append(TakenStep(step, trainee, window, figures))
        model = self.config.model
        if step == self.first_step and not model.is_built_in:
            fault = weights_used_beside(state)
            if fault is not None:
                raise UserError(f"{named(model)}: {fault}")
        if (
            not self.reads_late
            or self._has_row(trainee, step)
            or self._is_evaluated(trainee, step)
            or len(self.unread) == READ_EVERY
        ):
            self._read()
        if self.observer is not None:
            stepped = time.perf_counter() - started
            self.observer.after()
            # the observer's time does not count for the speed
            started = time.perf_counter() - stepped
        state.tokens = (step + 1) * tokens_per_step
        reset = None if self.reads_late else take_step(trainee)
        sums: Any = self.sums
        sums["steps"] += 1
        sums["tokens"] += tokens_per_step
        sums["seconds"] += time.perf_counter() - started
        if reset is not None:
            sums["reset"] += sum(self.group.gathered(reset))

    def _move_to(self, step: int) -> None:
        state = self.after_fork.state
        state.step = step
        state.tokens = step * self.after_fork.plan.tokens_per_step

    def _read(self) -> None:
        """Read the figures of all steps since the last reading; raise if one diverged."""
        figures = read_figures(self.group, self.unread)
        sums: Any = self.sums
        for step, (loss, norm) in zip(self.unread, figures, strict=True):
            for name, value in (("loss", loss), ("gradient norm", norm)):
                if not math.isfinite(value):
                    self.whole_steps.forget()  # the replay needs the memory
                    self._move_to(step.number)
                    operand = first_bad_operand(step.trainee, step.window)
                    message = f"non-finite training {name}{operand}"
                    steps = step.number + 1
                    raise _DivergedError(message, in_step=step.number, steps=steps)
            sums["loss"] += loss
            sums["norm"] += norm
        self.unread.clear()

    def _write_row(self, trainee: Trainee, step: int) -> None:
        sums = self.sums
        row = {
            "kind": "train",
            "tokens": trainee.state.tokens,
            "step": step + 1,
            "lr": learning_rate(trainee.settings, step),
            "loss": sums["loss"] / sums["steps"],
            "grad_norm": sums["norm"] / sums["steps"],
            "tokens_per_sec": sums["tokens"] / sums["seconds"],
        }
        deoscillation = self.after_fork.deoscillation
        if deoscillation is not None and deoscillation.followed is not None:
            row["weights_reset"] = sums["reset"]
        self.on_metrics(row)
        sums.clear()

    def _evaluate(self, trainee: Trainee, step: int, tokens: Tokens) -> None:
        """Evaluate, and write the row; raise where validation diverged."""
        steps = step + 1
        losses = evaluate(trainee, tokens, self.whole_steps.summed_loss)
        val_loss = losses["val_loss"]
        if not math.isfinite(val_loss):
            message = "non-finite validation loss"
            raise _DivergedError(message, in_step=steps, steps=steps)
        finite = {name: loss for name, loss in losses.items() if math.isfinite(loss)}
        self.on_metrics(
            {"kind": "eval", "tokens": trainee.state.tokens, "step": steps, **finite}
        )
        settings = trainee.settings
        bound = divergence_bound(settings.divergence_loss, self.config.vocab_size)
        count = self.evaluations_above_bound + 1 if val_loss > bound else 0
        self.evaluations_above_bound = count
        if count >= settings.divergence_evals:
            above = f"validation loss above {bound:.3g} nats/token"
            message = f"{above} for {count} evaluations"
            raise _DivergedError(message, in_step=steps, steps=steps)

    def _save_if_due(self, step: int, *, stops: bool) -> None:
        trainee = self.after_fork
        checkpoints = self.checkpoints
        if checkpoints is None:
            if stops:
                self._read()
            return
        is_due = self.group.first(checkpoints.due(trainee.state.tokens))
        if not is_due and not stops:
            return
        self._read()
        numbers = {
            "evaluations_above_bound": self.evaluations_above_bound,
            "window": dict(self.sums),
        }
        snapshot = take_snapshot(
            trainee.module,
            trainee.optimizer,
            trainee.deoscillation,
            step=step + 1,
            numbers=numbers,
        )
        checkpoints.save(snapshot)
