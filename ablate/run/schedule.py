"""The steps of a run: batch arithmetic, the learning rate, and the first steps that runs have in common.

Budgets, warm-up and evaluation intervals are given in tokens. They are rounded to whole optimizer steps only
here, so that planning and training agree.

Training is exact: runs of one seed that use the same up to a step have the same state and the same rows
there, to the bit. They part at a fork, or when a later part of one of them begins (``Recipe.later``). So one
of them trains the common steps, and the others start from its checkpoint. The evaluation after a step already
uses the recipe of the next step; so the last common step is one before the last with equal states. Runs that
may differ share nothing: with a trainer of their own, on other devices, or with delayed scales, whose history
belongs to one recipe.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

from ablate.recipes import Deoscillate, Phase, Recipe

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from ablate.run.config import ArmConfig, ResourcesConfig, RunConfig, TrainingConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPlan:
    """The arithmetic of one run. ``tokens`` is the budget rounded up to whole steps.

    ``micro_batches``: forward passes per step, over all devices. ``metric_rows``: of training and evaluation.
    """

    tokens_per_step: int
    micro_batches: int
    steps: int
    tokens: int
    evals: int
    metric_rows: int
    eval_every_steps: int
    log_every_steps: int


def plan_steps(training: TrainingConfig, devices: int = 1) -> StepPlan:
    """Convert a token budget to whole steps; the last step completes the budget.

    >>> from ablate.run.config import TrainingConfig
    >>> plan = plan_steps(TrainingConfig(tokens=100_000, batch_size=8, seq_len=128))
    >>> plan.steps, plan.tokens
    (98, 100352)
    """
    tokens_per_step = training.batch_size * training.seq_len
    steps = math.ceil(training.tokens / tokens_per_step)
    eval_every = min(steps, max(1, round(training.eval_every_tokens / tokens_per_step)))
    micro = training.micro_batch_size or training.batch_size // devices
    log_every = max(1, eval_every // 10)
    evals = math.ceil(steps / eval_every)
    return StepPlan(
        tokens_per_step=tokens_per_step,
        micro_batches=training.batch_size // micro,
        steps=steps,
        tokens=steps * tokens_per_step,
        evals=evals,
        metric_rows=math.ceil(steps / log_every) + evals,
        eval_every_steps=eval_every,
        log_every_steps=log_every,
    )


def evaluated_in(config: ArmConfig) -> tuple[Literal["recipe", "bf16"], ...]:
    """Return what linear layers run in at each evaluation, in order; one if ``both`` would be equal."""
    evaluate_in = config.training.evaluate_in
    if evaluate_in != "both":
        return (evaluate_in,)
    if all(part.fprop.is_untouched for part in config.recipe.parts):
        return ("recipe",)
    return ("recipe", "bf16")


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
        progress = min(1.0, (tokens - training.warmup_tokens) / span)
        return floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * progress))
    remaining = max(0, training.tokens - tokens)
    if remaining >= training.decay_tokens:
        return peak
    return floor + (peak - floor) * remaining / training.decay_tokens


def decay_begins(training: TrainingConfig) -> int | None:
    """Return the tokens at which warm-up–stable–decay starts to decay; None for other schedules."""
    if training.schedule == "wsd":
        return training.tokens - training.decay_tokens
    return None


def steady_spans(
    training: Mapping[str, Any], switches: Iterable[float] = ()
) -> tuple[tuple[float, float], ...]:
    """Return the spans of tokens, from and to, in which the learning rate is known to be constant.

    ``training``: a section ``training``, or what a log says of it; no span for cosine or an unknown schedule.
    ``switches``: the tokens at which a recipe changes; there a span ends and the next begins.
    """
    start = training.get("warmup_tokens") or 0
    if training.get("schedule") == "wsd":
        end = (training.get("tokens") or 0) - (training.get("decay_tokens") or 0)
    elif training.get("schedule") == "constant":
        end = math.inf
    else:
        return ()
    places = [
        start,
        *sorted(tokens for tokens in switches if start < tokens < end),
        end,
    ]
    return tuple((low, high) for low, high in itertools.pairwise(places) if low < high)


def divergence_bound(divergence_loss: float | None, vocab_size: int) -> float:
    """Return the validation loss, in nats per token, from which a run counts as diverged.

    The default is 1.5 times the loss of a uniform guess.
    """
    return divergence_loss or 1.5 * math.log(vocab_size)


@dataclass(frozen=True, kw_only=True, slots=True)
class Prefix:
    """The first ``step`` steps (``tokens`` tokens) that runs have in common. ``key``: a hash of all they use.

    ``holder``: the id of the run that trains them first.
    """

    key: str
    step: int
    tokens: int
    holder: str


def shared_prefixes(
    runs: Iterable[tuple[str, RunConfig, ResourcesConfig]],
    *,
    salt: str = "",
    is_there: Callable[[str], bool] = lambda _key: False,
    can_hold: Callable[[str, int], bool] = lambda _run, _step: True,
) -> dict[str, Prefix]:
    """Return each run's longest prefix that an earlier run trains, too, or whose state exists already.

    A run without one is left out. ``salt``: what else must be equal, for the keys. ``is_there(key)``: whether
    the state exists. ``can_hold(run_id, step)``: whether that run can give others its state after the step.
    """
    sharing = [
        (run_id, config, resources)
        for run_id, config, resources in runs
        if config.trainer is None
        and not _has_history(config.recipe)
        and not (config.fork and _has_history(config.fork.recipe))
    ]
    cuts: dict[int, set[int]] = defaultdict(set)
    for _, config, _ in sharing:
        cuts[config.seed] |= _last_common_steps(config)
    holders: dict[str, str] = {}
    prefixes: dict[str, Prefix] = {}
    for run_id, config, resources in sharing:
        batches = plan_steps(config.training)
        for step in sorted(cuts[config.seed], reverse=True):
            if step >= batches.steps:
                continue
            key = _key(config, resources, step, salt)
            is_longest = run_id not in prefixes
            if is_longest and (key in holders or is_there(key)):
                tokens = step * batches.tokens_per_step
                holder = holders.get(key, run_id)
                prefixes[run_id] = Prefix(
                    key=key, step=step, tokens=tokens, holder=holder
                )
            if key not in holders and can_hold(run_id, step):
                holders[key] = run_id
    return prefixes


@lru_cache(maxsize=4096)
def _has_history(recipe: Recipe) -> bool:
    return any(
        policy.scale == "delayed" for part in recipe.parts for policy in part.policies
    )


def _last_common_steps(config: RunConfig) -> set[int]:
    """One before each change of a run: its fork, and each part that begins later."""
    plan = plan_steps(config.training)
    starts = {part.start(plan.tokens) for part in config.recipe.later}
    if config.fork is not None:
        fork_tokens = config.fork.tokens
        parent_tokens = plan_steps(config.fork.training).tokens
        of_parent = {part.start(parent_tokens) for part in config.fork.recipe.later}
        starts = {start for start in starts if start > fork_tokens}
        starts |= {start for start in of_parent if start < fork_tokens} | {fork_tokens}
    steps = {math.ceil(start / plan.tokens_per_step) - 1 for start in starts}
    return {step for step in steps if step > 0}


def _key(config: RunConfig, resources: ResourcesConfig, step: int, salt: str) -> str:
    """Hash all that a run's first ``step`` steps use."""
    tokens = step * plan_steps(config.training).tokens_per_step
    run = config
    fork = ""
    if config.fork is not None:
        if tokens < config.fork.tokens:
            assert config.parent is not None
            run = config.parent
        else:
            fork = config.fork.text
    content = [
        salt, step, run.seed, run.model.text, run.data_digest, run.vocab_size, run.code_digest, run.backend,
        run.training.text, fork, _until(run.recipe, plan_steps(run.training).tokens, tokens).text,
        resources.devices_per_run, resources.cpus, math.ceil(resources.num_gpus),
    ]  # fmt: skip
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


@lru_cache(maxsize=4096)
def _until(recipe: Recipe, total_tokens: int, tokens: int) -> Recipe:
    """Drop the later parts that have not begun after ``tokens``; the others get their starts in tokens."""
    parts = [
        replace(part, from_tokens=part.start(total_tokens), from_fraction=None)
        for part in recipe.later
        if part.start(total_tokens) <= tokens
    ]
    phases = tuple(part for part in parts if isinstance(part, Phase))
    deoscillate = next((part for part in parts if isinstance(part, Deoscillate)), None)
    return replace(recipe, phases=phases, deoscillate=deoscillate)


def schedule_text(training: TrainingConfig) -> str:
    """Describe the learning rate schedule in one line."""
    peak = f"{training.learning_rate:g}"
    final = f"{training.learning_rate * training.final_lr_ratio:g}"
    if training.warmup_tokens:
        text = f"linear warm-up over {training.warmup_tokens:,} tokens, then "
    else:
        text = ""
    if training.schedule == "constant":
        return f"{text}constant at {peak}"
    if training.schedule == "cosine":
        return f"{text}cosine from {peak} to {final} at the end of the budget"
    return f"{text}{peak}, and linear decay to {final} over the last {training.decay_tokens:,} tokens"
