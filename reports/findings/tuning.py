"""How far a comparison depends on the learning rate: arms at the values found for them.

A study that tunes its arms runs those whose values changed a second time. Both comparisons are made as for
any study; the report leads with the one at the values found.

How it fails: before tuning has ended there is one comparison, at the study's own values, and a notice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ablate.reports.findings.results import TunedArm, TuningResult
from ablate.results.ends import group_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ablate.reports.findings.results import Analysis, ArmResult
    from ablate.store.plan_file import GroupTuning, LockedPlan

RATE = "learning_rate"


def tuned(plan: LockedPlan, at_shared: Analysis, at_tuned: Analysis) -> TuningResult:
    """Put both comparisons of a study side by side. ``plan``: the whole plan, with the arms of both."""
    tuning = plan.tuning
    assert tuning is not None
    shared_arms = {arm.name: arm for arm in at_shared.arms}
    tuned_arms = {arm.name: arm for arm in at_tuned.arms}
    arms = tuple(
        _arm(group_of(tuning, plan, name), name, shared_arms[name], tuned_arms[stand_in])
        for name, stand_in in tuning.tuned.items()
        if not shared_arms[name].planned.again
    )
    budget = at_tuned.plan.training.get("tokens")
    return TuningResult(
        plan=tuning,
        share=tuning.tokens / budget if budget else None,
        total_tokens=sum(trial.tokens for group in tuning.groups for trial in group.trials),
        run_tokens=sum(run.tokens for arm in at_tuned.arms for run in arm.runs),
        arms=arms,
        others=tuple(arm for arm in at_shared.arms if arm.name not in tuned_arms),
        groups=tuning.groups,
    )


def _arm(group: GroupTuning, name: str, shared: ArmResult, found: ArmResult) -> TunedArm:
    trials, chosen = group.trials, group.chosen or {}
    diverged = sum(trial.diverged > 0 for trial in trials)
    pruned = sum(trial.state == "pruned" for trial in trials)

    def loss(values: Mapping[str, Any]) -> float | None:
        return next((trial.loss for trial in reversed(trials) if trial.values == values), None)

    def is_outermost(field: str) -> bool:
        """Tell whether the chosen value is at an end of those tried, so that one beyond may be better."""
        numbers = {value for trial in trials if isinstance(value := trial.values[field], int | float)}
        return len(numbers) > 1 and chosen[field] in (min(numbers), max(numbers))

    return TunedArm(
        name=name,
        tuned=found.name,
        group=group.name,
        shared=group.shared,
        chosen=chosen,
        trials_complete=len(trials) - pruned - diverged,
        trials_pruned=pruned,
        trials_diverged=diverged,
        tokens_of_the_trials=sum(trial.tokens for trial in trials),
        loss_shared=loss(group.shared),
        loss_chosen=loss(chosen),
        outermost=tuple(filter(is_outermost, chosen)),
        token_cost_shared=shared.token_cost,
        token_cost_tuned=found.token_cost,
    )
