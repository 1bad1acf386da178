"""The words of a report with what they mean in this study, its stop rule, and what its timing is worth."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ablate.reports.findings.compare import target_text
from ablate.reports.words import words
from ablate.results.stop_rule import levels_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ablate.reports.findings.results import Analysis
    from ablate.store.plan_file import StopRule


_EVALUATED = {
    "recipe": "by the recipe's own forward pass: a cost is what an arm learns worse and what it infers "
    "worse. training.evaluate_in: both tells them apart.",
    "bf16": "with every linear layer in bf16, whatever the recipe trains in: figures are of what was learnt.",
    "both": "by the recipe's own forward pass, on which all figures rest; and once more on the same batches "
    "with every linear layer in bf16, for what was learnt alone. Where a recipe's Fprop is in bf16 the two "
    "are one.",
}
"""What is said of the evaluations, by ``training.evaluate_in``."""


def definitions(analysis: Analysis) -> tuple[tuple[str, str], ...]:
    """Return the words of the report with what they mean in this study."""
    if analysis.plan.paired_seeds:
        test = "by Student's t on the differences of seeds in common, which share weights and data order"
    else:
        test = "by Welch's t on log T"
    if analysis.is_moderated:
        test += (
            "; each arm's variance is drawn towards those of the others (moderated), so that coverage is the "
            "average over the study's comparisons"
        )
    ratios = [(arm.name, arm.token_cost.pairing_variance_ratio) for arm in analysis.others]
    if gains := ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios if ratio):
        test += f"; realised gain of pairing (variance unpaired over paired, above 1 is a gain): {gains}"
    interval = words.tokens(analysis.resolution.tokens)
    of_target = words.share(analysis.resolution.share_of_tokens_to_target)
    if analysis.plan.target is None:
        test = "the differences of seeds in common" if analysis.plan.paired_seeds else "Welch's t"
        return (
            ("Target", f"{target_text(None)}."),
            (
                "Final loss difference",
                f"mean of the arm − mean of the baseline, with its 95\u00a0% interval by {test}.",
            ),
            ("Timing", _timing(analysis)),
        )
    found = {
        "Target": f"{target_text(analysis.plan.target)}.",
        "Tokens to target": f"{words.RULES[analysis.plan.target.crossing]}{_where(analysis)}; over seeds the "
        "geometric mean.",
        "Token cost": "exp(mean log T of the arm − mean log T of the baseline) − 1, with its "
        f"{words.coverage(analysis.plan.stop)} interval {test}.",
        "Not reached": "censored: the budget ended before the target. Diverged is an end of its own and "
        "counts as never reaching. Such an arm has no estimate, only a bound, with those runs at their "
        "budget.",
        "Break-even": "1 + token cost: the throughput over the baseline's from which the arm pays.",
        "Evaluation interval": f"{interval} tokens, {of_target} of the baseline's tokens to target.",
        "Learning-rate schedule": f"{analysis.plan.training.get('schedule', 'not recorded')}.",
        "Timing": _timing(analysis),
    }
    if evaluation := _EVALUATED.get(str(analysis.plan.training.get("evaluate_in"))):
        found["Evaluation"] = evaluation
    if (within := analysis.plan.margin) is not None:
        found["Margin"] = (
            f"{words.margin(within)}. Within: the 90\u00a0% interval lies inside (two one-sided tests at "
            "5\u00a0%); outside: it lies outside; else open."
        )
    places = sorted({words.tokens(arm.counted_from) for arm in analysis.arms if arm.counted_from})
    if places:
        found["Forks"] = (
            f"arms that start from another's state after {words.listed(places)} tokens, seed by seed. Their "
            "tokens to target are those after the fork, and so are the baseline's in their token cost: "
            "exp(mean log (T − fork) of the arm − mean log (T − fork) of the baseline) − 1, paired by seed, "
            "because both sides share all before. It is what the arm costs from there on, another question "
            "than what it costs from the beginning; the two are never pooled."
        )
    if analysis.plan.stop is not None:
        found["Early stops"] = f"{'; '.join(_stops(analysis.plan.stop))}."
    if analysis.waived:
        found["Waived"] = f"runs that differ in {', '.join(analysis.waived)} are pooled."
    return tuple(found.items())


def _where(analysis: Analysis) -> str:
    """Say how the place of each crossing was read."""
    if analysis.plan.target is None or analysis.plan.target.crossing == "first_eval":
        return ""
    hits = [run for arm in analysis.every_arm for run in arm.runs if run.end == "hit" and not run.left_bound]
    fitted = sum(run.fitted is not None for run in hits)
    interpolated = "interpolated in ln tokens"
    if not fitted:
        return f", {interpolated}"
    local = "where a local fit (LOWESS) of the curve over ln tokens meets the target"
    if fitted == len(hits):
        return f", {local}"
    return (
        f", {local}, in {fitted} of {words.plural(len(hits), 'run')}; else {interpolated}, because the "
        "learning rate is not known to be constant around the crossing"
    )


def _stops(rule: StopRule) -> Iterator[str]:
    """Say when an arm is stopped."""
    if rule.diverged is not None:
        yield f"an arm is stopped after {words.plural(rule.diverged, 'diverged run')}"
    if rule.settled is not None:
        first, last = rule.settled.looks[0], rule.settled.looks[-1]
        yield (
            f"an arm gets more seeds until it is settled: looks after each of {first} to {last} seeds, "
            f"nominal levels {words.levels(levels_of(rule.settled))} (repeated confidence intervals)"
        )


def _timing(analysis: Analysis) -> str:
    """Say what the timing of the runs is worth, and where a measured speed-up is from."""
    record = analysis.throughput
    alone = record is not None and bool(record.tokens_per_sec)
    if analysis.timing.kind == "native":
        text = "native and unshared in every run, as far as the runs can tell."
    elif analysis.timing.kind == "logged":
        text = "as their logs say: read from logs that others wrote, so nothing here is a measured speed-up."
    else:
        text = (
            f"not native and unshared in every run: {words.timing_reasons(analysis.timing)}. Tokens/s of "
            "these runs are not those of FP4 hardware"
        )
        text += "." if alone else ", and nothing here is a measured speed-up."
    if record is None or not alone:
        return text
    return f"{text} Measured speed is from `ablate throughput` ({words.timed_alone(record)})."
