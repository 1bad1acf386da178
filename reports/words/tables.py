"""The report's tables, of arms, runs, costs, time and money; a table without rows is not shown."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from ablate.modelled.speed import HARDWARE
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
    loss,
    make_table,
    margin,
    percents,
    setting,
    share,
    signed,
    timed_alone,
    times,
    tokens,
)
from ablate.reports.words.verdict import TONES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ablate.reports.findings.results import Analysis, ArmResult
    from ablate.reports.words.format import Table
    from ablate.reports.words.verdict import Finding


def arms_table(analysis: Analysis) -> Table:
    """Compare the arms with the baseline, one row each, the baseline among them."""
    within = analysis.plan.margin

    def row(arm: ArmResult) -> dict[str, object]:
        missing = f" (+{lacking} missing)" if (lacking := arm.count("missing")) else ""
        found: dict[str, object] = {
            "Arm": arm.name,
            "Recipe": arm.recipe,
            "n": f"{arm.n}{missing}{' (stopped)' * (arm.stopped is not None)}",
        }
        if analysis.plan.target is None:
            found |= {"diverged": arm.count("diverged"), "Final loss": interval(arm.final_loss)}
        else:
            wider = arm.token_cost.own if arm.token_cost.stands_out else None
            own = "" if wider is None else f", own [{percents(wider).partition('[')[2]}"
            found |= {
                "hit / cens. / div.": ends(arm.runs),
                "Tokens to target": interval(arm.tokens_to_target, tokens) + from_fork(arm.counted_from),
                "Token cost": cost(arm.token_cost) + own,
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
        f", {analysis.plan.unit}."
    )
    if analysis.plan.target is not None:
        caption += (
            " hit / cens. / div.: how they ended. > and ≤: a bound, because not every run reached the target."
        )
    if within is not None:
        caption += f" Margin: {margin(within, analysis.plan.unit)}; two one-sided tests at 5{NBSP}%."
    if any(arm.counted_from for arm in analysis.arms):
        caption += " From … on: counted from the fork, as the baseline's are; not those of whole runs."
    return make_table("arms", "Arms against the baseline", caption, map(row, analysis.arms), range(2, 9))


def matrix_tables(analysis: Analysis, findings: Sequence[Finding]) -> Iterator[Table]:
    """Show the verdict for each matrix of arms: GEMMs in FP4 by stabiliser; nothing without a target."""
    arms = {arm.name: arm for arm in analysis.arms}
    tones = {finding.arm: finding.tone for finding in findings}

    def cell(name: str | None) -> str | None:
        if name is None or name not in tones:
            return name and "baseline"
        text = TONES[tones[name]]
        known = arms[name].token_cost.kind != "none" and tones[name] != "diverged"
        return f"{text}:\n{cost(arms[name].token_cost)}" if known else text

    # Without a target there is no token cost.
    for number, matrix in enumerate(analysis.matrices if analysis.plan.target else (), 1):
        heads = ["no stabiliser" if one == PLAIN else one for one in matrix.stabilisers]
        # What differs from the baseline in the same way in all arms, besides the recipe.
        differs = [dict(arms[name].planned.differs) for name in arms if name in matrix.names]
        common = [
            f"{key} {setting(pair[1])}"
            for key, pair in differs[0].items()
            if not key.startswith("recipe") and all(one.get(key) == pair for one in differs)
        ]
        left = [arm.name for arm in analysis.others if arm.name not in matrix.names]
        caption = (
            f"Token cost against {analysis.baseline} by what is in {matrix.format.upper()} and how it is "
            f"stabilised; the arms differ in nothing else. Brackets: {coverage(analysis.plan.stop)} "
            "intervals. More, fewer: the interval leaves zero out; not settled: it holds zero. SR: "
            "stochastic rounding; RHT, DHT: random, deterministic Hadamard and its size; *: on a part of "
            f"the operands. {DASH}: not in the study."
        )
        if analysis.plan.margin is not None:
            caption += f" Margin: {margin(analysis.plan.margin, analysis.plan.unit)}."
        if common:
            caption += f" All with {', '.join(common)}."
        if left:
            caption += f" Not in this table: {', '.join(left)}."
        rows, shades = [], {}
        for i, (gemms, names) in enumerate(zip(matrix.gemms, matrix.arms, strict=True)):
            low = f" +{NBSP}".join(gemm.capitalize() for gemm in gemms)  # a line breaks only before a plus
            rows.append({"GEMMs in FP4": low, **dict(zip(heads, map(cell, names), strict=True))})
            for j, name in enumerate(names, 1):
                if name is None or name in tones:
                    shades[i, j] = tones.get(name or "", "absent")
        yield make_table(
            "matrix" if number == 1 else f"matrix-{number}",
            f"Token cost by GEMMs and stabiliser {number}",
            caption,
            rows,
            tones=shades,
            sentences=tuple(finding.text for finding in findings if finding.arm in matrix.names),
        )


def step_table(analysis: Analysis) -> Table:
    """Show what each further GEMM costs, one row for each pair of arms that differ only in it."""
    return make_table(
        "steps",
        "What each further GEMM adds",
        "What one more GEMM in FP4 adds, all else equal: pairs of arms that differ in nothing else. Token "
        f"cost of the second arm over the first, with its {coverage(analysis.plan.stop)} interval. What the "
        "first GEMM adds is its arm's token cost.",
        [
            {
                "GEMM": step.gemm.capitalize(),
                "From": step.from_arm,
                "To": step.to_arm,
                "Token cost": cost(step.cost),
                "n": counts(step.cost).partition(f"={NBSP}")[2],
            }
            for step in analysis.steps
            if step.from_arm != analysis.baseline
        ],
        {3, 4},
    )


def power_table(analysis: Analysis) -> Table:
    """Show the noise of each comparison, and what its seeds could have shown."""
    return make_table(
        "power",
        "What the seeds could show",
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
    """Describe each arm by its differences from the baseline."""
    return make_table(
        "design",
        "The arms",
        "The arms: what differs from the baseline, as study file keys (baseline → arm).",
        [
            {
                "Arm": arm.name,
                "Differs in": "; ".join(
                    f"{key}: {_plain(old)} → {_plain(new)}" for key, (old, new) in arm.planned.differs.items()
                )
                or ("baseline" if arm.name == analysis.baseline else None),
                "Also stands for": ", ".join(arm.planned.folded) or None,
                "Description": arm.planned.description or None,
            }
            for arm in analysis.arms
        ],
    )


def _plain(value: Any) -> str:
    if isinstance(value, dict):  # a part of a recipe, without the values that are not set
        known = ", ".join(f"{key}: {_plain(item)}" for key, item in value.items() if item is not None)
        return f"{{{known}}}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False).replace('"', "")


def run_table(analysis: Analysis) -> Table:
    """List every run of the plan: its tokens, last loss, state and, with a target, its end."""
    caption = f"Every run of the plan. Losses in {analysis.plan.unit}."
    hidden = {"To target", "End"}
    if analysis.plan.target is not None:
        hidden = set()
        caption += (
            " End: hit, censored (budget ended before the target), diverged, missing (no result), or unused "
            "(its arm was stopped early). To target: ≤ : at the target by its first evaluation; of an "
            "arm that forks from the fork on."
        )
    rows = [
        {
            "Run": run.run_id,
            "Arm": run.arm,
            "Seed": run.seed,
            "Last loss": loss(run.last_loss),
            "Tokens": tokens(run.trained),
            "To target": "≤ " * run.left_bound + tokens(run.tokens_to_target),
            "State": run.state,
            "End": run.end,
            "Message": run.message or None,
        }
        for arm in analysis.every_arm
        for run in arm.runs
    ]
    rows = [{head: cell for head, cell in row.items() if head not in hidden} for row in rows]
    return make_table("runs", "Every run", caption, rows, range(2, 6 - bool(hidden)))


def evaluation_table(analysis: Analysis) -> Table:
    """Compare both evaluations, by the arm's own Fprop and in bf16, of the arms that have both."""
    return make_table(
        "evaluation",
        "Learnt or inferred",
        "Each arm evaluated in bf16, with the same weights on the same batches as by its own Fprop, on which "
        f"all other figures rest. In bf16: what it learnt worse than {analysis.baseline}. Evaluation alone: "
        "what its own forward pass adds; 1 + token cost is 1 + cost in bf16, times 1 + evaluation alone. "
        f"Brackets: {coverage(analysis.plan.stop)} intervals; of evaluation alone from the differences "
        "within each run, by the arm's own variance.",
        [
            {"Arm": arm.name}
            | (
                {
                    "Token cost, in bf16": cost(found.token_cost),
                    "Evaluation alone": percents(found.tokens_alone),
                }
                if analysis.plan.target
                else {}
            )
            | {
                "Loss difference, in bf16": interval(found.difference, signed),
                f"Evaluation alone, {analysis.plan.unit}": interval(found.loss_alone, signed),
            }
            for arm in analysis.others
            if (found := arm.in_bf16) is not None
        ],
        range(1, 5),
    )


def tuning_table(analysis: Analysis) -> Table | None:
    """Show what was chosen for each arm, and its cost before and after; None if nothing is tuned."""
    tuning = analysis.tuning
    if tuning is None:
        return None

    def found(values: Mapping[str, Any], value: float | None) -> str:
        text = ", ".join(f"{field} {setting(one)}" for field, one in values.items())
        return text if value is None else f"{text} (loss {loss(value)})"

    return make_table(
        "tuning",
        "Tuning",
        f"What was found for each arm in {tuning.plan.trials} trials of {tokens(tuning.plan.tokens)} "
        f"tokens ({tuning.plan.sampler}), and the token cost at the study's own values beside the one at the "
        "values found, each against the baseline at the same kind of values. Trials: complete / pruned / "
        "diverged, of the arm's group. Loss: mean final validation loss of the trial, "
        f"{analysis.plan.unit}. "
        f"Brackets: 95{NBSP}% intervals over the seeds of the runs.",
        [
            {
                "Arm": arm.name if arm.group == arm.name else f"{arm.name} (group {arm.group})",
                "The study's own": found(arm.shared, arm.loss_shared),
                "Found": found(arm.chosen, arm.loss_chosen) + ", the outermost tried" * bool(arm.outermost),
                "Trials": f"{arm.trials_complete} / {arm.trials_pruned} / {arm.trials_diverged}",
                "Tokens of the trials": tokens(arm.tokens_of_the_trials),
                "Token cost, the study's own": cost(arm.token_cost_shared),
                "Token cost, found": cost(arm.token_cost_tuned),
            }
            for arm in tuning.arms
        ],
        range(3, 7),
    )


def measured_table(analysis: Analysis) -> Table:
    """Show throughput and end-to-end speed of arms with valid timing."""
    record = analysis.throughput
    alone = "" if record is None else f" (`ablate check steps STUDY`: {timed_alone(record)})"
    return make_table(
        "measured",
        "Measured speed",
        f"Throughput and end-to-end speed over {analysis.baseline}'s, the latter the ratio of the times to "
        "target, which is throughput / (1 + token cost): above 1 the arm pays. Intervals "
        f"({coverage(analysis.plan.stop)}) on logs, with the errors of throughput and of token cost both in "
        "the latter. GPU-hours: of one run to the target, evaluation left out. Timed alone"
        f"{alone}: native, errors of repeats on that one machine. As logged: as the logs of others say, on "
        "devices of one kind and number, errors over runs.",
        [
            {
                "Arm": arm.name,
                "Timed": measured.timed,
                "n": arm.n,
                "Throughput": times(measured.throughput),
                "Break-even": times(arm.break_even),
                "End-to-end speed": times(measured.end_to_end),
                "GPU-hours to target": interval(measured.hours, lambda hours: f"{hours:.3g}", f"{NBSP}h"),
            }
            for arm in analysis.arms
            if (measured := arm.measured) is not None
        ],
        range(2, 7),
    )


def modelled_table(analysis: Analysis) -> Table:
    """Show the modelled speed on named hardware."""
    return make_table(
        "modelled",
        "Modelled speed",
        f"Modelled, not measured: step speed over {analysis.baseline}'s at this study's own shapes, on one "
        "device, by a roofline of the shares of published peaks that public measurements reach, without "
        f"launches and communication. Intervals: 95{NBSP}%, from the model's errors on those measurements. "
        "Net: speed / (1 + token cost), with the errors of both. FP4 FLOPs: share of the training FLOPs with "
        "both operands in FP4. – : no unit for the format.",
        [
            {"Arm": arm.name, "FP4 FLOPs": share(arm.fp4_share)}
            | {
                one.hardware: times(one.speed)
                + (f"; net {times(one.net)}" if one.speed.estimate and arm.name != analysis.baseline else "")
                for one in arm.modelled
            }
            for arm in analysis.arms
            if arm.modelled
        ],
        range(1, 2 + len(HARDWARE)),
    )


def published_table(analysis: Analysis) -> Table:
    """Show published figures beside those of the arms whose recipes match."""
    return make_table(
        "published",
        "Published figures beside ours",
        f"Published figures beside ours (against {analysis.baseline}). They are others' and of other "
        "models, data and baselines: to compare with, and no part of any estimate here. Matched by "
        "format, GEMMs in FP4, rounding and Hadamard.",
        [
            {
                "Arm": arm.name,
                "Ours: token cost": cost(arm.token_cost),
                "Published": one.figure,
                "Their setting": one.setting,
            }
            for arm in analysis.others
            for one in arm.published
        ],
        {1},
    )
