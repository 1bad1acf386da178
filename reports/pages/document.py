# ruff: noqa: E501  the rows of the keys are lines
"""What scripts read: ``report.json``, the JSON of the pages beside it, and the CSV tables.

The keys are an interface; these are they. Values are strict JSON: no NaN, no Infinity. A dataclass becomes an
object of its fields. Costs are fractions (0.18 is 18 %), losses in `loss_unit`, such as
"nats/token"; null stands where there is no
honest figure, and a `note` says why.

## report.json

```text
format, study, description, baseline, loss_unit
trained           what was trained, in one line
target            {kind, value, val_loss, crossing}, null where imported logs are compared by final loss
take              the arm that the verdict says to take, null without one and where several tie
least_costly      {arm: {estimate, low, high}}: those that may need the fewest tokens, over the best other arm
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
  token_cost      {estimate, low, high, kind, note, n, n_baseline, left_out (runs without a partner), pairs, pairing_variance_ratio, own, stands_out,
                   baseline_stands_out, near_budget, restricted, counted_from_tokens (of the fork, 0 for whole runs)}
                  kind: baseline | interval | point (no interval) | bound (low or high alone) | none
                  own: the interval from its own variance alone; stands_out: its runs spread more than the others';
                  baseline_stands_out: without pairs, the baseline's spread more than the arms';
                  near_budget: a run reached the target in the last 5 % of its budget
  fork            {arm, tokens}: the arm that it leaves, and after how many tokens; null of whole runs
  final_loss      {mean, low, high, difference {estimate, low, high, tokens, n, n_baseline, left_out}}
  standing        "within" | "outside" | "open" of target.within, beside all other arms; null without a margin
  together        what holds beside the same of all other arms: of "differs", "within", "outside"
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
effects[]         {factor ("gemm", "stabiliser" or a key), over, level, estimate, low, high, n (seeds), p_same (of all pairs
                  alike), pairs[] {from, to, change (null: left out)}}: average over pairs that differ in that factor alone
pairs[]           {arm, over, token_cost, loss_difference}: each arm over each of the ten of lowest cost
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
               intercept, slope, figure (the slope with its variance)}: the line of log(1 + token cost), or the gap, over log10 of the place; the change is for
               a tenfold of it, of two studies from one to the other
holding        {token_cost, loss_gap}: the arms whose change is shown beside those of all others
pairs[]        as arms, of each arm over each other one: their names are "ARM over ARM"
left_out       {arm: reason}
differs        {key: a value each study}
rules[]        the studies' stop rules
loss_unit      of all losses
```

## search.json

What `ablate search --json` prints, too: the fields of ``findings.search.SearchResult``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from typing import TYPE_CHECKING, Any

import pandas as pd

from ablate.reports.findings.diagnoses import ArmDiagnosis
from ablate.reports.findings.gemms import Step
from ablate.reports.findings.results import (
    Analysis,
    ArmResult,
    Pair,
    TuningResult,
)
from ablate.reports.findings.search import SearchResult, TrialPoint
from ablate.reports.findings.speed import Measured, Modelled
from ablate.reports.read.rows import inert
from ablate.reports.words.diagnoses import diagnosis_sentences
from ablate.reports.words.format import cost, interval, read_value, tokens
from ablate.reports.words.trained import trained
from ablate.results.cost import Cost
from ablate.results.ends import RunResult
from ablate.results.intervals import Interval
from ablate.results.losses import LossDifference
from ablate.store.plan_file import GroupTuning

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ablate.reports.words.verdict import Verdict

Keys = dict[str, str | Callable[[Any], Any]]
"""Each key of an object, or column of a file, with the path of an attribute or a function of the record."""

FORMAT = 1


def _count(end: Any) -> Callable[[ArmResult], int]:
    return lambda arm: arm.count(end)


def _final_loss(arm: ArmResult) -> dict[str, Any]:
    loss = plain(arm.final_loss)
    return {"mean": loss.pop("estimate"), **loss, "difference": arm.difference}


def _target_sweep(arm: ArmResult) -> list[dict[str, float | None]] | None:
    if arm.moved is None or arm.moved.sweep is None:
        return None
    sweep = []
    for target, moved in arm.moved.sweep:
        ends = {"estimate": moved.estimate, "low": moved.low, "high": moved.high}
        sweep.append({"val_loss": target, **ends})
    return sweep


def _stopped(arm: ArmResult) -> dict[str, Any] | None:
    if arm.stopped is None:
        return None
    return vars(arm.stopped) | {"runs_unused": arm.count("unused")}


def _text(arm: ArmResult) -> dict[str, str]:
    return {
        "tokens_to_target": interval(arm.tokens_to_target, tokens),
        "token_cost": cost(arm.token_cost),
    }


def _pairs(analysis: Analysis) -> list[dict[str, Any]]:
    return [
        {
            "arm": arm.name,
            "over": over,
            "token_cost": arm.token_cost,
            "loss_difference": arm.difference,
        }
        for over, arms in analysis.over_rivals.items()
        for arm in arms.values()
    ]


def _counted(key: str, pairs: Iterable[tuple[Any, int]]) -> list[dict[str, Any]]:
    return [{"runs": runs, key: value} for value, runs in pairs]


def _keys(*names: str, **others: str | Callable[[Any], Any]) -> Keys:
    """Declare keys: ``names`` are those of attributes, too."""
    return {name: name for name in names} | others


_KEYS: dict[type, Keys] = {
    Analysis: {
        "study": "plan.study",
        "description": "plan.description",
        "baseline": "plan.baseline",
        "loss_unit": "plan.unit",
        "trained": trained,
        "matrices": "matrices",
        "runs_planned": "planned",
        "runs_missing": "missing",
        "paired_seeds": "plan.paired_seeds",
        "intervals": "plan.intervals",
        "stop": "plan.stop",
        "timing": "timing.kind",
        "throughput": "throughput",
        "waived": "plan.waive",
        "not_pooled": "set_apart",
        "evaluation_interval": "resolution",
        "arms": "arms",
        "steps": "steps",
        "effects": "effects",
        "pairs": _pairs,
        "tuning": "tuning",
        "dropped": "plan.dropped",
        "environments": lambda analysis: _counted("environment", analysis.environments),
        "back_ends": lambda analysis: _counted("what", analysis.backends),
        "training": "plan.training",
        "failed_self_tests": "failed_self_tests",
        "resumed_differently": "resumed_differently",
        "markers": "markers",
    },
    ArmResult: _keys(
        "name",
        "recipe",
        "n",
        "tokens_to_target",
        "token_cost",
        "standing",
        "power",
        "measured",
        "modelled",
        "published",
        "in_bf16",
        "runs",
        description="planned.description",
        baseline_again="planned.again",
        differs="planned.differs",
        folded="planned.folded",
        fork="planned.fork",
        counted_from_tokens="counted_from",
        hit=_count("hit"),
        censored=_count("censored"),
        diverged=_count("diverged"),
        missing=_count("missing"),
        nominal_level="alpha",
        decay_begins_tokens="decay_begins",
        stopped=_stopped,
        break_even_throughput="break_even",
        final_loss=_final_loss,
        target_sweep=_target_sweep,
        fp4_share_of_flops="fp4_share",
        together=lambda arm: sorted(arm.claims),
        text=_text,
    ),
    RunResult: _keys(
        "arm",
        "seed",
        "state",
        "end",
        "tokens_to_target",
        "interpolated",
        "fitted",
        "last_loss",
        "message",
        "seconds",
        "tokens_per_sec",
        "backend_mode",
        id="run_id",
        tokens="trained",
        at_or_before_first_evaluation="left_bound",
    ),
    Cost: _keys(
        "estimate",
        "low",
        "high",
        "note",
        "kind",
        "n",
        "n_baseline",
        "left_out",
        "pairs",
        "pairing_variance_ratio",
        "own",
        "stands_out",
        "baseline_stands_out",
        "near_budget",
        "restricted",
        counted_from_tokens="counted_from",
    ),
    LossDifference: _keys(
        "estimate", "low", "high", "note", "tokens", "n", "n_baseline", "left_out"
    ),
    Measured: _keys(
        "timed",
        throughput_over_baseline="throughput",
        end_to_end_speed="end_to_end",
        gpu_hours_to_target="hours",
    ),
    Modelled: _keys(
        "hardware",
        step_speed_over_baseline="speed",
        net_speed="net",
        gpu_hours_to_target="hours",
    ),
    Step: {"gemm": "gemm", "from": "from_arm", "to": "to_arm", "token_cost": "cost"},
    Pair: {"from": "from_arm", "to": "to_arm", "change": "change"},
    TuningResult: _keys(
        "arms",
        study="plan.study",
        done="plan.done",
        fields=lambda tuning: list(tuning.plan.fields),
        sampler="plan.sampler",
        trials="plan.trials",
        seeds=lambda tuning: len(tuning.plan.seeds),
        tokens="plan.tokens",
        groups="plan.groups",
        share_of_a_run="share",
        tokens_of_all_trials="total_tokens",
        tokens_of_the_runs_compared="run_tokens",
        arms_at_shared_values="others",
    ),
    GroupTuning: _keys("name", "arms", "shared", "chosen", "trials"),
    ArmDiagnosis: _keys(
        "arm", "runs", "busiest", "gemms", findings=diagnosis_sentences
    ),
    SearchResult: _keys(*SearchResult.__dataclass_fields__, "is_done"),
    TrialPoint: _keys(
        "number",
        "name",
        "recipe",
        "levels",
        "started_from",
        "is_baseline",
        "on_front",
        "end",
        "value",
        "modelled_time",
        "why",
        id="run_id",
    ),
}
"""The keys of each record; any other record has those of its fields."""

_ARM_COLUMNS: Keys = {
    "arm": "name",
    "recipe": "recipe",
    "n": "n",
    "hit": _count("hit"),
    "censored": _count("censored"),
    "diverged": _count("diverged"),
    "missing": _count("missing"),
    "tokens_to_target_estimate": "tokens_to_target.estimate",
    "tokens_to_target_low": "tokens_to_target.low",
    "tokens_to_target_high": "tokens_to_target.high",
    "token_cost_estimate": "token_cost.estimate",
    "token_cost_low": "token_cost.low",
    "token_cost_high": "token_cost.high",
    "final_loss_estimate": "final_loss.estimate",
    "final_loss_low": "final_loss.low",
    "final_loss_high": "final_loss.high",
    "loss_difference_estimate": "difference.estimate",
    "loss_difference_low": "difference.low",
    "loss_difference_high": "difference.high",
    "token_cost_kind": "token_cost.kind",
    "loss_difference_tokens": "difference.tokens",
    "counted_from_tokens": "counted_from",
}
_RUN_COLUMNS: Keys = {
    **_keys("run_id", "arm", "seed", "state", "end", tokens="trained"),
    **_keys("tokens_to_target", "left_bound", "last_loss", "seconds", "tokens_per_sec"),
    **_keys("backend_mode", "message"),
}


def report_document(
    analysis: Analysis,
    verdict: Verdict,
    notices: Sequence[str],
    warnings: Sequence[str],
    diagnosed: Sequence[ArmDiagnosis],
) -> dict[str, Any]:
    """Collect the content of ``report.json``."""
    target = analysis.plan.target
    return {
        "format": FORMAT,
        **plain(analysis),
        "target": target and plain(target) | {"val_loss": target.val_loss},
        "take": verdict.take,
        "least_costly": plain(verdict.least),
        "verdict": list(verdict.sentences),
        "findings": plain(verdict.findings),
        "notices": list(notices),
        "warnings": list(warnings),
        "diagnostics": plain(diagnosed),
    }


def plain(value: Any) -> Any:
    """Convert records, mappings and sequences to what JSON has."""
    if isinstance(value, Mapping):
        return {key: plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(part) for part in value]
    if not is_dataclass(value):
        return value
    keys = _KEYS.get(type(value)) or _keys(*vars(value))
    converted = {key: plain(read_value(value, read)) for key, read in keys.items()}
    if isinstance(value, Interval) and not value.note:
        del converted["note"]
    return converted


def _frame(records: Sequence[object], columns: Keys) -> pd.DataFrame:
    cells = {
        name: [read_value(record, read) for record in records]
        for name, read in columns.items()
    }
    return pd.DataFrame(cells, dtype=object)


def arm_frame(analysis: Analysis) -> pd.DataFrame:
    """Make the frame of ``arms.csv``, one row an arm; figures have full precision."""
    return _frame(analysis.arms, _ARM_COLUMNS)


def run_frame(analysis: Analysis) -> pd.DataFrame:
    """Make the frame of ``runs.csv``, one row a run; figures have full precision."""
    return _frame([run for arm in analysis.every_arm for run in arm.runs], _RUN_COLUMNS)


def csv_text(frame: pd.DataFrame) -> str:
    """Write a frame as CSV; a text that a spreadsheet would take for a formula gets a ' in front."""
    texts = {
        str(name): column.map(inert)
        for name, column in frame.select_dtypes(exclude="number").items()
    }
    text: str = frame.assign(**texts).to_csv(index=False, lineterminator="\n")
    return text
