"""How each run of a study has ended, counted from one place, and the comparisons that a study holds."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from ablate.results.losses import Curve
from ablate.run.local_fit import LocalFit
from ablate.run.outcome import Outcome, outcome
from ablate.run.schedule import steady_spans

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from ablate.results.frames import StudyFrames
    from ablate.store.plan_file import GroupTuning, LockedPlan, LockedTuning
    from ablate.store.records import RecordedConfig


def number_in(value: Any) -> float | None:
    """Return a number out of a data frame's cell, None where it is empty."""
    return None if value is None or pd.isna(value) else float(value)


def run_ends(
    frames: StudyFrames, apart: Collection[str], origin: int = 0
) -> Iterator[tuple[dict[str, Any], Curve, Outcome]]:
    """Yield each run's row, its curve (without a point before the first evaluation), and how it ended.

    ``origin``: the tokens from which those to target are counted; what lies before is left out.
    """
    target = frames.plan.target
    steady = {arm: _steady(config) for arm, config in frames.configs.items()}
    evals = {str(run_id): group for run_id, group in frames.evals.groupby("run_id", sort=False)}
    for row in frames.runs.to_dict("records"):
        run_id = str(row["run_id"])
        group = evals.get(run_id)
        tokens = np.empty(0, dtype=np.int64) if group is None else group["tokens"].to_numpy(dtype=np.int64)
        loss = np.empty(0) if group is None else group["val_loss"].to_numpy(dtype=float)
        tokens, loss = tokens[tokens >= origin], loss[tokens >= origin]
        spans = steady.get(str(row["arm"]), ())
        fit = LocalFit(tokens, loss, [(max(start, origin), end) for start, end in spans])
        end = outcome(
            seed=int(row["seed"]),
            state="set apart" if run_id in apart else str(row["state"]),
            tokens=tokens,
            loss=loss,
            target=None if target is None else target.val_loss,
            rule="confirmed" if target is None else target.crossing,
            budget_tokens=number_in(row["budget_tokens"]) or 0.0,
            fit=fit,
        ).after(origin)
        curve = Curve(
            run_id=run_id,
            arm=str(row["arm"]),
            seed=end.seed,
            end=end.end,
            tokens=tokens,
            loss=loss,
            fit=fit,
            origin=origin,
        )
        yield {str(key): value for key, value in row.items()}, curve, end


def _steady(config: RecordedConfig) -> tuple[tuple[float, float], ...]:
    """Return the spans of tokens in which nothing of an arm's training changes, as far as it is known."""
    if config.whole.get("trainer") is not None:  # the user's own, which may follow another schedule
        return ()
    training = config.training or {}
    recipe, total = config.recipe or {}, training.get("tokens") or 0
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


def split_frames(frames: StudyFrames) -> tuple[StudyFrames, StudyFrames] | None:
    """Return the study at its own values, and at those found; None where nothing was found."""
    tuning = frames.plan.tuning
    if tuning is None or not tuning.done:
        return None
    names = {name: name for name in tuning.tuned}
    return _part(frames, tuning, names), _part(frames, tuning, tuning.tuned)


def _part(frames: StudyFrames, tuning: LockedTuning, names: Mapping[str, str]) -> StudyFrames:
    """Return a part of a study: ``names`` maps each arm to the one that stands in for it.

    All configurations get the baseline's tuned values, so that steps of one GEMM are still found.
    """
    plan = frames.plan
    base = names[plan.baseline]
    fields = [f"training.{field}" for field in tuning.fields]
    arms = []
    for name, stand_in in names.items():
        arm = plan.arm(stand_in)
        kept = {key: pair for key, pair in arm.differs.items() if key not in fields}
        own, usual = (_values(tuning, plan, one, tuned=names[one] != one) for one in (name, plan.baseline))
        changed = {f"training.{key}": (usual[key], own[key]) for key in own if own[key] != usual[key]}
        arms.append(replace(arm, folded=plan.arm(name).folded, differs=kept | changed))
    wanted = {run.id for arm in arms for run in arm.runs}
    common = _values(tuning, plan, plan.baseline, tuned=base != plan.baseline)
    return replace(
        frames,
        plan=replace(plan, arms=tuple(arms), baseline=base),
        runs=frames.runs[frames.runs["run_id"].isin(wanted)],
        evals=frames.evals[frames.evals["run_id"].isin(wanted)],
        configs={
            arm: config.with_training(**common)
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


def _values(tuning: LockedTuning, plan: LockedPlan, arm: str, *, tuned: bool) -> dict[str, Any]:
    group = group_of(tuning, plan, arm)
    return (group.chosen or {}) if tuned else group.shared
