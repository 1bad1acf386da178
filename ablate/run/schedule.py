"""Batch arithmetic and the learning rate, as pure functions of the configuration and the step.

Budgets, warm-up and evaluation intervals are given in tokens. They are rounded to whole optimizer steps only
here, so that planning and training agree.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ablate.run.config import ArmConfig, TrainingConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPlan:
    """The arithmetic of one run. ``tokens`` is the budget rounded up to whole steps.

    ``micro_batches``: forward passes per step, over all devices. ``metric_rows``: of training and evaluation.
    """

    tokens_per_step: int
    micro_batches: int
    steps: int
    tokens: int
    warmup_steps: int
    evals: int
    metric_rows: int
    eval_every_steps: int
    log_every_steps: int


def plan_steps(training: TrainingConfig, devices: int = 1) -> StepPlan:
    """Convert a token budget to whole steps; the last step completes the budget."""
    tokens_per_step = training.batch_size * training.seq_len
    steps = math.ceil(training.tokens / tokens_per_step)
    eval_every = min(steps, max(1, round(training.eval_every_tokens / tokens_per_step)))
    micro = training.micro_batch_size or training.batch_size // devices
    log_every, evals = max(1, eval_every // 10), math.ceil(steps / eval_every)
    return StepPlan(
        tokens_per_step=tokens_per_step,
        micro_batches=training.batch_size // micro,
        steps=steps,
        tokens=steps * tokens_per_step,
        warmup_steps=math.ceil(training.warmup_tokens / tokens_per_step),
        evals=evals,
        metric_rows=math.ceil(steps / log_every) + evals,
        eval_every_steps=eval_every,
        log_every_steps=log_every,
    )


def evaluated_in(config: ArmConfig) -> tuple[Literal["recipe", "bf16"], ...]:
    """Return what each evaluation of a run is done in, in order. One serves as both of a bf16 Fprop."""
    how, recipe = config.training.evaluate_in, config.recipe
    if how != "both":
        return (how,)
    untouched = all(part.fprop.is_untouched for part in recipe.parts)
    return ("recipe",) if untouched else ("recipe", "bf16")


def learning_rate(training: TrainingConfig, step: int) -> float:
    """Return the learning rate of optimizer step ``step``, counted from 0.

    Linear warm-up to the peak, then one of: constant; cosine to the end of the budget; or stable, then a
    linear decay over the last ``decay_tokens`` (warm-up–stable–decay).
    """
    plan = plan_steps(training)
    tokens = (step + 1) * plan.tokens_per_step
    peak = training.learning_rate
    if tokens < training.warmup_tokens:
        return peak * tokens / training.warmup_tokens
    if training.schedule == "constant":
        return peak
    floor = peak * training.final_lr_ratio
    if training.schedule == "cosine":
        span = max(1, training.tokens - training.warmup_tokens)
        done = min(1.0, (tokens - training.warmup_tokens) / span)
        return floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * done))
    left = max(0, training.tokens - tokens)
    if left >= training.decay_tokens:
        return peak
    return floor + (peak - floor) * left / training.decay_tokens


def decay_begins(training: TrainingConfig) -> int | None:
    """Return the tokens at which warm-up–stable–decay starts to decay; None for other schedules."""
    return training.tokens - training.decay_tokens if training.schedule == "wsd" else None


def steady_spans(
    training: Mapping[str, Any], switches: Iterable[float] = ()
) -> tuple[tuple[float, float], ...]:
    """Return the spans of tokens, from and to, in which the learning rate is known to be constant.

    ``training``: a section ``training`` or what a log tells of it; none without a schedule that we know.
    ``switches``: the tokens at which a recipe changes, where a span ends and the next begins.
    """
    schedule, start, end = training.get("schedule"), training.get("warmup_tokens") or 0, math.inf
    if schedule == "wsd":
        end = (training.get("tokens") or 0) - (training.get("decay_tokens") or 0)
    elif schedule != "constant":
        return ()
    places = [start, *sorted(at for at in switches if start < at < end), end]
    return tuple((low, high) for low, high in itertools.pairwise(places) if low < high)


def divergence_bound(divergence_loss: float | None, vocab_size: int) -> float:
    """Return the validation loss, in nats per token, from which a run counts as diverged.

    The default is 1.5 times the loss of a uniform guess.
    """
    return divergence_loss or 1.5 * math.log(vocab_size)
