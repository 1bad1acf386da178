"""The report's tables of arms, runs and comparisons, as text in cells; one without rows is not shown."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

from ablate.reports.findings.power import MOST_SEEDS
from ablate.reports.words import caveats, words
from ablate.reports.words.table import Table, make_table

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ablate.reports.findings.effects import Effect
    from ablate.reports.findings.power import Power
    from ablate.reports.findings.results import Analysis, ArmResult
    from ablate.results.ends import RunResult


def headline(analysis: Analysis) -> Table:
    """Return the arms against the baseline."""

    def results(arm: ArmResult) -> str:
        missing = f" (+{arm.missing} missing)" if arm.missing else ""
        return f"{arm.n}{missing}{' (stopped)' if arm.stopped else ''}"

    def difference(arm: ArmResult) -> str:
        if arm.name == analysis.baseline:
            return f"(loss {words.loss(arm.final_loss.estimate)})"
        found = words.loss_interval(arm.difference, difference=True)
        early = caveats.early_difference(arm, analysis)
        return found if early is None else f"{found} at {words.tokens(early)}"

    def cost(arm: ArmResult) -> str:
        own = arm.token_cost.own
        if not arm.token_cost.stands_out or own is None or own.low is None:
            return words.cost(arm.token_cost)
        return f"{words.cost(arm.token_cost)}, own {words.percent_range(own.low, own.high)}"

    if analysis.plan.target is None:
        where = (
            "at the last evaluation that all runs of both have"
            if analysis.has_curves
            else "of the final losses"
        )
        return make_table(
            "Arms against the baseline. n: results (runs that finished or diverged). Brackets: 95\u00a0% "
            f"intervals over runs, each for its own comparison. Loss difference: {where}, nats/token.",
            analysis.arms,
            {
                "Arm": lambda arm: arm.name,
                "Recipe": lambda arm: arm.recipe,
                "n": results,
                "diverged": lambda arm: str(arm.diverged),
                "Final loss": lambda arm: words.loss_interval(arm.final_loss),
                "Final loss difference": lambda arm: (
                    "baseline" if arm.name == analysis.baseline else difference(arm)
                ),
            },
            numeric=range(2, 6),
        )
    columns: dict[str, Callable[[ArmResult], str]] = {
        "Arm": lambda arm: arm.name,
        "Recipe": lambda arm: arm.recipe,
        "n": results,
        "hit / cens. / div.": words.ends,
        "Tokens to target": lambda arm: (
            words.tokens_interval(arm.tokens_to_target) + words.from_fork(arm.counted_from)
        ),
        "Token cost": cost,
        "Break-even": lambda arm: "1" if arm.name == analysis.baseline else words.break_even(arm),
        "Final loss difference": difference,
    }
    forks = (
        " From … on: an arm that forks; its tokens and its cost are counted from the fork, against the "
        "baseline's from the same place, and are not those of whole runs."
        if any(arm.counted_from for arm in analysis.arms)
        else ""
    )
    margin = analysis.plan.margin
    within = ""
    if margin is not None:
        columns["Margin"] = lambda arm: arm.standing or words.DASH
        within = f" Margin: {words.margin(margin)}; two one-sided tests at 5\u00a0%."
    return make_table(
        "Arms against the baseline. n: results (runs that finished or diverged), of which hit / censored "
        f"/ diverged. Brackets: {words.coverage(analysis.plan.stop)} intervals over seeds, each for its own "
        "comparison. > : a bound, because not every run reached the target. Break-even: the throughput over "
        "the baseline's from which the arm pays. Loss difference: at the last evaluation that all runs of "
        f"both have, nats/token.{within}{forks}",
        analysis.arms,
        columns,
        numeric=range(2, 8),
    )


def stop_table(analysis: Analysis) -> Table:
    """Return the arms that were stopped early."""
    stopped = [(arm, arm.stopped) for arm in analysis.stopped if arm.stopped is not None]
    return make_table(
        "Arms whose other runs were not needed. Seeds: those that count, of this arm and of "
        f"{analysis.baseline}; what other runs had come to by then is left out. Nominal level: of the "
        "arm's interval, so that all looks together err in 5\u00a0% of studies. An arm that was stopped "
        "because runs diverged has a bound and no interval: the rest of its runs is a selection.",
        stopped,
        {
            "Arm": lambda row: row[0].name,
            "Why": lambda row: row[1].reason,
            "Seeds": lambda row: words.DASH if row[1].seeds is None else str(row[1].seeds),
            "Nominal level": lambda row: words.DASH if row[1].seeds is None else words.levels([row[0].alpha]),
            "Runs not needed": lambda row: str(row[0].unused),
            "Tokens saved": lambda row: words.tokens(row[0].tokens_saved),
        },
        numeric=range(2, 6),
    )


def effect_table(analysis: Analysis) -> Table:
    """Return the effects of a grid's factors on tokens to target."""
    found = analysis.token_effects
    p_on_loss = {effect.term: effect.p_holm for effect in analysis.loss_effects.terms}

    def levels(effect: Effect) -> str:
        if not effect.degrees:
            return "not to be told from the others"
        changes = effect.levels.items()
        return ", ".join(f"{level} {words.percent(math.expm1(change))}" for level, change in changes)

    return make_table(
        "Effects of the factors on log tokens to target. Levels: tokens over the geometric mean of the "
        "factor's levels, the other factors averaged. p: F tests (type II) over "
        f"{found.runs} runs, residual s.d. {words.share(found.residual)}, adjusted together after Holm; "
        "the last column is the same for the final loss. "
        f"{'Each seed is a block. ' if analysis.plan.paired_seeds else ''}"
        "Interactions (×) say that one factor's effect depends on the other.",
        found.terms,
        {
            "Factor": lambda effect: effect.term,
            "Levels": lambda effect: levels(effect) or words.DASH,
            "F": lambda effect: words.DASH if effect.f is None else f"{effect.f:.1f}",
            "d.f.": lambda effect: str(effect.degrees),
            "p (Holm)": lambda effect: words.p_value(effect.p_holm),
            "p (Holm), final loss": lambda effect: words.p_value(p_on_loss.get(effect.term)),
        },
        numeric=range(2, 6),
    )


def power_table(analysis: Analysis) -> Table:
    """Return the noise of each comparison and what so many seeds could have shown."""
    known = [(arm, arm.power) for arm in analysis.others if arm.power is not None]

    def more(power: Power) -> str:
        if power.more_seeds is None:
            return f"over {MOST_SEEDS:,}"
        return "settled" if power.more_seeds == 0 else f"about {power.more_seeds}"

    columns: dict[str, Callable[[tuple[ArmResult, Power]], str]] = {
        "Arm": lambda row: row[0].name,
        "n": lambda row: str(row[0].n),
        "Spread": lambda row: words.share(row[1].spread_of_log_tokens),
        "Spread of the baseline": lambda row: words.share(row[1].spread_of_the_baseline),
        "Spread of the pairs": lambda row: words.share(row[1].spread_of_the_pairs),
        "Smallest cost": lambda row: words.share(row[1].smallest_cost),
        "More seeds": lambda row: more(row[1]),
    }
    paired = any(power.spread_of_the_pairs is not None for _, power in known)
    if not paired:
        del columns["Spread of the pairs"]
    return make_table(
        "Noise and power. Spread: the standard deviation of log tokens to target over seeds, of the arm "
        f"and of {analysis.baseline}"
        + (", and of the differences between runs of one seed" if paired else "")
        + ". Smallest cost: what these seeds would have shown with a chance of 80\u00a0% (5\u00a0% "
        f"level, two-sided, {'paired where there are pairs' if paired else 'unpaired'}"
        f"{', moderated as the intervals are' if analysis.is_moderated else ''}). More seeds: of "
        "each arm, to settle what is open if the cost is what it seems. For planning: with few seeds the "
        "spread is itself uncertain.",
        known,
        columns,
        numeric=range(1, len(columns)),
    )


def published_table(analysis: Analysis) -> Table:
    """Return what others have published for such arms beside our figures."""
    return make_table(
        f"Published figures beside ours (against {analysis.baseline}). They are others' and of other "
        "models, data and baselines: to compare with, and no part of any estimate here. Matched by "
        "format, GEMMs in FP4, rounding and Hadamard.",
        [(arm, one) for arm in analysis.others for one in arm.published],
        {
            "Arm": lambda row: row[0].name,
            "Ours: token cost": lambda row: words.cost(row[0].token_cost),
            "Published": lambda row: row[1].figure,
            "Their setting": lambda row: row[1].setting,
        },
        numeric={1},
    )


def step_table(analysis: Analysis) -> Table:
    """Return what each further GEMM adds, by the pairs of arms that show it."""
    return make_table(
        "What one more GEMM in FP4 adds, all else equal: pairs of arms that differ in nothing else. "
        f"Token cost of the second arm over the first, with its {words.coverage(analysis.plan.stop)} "
        "interval.",
        analysis.steps,
        {
            "GEMM": lambda step: step.gemm.capitalize(),
            "From": lambda step: step.from_arm,
            "To": lambda step: step.to_arm,
            "Token cost": lambda step: words.cost(step.cost),
            "n": lambda step: words.counts(step.cost).partition(f"={words.NBSP}")[2],
        },
        numeric={3, 4},
    )


def tuning_table(analysis: Analysis) -> Table | None:
    """Return what was chosen for each arm and what it changed; None for a study that tunes nothing."""
    tuning = analysis.tuning
    if tuning is None or not tuning.arms:
        return None

    def loss(values: Mapping[str, Any], value: float | None) -> str:
        text = ", ".join(f"{field} {words.plain(one)}" for field, one in values.items())
        return text if value is None else f"{text} (loss {words.loss(value)})"

    return make_table(
        f"What was found for each arm in {tuning.plan.trials} trials of {words.tokens(tuning.plan.tokens)} "
        f"tokens ({tuning.plan.sampler}), and the token cost at the study's own values beside the one at the "
        "values found, each against the baseline at the same kind of values. Trials: complete / pruned / "
        "diverged, of the arm's group. Loss: mean final validation loss of the trial, nats/token. "
        "Brackets: 95\u00a0% intervals over the seeds of the runs.",
        tuning.arms,
        {
            "Arm": lambda arm: arm.name if arm.group == arm.name else f"{arm.name} (group {arm.group})",
            "The study's own": lambda arm: loss(arm.shared, arm.loss_shared),
            "Found": lambda arm: (
                loss(arm.chosen, arm.loss_chosen) + (", the outermost tried" if arm.outermost else "")
            ),
            "Trials": lambda arm: f"{arm.trials_complete} / {arm.trials_pruned} / {arm.trials_diverged}",
            "Tokens of the trials": lambda arm: words.tokens(arm.tokens_of_the_trials),
            "Token cost, the study's own": lambda arm: words.cost(arm.token_cost_shared),
            "Token cost, found": lambda arm: words.cost(arm.token_cost_tuned),
        },
        numeric=range(3, 7),
    )


def arm_table(analysis: Analysis) -> Table:
    """Return what each arm is."""

    def differs(arm: ArmResult) -> str:
        found = arm.planned.differs.items()
        text = "; ".join(f"{key}: {_plain(old)} → {_plain(new)}" for key, (old, new) in found)
        return text or ("baseline" if arm.name == analysis.baseline else words.DASH)

    return make_table(
        "The arms: what differs from the baseline, as study file keys (baseline → arm).",
        analysis.arms,
        {
            "Arm": lambda arm: arm.name,
            "Differs in": differs,
            "Also stands for": lambda arm: ", ".join(arm.planned.folded) or words.DASH,
            "Description": lambda arm: arm.planned.description or words.DASH,
        },
    )


def run_table(analysis: Analysis) -> Table:
    """Return the ledger: every run of the plan."""
    has_target = analysis.plan.target is not None
    columns: dict[str, Callable[[RunResult], str]] = {
        "Run": lambda run: run.run_id,
        "Arm": lambda run: run.arm,
        "Seed": lambda run: str(run.seed),
        "State": lambda run: run.state,
        "End": lambda run: run.end,
        "Tokens": lambda run: words.tokens(run.tokens),
        "Tokens to target": lambda run: ("≤ " if run.left_bound else "") + words.tokens(run.tokens_to_target),
        "Last loss": lambda run: words.loss(run.last_loss),
        "Message": lambda run: run.message or "",
    }
    if not has_target:
        del columns["End"], columns["Tokens to target"]
    if not analysis.has_curves:
        del columns["Tokens"]
    return make_table(
        "Every run of the plan."
        + (
            " End: hit, censored (budget ended before the target), diverged, or missing (no result). ≤ : at "
            "the target by its first evaluation."
            if has_target
            else ""
        )
        + " Losses in nats/token."
        + (" Unused: its arm was stopped early." if analysis.stopped else "")
        + (
            " Tokens to target of an arm that forks: from the fork on."
            if any(arm.counted_from for arm in analysis.every_arm)
            else ""
        ),
        [run for arm in analysis.every_arm for run in arm.runs],
        columns,
        numeric={
            i for i, name in enumerate(columns) if name in ("Seed", "Tokens", "Tokens to target", "Last loss")
        },
    )


def _plain(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(_plain(item) for item in value)}]"
    if isinstance(value, dict):  # a part of a recipe: what is not set says nothing
        known = (f"{key}: {_plain(item)}" for key, item in value.items() if item is not None)
        return f"{{{', '.join(known)}}}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
