# ruff: noqa: E501  the rows of the keys are lines
"""What scripts read: ``report.json``, the JSON of the pages beside it, and the CSV tables.

The keys are an interface; these are they. Values are strict JSON: no NaN, no Infinity. A dataclass becomes an
object of its fields. Costs are fractions (0.18 is 18 %), losses in `loss_unit`, such as
"nats/token"; null stands where there is no
honest figure, and a `note` says why.

## report.json

```text
format, study, description, baseline, loss_unit
target            {kind, value, val_loss, crossing}, null where imported logs are compared by final loss
take              the arm that the verdict says to take, null without one
verdict, notices, warnings          lists of sentences
findings[]        {arm, tone ("fewer" | "within" | "more" | "bound" | "diverged" | "open" | "none"), text}
matrices[]        {format, gemms[] (of a row), stabilisers[] (of a column), arms[][] (name, null where there is none)}
runs_planned, runs_missing, paired_seeds
stop              {diverged, settled {looks, narrower_than}}, null without a rule
timing            of the runs' tokens/s: "native" | "emulated" | "logged" | "command"
throughput        {device, arch, versions, steps, repeats, measured_unix, tokens_per_sec {arm: [...]},
                   not_used {arm: reason}}, null where `ablate check steps STUDY` has not been run
diagnostics[]     {arm, runs, findings[], busiest, gemms[]}, empty where the study has none
  busiest         {estimate, low, high}: tokens of the busiest expert over the mean; null without experts
  gemms[]         {gemm, measurements, draws, relative_error, gain, bias_share, zeros, zeros_bf16, alike,
                   largest {layer, relative_error}, operands[], error_over_data_noise, under_sqrt3}
  alike           {tokens_later, estimate, low, high}: share of the error that is the same at the next diagnosis, null without two
  operands[]      {operand, clipped, zeroed, crest_before, crest_after}
waived[], not_pooled[]              {run, arm, setting, own, others}
evaluation_interval                 {tokens, share_of_tokens_to_target}
arms[]            {name, description, baseline_again, recipe, differs, folded, fork,
                   counted_from_tokens, n, hit, censored, diverged, missing,
                   nominal_level, decay_begins_tokens, stopped, tokens_to_target, token_cost,
                   break_even_throughput, final_loss, standing, power, target_sweep[], measured,
                   fp4_share_of_flops, modelled[], published[], in_bf16, text, runs[]}
  tokens_to_target, break_even_throughput   {estimate, low, high}
  token_cost      {estimate, low, high, kind, note, n, n_baseline, pairs, pairing_variance_ratio, own, stands_out,
                   baseline_stands_out, near_budget, restricted, counted_from_tokens (of the fork, 0 for whole runs)}
                  kind: baseline | interval | point (no interval) | bound (low or high alone) | none
                  own: the interval from its own variance alone; stands_out: its runs spread more than the others';
                  baseline_stands_out: without pairs, the baseline's spread more than the arms';
                  near_budget: a run reached the target in the last 5 % of its budget
  fork            {arm, tokens}: the arm that it leaves, and after how many tokens; null of whole runs
  final_loss      {mean, low, high, difference {estimate, low, high, tokens, n, n_baseline}}
  standing        "within" | "outside" | "open" of target.within, null without a margin
  power           {spread_of_log_tokens, spread_of_the_baseline, spread_of_the_pairs, smallest_cost, more_seeds}
  stopped         {kind ("settled" | "diverged"), reason, seeds, runs_unused}, null unless stopped
  nominal_level   of the study's intervals: 0.05 unless it has looks
  measured        {timed ("alone" | "as logged"), throughput_over_baseline, end_to_end_speed, gpu_hours_to_target},
                  null without a timing that counts
  modelled[]      {hardware, step_speed_over_baseline, net_speed, gpu_hours_to_target},
                  each {estimate, low, high}
  published[]     {figure, setting}
  in_bf16         {token_cost, tokens_alone, share (of the log cost, null unless the cost excludes zero), final_loss,
                   difference, loss_alone}: by a second evaluation; null where the arm or the baseline has none
  runs[]          {id, arm, seed, state, end, tokens, tokens_to_target, interpolated, fitted, at_or_before_first_evaluation,
                   last_loss, message, seconds, tokens_per_sec, backend_mode}
steps[]           {gemm, from, to, token_cost}
tuning            null, or {study, done, fields, sampler, trials, seeds, tokens, share_of_a_run,
                  tokens_of_all_trials, tokens_of_the_runs_compared, arms[] {name, tuned, group, shared, chosen,
                  outermost, trials_complete, trials_pruned, trials_diverged, tokens_of_the_trials, loss_shared,
                  loss_chosen, token_cost_shared, token_cost_tuned}, groups[] {name, arms, shared, chosen, trials[]},
                  arms_at_shared_values[]}
dropped[]         {name, reason}
environments[]    {runs, environment}
back_ends[]       {runs, what}
training, failed_self_tests, resumed_differently (runs), markers[] (what trainer.expect matched)
```

## compare.json

What `ablate compare --out FOLDER` writes, and `--json` prints:

```text
studies[]      {name, baseline, target, parameters, tokens}, by rising place
axis, places[] "parameters" or "tokens", and those of each study; of two studies "" and 1, 10
arms[]         {name, token_cost, loss_gap}, each {points[] (null: not in that study), change {estimate, low, high, note},
               intercept, slope}: the line of log(1 + token cost), or the gap, over log10 of the place; the change is for
               a tenfold of it, of two studies from one to the other
left_out       {arm: reason}
differs        {key: a value each study}
rules[]        the studies' stop rules
loss_unit      of all losses
```

## search.json

What `ablate search --json` prints, too: the fields of ``findings.search.Found``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import is_dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import pandas as pd

from ablate.reports.findings.results import ArmResult
from ablate.reports.findings.search import Found
from ablate.reports.read.tables import inert
from ablate.reports.words.diagnoses import diagnosis_sentences
from ablate.reports.words.format import cost, interval, tokens
from ablate.results.ends import RunResult
from ablate.results.intervals import Interval

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ablate.reports.findings.diagnoses import ArmDiagnosis
    from ablate.reports.findings.results import Analysis
    from ablate.reports.words.verdict import Verdict
    from ablate.run.outcome import End

FORMAT = 1
_ENDS = ("estimate", "low", "high")
_COUNTED: tuple[End, ...] = ("hit", "censored", "diverged", "missing")

_KEYS = {
    "alpha": "nominal_level",
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
    "trained": "tokens",
}
"""Fields that have another key in the files."""
_LEFT_OUT = {"config", "fingerprint", "moderated", "moved", "planned", "unused"}
"""Fields that are left out, or written in another form."""
_COMPUTED: dict[type, tuple[str, ...]] = {
    Found: ("is_done",),
    ArmResult: ("name", "recipe", "n", "decay_begins", "break_even"),
}
"""Properties that are written besides the fields of a class."""
_RUN_FIGURES = (
    "run_id", "arm", "seed", "state", "end", "trained", "tokens_to_target", "left_bound", "last_loss",
    "seconds", "tokens_per_sec", "backend_mode", "message",
)  # fmt: skip
"""What is written of a run."""


def report_document(
    analysis: Analysis,
    verdict: Verdict,
    notices: Sequence[str],
    warnings: Sequence[str],
    diagnosed: Sequence[ArmDiagnosis],
) -> dict[str, Any]:
    """Collect the content of ``report.json``; the keys are listed above."""
    plan = analysis.plan
    target = plan.target and plain(plan.target) | {"val_loss": plan.target.val_loss}
    return {
        "format": FORMAT,
        **_parts(
            plan,
            "study",
            "description",
            "baseline",
            "paired_seeds",
            "intervals",
            "training",
            "dropped",
            loss_unit="unit",
        ),
        "target": target,
        **_parts(verdict, "take", "findings", verdict="sentences"),
        "notices": list(notices),
        "warnings": list(warnings),
        "stop": plain(plan.stop),
        "environments": [{"runs": count, "environment": one} for one, count in analysis.environments],
        "back_ends": [{"runs": count, "what": what} for what, count in analysis.backends],
        **_parts(
            analysis,
            "matrices",
            "throughput",
            "arms",
            "steps",
            "failed_self_tests",
            "resumed_differently",
            "markers",
            runs_planned="planned",
            runs_missing="missing",
            timing="timing.kind",
            evaluation_interval="resolution",
            not_pooled="set_apart",
            waived="plan.waive",
        ),
        "tuning": analysis.tuning
        and _parts(
            analysis.tuning,
            "arms",
            **{key: f"plan.{key}" for key in ("study", "done", "sampler", "trials", "tokens", "groups")},
            share_of_a_run="share",
            tokens_of_all_trials="total_tokens",
            tokens_of_the_runs_compared="run_tokens",
            arms_at_shared_values="others",
        )
        | {"fields": list(analysis.tuning.plan.fields), "seeds": len(analysis.tuning.plan.seeds)},
        "diagnostics": [
            _parts(arm, "arm", "runs", "busiest", "gemms") | {"findings": list(diagnosis_sentences(arm))}
            for arm in diagnosed
        ],
    }


def _parts(value: Any, /, *names: str, **renamed: str) -> dict[str, Any]:
    """Convert attributes of a value for JSON; ``renamed``: key → attribute, or a path of attributes."""
    paths = dict(zip(names, names, strict=True)) | renamed
    return {key: plain(attrgetter(path)(value)) for key, path in paths.items()}


def plain(value: Any) -> Any:
    """Convert data classes, mappings and sequences to types that JSON has, with the keys of the files."""
    if isinstance(value, Mapping):
        return {key: plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    if not is_dataclass(value):
        return value
    names = {*vars(value), *_COMPUTED.get(type(value), ())} - _LEFT_OUT
    if isinstance(value, RunResult):
        names = {*_RUN_FIGURES, "interpolated", "fitted"}
    found = _parts(value, **{_KEYS.get(name, name): name for name in sorted(names)})
    if isinstance(value, Interval):
        found.pop("figure", None)
        if not value.note:
            del found["note"]
    if isinstance(value, ArmResult):
        mean = found["final_loss"].pop("estimate")
        found["final_loss"] |= {"mean": mean, "difference": found.pop("difference")}
        sweep = value.moved and value.moved.sweep
        found["target_sweep"] = sweep and [{"val_loss": at, **_parts(one, *_ENDS)} for at, one in sweep]
        if value.stopped:
            found["stopped"]["runs_unused"] = value.count("unused")
        found |= {end: value.count(end) for end in _COUNTED}
        found |= _parts(value.planned, "description", "differs", "folded", "fork", baseline_again="again")
        to_target = interval(value.tokens_to_target, tokens)
        found["text"] = {"tokens_to_target": to_target, "token_cost": cost(value.token_cost)}
    return found


def arm_frame(analysis: Analysis) -> pd.DataFrame:
    """Make the frame of ``arms.csv``, one row an arm; figures have full precision."""
    parts = {name: name for name in ("tokens_to_target", "token_cost", "final_loss")}
    parts["loss_difference"] = "difference"
    columns = {f"{key}_{end}": f"{name}.{end}" for key, name in parts.items() for end in _ENDS}
    columns |= {"token_cost_kind": "token_cost.kind", "loss_difference_tokens": "difference.tokens"}
    columns["counted_from_tokens"] = "counted_from"
    rows = [
        _parts(arm, arm="name", recipe="recipe", n="n")
        | {end: arm.count(end) for end in _COUNTED}
        | _parts(arm, **columns)
        for arm in analysis.arms
    ]
    return pd.DataFrame(rows, dtype=object)


def run_frame(analysis: Analysis) -> pd.DataFrame:
    """Make the frame of ``runs.csv``, one row a run; figures have full precision."""
    rows = [_parts(run, *_RUN_FIGURES) for arm in analysis.every_arm for run in arm.runs]
    return pd.DataFrame(rows, dtype=object).rename(columns={"trained": "tokens"})


def csv_text(frame: pd.DataFrame) -> str:
    """Write a frame as CSV; a text that a spreadsheet would take for a formula gets a ' in front."""
    texts = {str(name): column.map(inert) for name, column in frame.select_dtypes(exclude="number").items()}
    text: str = frame.assign(**texts).to_csv(index=False, lineterminator="\n")
    return text
