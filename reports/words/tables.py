"""The report's tables of arms, runs and comparisons, as text in cells."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

from ablate.reports.statistics.power import MOST_SEEDS
from ablate.reports.words import words
from ablate.reports.words.table import Table

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ablate.reports.findings.results import Analysis
    from ablate.reports.statistics.effects import Effect
    from ablate.reports.statistics.power import Power


def headline(analysis: Analysis) -> Table:
    """Return the arms against the baseline."""
    return Table(
        caption=(
            "Arms against the baseline. n: results (runs that finished or diverged), of which hit / censored "
            f"/ diverged. Brackets: {words.coverage(analysis.rule)} intervals over seeds, each for its own "
            "comparison. > : a bound, "
            "because not every run reached the target. Break-even: the throughput over the baseline's "
            "from which the arm pays. Loss difference: at the last evaluation that all runs of both have, "
            "nats/token."
        ),
        columns=(
            "Arm",
            "Recipe",
            "n",
            "hit / cens. / div.",
            "Tokens to target",
            "Token cost",
            "Break-even",
            "Final loss difference",
        ),
        rows=tuple(
            (
                arm.name,
                arm.recipe,
                str(arm.n)
                + (f" (+{arm.missing} missing)" if arm.missing else "")
                + (" (stopped)" if arm.stopped else ""),
                words.ends(arm),
                words.tokens_interval(arm.tokens_to_target),
                words.cost(arm.token_cost),
                words.break_even(arm) if arm.name != analysis.baseline else "1",
                words.loss_interval(arm.difference.interval, difference=True)
                if arm.name != analysis.baseline
                else f"(loss {words.loss(arm.final_loss.estimate)})",
            )
            for arm in analysis.arms
        ),
        numeric=frozenset({2, 3, 4, 5, 6, 7}),
    )


def stop_table(analysis: Analysis) -> Table | None:
    """Return the arms that were stopped early; None where none was."""
    if not analysis.stopped:
        return None
    return Table(
        caption=(
            "Arms whose other runs were not needed. Seeds: those that count, of this arm and of "
            f"{analysis.baseline}; what other runs had come to by then is left out. Nominal level: of the "
            "arm's interval, so that all looks together err in 5\u00a0% of studies. An arm that was stopped "
            "because runs diverged has a bound and no interval: the rest of its runs is a selection."
        ),
        columns=("Arm", "Why", "Seeds", "Nominal level", "Runs not needed", "Tokens saved"),
        rows=tuple(
            (
                arm.name,
                arm.stopped.reason,
                words.DASH if arm.stopped.seeds is None else str(arm.stopped.seeds),
                words.DASH if arm.stopped.seeds is None else words.levels([arm.alpha]),
                str(arm.unused),
                words.tokens(arm.tokens_saved),
            )
            for arm in analysis.stopped
            if arm.stopped is not None
        ),
        numeric=frozenset({2, 3, 4, 5}),
    )


def effect_table(analysis: Analysis) -> Table | None:
    """Return the effects of a grid's factors on tokens to target; None where there are none."""
    found = analysis.token_effects
    if not found.effects:
        return None
    on_loss = {effect.term: effect for effect in analysis.loss_effects.effects}

    def levels(effect: Effect) -> str:
        if effect.aliased_with:
            return f"not to be told from {', '.join(effect.aliased_with)}"
        changes = effect.levels.items()
        return ", ".join(f"{level} {words.percent(math.expm1(change))}" for level, change in changes)

    return Table(
        caption=(
            "Effects of the factors on log tokens to target. Levels: tokens over the geometric mean of the "
            "factor's levels, the other factors averaged. p: F tests (type II) over "
            f"{found.runs} runs, residual s.d. {words.share(found.residual)}, adjusted together after Holm; "
            "the last column is the same for the final loss. Interactions (×) say that one factor's effect "
            "depends on the other."
        ),
        columns=("Factor", "Levels", "F", "d.f.", "p (Holm)", "p (Holm), final loss"),
        rows=tuple(
            (
                effect.term,
                levels(effect) or words.DASH,
                words.DASH if effect.f is None else f"{effect.f:.1f}",
                str(effect.degrees),
                words.p_value(effect.p_holm),
                words.p_value(on_loss[effect.term].p_holm) if effect.term in on_loss else words.DASH,
            )
            for effect in found.effects
        ),
        numeric=frozenset({2, 3, 4, 5}),
    )


def power_table(analysis: Analysis) -> Table | None:
    """Return the noise of each comparison and what so many seeds could have shown; None without any."""
    known = [(arm, arm.power) for arm in analysis.others if arm.power is not None]
    if not known:
        return None

    def more(power: Power) -> str:
        if power.more_seeds is None:
            return f"over {MOST_SEEDS:,}"
        return "settled" if power.more_seeds == 0 else f"about {power.more_seeds}"

    def of_pairs(power: Power) -> tuple[str, ...]:
        if not paired:
            return ()
        return (words.DASH if power.spread_of_pairs is None else words.share(power.spread_of_pairs),)

    paired = any(power.spread_of_pairs is not None for _, power in known)
    return Table(
        caption=(
            "Noise and power. Spread: the standard deviation of log tokens to target over seeds, of the arm "
            f"and of {analysis.baseline}"
            + (", and of the differences between runs of one seed" if paired else "")
            + ". Smallest cost: what these seeds would have shown with a chance of 80\u00a0% (5\u00a0% "
            f"level, two-sided, {'paired where there are pairs' if paired else 'unpaired'}). More seeds: of "
            "each arm, to settle what is open if the cost is what it seems. For planning: with few seeds the "
            "spread is itself uncertain."
        ),
        columns=(
            "Arm",
            "n",
            "Spread",
            "Spread of the baseline",
            *(("Spread of the pairs",) if paired else ()),
            "Smallest cost",
            "More seeds",
        ),
        rows=tuple(
            (
                arm.name,
                str(arm.n),
                words.share(power.spread),
                words.share(power.spread_baseline),
                *of_pairs(power),
                words.share(power.smallest_cost),
                more(power),
            )
            for arm, power in known
        ),
        numeric=frozenset(range(1, 7 if paired else 6)),
    )


def reached_table(analysis: Analysis) -> Table | None:
    """Return restricted means, where some run did not reach the target; None where all or none did."""
    if all(arm.hit == arm.n for arm in analysis.arms) or not any(arm.hit for arm in analysis.arms):
        return None
    horizon = words.tokens(analysis.horizon_tokens)
    return Table(
        caption=(
            f"Restricted mean: tokens to target cut at {horizon}, as far as every arm was looked at; the "
            f"area over its Kaplan–Meier curve, with Greenwood's {words.coverage(analysis.rule)} interval. "
            "Censored runs count for "
            f"as long as they were looked at, diverged ones to {horizon}."
        ),
        columns=("Arm", "n", "hit / cens. / div.", "Reached by the end", "Restricted mean"),
        rows=tuple(
            (
                arm.name,
                str(arm.n),
                words.ends(arm),
                words.DASH if arm.reached is None else words.share(arm.reached.share[-1]),
                words.tokens_interval(arm.restricted_mean),
            )
            for arm in analysis.arms
        ),
        numeric=frozenset({1, 2, 3, 4}),
    )


def published_table(analysis: Analysis) -> Table | None:
    """Return what others have published for such arms beside our figures; None where there is nothing."""
    rows = tuple(
        (arm.name, words.cost(arm.token_cost), one.figure, one.setting)
        for arm in analysis.others
        for one in arm.published
    )
    if not rows:
        return None
    return Table(
        caption=(
            f"Published figures beside ours (against {analysis.baseline}). They are others' and of other "
            "models, data and baselines: to compare with, and no part of any estimate here. Matched by "
            "format, GEMMs in FP4, rounding and Hadamard."
        ),
        columns=("Arm", "Ours: token cost", "Published", "Their setting"),
        rows=rows,
        numeric=frozenset({1}),
    )


def step_table(analysis: Analysis) -> Table | None:
    """Return what each further GEMM adds; None where no pair of arms shows it."""
    if not analysis.steps:
        return None
    return Table(
        caption=(
            "What one more GEMM in FP4 adds, all else equal: pairs of arms that differ in nothing else. "
            f"Token cost of the second arm over the first, with its {words.coverage(analysis.rule)} interval."
        ),
        columns=("GEMM", "From", "To", "Token cost", "n"),
        rows=tuple(
            (
                step.gemm.capitalize(),
                step.from_arm,
                step.to_arm,
                words.cost(step.cost),
                words.counts(step.cost).partition(f"={words.NBSP}")[2],
            )
            for step in analysis.steps
        ),
        numeric=frozenset({3, 4}),
    )


def tuning_table(analysis: Analysis) -> Table | None:
    """Return what was chosen for each arm and what it changed; None for a study that tunes nothing."""
    tuning = analysis.tuning
    if tuning is None or not tuning.arms:
        return None

    def loss(values: Mapping[str, Any], value: float | None) -> str:
        text = ", ".join(f"{field} {words.plain(one)}" for field, one in values.items())
        return text if value is None else f"{text} (loss {words.loss(value)})"

    return Table(
        caption=(
            f"What was found for each arm in {tuning.trials} trials of {words.tokens(tuning.tokens)} tokens "
            f"({tuning.sampler}), and the token cost at the study's own values beside the one at the values "
            "found, each against the baseline at the same kind of values. Trials: complete / pruned / "
            "diverged, of the arm's group. Loss: mean final validation loss of the trial, nats/token. "
            "Brackets: 95\u00a0% intervals over the seeds of the runs."
        ),
        columns=(
            "Arm",
            "The study's own",
            "Found",
            "Trials",
            "Tokens of the trials",
            "Token cost, the study's own",
            "Token cost, found",
        ),
        rows=tuple(
            (
                arm.name if arm.group == arm.name else f"{arm.name} (group {arm.group})",
                loss(arm.shared, arm.shared_loss),
                loss(arm.chosen, arm.chosen_loss) + (", the outermost tried" if arm.outermost else ""),
                f"{arm.complete} / {arm.pruned} / {arm.diverged}",
                words.tokens(arm.tokens),
                words.cost(arm.shared_cost),
                words.cost(arm.tuned_cost),
            )
            for arm in tuning.arms
        ),
        numeric=frozenset({3, 4, 5, 6}),
    )


def arm_table(analysis: Analysis) -> Table:
    """Return what each arm is."""
    return Table(
        caption="The arms: what differs from the baseline, as study file keys (baseline → arm).",
        columns=("Arm", "Differs in", "Also stands for", "Description"),
        rows=tuple(
            (
                arm.name,
                "; ".join(
                    f"{key}: {_plain(old)} → {_plain(new)}" for key, (old, new) in arm.planned.differs.items()
                )
                or ("baseline" if arm.name == analysis.baseline else words.DASH),
                ", ".join(arm.planned.folded) or words.DASH,
                arm.planned.description or words.DASH,
            )
            for arm in analysis.arms
        ),
    )


def run_table(analysis: Analysis) -> Table:
    """Return the ledger: every run of the plan."""
    return Table(
        caption=(
            "Every run of the plan. End: hit, censored (budget ended before the target), diverged, or "
            "missing (no result). ≤ : at the target by its first evaluation. Losses in nats/token."
            + (" Unused: its arm was stopped early." if analysis.stopped else "")
        ),
        columns=("Run", "Arm", "Seed", "State", "End", "Tokens", "Tokens to target", "Last loss", "Message"),
        rows=tuple(
            (
                run.run_id,
                run.arm,
                str(run.seed),
                run.state,
                run.end,
                words.tokens(run.tokens),
                ("≤ " if run.left_bound else "") + words.tokens(run.tokens_to_target),
                words.loss(run.last_loss),
                run.message or "",
            )
            for arm in analysis.every_arm
            for run in arm.runs
        ),
        numeric=frozenset({2, 5, 6, 7}),
    )


def _plain(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(_plain(item) for item in value)}]"
    if isinstance(value, dict):  # a part of a recipe: what is not set says nothing
        known = (f"{key}: {_plain(item)}" for key, item in value.items() if item is not None)
        return f"{{{', '.join(known)}}}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
