"""The report's tables of arms, runs and what was found on them; one without rows is not shown."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

from ablate.reports.findings.gemms import PLAIN
from ablate.reports.findings.power import MOST_SEEDS
from ablate.reports.words.caveats import early_difference
from ablate.reports.words.format import (
    DASH,
    NBSP,
    cost,
    counts,
    coverage,
    ends,
    from_fork,
    interval,
    levels,
    loss,
    make_table,
    margin,
    percent,
    percents,
    setting,
    share,
    signed,
    times,
    tokens,
)
from ablate.reports.words.verdict import TONES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ablate.recipes import Gemm
    from ablate.reports.findings.effects import Effect
    from ablate.reports.findings.gemms import Matrix
    from ablate.reports.findings.results import Analysis, ArmResult
    from ablate.reports.words.format import Table
    from ablate.reports.words.verdict import Finding, Tone


def arms_table(analysis: Analysis) -> Table:
    """Return the arms against the baseline."""
    within = analysis.plan.margin

    def row(arm: ArmResult) -> dict[str, object]:
        missing = f" (+{arm.missing} missing)" if arm.missing else ""
        found: dict[str, object] = {
            "Arm": arm.name,
            "Recipe": arm.recipe,
            "n": f"{arm.n}{missing}{' (stopped)' * (arm.stopped is not None)}",
        }
        if analysis.plan.target is None:
            found |= {"diverged": arm.diverged, "Final loss": interval(arm.final_loss)}
        else:
            wider = arm.token_cost.own if arm.token_cost.stands_out else None
            own = "" if wider is None else f", own [{percents(wider).partition('[')[2]}"
            found |= {
                "hit / cens. / div.": ends(arm),
                "Tokens to target": interval(arm.tokens_to_target, tokens) + from_fork(arm.counted_from),
                "Token cost": cost(arm.token_cost) + own,
                "Break-even": times(arm.break_even),
            }
        difference = interval(arm.difference, signed)
        if arm.name == analysis.baseline:
            difference = f"(loss {loss(arm.final_loss.estimate)})"
        elif early := early_difference(arm, analysis):
            difference += f" at {tokens(early)}"
        found["Final loss difference"] = difference
        return found | ({} if within is None else {"Margin": arm.standing})

    caption = (
        f"Arms against the baseline. n: results (runs that finished or diverged). Brackets: "
        f"{coverage(analysis.plan.stop)} intervals over runs, each for its own comparison. Loss difference: "
        f"{'at the last evaluation that all runs of both have' if analysis.has_curves else 'of final losses'}"
        ", nats/token."
    )
    if analysis.plan.target is not None:
        caption += (
            " hit / cens. / div.: how they ended. > and ≤: a bound, because not every run reached the "
            "target. Break-even: the throughput over the baseline's from which the arm pays."
        )
    if within is not None:
        caption += f" Margin: {margin(within)}; two one-sided tests at 5{NBSP}%."
    if any(arm.counted_from for arm in analysis.arms):
        caption += " From … on: counted from the fork, as the baseline's are; not those of whole runs."
    return make_table(caption, map(row, analysis.arms), range(2, 9))


def matrix_tables(analysis: Analysis, findings: Sequence[Finding]) -> tuple[Table, ...]:
    """Return the verdict as a table for each matrix of arms: what is in FP4 by how it is stabilised."""
    if analysis.plan.target is None:  # there is no token cost
        return ()
    tones = {finding.arm: finding.tone for finding in findings}
    return tuple(_matrix_table(matrix, analysis, tones) for matrix in analysis.matrices)


def gemms_text(gemms: Sequence[Gemm]) -> str:
    """Return ``Fprop + Dgrad``, which breaks before a plus alone."""
    return f" +{NBSP}".join(gemm.capitalize() for gemm in gemms)


def _matrix_table(matrix: Matrix, analysis: Analysis, tones: dict[str, Tone]) -> Table:
    arms = {arm.name: arm for arm in analysis.arms}

    def cell(name: str | None) -> str | None:
        if name is None or name not in tones:
            return name and "baseline"
        text = TONES[tones[name]]
        known = arms[name].token_cost.kind != "none" and tones[name] != "diverged"
        return f"{text}:\n{cost(arms[name].token_cost)}" if known else text

    heads = ["no stabiliser" if one == PLAIN else one for one in matrix.stabilisers]
    # In what all its arms differ from the baseline besides their recipe.
    differs = [dict(arms[name].planned.differs) for name in arms if name in matrix.names]
    common = [
        f"{key} {setting(pair[1])}"
        for key, pair in differs[0].items()
        if not key.startswith("recipe") and all(one.get(key) == pair for one in differs)
    ]
    left = [arm.name for arm in analysis.others if arm.name not in matrix.names]
    caption = (
        f"Token cost against {analysis.baseline} by what is in {matrix.format.upper()} and how it is "
        f"stabilised; the arms differ in nothing else. Brackets: {coverage(analysis.plan.stop)} intervals. "
        "More, fewer: the interval leaves zero out; not settled: it holds zero. SR: stochastic rounding; "
        "RHT, DHT: random, deterministic Hadamard and its size; *: on a part of the operands. "
        f"{DASH}: not in the study."
    )
    if analysis.plan.margin is not None:
        caption += f" Margin: {margin(analysis.plan.margin)}."
    if common:
        caption += f" All with {', '.join(common)}."
    if left:
        caption += f" Not in this table: {', '.join(left)}."
    return make_table(
        caption,
        [
            {"GEMMs in FP4": gemms_text(gemms), **dict(zip(heads, map(cell, names), strict=True))}
            for gemms, names in zip(matrix.gemms, matrix.arms, strict=True)
        ],
        tones={
            (i, j): tones.get(name or "", "absent")
            for i, names in enumerate(matrix.arms)
            for j, name in enumerate(names, 1)
            if name is None or name in tones
        },
    )


def stop_table(analysis: Analysis) -> Table:
    """Return the arms that were stopped early."""
    return make_table(
        "Arms whose other runs were not needed. Seeds: those that count, of this arm and of "
        f"{analysis.baseline}; what other runs had come to by then is left out. Nominal level: of the "
        f"arm's interval, so that all looks together err in 5{NBSP}% of studies. An arm that was stopped "
        "because runs diverged has a bound and no interval: the rest of its runs is a selection.",
        [
            {
                "Arm": arm.name,
                "Why": arm.stopped.reason,
                "Seeds": arm.stopped.seeds,
                "Nominal level": arm.stopped.seeds and levels([arm.alpha]),
                "Runs not needed": arm.unused,
                "Tokens saved": tokens(arm.tokens_saved),
            }
            for arm in analysis.stopped
            if arm.stopped is not None
        ],
        range(2, 6),
    )


def step_table(analysis: Analysis) -> Table:
    """Return what each further GEMM adds, by the pairs of arms that show it."""
    return make_table(
        "What one more GEMM in FP4 adds, all else equal: pairs of arms that differ in nothing else. Token "
        f"cost of the second arm over the first, with its {coverage(analysis.plan.stop)} interval.",
        [
            {
                "GEMM": step.gemm.capitalize(),
                "From": step.from_arm,
                "To": step.to_arm,
                "Token cost": cost(step.cost),
                "n": counts(step.cost).partition(f"={NBSP}")[2],
            }
            for step in analysis.steps
        ],
        {3, 4},
    )


def effect_table(analysis: Analysis) -> Table:
    """Return the effects of a grid's factors on tokens to target."""
    found = analysis.token_effects
    on_loss = {effect.term: effect.p_holm for effect in analysis.loss_effects.terms}

    def told(effect: Effect) -> str:
        if not effect.degrees:
            return "not to be told from the others"
        changes = effect.levels.items()
        return ", ".join(f"{level} {percent(math.expm1(change))}" for level, change in changes) or DASH

    return make_table(
        "Effects of the factors on log tokens to target. Levels: tokens over the geometric mean of the "
        "factor's levels, the other factors averaged. p: F "
        f"tests (type II) over {found.runs} runs, residual s.d. {share(found.residual)}, adjusted together "
        "after Holm; the last column is the same for the final loss. With paired seeds each seed is a block. "
        "Interactions (×) say that one factor's effect depends on the other.",
        [
            {
                "Factor": effect.term,
                "Levels": told(effect),
                "F": effect.f and f"{effect.f:.1f}",
                "d.f.": effect.degrees,
                "p (Holm)": _p_value(effect.p_holm),
                "p (Holm), final loss": _p_value(on_loss.get(effect.term)),
            }
            for effect in found.terms
        ],
        range(2, 6),
    )


def _p_value(value: float | None) -> str | None:
    return None if value is None else "<0.001" if value < 0.001 else f"{value:.3f}"


def power_table(analysis: Analysis) -> Table:
    """Return the noise of each comparison and what so many seeds could have shown."""
    return make_table(
        "Noise and power. Spread: the standard deviation of log tokens to target over seeds, of the arm, of "
        f"{analysis.baseline}, and of the differences between runs of one seed. Smallest cost: what these "
        f"seeds would have shown with a chance of 80{NBSP}% (5{NBSP}% level, two-sided), compared as the "
        "intervals are. More seeds: of each arm, to settle what is open if the cost is what it seems; 0 "
        "where it is settled. For planning: with few seeds the spread is itself uncertain.",
        [
            {
                "Arm": arm.name,
                "n": arm.n,
                "Spread": share(power.spread_of_log_tokens),
                "Spread of the baseline": share(power.spread_of_the_baseline),
                "Spread of the pairs": share(power.spread_of_the_pairs),
                "Smallest cost": share(power.smallest_cost),
                "More seeds": f"over {MOST_SEEDS:,}" if power.more_seeds is None else power.more_seeds,
            }
            for arm in analysis.others
            if (power := arm.power) is not None
        ],
        range(1, 7),
    )


def design_table(analysis: Analysis) -> Table:
    """Return what each arm is."""

    def differs(arm: ArmResult) -> str:
        found = arm.planned.differs.items()
        return "; ".join(f"{key}: {_plain(old)} → {_plain(new)}" for key, (old, new) in found)

    return make_table(
        "The arms: what differs from the baseline, as study file keys (baseline → arm).",
        [
            {
                "Arm": arm.name,
                "Differs in": differs(arm) or ("baseline" if arm.name == analysis.baseline else None),
                "Also stands for": ", ".join(arm.planned.folded) or None,
                "Description": arm.planned.description or None,
            }
            for arm in analysis.arms
        ],
    )


def _plain(value: Any) -> str:
    if isinstance(value, dict):  # a part of a recipe: what is not set says nothing
        known = ", ".join(f"{key}: {_plain(item)}" for key, item in value.items() if item is not None)
        return f"{{{known}}}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False).replace('"', "")


def run_table(analysis: Analysis) -> Table:
    """Return the ledger: every run of the plan."""
    has_target = analysis.plan.target is not None
    caption = "Every run of the plan. Losses in nats/token."
    if has_target:
        caption += (
            " End: hit, censored (budget ended before the target), diverged, missing (no result), or unused "
            "(its arm was stopped early). To target: ≤ : at the target by its first evaluation; of an "
            "arm that forks from the fork on."
        )
    return make_table(
        caption,
        [
            {
                "Run": run.run_id,
                "Arm": run.arm,
                "Seed": run.seed,
                "Last loss": loss(run.last_loss),
                "Tokens": tokens(run.tokens),
            }
            | ({"To target": "≤ " * run.left_bound + tokens(run.tokens_to_target)} if has_target else {})
            | {"State": run.state}
            | ({"End": run.end} if has_target else {})
            | {"Message": run.message or ""}
            for arm in analysis.every_arm
            for run in arm.runs
        ],
        range(2, 6 if has_target else 5),
    )
