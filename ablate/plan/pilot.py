"""What two runs of the baseline say of a study: which target to take, how many seeds, how long it takes.

Pure: curves, a plan and speeds in; advice out. The target is where both runs have passed it with room for
slower arms. Two runs tell the spread badly, so the findings' is used where theirs is smaller.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from ablate.plan.estimate import estimate
from ablate.plan.seeds import SPREAD, cost_found
from ablate.run.local_fit import LocalFit
from ablate.run.outcome import outcomes
from ablate.run.schedule import decay_begins, steady_spans
from ablate.store.plan_file import LockedRun

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ablate.plan.plan import Plan, PlannedArm, StudyProgress

SHARES = (0.7, 0.6, 0.5)
"""Where in the budget the target is looked for: at 0.7 an arm may need 43 % more tokens."""
ENOUGH_ROOM = 0.15
COSTS = (0.2, 0.1, 0.05, 0.03)
"""Sizes of effect, as token costs."""
MOST_SEEDS = 30
PAIRED = 0.7
"""Spread of the log ratio of two runs of a seed over that of an arm's runs: 3.5 of 5.1 % in docs/findings."""
_FEWEST_EVALS = 4
_RANGE_OF_TWO = (0.446, 31.9)
"""A spread of two runs times these is its 95 % range: sqrt(1 / χ²) at 97.5 % and 2.5 % of one degree."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """The evaluations of one run of the baseline; losses in nats per token."""

    seed: int
    tokens: Sequence[float]
    val_loss: Sequence[float]
    diverged: bool = False


@dataclass(frozen=True, kw_only=True)
class Reached:
    """A loss in nats per token and the tokens after which each run has it, by seed.

    ``room``: the share of more tokens than the slower run that an arm may need within the budget.
    """

    val_loss: float
    tokens: dict[int, float]
    room: float


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Standard deviation of log tokens to target over seeds, of two runs, and its 95 % range.

    ``pairs``: what is counted with for the log ratio of an arm's and the baseline's run, never less than the
    findings'.
    """

    runs: float
    low: float
    high: float
    pairs: float


@dataclass(frozen=True, kw_only=True)
class SeedsFor:
    """How many seeds find a token cost in four of five comparisons, None for more than 30.

    ``seconds``: wall time of what the study then still has to run.
    """

    cost: float
    seeds: int | None
    seconds: float | None


@dataclass(frozen=True, kw_only=True)
class Advice:
    """What the pilot says. ``own``: the study's own target, None where it has none or a run misses it.

    ``take``: the target to take, ``own`` where that has room. ``why_not``: why there is none.
    ``seconds``: wall time of the rest of the study with its own seeds. ``slower``: time of an arm's tokens
    over the baseline's, where it was measured. ``emulated``: whether some of that was emulation.
    ``may_end_sooner``: whether a rule of the study may do with fewer seeds.
    """

    study: str
    baseline: str
    seeds: int
    has_target: bool
    own: Reached | None
    take: Reached | None
    why_not: str | None
    spread: Spread | None
    needed: tuple[SeedsFor, ...]
    seconds: float | None
    slower: dict[str, float]
    emulated: bool = False
    may_end_sooner: bool = False


def advise(plan: Plan, curves: Sequence[Curve], progress: StudyProgress, *, cores: int) -> Advice:
    """Say what the baseline's runs mean for the study.

    ``progress``: with the speeds of all arms that are known.
    """
    base = plan.arm(plan.baseline)
    why_not = _unusable(curves)
    own = take = None
    if why_not is None:
        if plan.target is not None:
            own = _reached(plan, base, curves, plan.target.val_loss)
        take = own if own is not None and own.room >= ENOUGH_ROOM else _target(plan, base, curves)
        if take is None:
            why_not = (
                "the runs do not fall steadily below a guess: train longer, or with another learning rate"
            )
    spread = None if take is None else _spread(list(take.tokens.values()), paired=plan.paired_seeds)
    speeds = progress.tokens_per_sec
    slower = {name: speeds[base.name] / speed for name, speed in speeds.items() if base.name in speeds}
    return Advice(
        study=plan.study,
        baseline=base.name,
        seeds=len(base.runs),
        has_target=plan.target is not None,
        own=own,
        take=take,
        why_not=why_not,
        spread=spread,
        needed=() if spread is None else _needed(plan, spread.pairs, progress, cores),
        seconds=estimate(plan, progress, cores=cores).wall_seconds,
        slower=slower,
        may_end_sooner=plan.stop is not None,
    )


def _unusable(curves: Sequence[Curve]) -> str | None:
    for curve in curves:
        if curve.diverged:
            return f"seed {curve.seed} diverged: lower the learning rate, or warm up longer"
        if len(curve.tokens) < _FEWEST_EVALS:
            return f"seed {curve.seed} has {len(curve.tokens)} evaluations: evaluate more often"
    return None


def _reached(plan: Plan, base: PlannedArm, curves: Sequence[Curve], loss: float) -> Reached | None:
    """Return when the runs reach a loss, counted as the report does; None where one does not."""
    origin = 0 if base.fork is None else base.fork.tokens
    rule = "confirmed" if plan.target is None else plan.target.crossing
    found: dict[int, float] = {}
    for curve in curves:
        spans = () if base.config.recipe.later else steady_spans(asdict(base.config.training))
        fit = LocalFit(curve.tokens, curve.val_loss, spans)
        end = outcomes(
            seed=curve.seed, tokens=curve.tokens, loss=curve.val_loss, targets=(loss,), rule=rule, fit=fit
        )[0].after(origin)
        if not end.exact:
            return None
        found[curve.seed] = end.high
    return Reached(val_loss=loss, tokens=found, room=(_end(base) - origin) / max(found.values()) - 1)


def _end(base: PlannedArm) -> int:
    """Return the tokens after which a crossing says nothing: where the rate decays, else the budget."""
    return decay_begins(base.config.training) or base.batches.tokens


def _target(plan: Plan, base: PlannedArm, curves: Sequence[Curve]) -> Reached | None:
    """Return the loss of the slower run at 0.7 of the budget, or earlier if that is no crossing."""
    origin = 0 if base.fork is None else base.fork.tokens
    for share in SHARES:
        at = origin + share * (_end(base) - origin)
        loss = math.ceil(max(_loss_at(curve, at) for curve in curves) * 1000) / 1000
        if loss < math.log(base.config.vocab_size) and (found := _reached(plan, base, curves, loss)):
            return found
    return None


def _loss_at(curve: Curve, at: float) -> float:
    """Interpolate in ln tokens between the evaluations around a place."""
    points = list(zip(curve.tokens, curve.val_loss, strict=True))
    after = next((i for i, (tokens, _) in enumerate(points) if tokens >= at), len(points) - 1)
    if after == 0:
        return points[0][1]
    (before, high), (then, low) = points[after - 1], points[after]
    share = math.log(at / before) / math.log(then / before)
    return high + (low - high) * min(1.0, share)


def _spread(reached: Sequence[float], *, paired: bool) -> Spread:
    runs = abs(math.log(reached[0] / reached[1])) / math.sqrt(2)
    low, high = (runs * factor for factor in _RANGE_OF_TWO)
    pairs = max(SPREAD, PAIRED * runs) if paired else math.sqrt(2) * max(SPREAD / PAIRED, runs)
    return Spread(runs=runs, low=low, high=high, pairs=pairs)


def _needed(plan: Plan, spread: float, progress: StudyProgress, cores: int) -> tuple[SeedsFor, ...]:
    arms = max(1, len(plan.arms) - 1)
    found = {
        n: cost_found(n, arms, moderated=plan.intervals == "moderated", spread=spread)
        for n in range(2, MOST_SEEDS + 1)
    }
    rows = []
    for cost in COSTS:
        seeds = next((n for n, least in found.items() if least is not None and least <= cost), None)
        seconds = None if seeds is None else estimate(_of(plan, seeds), progress, cores=cores).wall_seconds
        rows.append(SeedsFor(cost=cost, seeds=seeds, seconds=seconds))
    return tuple(rows)


def _of(plan: Plan, seeds: int) -> Plan:
    """Return the plan with so many seeds of each arm; runs beyond its own are to do."""

    def runs(arm: PlannedArm) -> tuple[LockedRun, ...]:
        more = range(len(arm.runs), seeds)
        return (*arm.runs[:seeds], *(LockedRun(id=f"{arm.name} {n}", seed=n) for n in more))

    return replace(plan, arms=tuple(replace(arm, runs=runs(arm)) for arm in plan.arms))


def with_target(text: str, line: int, target: Reached) -> str | None:
    """Return the text of a study with the target in the place of ``target: null`` in this line, from 1.

    None where the line says something else. All other lines stay as they are.
    """
    lines = text.splitlines(keepends=True)
    key, _, rest = lines[line - 1].partition(":")
    if key != "target" or rest.partition("#")[0].strip() not in ("", "null", "~"):
        return None
    tokens = " and ".join(f"{tokens:,.0f}" for tokens in target.tokens.values())
    said = f"nats per token; two runs of the baseline reach it after {tokens} tokens (ablate pilot)"
    lines[line - 1] = f"target: {{val_loss: {target.val_loss:g}}}  # {said}\n"
    return "".join(lines)


def merged_speeds(progress: StudyProgress, baseline: str, timed: Mapping[str, float]) -> StudyProgress:
    """Return the progress with the speeds of arms that have no run yet, from their ratio to the baseline's.

    ``timed``: tokens per second of a short measurement; the baseline's own runs say how fast it really is.
    """
    runs = progress.tokens_per_sec
    if baseline not in runs or baseline not in timed:
        return progress
    scale = runs[baseline] / timed[baseline]
    return replace(progress, tokens_per_sec={name: speed * scale for name, speed in timed.items()} | runs)
