"""``report.json`` and the JSON of the pages beside it: every number, null where there is no honest figure.

The keys are an interface; docs/report-json.md lists them. Values are strict JSON: no NaN, no Infinity. A
dataclass becomes an object of its fields in their order, unless ``_KEYS`` names its keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any

from ablate.reports.findings.results import ArmResult, TuningResult
from ablate.reports.findings.targets import Sweep
from ablate.reports.words import words
from ablate.reports.words.diagnoses import diagnosis_sentences
from ablate.reports.words.search import search_sentences
from ablate.results.intervals import Interval

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ablate.reports.findings.compare import Comparison
    from ablate.reports.findings.diagnoses import ArmDiagnosis
    from ablate.reports.findings.results import Analysis
    from ablate.reports.findings.search import Found, TrialPoint
    from ablate.reports.findings.trend import Line, Trend
    from ablate.reports.words.verdict import Verdict

FORMAT = 1

_KEYS = {
    # By the name of the class the keys in their order; "key=attribute" where they are not called alike.
    "ArmResult": "name description=planned.description baseline_again=planned.again recipe "
    "differs=planned.differs folded=planned.folded fork=planned.fork "
    "counted_from_tokens=counted_from n hit censored diverged missing nominal_level=alpha "
    "decay_begins_tokens=decay_begins stopped tokens_to_target token_cost "
    "break_even_throughput=break_even final_loss standing tokens_behind=behind "
    "measured fp4_share_of_flops=fp4_share "
    "modelled published power target_sweep=sweep in_bf16",
    "Cost": "estimate low high kind reason n n_baseline pairs pairing_variance_ratio own stands_out "
    "baseline_stands_out near_budget restricted counted_from_tokens=counted_from",
    "LossDifference": "estimate low high note tokens n n_baseline",
    "Likeness": "diagnoses_later tokens_later estimate low high",
    "GroupTuning": "name arms trials",
    "Measured": "timed throughput_over_baseline=throughput end_to_end_speed=end_to_end "
    "gpu_hours_to_target=hours",
    "Modelled": "hardware step_speed_over_baseline=speed net_speed=net gpu_hours_to_target=hours",
    "Rate": "learning_rate arm final_loss=loss n diverged",
    "RateCurve": "name best=best.learning_rate best_is_outermost rates",
    "RunResult": "id=run_id seed state end tokens tokens_to_target interpolated fitted "
    "at_or_before_first_evaluation=left_bound "
    "last_loss message seconds tokens_per_sec backend_mode",
    "Step": "gemm from=from_arm to=to_arm token_cost=cost",
    "Stopped": "kind reason seeds",
    "TuningResult": "study=plan.study done=plan.done fields=plan.fields sampler=plan.sampler "
    "trials=plan.trials seeds=plan.seeds tokens=plan.tokens share_of_a_run=share "
    "tokens_of_all_trials=total_tokens tokens_of_the_runs_compared=run_tokens arms groups "
    "arms_at_shared_values=others",
}  # fmt: skip


def report_document(
    analysis: Analysis,
    verdict: Verdict,
    notices: Sequence[str],
    warnings: Sequence[str],
    diagnosed: Sequence[ArmDiagnosis],
) -> dict[str, Any]:
    """Return the content of ``report.json``."""
    rule, stopped = analysis.plan.stop, sum(arm.tokens_saved for arm in analysis.stopped)
    return {
        "format": FORMAT,
        **_object(analysis.plan, "study description baseline"),
        "target": analysis.plan.target
        and _object(analysis.plan.target, "kind value val_loss crossing within"),
        "take": verdict.take,
        "verdict": list(verdict.sentences),
        "findings": _plain(verdict.findings),
        "matrices": _plain(analysis.matrices),
        "notices": list(notices),
        "warnings": list(warnings),
        **_object(
            analysis,
            "runs_planned=planned runs_missing=missing paired_seeds=plan.paired_seeds "
            "intervals=plan.intervals",
        ),
        "stop": None if rule is None else _plain(rule) | {"tokens_saved": stopped},
        "timing": analysis.timing.kind,
        "timing_reasons": [{"reason": reason, "runs": count} for reason, count in analysis.timing.reasons],
        **_object(analysis, "throughput evaluation_interval=resolution arms steps"),
        **_object(analysis.plan, "dropped training"),
        "environments": [{"runs": count, "environment": one} for one, count in analysis.environments],
        "back_ends": [{"runs": count, "what": what} for what, count in analysis.backends],
        "effects": _object(analysis, "log_tokens_to_target=token_effects final_loss=loss_effects"),
        **_object(analysis, "waived not_pooled=set_apart"),
        **_object(analysis, "learning_rate=rate_curves tuning failed_self_tests"),
        "diagnostics": [
            _object(arm, "arm what_if runs")
            | {"findings": list(diagnosis_sentences(arm)), "gemms": _plain(arm.gemms)}
            for arm in diagnosed
        ],
    }


def comparison_document(comparison: Comparison) -> dict[str, Any]:
    """Return two studies side by side; costs and ratios are fractions."""
    return {
        "studies": [comparison.left, comparison.right],
        "differ_in": _plain(comparison.differs),
        "arms": [
            {
                "name": arm.name,
                "token_cost": [
                    None if cost is None else _object(cost, "estimate low high kind")
                    for cost in (arm.left, arm.right)
                ],
                "ratio": vars(arm.ratio),
            }
            for arm in comparison.arms
        ],
    }


def trend_document(found: Trend) -> dict[str, Any]:
    """Return the trends of arms over the size of the model or the budget; costs are fractions."""
    return {
        "over": found.axis,
        "studies": _plain(found.studies),
        "coverage": words.coverage(*found.rules).replace(words.NBSP, " "),
        "differ_in": _plain(found.differs),
        "arms": [
            {"name": arm.name, "token_cost": _line(arm.cost), "loss_gap": _line(arm.gap)}
            for arm in found.arms
        ],
        "left_out": dict(found.left_out),
    }


def _line(line: Line | None) -> dict[str, Any] | None:
    if line is None:
        return None
    points = [None if one is None else _object(one, "estimate low high") for one in line.points]
    return {"points": points, "per_tenfold": vars(line.change), **_object(line, "intercept slope")}


def search_document(found: Found) -> dict[str, Any]:
    """Return what a search found; step times are modelled."""
    value, time = found.importances

    def trial(one: TrialPoint) -> dict[str, Any]:
        keys = "number recipe=name gemms=recipe run=run_id levels started_from end why"
        return _object(one, f"{keys} {found.objective}=value step_time_over_baseline=time on_front")

    return {
        **_object(found, "search=name description objective"),
        "step_time": {"figures_are": "modelled", "hardware": found.hardware, "shapes": found.shapes},
        **_object(found, "baseline sampler seed done=is_done recipes=candidates to_try=wanted"),
        "findings": list(search_sentences(found)),
        "front": [one.name for one in found.last.front],
        "budgets": [
            {"tokens": rung.tokens, "trials": [trial(one) for one in rung.points]} for rung in found.rungs
        ],
        "importances": {
            "method": "fANOVA", "trials": found.weighed, found.objective: _plain(value),
            "step_time": _plain(time),
        },
        "dropped": [{"name": name, "reason": reason} for name, reason in found.dropped],
    }  # fmt: skip


def _plain(value: Any) -> Any:
    """Return data classes, mappings and sequences as what JSON knows."""
    match value:
        case Interval():
            return {key: one for key, one in _object(value).items() if key != "note" or one}
        case Sweep():
            pairs = zip(value.targets, value.costs, strict=True)
            return [{"val_loss": at, **_object(cost, "estimate low high")} for at, cost in pairs]
        case ArmResult():
            return _arm(value)
        case TuningResult():
            told = {"fields": list(value.plan.fields), "seeds": len(value.plan.seeds)}
            return _object(value) | told
        case Mapping():
            return {key: _plain(one) for key, one in value.items()}
        case list() | tuple():
            return [_plain(one) for one in value]
        case _:
            return _object(value) if is_dataclass(value) else value


def _object(value: Any, keys: str | None = None) -> dict[str, Any]:
    """Return the attributes that ``keys``, else ``_KEYS``, names, in that order; else all fields."""
    names = keys or _KEYS.get(type(value).__name__) or " ".join(field.name for field in fields(value))
    pairs = (name.partition("=") for name in names.split())
    return {key: _plain(_attribute(value, path or key)) for key, _, path in pairs}


def _attribute(value: Any, path: str) -> Any:
    return reduce(lambda one, name: None if one is None else getattr(one, name), path.split("."), value)


def _arm(value: ArmResult) -> dict[str, Any]:
    found = _object(value)
    loss = found["final_loss"]
    loss["mean"] = loss.pop("estimate")
    loss["difference"] = _plain(value.difference)
    if value.stopped is not None:
        found["stopped"] |= {"runs_unused": value.unused, "tokens_saved": value.tokens_saved}
    text = {
        "tokens_to_target": words.tokens_interval(value.tokens_to_target),
        "token_cost": words.cost(value.token_cost),
    }
    return found | {"text": text, "runs": _plain(value.runs)}
