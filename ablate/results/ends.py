"""How each run of a study has ended, counted from one place, and the comparisons that a study holds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from ablate.results.losses import Curve
from ablate.run.outcome import End, LocalFit, Outcome, outcome
from ablate.run.schedule import steady_spans

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from ablate.results.frames import StudyFrames
    from ablate.store.plan_file import GroupTuning, LockedPlan, LockedTuning
    from ablate.store.records import RecordedConfig


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """One run: how it stands (``state``), its curve, and how it ended with regard to the target.

    ``tokens`` trained of the ``budget``, in tokens as well. ``unused``: of an arm that was stopped early, it
    counts for nothing.
    """

    run_id: str
    arm: str
    seed: int
    state: str
    curve: Curve
    outcome: Outcome
    tokens: int
    budget: int
    message: str | None
    seconds: float | None
    tokens_per_sec: float | None
    devices: int
    backend_mode: str | None
    unused: bool = False

    @property
    def end(self) -> End:
        """How it ended with regard to the target."""
        return "unused" if self.unused else self.outcome.end

    @property
    def tokens_to_target(self) -> float | None:
        """None without a hit."""
        return self.outcome.high if self.end == "hit" else None

    @property
    def interpolated(self) -> float | None:
        """The crossing between two evaluations, in tokens."""
        return None if self.unused else self.outcome.interpolated

    @property
    def fitted(self) -> float | None:
        """The crossing of the local fit, in tokens."""
        return None if self.unused else self.outcome.fitted

    @property
    def left_bound(self) -> bool:
        """Whether it reached the target at or before its first evaluation."""
        return self.end == "hit" and not self.outcome.exact

    @property
    def last_loss(self) -> float | None:
        """Nats per token."""
        return float(self.curve.loss[-1]) if len(self.curve.loss) else None


def number_in(value: Any) -> float | None:
    """Return a number out of a data frame's cell, None where it is empty."""
    return None if value is None or pd.isna(value) else float(value)


def run_ends(frames: StudyFrames, apart: Collection[str], origin: int = 0) -> Iterator[RunResult]:
    """Yield how each run has ended, in the order of the plan; those ``apart`` are no results.

    ``origin``: the tokens from which those to target are counted; what lies before is left out.
    """
    target = frames.plan.target
    steady = {arm: _steady(config) for arm, config in frames.configs.items()}
    whole_steps = {arm.name: arm.tokens for arm in frames.plan.arms}
    evals = {str(run_id): group for run_id, group in frames.evals.groupby("run_id", sort=False)}
    for row in frames.runs.to_dict("records"):
        run_id, arm, state = (str(row[key]) for key in ("run_id", "arm", "state"))
        group = evals.get(run_id, frames.evals.iloc[:0])
        tokens = group["tokens"].to_numpy(dtype=np.int64)
        loss = group["val_loss"].to_numpy(dtype=float)
        tokens, loss = tokens[tokens >= origin], loss[tokens >= origin]
        fit = LocalFit(tokens, loss, [(max(start, origin), end) for start, end in steady.get(arm, ())])
        budget = number_in(row["budget_tokens"]) or 0.0
        end = outcome(
            seed=int(row["seed"]),
            state="set apart" if run_id in apart else state,
            tokens=tokens,
            loss=loss,
            target=None if target is None else target.val_loss,
            rule="confirmed" if target is None else target.crossing,
            budget_tokens=budget,
            fit=fit,
        ).after(origin)
        curve = Curve(
            run_id=run_id,
            arm=arm,
            seed=end.seed,
            end=end.end,
            tokens=tokens,
            loss=loss,
            fit=fit,
            origin=origin,
        )
        started, ended = number_in(row["started_unix"]), number_in(row["ended_unix"])
        environment = frames.environments.get(run_id)
        yield RunResult(
            run_id=run_id,
            arm=arm,
            seed=end.seed,
            state=state,
            curve=curve,
            outcome=end,
            # The status tells it at the end of an attempt; an evaluation may be later than a killed one's.
            tokens=max(int(row["tokens"]), int(tokens[-1]) if len(tokens) else 0),
            budget=int(whole_steps[arm] or budget),
            message=row["message"] if isinstance(row["message"], str) else None,
            seconds=None if started is None or ended is None else ended - started,
            tokens_per_sec=number_in(row["tokens_per_sec"]),
            devices=(environment and environment.world_size) or 1,
            backend_mode=row["backend_mode"] if isinstance(row["backend_mode"], str) else None,
        )


def _steady(config: RecordedConfig) -> tuple[tuple[float, float], ...]:
    """Return the spans of tokens in which nothing of an arm's training changes, as far as it is known."""
    if config.whole.get("trainer") is not None:  # the user's own, which may follow another schedule
        return ()
    training, recipe = config.training or {}, config.recipe or {}
    total = training.get("tokens") or 0
    phases = [*(recipe.get("phases") or ()), *filter(None, [recipe.get("deoscillate")])]
    switches = [
        phase.get("from_tokens") or round((phase.get("from_fraction") or 0.0) * total) for phase in phases
    ]
    fork = config.whole.get("fork")
    if isinstance(fork, dict) and isinstance(fork.get("tokens"), int):
        switches.append(fork["tokens"])
    return steady_spans(training, switches)


def origins(plan: LockedPlan) -> dict[int, frozenset[str]]:
    """Return the tokens from which costs are counted, 0 among them, with the arms that are compared so."""
    found: dict[int, set[str]] = {0: set()}
    for arm in plan.arms:
        found.setdefault(plan.counted_from(arm.name), set()).add(arm.name)
    return {origin: frozenset(names) for origin, names in found.items()}


def is_paired(plan: LockedPlan, origin: int) -> bool:
    """Whether arms are compared seed by seed: as declared, and always where runs share their beginning."""
    return plan.paired_seeds or origin > 0


def comparisons(frames: StudyFrames) -> tuple[StudyFrames, ...]:
    """Return the study; of one whose arms were tuned, the study at its own values and at those found."""
    tuning = frames.plan.tuning
    if tuning is None or not tuning.done:
        return (frames,)
    return tuple(_part(frames, tuning, names) for names in ({one: one for one in tuning.tuned}, tuning.tuned))


def _part(frames: StudyFrames, tuning: LockedTuning, names: Mapping[str, str]) -> StudyFrames:
    """Return a part of a study: ``names`` maps each arm to the one that stands in for it.

    All configurations get the baseline's tuned values, so that steps of one GEMM are still found.
    """
    plan = frames.plan
    values = {}
    for name, stand_in in names.items():
        group = group_of(tuning, plan, name)
        values[name] = group.shared if stand_in == name else group.chosen or {}
    usual = values[plan.baseline]
    fields = {f"training.{field}" for field in tuning.fields}
    arms = []
    for name, stand_in in names.items():
        arm = plan.arm(stand_in)
        kept = {key: pair for key, pair in arm.differs.items() if key not in fields}
        own = values[name]
        changed = {f"training.{key}": (usual[key], own[key]) for key in own if own[key] != usual[key]}
        arms.append(replace(arm, folded=plan.arm(name).folded, differs=kept | changed))
    wanted = {run.id for arm in arms for run in arm.runs}
    return replace(
        frames,
        plan=replace(plan, arms=tuple(arms), baseline=names[plan.baseline]),
        runs=frames.runs[frames.runs["run_id"].isin(wanted)],
        evals=frames.evals[frames.evals["run_id"].isin(wanted)],
        configs={
            arm: config.with_training(**usual)
            for arm, config in frames.configs.items()
            if arm in names.values()
        },
        environments={key: value for key, value in frames.environments.items() if key in wanted},
        attempts={key: value for key, value in frames.attempts.items() if key in wanted},
    )


def group_of(tuning: LockedTuning, plan: LockedPlan, arm: str) -> GroupTuning:
    """Return the group of an arm; the baseline's second arm goes with the baseline."""
    group = tuning.group_of(arm) or tuning.group_of(plan.baseline)
    assert group is not None
    return group
