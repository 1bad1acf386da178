"""The report's tables, of arms, runs, costs, time and money; a table without rows is not shown."""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Any

from ablate.modelled.speed import HARDWARE
from ablate.reports.findings.gemms import PLAIN
from ablate.reports.findings.power import MOST_SEEDS
from ablate.reports.words.caveats import coarse_share, early_difference
from ablate.reports.words.format import (
    DASH,
    NBSP,
    Column,
    Table,
    cost,
    coverage,
    difference,
    ends,
    from_fork,
    interval,
    left_out,
    loss,
    make_table,
    margin,
    number,
    percents,
    sample,
    setting,
    share,
    timed_alone,
    times,
    tokens,
)
from ablate.reports.words.judge import TONES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from ablate.reports.findings.gemms import Matrix
    from ablate.reports.findings.results import Analysis, ArmResult, TunedArm
    from ablate.reports.words.judge import Finding
    from ablate.results.ends import RunResult
    from ablate.results.intervals import Interval

_ARM = Column("Arm", "name")


def arms_table(analysis: Analysis) -> Table:
    """Compare the arms with the baseline, one row each, the baseline among them."""
    plan = analysis.plan
    columns = [_ARM, Column("Recipe", "recipe"), number("n", _results)]
    if plan.target is None:
        columns += [
            number("diverged", lambda arm: arm.count("diverged")),
            number("Final loss", "final_loss", interval),
        ]
    else:
        columns += [
            number("hit / cens. / div.", "runs", ends),
            number("Tokens to target", _tokens_to_target),
            number("Token cost", lambda arm: _token_cost(arm, analysis)),
        ]
    columns += [
        number("Final loss difference", lambda arm: _final_difference(arm, analysis)),
        number("Margin", "standing"),
    ]
    if analysis.has_curves:
        place = "at the last evaluation that all runs of both have"
    else:
        place = "of final losses"
    caption = (
        f"Arms against the baseline. n: results (runs that finished or diverged). Brackets: "
        f"{coverage(plan.stop)} intervals over runs, each for its own comparison. Loss difference: {place}, "
        f"{plan.unit}."
    )
    if len(analysis.judged) > 1:
        caption += (
            f" *: more or fewer beside all {len(analysis.judged)} comparisons together."
        )
    if plan.target is not None:
        caption += " hit / cens. / div.: how they ended. > and ≤: a bound, because not every run reached the target."
    if plan.margin is not None:
        caption += f" Margin: {margin(plan)}; two one-sided tests at 5{NBSP}%."
    if any(arm.counted_from for arm in analysis.arms):
        caption += " From … on: counted from the fork, as the baseline's are; not those of whole runs."
    return make_table(
        "arms", "Arms against the baseline", caption, columns, analysis.arms
    )


def _results(arm: ArmResult) -> str:
    text = str(arm.n)
    if missing := arm.count("missing"):
        text += f" (+{missing} missing)"
    if arm.stopped is not None:
        text += " (stopped)"
    return text + (left_out(arm.token_cost) or left_out(arm.difference))


def _tokens_to_target(arm: ArmResult) -> str:
    return interval(arm.tokens_to_target, tokens) + from_fork(arm.counted_from)


def _token_cost(arm: ArmResult, analysis: Analysis) -> str:
    text = cost(arm.token_cost)
    if "differs" in arm.claims and len(analysis.judged) > 1:
        text += " *"
    coarse = coarse_share(arm, analysis)
    if coarse is not None:
        text += f", below one evaluation ({share(coarse)})"
    if arm.token_cost.stands_out and arm.token_cost.own is not None:
        text += f", own [{percents(arm.token_cost.own).partition('[')[2]}"
    return text


def _final_difference(arm: ArmResult, analysis: Analysis) -> str:
    if arm.name == analysis.baseline:
        return f"(loss {loss(arm.final_loss.estimate)})"
    text = difference(arm.difference)
    if analysis.plan.target is None and "differs" in arm.claims:
        text += " *"
    if early := early_difference(arm, analysis):
        text += f" at {tokens(early)}"
    return text


def matrix_tables(analysis: Analysis, findings: Sequence[Finding]) -> Iterator[Table]:
    """Show the verdict for each matrix of arms: GEMMs in FP4 by stabiliser; nothing without a target."""
    if analysis.plan.target is None or not findings:  # there is no token cost
        return
    cells: dict[str | None, tuple[str, str]] = {  # by arm: its tone and text
        None: ("absent", DASH),
        analysis.baseline: ("", "baseline"),
    }
    for arm, finding in zip(analysis.others, findings, strict=True):
        text = TONES[finding.tone]
        if arm.token_cost.kind != "none" and finding.tone != "diverged":
            text += f":\n{cost(arm.token_cost)}"
        cells[arm.name] = (finding.tone, text)
    for i, matrix in enumerate(analysis.matrices, 1):
        tones = []
        rows = []
        for gemms, names in zip(matrix.gemms, matrix.arms, strict=True):
            # a line breaks only before a plus
            low = f" +{NBSP}".join(map(str.capitalize, gemms))
            tones.append(("", *(cells[name][0] for name in names)))
            rows.append((low, *(cells[name][1] for name in names)))
        stabilisers = [
            "no stabiliser" if word == PLAIN else word for word in matrix.stabilisers
        ]
        yield Table(
            name="matrix" if i == 1 else f"matrix-{i}",
            title=f"Token cost by GEMMs and stabiliser {i}",
            caption=_matrix_caption(matrix, analysis),
            columns=("GEMMs in FP4", *stabilisers),
            rows=tuple(rows),
            tones=tuple(tones),
            sentences=tuple(
                finding.text for finding in findings if finding.arm in matrix.names
            ),
        )


def _matrix_caption(matrix: Matrix, analysis: Analysis) -> str:
    inside = [arm.planned.differs for arm in analysis.arms if arm.name in matrix.names]
    outside = [arm.name for arm in analysis.others if arm.name not in matrix.names]
    # What differs from the baseline in the same way in all arms, besides the recipe.
    common = []
    for key, pair in inside[0].items():
        is_common = all(differs.get(key) == pair for differs in inside)
        if is_common and not key.startswith("recipe"):
            common.append(f"{key} {setting(pair[1])}")
    caption = (
        f"Token cost against {analysis.baseline} by what is in {matrix.format.upper()} and how it is "
        f"stabilised; the arms differ in nothing else. Brackets: {coverage(analysis.plan.stop)} "
        "intervals. More, fewer: so for all comparisons together; else not settled. SR: "
        "stochastic rounding; RHT, DHT: random, deterministic Hadamard and its size; *: on a part of "
        f"the operands. {DASH}: not in the study."
    )
    if analysis.plan.margin is not None:
        caption += f" Margin: {margin(analysis.plan)}."
    if common:
        caption += f" All with {', '.join(common)}."
    if outside:
        caption += f" Not in this table: {', '.join(outside)}."
    return caption


def step_table(analysis: Analysis) -> Table:
    """Show what each further GEMM costs, one row for each pair of arms that differ only in it."""
    return make_table(
        "steps",
        "What each further GEMM adds",
        "What one more GEMM in FP4 adds, all else equal: pairs of arms that differ in nothing else. Token "
        f"cost of the second arm over the first, with its {coverage(analysis.plan.stop)} interval. What the "
        "first GEMM adds is its arm's token cost.",
        [
            Column("GEMM", "gemm", str.capitalize),
            Column("From", "from_arm"),
            Column("To", "to_arm"),
            number("Token cost", "cost", cost),
            number("n", "cost", sample),
        ],
        [step for step in analysis.steps if step.from_arm != analysis.baseline],
    )


def pair_table(analysis: Analysis, least: Mapping[str, Interval]) -> Table:
    """Show each arm over each other one, once; ``least``: those that may need the fewest tokens."""
    names = list(analysis.over_rivals)
    figure = "token_cost"
    write: Callable[[Any], str] = cost
    if analysis.plan.target is None:
        figure = "difference"
        write = difference

    def cell(column: int, name: str) -> Any:
        arm = analysis.over_rivals[names[column]].get(name)
        return getattr(arm, figure, None) if names.index(name) > column else None

    columns = [Column("Arm", str)]
    for column, other in enumerate(names[:-1]):
        columns.append(number(f"over {other}", partial(cell, column), write))
    columns.append(number("over the best other", least.get, percents))
    caption = (
        "Each arm over each other one, compared as with the baseline. Brackets: "
        f"{coverage(analysis.plan.stop)} intervals, each for its own comparison; over the best other: they "
        "hold together (Hsu 1984), of the arms that may need the fewest tokens."
    )
    others = [arm.name for arm in analysis.judged if arm.name not in names]
    if others:
        caption += (
            f" Left out, for a higher cost, no FP4 or no interval: {', '.join(others)}."
        )
    rows = names if len(names) > 1 else []
    return make_table("pairs", "Arm against arm", caption, columns, rows)


def power_table(analysis: Analysis) -> Table:
    """Show the noise of each comparison, and what its seeds could have shown."""
    of_pairs = ""
    if any(arm.power and arm.power.spread_of_the_pairs for arm in analysis.others):
        of_pairs = ", and of the differences between runs of one seed"
    return make_table(
        "power",
        "What the seeds could show",
        "Noise and power. Spread: the standard deviation of log tokens to target over seeds, of the arm and "
        f"of {analysis.baseline}{of_pairs}. Smallest cost: what these "
        f"seeds would have shown with a chance of 80{NBSP}% (5{NBSP}% level, two-sided), compared as the "
        "intervals are. More seeds: of each arm, to settle what is open, beside all others that are, if the "
        "cost is what it seems; 0 where it is settled. For planning: with few seeds the spread is itself "
        "uncertain.",
        [
            _ARM,
            number("n", "n"),
            number("Spread", "power.spread_of_log_tokens", share),
            number("Spread of the baseline", "power.spread_of_the_baseline", share),
            number("Spread of the pairs", "power.spread_of_the_pairs", share),
            number("Smallest cost", "power.smallest_cost", share),
            number("More seeds", _more_seeds),
        ],
        [arm for arm in analysis.others if arm.power is not None],
    )


def _more_seeds(arm: ArmResult) -> str:
    assert arm.power is not None
    if arm.power.more_seeds is None:
        return f"over {MOST_SEEDS:,}"
    return str(arm.power.more_seeds)


def design_table(analysis: Analysis) -> Table:
    """Describe each arm by its differences from the baseline."""

    def differences(arm: ArmResult) -> str | None:
        if arm.name == analysis.baseline and not arm.planned.differs:
            return "baseline"
        changes = []
        for key, (base_value, value) in arm.planned.differs.items():
            changes.append(f"{key}: {_plain(base_value)} → {_plain(value)}")
        return "; ".join(changes) or None

    return make_table(
        "design",
        "The arms",
        "The arms: what differs from the baseline, as study file keys (baseline → arm).",
        [
            _ARM,
            Column("Differs in", differences),
            Column(
                "Also stands for", lambda arm: ", ".join(arm.planned.folded) or None
            ),
            Column("Description", lambda arm: arm.planned.description or None),
        ],
        analysis.arms,
    )


def _plain(value: Any) -> str:
    if isinstance(value, str):
        return value
    # a part of a recipe, without the values that are not set
    if isinstance(value, dict):
        known = [
            f"{key}: {_plain(item)}" for key, item in value.items() if item is not None
        ]
        return f"{{{', '.join(known)}}}"
    return json.dumps(value, ensure_ascii=False).replace('"', "")


def run_table(analysis: Analysis) -> Table:
    """List every run of the plan: its tokens, last loss, state and, with a target, its end."""
    caption = f"Every run of the plan. Losses in {analysis.plan.unit}."
    columns = [
        Column("Run", "run_id"),
        Column("Arm", "arm"),
        number("Seed", "seed"),
        number("Last loss", "last_loss", loss),
        number("Tokens", "trained", tokens),
        number("To target", _run_to_target),
        Column("State", "state"),
        Column("End", "end"),
        Column("Message", lambda run: run.message or None),
    ]
    if analysis.plan.target is None:
        columns = [
            column for column in columns if column.heading not in ("To target", "End")
        ]
    else:
        caption += (
            " End: hit, censored (budget ended before the target), diverged, missing (no result), or unused "
            "(its arm was stopped early). To target: ≤ : by its first evaluation, or between two around a "
            "change of schedule or recipe; of an arm that forks from the fork on."
        )
    runs = [run for arm in analysis.every_arm for run in arm.runs]
    return make_table("runs", "Every run", caption, columns, runs)


def _run_to_target(run: RunResult) -> str:
    text = tokens(run.tokens_to_target)
    return text if run.exact or run.end != "hit" else f"≤ {text}"


def evaluation_table(analysis: Analysis) -> Table:
    """Compare both evaluations, by the arm's own Fprop and in bf16, of the arms that have both."""
    columns = [_ARM]
    if analysis.plan.target is not None:
        columns += [
            number("Token cost, in bf16", "in_bf16.token_cost", cost),
            number("Evaluation alone", "in_bf16.tokens_alone", percents),
        ]
    columns += [
        number("Loss difference, in bf16", "in_bf16.difference", difference),
        number(
            f"Evaluation alone, {analysis.plan.unit}", "in_bf16.loss_alone", difference
        ),
    ]
    return make_table(
        "evaluation",
        "Learnt or inferred",
        "Each arm evaluated in bf16, with the same weights on the same batches as by its own Fprop, on which "
        f"all other figures rest. In bf16: what it learnt worse than {analysis.baseline}. Evaluation alone: "
        "what its own forward pass adds; 1 + token cost is 1 + cost in bf16, times 1 + evaluation alone. "
        f"Brackets: {coverage(analysis.plan.stop)} intervals; of evaluation alone from the differences "
        "within each run, by the arm's own variance.",
        columns,
        [arm for arm in analysis.others if arm.in_bf16 is not None],
    )


def tuning_table(analysis: Analysis) -> Table | None:
    """Show what was chosen for each arm, and its cost before and after; None if nothing is tuned."""
    tuning = analysis.tuning
    if tuning is None:
        return None
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
            Column("Arm", _arm_and_group),
            Column(
                "The study's own", lambda arm: _settings(arm.shared, arm.loss_shared)
            ),
            Column("Found", _chosen),
            number("Trials", _trials),
            number("Tokens of the trials", "tokens_of_the_trials", tokens),
            number("Token cost, the study's own", "token_cost_shared", cost),
            number("Token cost, found", "token_cost_tuned", cost),
        ],
        tuning.arms,
    )


def _arm_and_group(arm: TunedArm) -> str:
    if arm.group == arm.name:
        return arm.name
    return f"{arm.name} (group {arm.group})"


def _settings(values: Mapping[str, Any], final_loss: float | None) -> str:
    text = ", ".join(f"{field} {setting(value)}" for field, value in values.items())
    if final_loss is None:
        return text
    return f"{text} (loss {loss(final_loss)})"


def _chosen(arm: TunedArm) -> str:
    text = _settings(arm.chosen, arm.loss_chosen)
    return f"{text}, the outermost tried" if arm.outermost else text


def _trials(arm: TunedArm) -> str:
    return f"{arm.trials_complete} / {arm.trials_pruned} / {arm.trials_diverged}"


def measured_table(analysis: Analysis) -> Table:
    """Show throughput and end-to-end speed of arms with valid timing."""
    alone = ""
    if analysis.throughput is not None:
        alone = f" (`ablate check steps STUDY`: {timed_alone(analysis.throughput)})"
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
            _ARM,
            Column("Timed", "measured.timed"),
            number("n", "n"),
            number("Throughput", "measured.throughput", times),
            number("Break-even", "break_even", times),
            number("End-to-end speed", "measured.end_to_end", times),
            number(
                "GPU-hours to target",
                "measured.hours",
                lambda hours: interval(hours, "{:.3g}".format, f"{NBSP}h"),
            ),
        ],
        [arm for arm in analysis.arms if arm.measured is not None],
    )


def modelled_table(analysis: Analysis) -> Table:
    """Show the modelled speed on named hardware."""

    def speed(i: int, arm: ArmResult) -> str:
        modelled = arm.modelled[i]
        text = times(modelled.speed)
        if modelled.speed.estimate and arm.name != analysis.baseline:
            text += f"; net {times(modelled.net)}"
        return text

    columns = [_ARM, number("FP4 FLOPs", "fp4_share", share)]
    for i, hardware in enumerate(HARDWARE):
        columns.append(number(hardware, partial(speed, i)))
    return make_table(
        "modelled",
        "Modelled speed",
        f"Modelled, not measured: step speed over {analysis.baseline}'s at this study's own shapes, on one "
        "device, by a roofline of the shares of published peaks that public measurements reach, without "
        f"launches and communication. Intervals: 95{NBSP}%, from the model's errors on those measurements. "
        "Net: speed / (1 + token cost), with the errors of both. FP4 FLOPs: share of the training FLOPs with "
        "both operands in FP4. – : no unit for the format.",
        columns,
        [arm for arm in analysis.arms if arm.modelled],
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
            Column("Arm", lambda row: row[0].name),
            number("Ours: token cost", lambda row: cost(row[0].token_cost)),
            Column("Published", lambda row: row[1].figure),
            Column("Their setting", lambda row: row[1].setting),
        ],
        [(arm, published) for arm in analysis.others for published in arm.published],
    )
