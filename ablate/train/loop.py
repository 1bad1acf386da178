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

import numpy as np

from ablate.base.errors import UserError
from ablate.base.files import cache_folder
from ablate.data.batches import batch, sequence_starts
from ablate.layers.linear import weights_used_alone
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

    from ablate.layers.deoscillation import Deoscillation
    from ablate.recipes import Recipe
    from ablate.run.config import RunConfig
    from ablate.train.group import Group

Metrics = dict[str, Any]
TokenArrays = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]
End = Literal["finished", "diverged", "interrupted"]
READ_EVERY = 16
"""Steps after which a GPU's losses and norms are read at the latest."""
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

    unread: list[TakenStep] = []
    conditions: dict[str, Any] = {"devices": group.size, "observed": observer is not None}
    reads_late = why_read_at_once(config, device, **conditions) is None
    eager = why_eager(config, device, **conditions) or unproven(config, device, layout)
    whole_steps = WholeSteps(own, eager, layout.on_eager)

    def read() -> TrainResult | None:
        """Read the figures of all steps since the last reading; return how the run ended if one diverged."""
        bad = _read_up_to_divergence(group, unread, window)
        if bad is None:
            return None
        step, what = bad
        whole_steps.forget()  # the replay needs the memory
        state.step, state.tokens = step.number, step.number * plan.tokens_per_step
        where = first_bad_operand(step.trainee, step.window)
        return diverged(f"non-finite training {what}{where}", step.number, step.number + 1)

    for step in range(first, plan.steps):
        started = time.perf_counter()
        state.step, state.tokens = step, step * plan.tokens_per_step
        trainee = own if step >= fork_step else as_parent
        settings = trainee.settings
        rate = learning_rate(settings, step)
        set_optimizer(optimizer, settings, rate)
        starts = sequence_starts(config.seed, step, settings.batch_size, settings.seq_len, len(train_tokens))
        tokens_of_step = batch(train_tokens, starts, settings.seq_len)
        if observer is not None:
            observer.before(step)
        sequences = on_device(tokens_of_step, device)
        if reads_late:
            figures = whole_steps.take(trainee, sequences)
        else:
            figures = set_gradients(trainee, sequences, settings.grad_clip)
        unread.append(TakenStep(number=step, trainee=trainee, window=tokens_of_step, figures=figures))
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
        reset = None if reads_late else take_step(trainee)
        sums: dict[str, Any] = {
            "steps": 1, "tokens": plan.tokens_per_step,
            "seconds": time.perf_counter() - started,
            "reset": 0 if reset is None else sum(group.gathered(reset)),
        }  # fmt: skip
        window.update(sums)

        if has_row:
            row = {"kind": "train", "tokens": seen, "step": done, "lr": rate}
            on_metrics(row | _figures_of_row(window, own.deoscillation))
            window.clear()
        if is_evaluated:
            losses = evaluate(trainee, validation_tokens, whole_steps.summed_loss)
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


def _figures_of_row(window: Counter[str], deoscillation: Deoscillation | None) -> Metrics:
    """Turn the sums since the last training row into its figures."""
    figures = {
        "loss": window["loss"] / window["steps"],
        "grad_norm": window["norm"] / window["steps"],
        "tokens_per_sec": window["tokens"] / window["seconds"],
    }
    if deoscillation is not None and deoscillation.followed is not None:
        figures["weights_reset"] = window["reset"]
    return figures


def _read_up_to_divergence(
    group: Group, unread: list[TakenStep], window: Counter[str]
) -> tuple[TakenStep, str] | None:
    """Add the figures of steps to ``window``; return the first that diverged, and what was not finite."""
    for step, (loss, norm) in zip(unread, read_figures(group, unread), strict=True):
        if not math.isfinite(loss):
            return step, "loss"
        if not math.isfinite(norm):
            return step, "gradient norm"
        window.update({"loss": loss, "norm": norm})
    unread.clear()
    return None
