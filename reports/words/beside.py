"""Studies beside each other in words: two compared, or several over the size of the model and the budget."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ablate.reports.findings.trend import cut
from ablate.reports.statistics.scaling import SEEN
from ablate.reports.words import words
from ablate.reports.words.table import Table

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ablate.reports.findings.compare import Comparison
    from ablate.reports.findings.trend import Trend
    from ablate.reports.statistics.intervals import Interval
    from ablate.reports.statistics.law_fit import Key
    from ablate.reports.statistics.scaling import ArmScaling, Prediction, Scaling

_LONGEST_VALUE = 60
_MISSED = 1 / 3
"""Of an arm's loss gaps, from where on the report says that the law misses them."""


def compare_table(comparison: Comparison) -> Table:
    """Return the comparison as text in cells."""
    return Table(
        caption=f"Token cost of each arm in both studies, with its {words.coverage(*comparison.rules)} "
        f"interval, and the ratio of (1 + token cost) in {comparison.right} over {comparison.left}, minus "
        "one: above zero the arm costs more there.",
        columns=("Arm", comparison.left, comparison.right, "Ratio"),
        rows=tuple(
            (arm.name, words.cost(arm.left), words.cost(arm.right), words.percent_interval(arm.ratio))
            for arm in comparison.arms
        ),
        numeric=range(1, 4),
    )


def trend_table(found: Trend) -> Table:
    """Return the trends as text in cells."""
    return Table(
        caption=(
            f"Token cost of each arm over {found.against} in each study, by rising number of parameters, at "
            f"the study's own target, with its {words.coverage(*found.rules)} interval; and what "
            "(1 + token cost) changes by for each tenfold of parameters: above zero the cost grows with "
            "size. Each interval is for its own comparison. That of the change holds the error of the runs, "
            "not that of the straight line, which is an average slope: see whether the points follow it."
        ),
        columns=(
            "Arm",
            *(f"{study.name} ({words.parameters(study.parameters)})" for study in found.studies),
            "Change per tenfold",
        ),
        rows=tuple(
            (arm.name, *map(words.cost, arm.costs), words.percent_interval(arm.per_tenfold))
            for arm in found.arms
        ),
        numeric=range(1, len(found.studies) + 2),
    )


def trend_sentences(found: Trend) -> Iterator[str]:
    """Say which costs grow or shrink with size, which trends are not settled, and what limits them."""
    unsettled, without = [], []
    for arm in found.arms:
        change = arm.per_tenfold
        text = words.percent_interval(change)
        if change.low is None or change.high is None:
            without.append(f"{arm.name} ({change.note})")
        elif change.low <= 0 <= change.high:
            unsettled.append(f"{arm.name} ({text})")
        else:
            pairs = zip(found.studies, arm.costs, strict=True)
            known = [
                study.parameters for study, cost in pairs if cost is not None and cost.log_ratio is not None
            ]
            yield (
                f"{arm.name}: its token cost {'grows' if change.low > 0 else 'shrinks'} with size: "
                f"(1 + token cost) changes by {text} for each tenfold of parameters, over {len(known)} "
                f"studies from {words.parameters(known[0])} to {words.parameters(known[-1])}."
            )
    if unsettled:
        yield f"Inconclusive, for the interval holds zero: {', '.join(unsettled)}."
    if without:
        yield f"No interval: {', '.join(without)}."
    if found.left_out:
        yield f"Left out: {', '.join(f'{name} ({reason})' for name, reason in found.left_out.items())}."
    if len({study.parameters for study in found.studies}) == 2:
        yield "There are two sizes alone: nothing can show whether the change is the same between them."
    if found.span < 10:
        yield f"The sizes span a factor of {found.span:.3g}: a tenfold lies beyond them."


def differences_text(found: Trend) -> tuple[str, ...]:
    """Say what the studies differ in besides the model: in targets by their nature, in more by choice."""
    targets = {study.target for study in found.studies}
    each = "; ".join(f"{study.name}: {study.target}" for study in found.studies)
    own = f"Each study has its own target. {each}."
    first = own if len(targets) > 1 else f"Target of every study: {targets.pop()}."
    differs = (f"{key} {' / '.join(map(_grouped, values))}" for key, values in found.differs.items())
    more = f"The studies differ in more than the model: {'; '.join(differs)}."
    return (first, more) if found.differs else (first,)


def _grouped(value: str) -> str:
    return f"{int(value):,}" if value.isascii() and value.isdigit() else cut(value, _LONGEST_VALUE)


def law_tables(law: Scaling | str) -> tuple[tuple[str, Table], ...]:
    """Return each arm's factors, and what the law says at each named size and budget; with their titles."""
    if isinstance(law, str):
        return ()
    factors = [("Efficiency factors", _factors(law))] if law.arms else []
    return (*factors, *(_prediction(law, one) for one in law.predictions))


def _factors(law: Scaling) -> Table:
    most = max((arm.gap_cells for arm in law.arms), default=0)
    fewer = ", ".join(f"{arm.name} {arm.gap_cells}" for arm in law.arms if arm.gap_cells < most)
    over = f"{most} sizes × budgets{f' ({fewer})' if fewer else ''}"
    seeds = "over pairs of seeds" if law.paired else "over runs"
    if law.goodness.seed_sd is None:
        seeds = "over the sizes and budgets, for each has one run"
    return Table(
        caption=(
            f"Against {law.baseline}, whose factors are 1, with 95{words.NBSP}% intervals. eff_N: what a "
            "parameter counts for; eff_D: what a token counts for. Loss gap: validation loss minus that of "
            f"{law.baseline} (nats/token), mean over {over} of the same weight, its interval {seeds}."
        ),
        columns=("Arm", "eff_N", "eff_D", "Loss gap"),
        rows=tuple(
            (
                arm.name,
                _factor(arm.eff_n),
                _factor(arm.eff_d),
                words.loss_interval(arm.gap, difference=True),
            )
            for arm in law.arms
        ),
        numeric=range(1, 4),
    )


def _prediction(law: Scaling, found: Prediction) -> tuple[str, Table]:
    far = [
        f"{f'{beyond:,.0f}' if beyond >= 100 else f'{beyond:.3g}'} times the largest {noun}"
        for beyond, noun in zip(found.beyond, ("size", "budget"), strict=True)
        if beyond > SEEN
    ]
    title = f"At {words.parameters(found.parameters)} parameters and {words.tokens(found.tokens)} tokens"
    where = f"extrapolated, {words.listed(far)} seen" if far else "within the sizes and budgets seen"
    missed = [arm.name for arm in _missed(law)]
    doubt = f" Of {words.listed(missed)} do not believe it: the law misses their gaps." if missed else ""
    heads = (f"{head} (extrapolated)" if far else head for head in ("Loss", "Loss gap", "Token cost"))
    return f"{title}{': extrapolated' if far else ''}", Table(
        caption=(
            f"{title}, by the law: {where}. Token cost: to the loss that {law.baseline} has there. The "
            f"95{words.NBSP}% intervals hold the runs, and how the law misses what was seen, not that its "
            f"form may be wrong elsewhere.{doubt}"
        ),
        columns=("Arm", *heads),
        rows=tuple(
            (place.arm, words.loss_interval(place.loss), "baseline", "baseline")
            if place.arm == law.baseline
            else (
                place.arm,
                words.loss_interval(place.loss),
                words.loss_interval(place.gap, difference=True),
                _open_cost(place.cost),
            )
            for place in found.places
        ),
        numeric=range(1, 4),
    )


def law_sentences(law: Scaling | str) -> Iterator[str]:
    """Say what law it is, how well it holds, and what of it the losses cannot tell; or why there is none."""
    if isinstance(law, str):
        yield f"No scaling law: {law}."
        return
    goodness = law.goodness
    yield (
        f"Scaling law: {_law_text(law)}, N parameters and D tokens; fitted to {goodness.cells} cells (arms × "
        f"sizes × budgets) of {words.plural(law.runs, 'run')}: {law.of}."
    )
    if law.why_not:
        yield (
            f"It is over {law.axes[0]} alone, and its factor stands for all that an arm costs: {law.why_not}."
        )
    cell, off = goodness.largest
    seeds = (
        f"where the seeds alone would make {goodness.mean_sd:.4f} (one run: {goodness.seed_sd:.4f})"
        if goodness.mean_sd is not None and goodness.seed_sd is not None
        else "with one run a cell, so that nothing tells seeds from what misses the law"
    )
    yield (
        f"Means of cells lie {goodness.residual_sd:.4f} nats (s.d.) about it, {seeds}; it explains "
        f"{100 * goodness.explained:.2f}{words.NBSP}% of the variance of ln loss. Furthest off: "
        f"{_cell(cell)}, {words.signed(off, 4)}."
    )
    if missed := _missed(law):
        each = (f"{arm.name} ({arm.gap_miss:.4f} of {arm.gap_size:.4f} nats)" for arm in missed)
        yield (
            "The factors do not tell where these arms cost more and where less; the law misses their loss "
            f"gaps by more than a third (r.m.s.): {', '.join(each)}."
        )
    if goodness.spare <= 0:
        yield "It has as many parameters as there are sizes and budgets: nothing tests its form."
    if law.arms and law.axes == ("parameters", "tokens"):
        yield (
            "An arm with eff_N of 1 costs the same tokens everywhere, 1 / eff_D − 1. With eff_N below 1 it "
            "costs what a smaller model does: more the longer the run, at last any number."
        )
    if law.left_out:
        yield (
            "Left out of the law: "
            f"{', '.join(f'{name} ({reason})' for name, reason in law.left_out.items())}."
        )


def _missed(law: Scaling) -> list[ArmScaling]:
    """Return the arms whose loss gaps the law does not tell."""
    return [arm for arm in law.arms if arm.gap_miss > _MISSED * arm.gap_size]


def _law_text(law: Scaling) -> str:
    def term(name: str, power: str, letter: str) -> str | None:
        constant, exponent = law.law[name], law.law[power]
        if constant is None or exponent is None:
            return None
        return f"{constant:.3g} / ({letter} · eff_{letter})^{exponent:.3f}"

    terms = [text for text in (term("A", "alpha", "N"), term("B", "beta", "D")) if text]
    gamma, e = law.law["gamma"], law.law["E"]
    text = " + ".join(terms)
    return f"L = {text} + {e:.3f}" if gamma == 1 else f"L = ({text})^{gamma:.3f} + {e:.3f}"


def _cell(cell: Key) -> str:
    size, budget = words.parameters(cell.parameters), words.tokens(cell.tokens)
    return f"{cell.arm} at {size} parameters and {budget} tokens"


def _factor(value: Interval | None) -> str:
    if value is None or value.estimate is None:
        return words.DASH
    if value.low is None and value.high is None:
        return f"{value.estimate:.2f} ({value.note})"
    low = value.note if value.low is None else f"{value.low:.2f}"
    high = value.note if value.high is None else f"{value.high:.2f}"
    return f"{value.estimate:.2f} [{low}, {high}]"


def _open_cost(value: Interval) -> str:
    if value.estimate is None:
        bound = "" if value.low is None else f" (> {words.percent(value.low).removeprefix('+')})"
        return f"{value.note}{bound}"
    if value.high is None and value.low is not None:
        return f"{words.percent(value.estimate)} [{words.percent(value.low)}, {value.note}]"
    return words.percent_interval(value)
