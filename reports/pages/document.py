"""``report.json``: every number of the report for scripts, with null where there is no honest figure.

The keys are an interface; docs/report.md lists them. Values are strict JSON: no NaN, no Infinity.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ablate.modelled.speed import published_checks
from ablate.reports.statistics.stopping import levels_of
from ablate.reports.words import words

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ablate.reports.findings.analyse import Analysis, ArmResult, RunResult
    from ablate.reports.findings.timing import Throughput
    from ablate.reports.findings.tuning import Tuned
    from ablate.reports.statistics.cost import Cost
    from ablate.reports.statistics.effects import Effects
    from ablate.reports.statistics.intervals import Interval
    from ablate.reports.words.verdict import Verdict

FORMAT = 1


def build_document(
    analysis: Analysis, verdict: Verdict, notices: Sequence[str], warnings: Sequence[str]
) -> dict[str, Any]:
    """Return the content of ``report.json``."""
    return {
        "format": FORMAT,
        "study": analysis.study,
        "description": analysis.description,
        "baseline": analysis.baseline,
        "target": {
            "kind": analysis.target.kind,
            "value": analysis.target.value,
            "val_loss": analysis.target.val_loss,
            "crossing": analysis.target.crossing,
        },
        "verdict": list(verdict.sentences),
        "notices": list(notices),
        "warnings": list(warnings),
        "runs_planned": analysis.planned,
        "runs_missing": analysis.missing,
        "paired_seeds": analysis.paired,
        "stop": _stop(analysis),
        "timing": analysis.timing.kind,
        "timing_reasons": [{"reason": reason, "runs": count} for reason, count in analysis.timing.reasons],
        "throughput": _throughput(analysis.throughput),
        "evaluation_interval": {
            "tokens": analysis.resolution.interval_tokens,
            "share_of_tokens_to_target": analysis.resolution.share,
        },
        "arms": [_arm(arm) for arm in analysis.arms],
        "steps": [
            {"gemm": step.gemm, "from": step.from_arm, "to": step.to_arm, "token_cost": _cost(step.cost)}
            for step in analysis.steps
        ],
        "dropped": [asdict(cell) for cell in analysis.dropped],
        "training": analysis.training,
        "environments": [
            {"runs": count, "environment": environment} for environment, count in analysis.environments
        ],
        "back_ends": [{"runs": count, "what": what} for what, count in analysis.backends],
        "effects": {
            "log_tokens_to_target": _effects(analysis.token_effects),
            "final_loss": _effects(analysis.loss_effects),
        },
        "waived": list(analysis.waived),
        "not_pooled": [
            {
                "run": run.run_id,
                "arm": run.arm,
                "setting": run.setting,
                "own": run.own,
                "others": run.others,
            }
            for run in analysis.set_apart
        ],
        "horizon_tokens": analysis.horizon_tokens,
        "speed_model": [
            {
                "what": check.what,
                "source": check.source,
                "published": check.published,
                "at_least": check.at_least,
                "modelled": check.modelled,
                "deviation": check.deviation,
            }
            for check in published_checks()
        ]
        if any(arm.modelled for arm in analysis.arms)
        else [],
        "learning_rate": [
            {
                "name": curve.name,
                "best": None if curve.best is None else curve.best.learning_rate,
                "best_is_outermost": curve.best_is_outermost,
                "rates": [
                    {
                        "learning_rate": rate.learning_rate,
                        "arm": rate.arm,
                        "final_loss": _interval(rate.loss),
                        "n": rate.n,
                        "diverged": rate.diverged,
                    }
                    for rate in curve.rates
                ],
            }
            for curve in analysis.rate_curves
        ],
        "tuning": _tuning(analysis.tuning),
        "failed_self_tests": analysis.failed_self_tests,
    }


def _tuning(tuning: Tuned | None) -> dict[str, Any] | None:
    if tuning is None:
        return None
    return {
        "study": tuning.study,
        "done": tuning.done,
        "fields": list(tuning.fields),
        "sampler": tuning.sampler,
        "trials": tuning.trials,
        "seeds": tuning.seeds,
        "tokens": tuning.tokens,
        "share_of_a_run": tuning.share,
        "tokens_of_all_trials": tuning.total_tokens,
        "tokens_of_the_runs_compared": tuning.run_tokens,
        "arms": [
            {
                "name": arm.name,
                "tuned": arm.tuned,
                "group": arm.group,
                "shared": arm.shared,
                "chosen": arm.chosen,
                "outermost": list(arm.outermost),
                "trials_complete": arm.complete,
                "trials_pruned": arm.pruned,
                "trials_diverged": arm.diverged,
                "tokens_of_the_trials": arm.tokens,
                "loss_shared": arm.shared_loss,
                "loss_chosen": arm.chosen_loss,
                "token_cost_shared": _cost(arm.shared_cost),
                "token_cost_tuned": _cost(arm.tuned_cost),
            }
            for arm in tuning.arms
        ],
        "groups": [
            {"name": group.name, "arms": group.arms, "trials": [asdict(trial) for trial in group.trials]}
            for group in tuning.groups
        ],
        "arms_at_shared_values": [_arm(arm) for arm in tuning.others],
    }


def _throughput(record: Throughput | None) -> dict[str, Any] | None:
    if record is None:
        return None
    return {
        "device": record.device,
        "arch": record.arch,
        "versions": record.versions,
        "steps": record.steps,
        "repeats": record.repeats,
        "measured_unix": record.measured_unix,
        "tokens_per_sec": {arm: list(rates) for arm, rates in record.rates.items()},
        "not_used": dict(record.refused),
    }


def _stop(analysis: Analysis) -> dict[str, Any] | None:
    rule = analysis.rule
    if rule is None:
        return None
    return {
        "diverged": rule.diverged,
        "hopeless": None
        if rule.hopeless is None
        else {
            "cost_above": rule.hopeless.cost_above,
            "spending": rule.hopeless.spending,
            "looks": list(rule.hopeless.looks),
            "nominal_levels": list(levels_of(rule.hopeless)),
        },
        "tokens_saved": sum(arm.tokens_saved for arm in analysis.stopped),
    }


def _effects(found: Effects) -> dict[str, Any]:
    return {
        "reason": found.reason,
        "runs": found.runs,
        "residual": found.residual,
        "residual_degrees": found.degrees,
        "terms": [
            {
                "term": effect.term,
                "degrees": effect.degrees,
                "f": effect.f,
                "p": effect.p,
                "p_holm": effect.p_holm,
                "aliased_with": list(effect.aliased_with),
                "levels": dict(effect.levels),
            }
            for effect in found.effects
        ],
    }


def _interval(interval: Interval) -> dict[str, Any]:
    values: dict[str, Any] = {"estimate": interval.estimate, "low": interval.low, "high": interval.high}
    return values | ({"note": interval.note} if interval.note else {})


def _cost(cost: Cost) -> dict[str, Any]:
    return {
        "estimate": cost.estimate,
        "low": cost.low,
        "high": cost.high,
        "kind": cost.kind,
        "reason": cost.reason,
        "n": cost.n,
        "n_baseline": cost.n_baseline,
        "pairs": cost.pairs,
        "pairing_variance_ratio": cost.variance_ratio,
        "restricted": None if cost.restricted is None else _interval(cost.restricted),
    }


def _arm(arm: ArmResult) -> dict[str, Any]:
    loss = _interval(arm.final_loss)
    loss["mean"] = loss.pop("estimate")
    return {
        "name": arm.name,
        "description": arm.description,
        "baseline_again": arm.again,
        "recipe": arm.recipe,
        "differs": arm.differs,
        "folded": list(arm.folded),
        "n": arm.n,
        "hit": arm.hit,
        "censored": arm.censored,
        "diverged": arm.diverged,
        "missing": arm.missing,
        "nominal_level": arm.alpha,
        "decay_begins_tokens": arm.decay_begins,
        "cost_growth": _cost(arm.cost_growth),
        "stopped": None
        if arm.stopped is None
        else {
            "kind": arm.stopped.kind,
            "reason": arm.stopped.reason,
            "look": arm.stopped.look,
            "seeds": arm.stopped.seeds,
            "runs_unused": arm.unused,
            "tokens_saved": arm.tokens_saved,
        },
        "tokens_to_target": _interval(arm.tokens_to_target),
        "token_cost": _cost(arm.token_cost),
        "break_even_throughput": _interval(arm.break_even),
        "final_loss": loss
        | {
            "difference": _interval(arm.difference.interval)
            | {
                "tokens": arm.difference.tokens,
                "n": arm.difference.n,
                "n_baseline": arm.difference.n_baseline,
            }
        },
        "restricted_mean": _interval(arm.restricted_mean),
        "measured": None
        if arm.measured is None
        else {
            "timed": "alone" if arm.measured.alone else "in its runs",
            "throughput_over_baseline": _interval(arm.measured.throughput),
            "end_to_end_speed": _interval(arm.measured.end_to_end),
            "gpu_hours_to_target": _interval(arm.measured.hours),
        },
        "fp4_share_of_flops": arm.fp4_share,
        "modelled": [
            {
                "hardware": one.hardware,
                "step_speed_over_baseline": one.speed,
                "net_speed": _interval(one.net),
                "gpu_hours_to_target": one.hours,
                "step_speed_at_llama_3_1_8b": one.large,
            }
            for one in arm.modelled
        ],
        "published": [{"figure": one.figure, "setting": one.setting} for one in arm.published],
        "power": None
        if arm.power is None
        else {
            "spread_of_log_tokens": arm.power.spread,
            "spread_of_the_baseline": arm.power.spread_baseline,
            "spread_of_the_pairs": arm.power.spread_of_pairs,
            "smallest_cost": arm.power.smallest_cost,
            "more_seeds": arm.power.more_seeds,
        },
        "target_sweep": None
        if arm.sweep is None
        else [
            {"val_loss": target, "estimate": cost, "low": low, "high": high}
            for target, cost, low, high in zip(
                arm.sweep.targets, arm.sweep.cost, arm.sweep.low, arm.sweep.high, strict=True
            )
        ],
        "text": {
            "tokens_to_target": words.tokens_interval(arm.tokens_to_target),
            "token_cost": words.cost(arm.token_cost),
        },
        "runs": [_run(run) for run in arm.runs],
    }


def _run(run: RunResult) -> dict[str, Any]:
    return {
        "id": run.run_id,
        "seed": run.seed,
        "state": run.state,
        "end": run.end,
        "tokens": run.tokens,
        "tokens_to_target": run.tokens_to_target,
        "at_or_before_first_evaluation": run.left_bound,
        "last_loss": run.last_loss,
        "message": run.message,
        "seconds": run.seconds,
        "tokens_per_sec": run.tokens_per_sec,
        "backend_mode": run.backend_mode,
    }
