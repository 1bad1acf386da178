"""The same runs compared with another arm, or at another target, than the study file names.

A study against BF16 says what each arm costs. Whether a Hadamard transform reduces that cost is answered by
the same runs, compared with the arm without it.

How it fails: a study with ``stop`` or ``tune`` is refused, because its own comparison decided which runs
there are.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ablate.base.errors import UserError
from ablate.store.plan_file import Target

if TYPE_CHECKING:
    from ablate.results.frames import StudyFrames

    Differs = dict[str, tuple[Any, Any]]


def read_against(
    frames: StudyFrames,
    *,
    baseline: str | None = None,
    target: float | Target | None = None,
) -> StudyFrames:
    """Change the study's baseline, its target (a number keeps its kind), or both; None keeps either.

    Raises:
        UserError: there is no such arm, the target is not possible, or the study has ``stop`` or ``tune``.
    """
    plan = frames.plan
    if baseline is None and target is None:
        return frames
    for key, section in (("stop", plan.stop), ("tune", plan.tuning)):
        if section is not None:
            raise UserError(
                f"--baseline and --target: study '{plan.study}' has '{key}', which chose its runs by the "
                f"comparison that the study file names (leave the option out)"
            )
    if target is not None:
        plan = replace(plan, target=_target(frames, target))
    if baseline not in (None, plan.baseline):
        arms = {arm.name: arm for arm in plan.arms}
        if baseline not in arms:
            raise UserError(
                f"--baseline: no arm '{baseline}' in study '{plan.study}' (arms: {', '.join(sorted(arms))})"
            )
        new_base = arms[baseline].differs
        # The old baseline's second arm does not repeat the new baseline.
        plan = replace(
            plan,
            baseline=baseline,
            arms=tuple(
                replace(arm, again=False, differs=_differs(arm.differs, new_base))
                for arm in plan.arms
            ),
        )
    return replace(frames, plan=plan)


def _target(frames: StudyFrames, target: float | Target) -> Target:
    """Return the target to read; a number keeps the kind of the study's own."""
    plan = frames.plan
    new_target = plan.target or Target(kind="val_loss", value=1.0)
    if isinstance(target, Target):
        target.check_unit(plan.loss_unit)
        new_target = replace(new_target, kind=target.kind)
        target = target.value
    if not math.isfinite(target) or target <= 0:
        raise UserError(
            f"--target: {target:g} is no {new_target.kind} (expected above 0)"
        )
    if not frames.evals["tokens"].any():
        raise UserError(f"--target: study '{plan.study}' has no curves to read it on")
    return replace(new_target, value=target)


def target_after(frames: StudyFrames, tokens: int) -> float:
    """Compute the target that the study's own baseline reaches after ``tokens``: its mean loss there.

    The mean is over the baseline's runs that did not diverge, linear between evaluations, rounded to three
    decimals; for a perplexity target it is exponentiated. Cost intervals do not include its error.

    Raises:
        UserError: the baseline has no losses, or not all of these runs have evaluations on both sides.
    """
    plan = frames.plan
    curves = []
    for run_id, evals in frames.evals.groupby("run_id", sort=False):
        run = frames.runs[str(run_id)]
        if run.arm == plan.baseline and run.status.state != "diverged":
            curves.append((evals["tokens"].to_numpy(), evals["val_loss"]))
    if not curves:
        raise UserError(
            f"--after: '{plan.baseline}' in study '{plan.study}' has no losses yet"
        )
    first = max(places[0] for places, _ in curves)
    last = min(places[-1] for places, _ in curves)
    if not first <= tokens <= last:
        raise UserError(
            f"--after: {tokens:,} tokens is outside what '{plan.baseline}' in study '{plan.study}' was "
            f"evaluated at (from {first:,} to {last:,})"
        )
    loss = sum(float(np.interp(tokens, *curve)) for curve in curves) / len(curves)
    if plan.target is not None and plan.target.kind == "perplexity":
        loss = math.exp(loss)
    return round(loss, 3)


def _differs(arm: Differs, base: Differs) -> Differs:
    """Find where an arm differs from the new baseline, from the differences of both to the old one."""
    differs: Differs = {}
    for field in base | arm:
        old_value, _ = base[field] if field in base else arm[field]
        _, base_value = base.get(field, (None, old_value))
        _, arm_value = arm.get(field, (None, old_value))
        if base_value != arm_value:
            differs[field] = (base_value, arm_value)
    return differs
