# ruff: noqa: E501  the rows of the keys are lines
"""What scripts read: ``report.json``, the JSON of the pages beside it, and the CSV tables.

The keys are an interface; these are they. Values are strict JSON: no NaN, no Infinity. A dataclass becomes an
object of its fields. Costs are fractions (0.18 is 18 %), losses nats per token; null stands where there is no
honest figure, and a `note` says why.

## report.json

```text
format, study, description, baseline
target            {kind, value, val_loss, crossing}, null where imported logs are compared by final loss
take              the arm that the verdict says to take, null without one
verdict, notices, warnings          lists of sentences
findings[]        {arm, tone ("fewer" | "within" | "more" | "bound" | "diverged" | "open" | "none"), text}
matrices[]        {format, gemms[] (of a row), stabilisers[] (of a column), arms[][] (name, null where there is none)}
runs_planned, runs_missing, paired_seeds
stop              {diverged, settled {looks, narrower_than}, tokens_saved}, null without a rule
timing            of the runs: "native" | "unvouched" (native, but not known to be unshared) | "emulated" | "logged"
timing_reasons[]  {reason, runs}
throughput        {device, arch, versions, steps, repeats, measured_unix, tokens_per_sec {arm: [...]},
                   not_used {arm: reason}}, null where `ablate check STUDY --steps` has not been run
diagnostics[]     {arm, what_if (another recipe, measured on the arm's tensors), runs, findings[], gemms[]}, empty where
                   the study has none
  gemms[]         {gemm, measurements, draws, relative_error, gain, bias_share, alike[], largest {layer, relative_error},
                   operands[], error_over_data_noise, under_sqrt3}
  alike[]         {diagnoses_later, tokens_later, estimate, low, high}: share of the error that is still the same
  operands[]      {operand, clipped, underflowed, zeroed, crest_before, crest_after}
waived[], not_pooled[]              {run, arm, setting, own, others}
evaluation_interval                 {tokens, share_of_tokens_to_target}
arms[]            {name, description, baseline_again, recipe, differs, folded, fork,
                   counted_from_tokens, n, hit, censored, diverged, missing,
                   nominal_level, decay_begins_tokens, stopped, tokens_to_target, token_cost,
                   break_even_throughput, final_loss, standing, tokens_behind, power, target_sweep[], measured,
                   fp4_share_of_flops, modelled[], published[], in_bf16, text, runs[]}
  tokens_to_target, break_even_throughput   {estimate, low, high}
  token_cost      {estimate, low, high, kind, reason, n, n_baseline, pairs, pairing_variance_ratio, own, stands_out,
                   baseline_stands_out, near_budget, restricted, counted_from_tokens (of the fork, 0 for whole runs)}
                  kind: baseline | interval | point (no interval) | bound (low or high alone) | none
                  own: the interval from its own variance alone; stands_out: its runs spread more than the others';
                  baseline_stands_out: without pairs, the baseline's spread more than the arms';
                  near_budget: a run reached the target in the last 5 % of its budget
  fork            {arm, tokens}: the arm that it leaves, and after how many tokens; null of whole runs
  final_loss      {mean, low, high, difference {estimate, low, high, tokens, n, n_baseline}}
  standing        "within" | "outside" | "open" of target.within, null without a margin
  tokens_behind   {estimate, low, high}: of a bound, the loss difference over the baseline's slope
  power           {spread_of_log_tokens, spread_of_the_baseline, spread_of_the_pairs, smallest_cost, more_seeds}
  stopped         {kind ("settled" | "diverged"), reason, seeds, nominal_level, runs_unused, tokens_saved}, null unless stopped
  nominal_level   of the arm's intervals: 0.05 unless the study has looks
  measured        {timed ("alone" | "in its runs" | "as logged"), throughput_over_baseline, end_to_end_speed, gpu_hours_to_target},
                  null without a timing that counts
  modelled[]      {hardware, step_speed_over_baseline, net_speed, gpu_hours_to_target},
                  each {estimate, low, high}
  published[]     {figure, setting}
  in_bf16         {token_cost, tokens_alone, share (of the log cost, null unless the cost excludes zero), final_loss,
                   difference, loss_alone}: by a second evaluation; null where the arm or the baseline has none
  runs[]          {id, arm, seed, state, end, tokens, tokens_to_target, interpolated, fitted, at_or_before_first_evaluation,
                   last_loss, message, seconds, tokens_per_sec, backend_mode}
steps[]           {gemm, from, to, token_cost}
effects           {log_tokens_to_target, final_loss}: {reason, runs, residual, residual_degrees, terms[]}
learning_rate[]   {name, best, best_is_outermost, rates[] {learning_rate, arm, final_loss, n, diverged}}
tuning            null, or {study, done, fields, sampler, trials, seeds, tokens, share_of_a_run,
                  tokens_of_all_trials, tokens_of_the_runs_compared, arms[] {name, tuned, group, shared, chosen,
                  outermost, trials_complete, trials_pruned, trials_diverged, tokens_of_the_trials, loss_shared,
                  loss_chosen, token_cost_shared, token_cost_tuned}, groups[] {name, arms, shared, chosen, trials[]},
                  arms_at_shared_values[]}
dropped[]         {name, reason}
environments[]    {runs, environment}
back_ends[]       {runs, what}
training, failed_self_tests
```

## compare.json

What `ablate compare --out FOLDER` writes, and `--json` prints. Of two studies:

```text
studies[]      names
differ_in      {key: a value each study}
arms[]         {name, token_cost[] (null: not in that study), ratio {estimate, low, high, note}}
```

Of more:

```text
over           "parameters" or "tokens"
studies[]      {name, parameters, tokens, baseline, target}
coverage
differ_in      {key: a value each study}
arms[]         {name, token_cost, loss_gap}; each null without two estimates, else
               {points[] (null: not in that study), per_tenfold {estimate, low, high, note}, intercept, slope}:
               log(1 + token cost), or the gap, over log10 of the place
left_out       {arm: reason}
```
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import TYPE_CHECKING, Any

import pandas as pd

from ablate.reports.findings.results import ArmResult, Rate, RateCurve
from ablate.reports.findings.targets import Sweep
from ablate.reports.read.tables import inert
from ablate.reports.words.diagnoses import diagnosis_sentences
from ablate.reports.words.format import NBSP, cost, coverage, interval, tokens
from ablate.reports.words.search import search_sentences
from ablate.results.ends import RunResult
from ablate.results.intervals import Interval

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ablate.reports.findings.compare import Comparison, Line, Trend
    from ablate.reports.findings.diagnoses import ArmDiagnosis
    from ablate.reports.findings.results import Analysis, TuningResult
    from ablate.reports.findings.search import Found
    from ablate.reports.words.verdict import Verdict

FORMAT = 1

_KEYS = {
    "alpha": "nominal_level",
    "behind": "tokens_behind",
    "break_even": "break_even_throughput",
    "cost": "token_cost",
    "counted_from": "counted_from_tokens",
    "decay_begins": "decay_begins_tokens",
    "end_to_end": "end_to_end_speed",
    "fp4_share": "fp4_share_of_flops",
    "from_arm": "from",
    "hours": "gpu_hours_to_target",
    "left_bound": "at_or_before_first_evaluation",
    "net": "net_speed",
    "run_id": "id",
    "speed": "step_speed_over_baseline",
    "throughput": "throughput_over_baseline",
    "to_arm": "to",
}
"""Keys of fields that are called otherwise in the files."""
_LEFT_OUT = {
    "budget", "config", "curve", "devices", "fingerprint", "log_ratio", "moderated", "moved", "outcome",
    "planned", "reached", "unused",
}  # fmt: skip
"""Fields that are in no file as they are."""
_COMPUTED: dict[type, tuple[str, ...]] = {
    ArmResult: (
        "name", "recipe", "n", "hit", "censored", "diverged", "missing", "decay_begins", "break_even",
    ),
    RateCurve: ("best_is_outermost",),
    RunResult: ("end", "tokens_to_target", "interpolated", "fitted", "left_bound", "last_loss"),
}  # fmt: skip
"""Properties that are in the files beside the fields of a class."""


def report_document(
    analysis: Analysis,
    verdict: Verdict,
    notices: Sequence[str],
    warnings: Sequence[str],
    diagnosed: Sequence[ArmDiagnosis],
) -> dict[str, Any]:
    """Return the content of ``report.json``."""
    plan = analysis.plan
    saved = {"tokens_saved": sum(arm.tokens_saved for arm in analysis.stopped)}
    return {
        "format": FORMAT,
        "study": plan.study,
        "description": plan.description,
        "baseline": plan.baseline,
        "target": plan.target and plain(plan.target) | {"val_loss": plan.target.val_loss},
        "take": verdict.take,
        "verdict": list(verdict.sentences),
        "findings": plain(verdict.findings),
        "matrices": plain(analysis.matrices),
        "notices": list(notices),
        "warnings": list(warnings),
        "runs_planned": analysis.planned,
        "runs_missing": analysis.missing,
        "paired_seeds": plan.paired_seeds,
        "intervals": plan.intervals,
        "stop": plan.stop and plain(plan.stop) | saved,
        "timing": analysis.timing.kind,
        "timing_reasons": [{"reason": reason, "runs": count} for reason, count in analysis.timing.reasons],
        "throughput": plain(analysis.throughput),
        "evaluation_interval": plain(analysis.resolution),
        "arms": plain(analysis.arms),
        "steps": plain(analysis.steps),
        "dropped": plain(plan.dropped),
        "training": plan.training,
        "environments": [{"runs": count, "environment": one} for one, count in analysis.environments],
        "back_ends": [{"runs": count, "what": what} for what, count in analysis.backends],
        "effects": {
            "log_tokens_to_target": plain(analysis.token_effects),
            "final_loss": plain(analysis.loss_effects),
        },
        "waived": list(analysis.waived),
        "not_pooled": plain(analysis.set_apart),
        "learning_rate": plain(analysis.rate_curves),
        "tuning": analysis.tuning and _tuning(analysis.tuning),
        "failed_self_tests": analysis.failed_self_tests,
        "diagnostics": [
            {"arm": arm.arm, "what_if": arm.what_if, "runs": arm.runs, "gemms": plain(arm.gemms)}
            | {"findings": list(diagnosis_sentences(arm))}
            for arm in diagnosed
        ],
    }


def plain(value: Any) -> Any:
    """Return data classes, mappings and sequences as what JSON knows."""
    if isinstance(value, Sweep):
        pairs = zip(value.targets, value.costs, strict=True)
        return [{"val_loss": at, **_interval(one)} for at, one in pairs]
    if isinstance(value, Mapping):
        return {key: plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    if not is_dataclass(value):
        return value
    known = {key: one for key, one in vars(value).items() if key not in _LEFT_OUT}
    known |= {key: getattr(value, key) for key in _COMPUTED.get(type(value), ())}
    found = {_KEYS.get(key, key): plain(one) for key, one in known.items()}
    if isinstance(value, Interval):
        found.pop("figure", None)
        if not value.note:
            del found["note"]
    if isinstance(value, Rate):
        found["final_loss"] = found.pop("loss")
    if isinstance(value, RateCurve):
        found["best"] = value.best and value.best.learning_rate
    return found | _of_arm(value, found) if isinstance(value, ArmResult) else found


def _of_arm(arm: ArmResult, found: dict[str, Any]) -> dict[str, Any]:
    """Return what an arm's object has beside its fields."""
    planned = ("description", "differs", "folded", "fork")
    loss = found["final_loss"]
    stopped = {"runs_unused": arm.unused, "tokens_saved": arm.tokens_saved}
    return {
        **{key: plain(getattr(arm.planned, key)) for key in planned},
        "baseline_again": arm.planned.again,
        "final_loss": loss | {"mean": loss.pop("estimate"), "difference": found.pop("difference")},
        "stopped": arm.stopped and found["stopped"] | stopped,
        "target_sweep": plain(arm.sweep),
        "text": {
            "tokens_to_target": interval(arm.tokens_to_target, tokens),
            "token_cost": cost(arm.token_cost),
        },
    }


def _interval(value: Any) -> dict[str, Any]:
    return {key: getattr(value, key) for key in ("estimate", "low", "high")}


def _tuning(tuning: TuningResult) -> dict[str, Any]:
    plan = tuning.plan
    return {
        **{key: getattr(plan, key) for key in ("study", "done", "sampler", "trials", "tokens")},
        "fields": list(plan.fields),
        "seeds": len(plan.seeds),
        "share_of_a_run": tuning.share,
        "tokens_of_all_trials": tuning.total_tokens,
        "tokens_of_the_runs_compared": tuning.run_tokens,
        "arms": plain(tuning.arms),
        "groups": plain(tuning.groups),
        "arms_at_shared_values": plain(tuning.others),
    }


def comparison_document(found: Comparison) -> dict[str, Any]:
    """Return two studies side by side; costs and ratios are fractions."""
    return {
        "studies": [found.left, found.right],
        "differ_in": plain(found.differs),
        "arms": [
            {
                "name": arm.name,
                "token_cost": [one and _interval(one) | {"kind": one.kind} for one in (arm.left, arm.right)],
                "ratio": vars(arm.ratio),
            }
            for arm in found.arms
        ],
    }


def trend_document(found: Trend) -> dict[str, Any]:
    """Return the trends of arms over the size of the model or the budget; costs are fractions."""

    def line(one: Line | None) -> dict[str, Any] | None:
        return (
            None
            if one is None
            else {
                "points": [point and _interval(point) for point in one.points],
                "per_tenfold": vars(one.change),
                "intercept": one.intercept,
                "slope": one.slope,
            }
        )

    return {
        "over": found.axis,
        "studies": plain(found.studies),
        "coverage": coverage(*found.rules).replace(NBSP, " "),
        "differ_in": plain(found.differs),
        "arms": [
            {"name": arm.name, "token_cost": line(arm.cost), "loss_gap": line(arm.gap)} for arm in found.arms
        ],
        "left_out": dict(found.left_out),
    }


def search_document(found: Found) -> dict[str, Any]:
    """Return what a search found; step times are modelled."""
    value, time = found.importances
    same = ("number", "levels", "started_from", "end", "why", "on_front")
    return {
        "search": found.name,
        **{key: getattr(found, key) for key in ("description", "objective", "baseline", "sampler", "seed")},
        "step_time": {"figures_are": "modelled", "hardware": found.hardware, "shapes": found.shapes},
        "done": found.is_done,
        "recipes": found.candidates,
        "to_try": found.wanted,
        "findings": list(search_sentences(found)),
        "front": [one.name for one in found.last.front],
        "budgets": [
            {
                "tokens": rung.tokens,
                "trials": [
                    {key: plain(getattr(one, key)) for key in same}
                    | {"recipe": one.name, "gemms": one.recipe, "run": one.run_id}
                    | {found.objective: one.value, "step_time_over_baseline": one.time}
                    for one in rung.points
                ],
            }
            for rung in found.rungs
        ],
        "importances": {
            "method": "fANOVA",
            "trials": found.weighed,
            found.objective: plain(value),
            "step_time": plain(time),
        },
        "dropped": [{"name": name, "reason": reason} for name, reason in found.dropped],
    }


RUN_FIGURES = (
    "run_id", "arm", "seed", "state", "end", "tokens", "tokens_to_target", "left_bound", "last_loss",
    "seconds", "tokens_per_sec", "backend_mode", "message",
)  # fmt: skip


def arm_frame(analysis: Analysis) -> pd.DataFrame:
    """Return the headline table with full precision, one row an arm."""
    rows = []
    for arm in analysis.arms:
        row: dict[str, Any] = {"arm": arm.name, "recipe": arm.recipe}
        row |= {name: getattr(arm, name) for name in ("n", "hit", "censored", "diverged", "missing")}
        parts = {name: getattr(arm, name) for name in ("tokens_to_target", "token_cost", "final_loss")}
        for name, part in (parts | {"loss_difference": arm.difference}).items():
            row |= {f"{name}_{end}": value for end, value in _interval(part).items()}
        row |= {"token_cost_kind": arm.token_cost.kind, "loss_difference_tokens": arm.difference.tokens}
        row["counted_from_tokens"] = arm.counted_from
        rows.append(row)
    return pd.DataFrame(rows, dtype=object)


def run_frame(analysis: Analysis) -> pd.DataFrame:
    """Return the ledger with full precision, one row a run."""
    runs = (run for arm in analysis.every_arm for run in arm.runs)
    rows = [[getattr(run, name) for name in RUN_FIGURES] for run in runs]
    return pd.DataFrame(rows, columns=list(RUN_FIGURES), dtype=object)


def csv_text(frame: pd.DataFrame) -> str:
    """Return a frame as CSV, one line a row; a text that a spreadsheet would compute gets a ' in front."""
    text: str = frame.map(inert).to_csv(index=False, lineterminator="\n")
    return text
