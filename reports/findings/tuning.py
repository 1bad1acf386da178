"""How far a comparison depends on the learning rate: arms at the values found for them.

A study that tunes its arms runs those whose values changed a second time. Both comparisons are made as for
any study; the report leads with the one at the values found.

How it fails: before tuning has ended there is one comparison, at the study's own values, and a notice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ablate.reports.findings.results import TunedArm, TuningResult

if TYPE_CHECKING:
    from ablate.reports.findings.results import Analysis
    from ablate.store.plan_file import LockedPlan

RATE = "learning_rate"


def tuned(plan: LockedPlan, at_shared: Analysis, at_tuned: Analysis) -> TuningResult:
    """Put both comparisons of a study side by side. ``plan``: the whole plan, with the arms of both."""
    tuning = plan.tuning
    assert tuning is not None
    shared_arms, tuned_arms = ({arm.name: arm for arm in one.arms} for one in (at_shared, at_tuned))
    arms = []
    for name, stand_in in tuning.tuned.items():
        if shared_arms[name].planned.again:
            continue
        group = tuning.group_of(name, plan.baseline)
        trials, chosen = group.trials, group.chosen or {}
        losses = [(trial.values, trial.loss) for trial in reversed(trials)]
        tried = {
            field: {value for trial in trials if isinstance(value := trial.values[field], int | float)}
            for field in chosen
        }
        diverged = sum(trial.diverged > 0 for trial in trials)
        pruned = sum(trial.state == "pruned" for trial in trials)
        arms.append(
            TunedArm(
                name=name,
                tuned=stand_in,
                group=group.name,
                shared=group.shared,
                chosen=chosen,
                # Beyond the ends of what was tried a value may be better.
                outermost=tuple(
                    field
                    for field, values in tried.items()
                    if len(values) > 1 and chosen[field] in (min(values), max(values))
                ),
                trials_complete=len(trials) - pruned - diverged,
                trials_pruned=pruned,
                trials_diverged=diverged,
                tokens_of_the_trials=sum(trial.tokens for trial in trials),
                loss_shared=next((loss for values, loss in losses if values == group.shared), None),
                loss_chosen=next((loss for values, loss in losses if values == chosen), None),
                token_cost_shared=shared_arms[name].token_cost,
                token_cost_tuned=tuned_arms[stand_in].token_cost,
            )
        )
    budget = at_tuned.plan.training.get("tokens")
    return TuningResult(
        plan=tuning,
        share=tuning.tokens / budget if budget else None,
        total_tokens=sum(trial.tokens for group in tuning.groups for trial in group.trials),
        run_tokens=sum(run.trained for arm in at_tuned.arms for run in arm.runs),
        arms=tuple(arms),
        others=tuple(arm for arm in at_shared.arms if arm.name not in tuned_arms),
    )
