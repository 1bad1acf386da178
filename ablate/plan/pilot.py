"""What two runs of the baseline say of a study: which target to take, how many seeds, how long it takes.

Pure: curves, a plan and speeds in; advice out. Both runs reach the target so early that slower arms have room
to reach it. Two runs tell little of the spread, and arms in FP4 spread more: that of docs/findings' arms is
used where theirs is smaller.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from ablate.plan.estimate import estimate, pair_spread, seeds_for
from ablate.run.outcome import LocalFit, outcomes
from ablate.run.schedule import decay_begins, steady_spans
from ablate.store.plan_file import LockedRun

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ablate.plan.plan import Plan, PlannedArm, StudyProgress

SHARES = (0.7, 0.6, 0.5)
"""Where in the budget the target is looked for: at 0.7 an arm may need 43 % more tokens."""
ENOUGH_ROOM = 0.15
COSTS = (0.2, 0.1, 0.05, 0.03)
"""Sizes of effect, as token costs."""
PAIRED = 0.85
"""Spread of the log ratio of one seed's two runs over that of an arm's runs; docs/findings: 4.4 of 5.2 %."""
_FEWEST_EVALS = 4


@dataclass(frozen=True, kw_only=True)
class PilotRun:
    """The evaluations of one run of the baseline."""

    seed: int
    tokens: Sequence[float]
    val_loss: Sequence[float]
    diverged: bool = False


@dataclass(frozen=True, kw_only=True)
class Reached:
    """A loss, and the tokens after which each run reaches it, by seed.

    ``room``: how many more tokens than the slower run an arm may need within the budget, as a share.
    """

    val_loss: float
    tokens: dict[int, float]
    room: float


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Standard deviation of log tokens to target over seeds, of two runs.

    ``pairs``: the spread assumed for the log ratio of an arm's run to the baseline's, at least that of
    docs/findings; ``is_own``: whether the two runs' own is larger.
    """

    runs: float
    pairs: float
    is_own: bool


@dataclass(frozen=True, kw_only=True)
class SeedsFor:
    """How many seeds find a token cost in four of five comparisons, None for more than 30.

    ``seconds``: wall time of the rest of the study with so many seeds; None if unknown.
    """

    cost: float
    seeds: int | None
    seconds: float | None


@dataclass(frozen=True, kw_only=True)
class Advice:
    """What the pilot says. ``own``: the study's own target, None if it has none or a run misses it.

    ``take``: the target to take, ``own`` if that has room. ``why_not``: why there is none.
    ``seconds``: wall time of the rest of the study with its own seeds. ``slower``: time per token over the
    baseline's, by arm, where it was measured. ``emulated``: whether some of that was emulation.
    ``may_end_sooner``: whether the study has a stop rule, which can save seeds.
    """

    study: str
    baseline: str
    seeds: int
    loss_unit: str
    has_target: bool
    own: Reached | None
    take: Reached | None
    why_not: str | None
    spread: Spread | None
    needed: tuple[SeedsFor, ...]
    seconds: float | None
    slower: dict[str, float]
    emulated: bool
    may_end_sooner: bool


def advise(
    plan: Plan,
    runs: Sequence[PilotRun],
    progress: StudyProgress,
    *,
    cores: int,
    emulated: bool = False,
) -> Advice:
    """Say what the baseline's runs mean for the study.

    ``progress``: with all known speeds of arms; ``emulated``: whether an arm was emulated.
    """
    base = plan.arm(plan.baseline)
    at_own_target: Reached | None = None
    take: Reached | None = None
    why_not = _without_advice(runs)
    if why_not is None:
        if plan.target is not None:
            at_own_target = _reached(plan, base, runs, plan.target.val_loss)
        if at_own_target is not None and at_own_target.room >= ENOUGH_ROOM:
            take = at_own_target
        else:
            take = _target(plan, base, runs)
        if take is None:
            why_not = "the runs do not fall steadily below a guess: train longer, or at another learning rate"
    spread: Spread | None = None
    needed: tuple[SeedsFor, ...] = ()
    if take is not None:
        spread = _spread(take, pair_spread(plan), is_paired=plan.paired_seeds)
        needed = tuple(_needed(plan, spread.pairs, progress, cores))
    speeds = progress.tokens_per_sec
    slower = {}
    if base.name in speeds:
        slower = {name: speeds[base.name] / speed for name, speed in speeds.items()}
    return Advice(
        study=plan.study,
        baseline=base.name,
        seeds=len(base.runs),
        loss_unit=plan.unit,
        has_target=plan.target is not None,
        own=at_own_target,
        take=take,
        why_not=why_not,
        spread=spread,
        needed=needed,
        seconds=estimate(plan, progress, cores=cores).wall_seconds,
        slower=slower,
        emulated=emulated,
        may_end_sooner=plan.stop is not None,
    )


def _without_advice(runs: Sequence[PilotRun]) -> str | None:
    """Return why the runs say nothing; None if they do."""
    for run in runs:
        if run.diverged:
            return (
                f"seed {run.seed} diverged: lower the learning rate, or warm up longer"
            )
        if len(run.tokens) < _FEWEST_EVALS:
            return f"seed {run.seed} has {len(run.tokens)} evaluations: evaluate more often"
    return None


def _spread(reached: Reached, least: float, *, is_paired: bool) -> Spread:
    first, second = reached.tokens.values()
    over_runs = abs(math.log(first / second)) / math.sqrt(2)
    pairs = max(least, PAIRED * over_runs)
    is_own = pairs > least
    if not is_paired:
        pairs *= math.sqrt(2) / PAIRED
    return Spread(runs=over_runs, pairs=pairs, is_own=is_own)


def _reached(
    plan: Plan, base: PlannedArm, runs: Sequence[PilotRun], loss: float
) -> Reached | None:
    """Count as the report does when the runs reach a loss; None if one of them does not."""
    origin, end_of_all = _counted(base)
    rule = "confirmed" if plan.target is None else plan.target.crossing
    spans = steady_spans(asdict(base.config.training))
    if base.config.recipe.later:
        spans = ()
    tokens: dict[int, float] = {}
    for run in runs:
        (outcome,) = outcomes(
            tokens=run.tokens,
            loss=run.val_loss,
            seed=run.seed,
            targets=(loss,),
            rule=rule,
            fit=LocalFit(tokens=run.tokens, loss=run.val_loss, spans=spans),
        )
        outcome = outcome.after(origin)
        if not outcome.exact:
            return None
        tokens[run.seed] = outcome.high
    room = (end_of_all - origin) / max(tokens.values()) - 1
    return Reached(val_loss=loss, tokens=tokens, room=room)


def _counted(base: PlannedArm) -> tuple[int, int]:
    """Return the tokens from which costs count, and those until which crossings do: then the rate decays."""
    origin = 0 if base.fork is None else base.fork.tokens
    return origin, decay_begins(base.config.training) or base.tokens


def _target(plan: Plan, base: PlannedArm, runs: Sequence[PilotRun]) -> Reached | None:
    """Return the loss of the slower run at 0.7 of the budget, or earlier if that is no crossing."""
    origin, end = _counted(base)
    for share in SHARES:
        log_tokens = math.log(origin + share * (end - origin))
        losses = [
            np.interp(log_tokens, np.log(run.tokens), run.val_loss) for run in runs
        ]
        loss = math.ceil(max(losses) * 1000) / 1000
        if loss < math.log(base.config.vocab_size):
            reached = _reached(plan, base, runs, loss)
            if reached is not None:
                return reached
    return None


def _needed(
    plan: Plan, spread: float, progress: StudyProgress, cores: int
) -> Iterator[SeedsFor]:
    """Yield how many seeds find each size of effect, and how long the study takes with them."""
    arms = max(1, len(plan.arms) - 1)
    for cost in COSTS:
        seeds = seeds_for(cost, arms, moderated=plan.is_moderated, spread=spread)
        seconds = None
        if seeds is not None:
            costs = estimate(_with_seeds(plan, seeds), progress, cores=cores)
            seconds = costs.wall_seconds
        yield SeedsFor(cost=cost, seeds=seeds, seconds=seconds)


def _with_seeds(plan: Plan, seeds: int) -> Plan:
    """Return the plan with so many seeds; runs beyond the planned ones are still to do."""
    arms = []
    for arm in plan.arms:
        more = [
            LockedRun(id=f"{arm.name} {seed}", seed=seed)
            for seed in range(len(arm.runs), seeds)
        ]
        arms.append(replace(arm, runs=(*arm.runs[:seeds], *more)))
    return replace(plan, arms=tuple(arms))


def with_target(text: str, line: int, target: Reached, unit: str) -> str | None:
    """Replace ``target: null`` in a line (counted from 1) of a study's text by the target.

    None if the line says something else. All other lines stay as they are.
    """
    lines = text.splitlines(keepends=True)
    key, _, rest = lines[line - 1].partition(":")
    if key != "target" or rest.partition("#")[0].strip() not in ("", "null", "~"):
        return None
    tokens = " and ".join(f"{tokens:,.0f}" for tokens in target.tokens.values())
    comment = f"{unit}; two runs of the baseline reach it after {tokens} tokens (ablate pilot)"
    lines[line - 1] = f"target: {{val_loss: {target.val_loss:g}}}  # {comment}\n"
    return "".join(lines)
