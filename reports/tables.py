"""The report's tables: as text for the pages, and with full precision as CSV.

A ``Table`` is already text in cells, so that the HTML and Markdown pages cannot differ in a figure.
"""

from __future__ import annotations

import csv
import io
import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ablate.reports import words
from ablate.reports.load import EVAL_COLUMNS, StudyFrames
from ablate.reports.power import MOST_SEEDS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ablate.reports.analyse import Analysis
    from ablate.reports.effects import Effect
    from ablate.reports.power import Power


@dataclass(frozen=True, kw_only=True)
class Table:
    """Text in cells. The first column names the row; ``numeric`` holds the columns set to the right."""

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numeric: frozenset[int] = frozenset()


def headline(analysis: Analysis) -> Table:
    """Return the arms against the baseline."""
    return Table(
        caption=(
            "Arms against the baseline. n: results (runs that finished or diverged), of which hit / censored "
            "/ diverged. Brackets: 95\u00a0% intervals over seeds, each for its own comparison. > : a bound, "
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
                str(arm.n) + (f" (+{arm.missing} missing)" if arm.missing else ""),
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


def effect_table(analysis: Analysis) -> Table | None:
    """Return the effects of a grid's factors on tokens to target; None where there are none."""
    found = analysis.token_effects
    if not found.effects:
        return None
    on_loss = {effect.term: effect for effect in analysis.loss_effects.effects}

    def levels(effect: Effect) -> str:
        if effect.aliased_with:
            return f"not to be told from {', '.join(effect.aliased_with)}"
        return ", ".join(f"{level} {words.percent(math.expm1(change))}" for level, change in effect.levels)

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

    return Table(
        caption=(
            "Noise and power. Spread: the standard deviation of log tokens to target over seeds, of the arm "
            f"and of {analysis.baseline}. Smallest cost: what these seeds would have shown with a chance "
            "of 80\u00a0% (5\u00a0% level, two-sided, unpaired). More seeds: of each arm, to settle what is "
            "open if the cost is what it seems. For planning: with few seeds the spread is itself uncertain."
        ),
        columns=("Arm", "n", "Spread", "Spread of the baseline", "Smallest cost", "More seeds"),
        rows=tuple(
            (
                arm.name,
                str(arm.n),
                words.share(power.spread),
                words.share(power.spread_baseline),
                words.share(power.smallest_cost),
                more(power),
            )
            for arm, power in known
        ),
        numeric=frozenset({1, 2, 3, 4, 5}),
    )


def step_table(analysis: Analysis) -> Table | None:
    """Return what each further GEMM adds; None where no pair of arms shows it."""
    if not analysis.steps:
        return None
    return Table(
        caption=(
            "What one more GEMM in FP4 adds, all else equal: pairs of arms that differ in nothing else. "
            "Token cost of the second arm over the first, with its 95\u00a0% interval."
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


def arm_table(analysis: Analysis) -> Table:
    """Return what each arm is."""
    return Table(
        caption="The arms: what differs from the baseline, as study file keys (baseline → arm).",
        columns=("Arm", "Differs in", "Also stands for", "Description"),
        rows=tuple(
            (
                arm.name,
                "; ".join(f"{key}: {_change(change)}" for key, change in arm.differs.items())
                or ("baseline" if arm.name == analysis.baseline else words.DASH),
                ", ".join(arm.folded) or words.DASH,
                arm.description or words.DASH,
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
            for arm in analysis.arms
            for run in arm.runs
        ),
        numeric=frozenset({2, 5, 6, 7}),
    )


def _change(change: Any) -> str:
    if isinstance(change, list) and len(change) == 2:
        return " → ".join(_plain(value) for value in change)
    return _plain(change)


def _plain(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(_plain(item) for item in value)}]"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def arms_csv(analysis: Analysis) -> str:
    """Return the headline table with full precision."""
    header = ["arm", "recipe", "n", "hit", "censored", "diverged", "missing"]
    groups = ("tokens_to_target", "token_cost", "final_loss", "loss_difference")
    header += [f"{group}_{part}" for group in groups for part in ("estimate", "low", "high")]
    header += ["token_cost_kind", "loss_difference_tokens"]
    rows = []
    for arm in analysis.arms:
        intervals = (arm.tokens_to_target, arm.token_cost, arm.final_loss, arm.difference.interval)
        figures = [part for i in intervals for part in (i.estimate, i.low, i.high)]
        rows.append(
            [
                *(arm.name, arm.recipe, arm.n, arm.hit, arm.censored, arm.diverged, arm.missing),
                *figures,
                arm.token_cost.kind,
                arm.difference.tokens,
            ]
        )
    return _csv(header, rows)


def runs_csv(analysis: Analysis) -> str:
    """Return the ledger with full precision."""
    header = [
        "run_id",
        "arm",
        "seed",
        "state",
        "end",
        "tokens",
        "tokens_to_target",
        "left_bound",
        "last_loss",
    ]
    header += ["seconds", "tokens_per_sec", "backend_mode", "message"]
    return _csv(
        header, [[getattr(run, name) for name in header] for arm in analysis.arms for run in arm.runs]
    )


def evaluations_csv(frames: StudyFrames) -> str:
    """Return every evaluation."""
    text: str = frames.evals.to_csv(index=False, columns=list(EVAL_COLUMNS), lineterminator="\n")
    return text


def _csv(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    return out.getvalue()
