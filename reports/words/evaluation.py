"""Learnt or inferred: an arm by its own evaluation beside the one in bf16, as a table and as sentences."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ablate.reports.words import words
from ablate.reports.words.table import Table, make_table
from ablate.results.cost import is_settled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ablate.reports.findings.results import Analysis, ArmResult, InBf16
    from ablate.results.intervals import Interval

    Row = tuple[ArmResult, InBf16]


def evaluation_table(analysis: Analysis) -> Table | None:
    """Return token costs and loss differences by both evaluations; None where no arm has both."""
    rows: list[Row] = [(arm, arm.in_bf16) for arm in analysis.others if arm.in_bf16 is not None]
    if not rows:
        return None
    tokens: dict[str, Callable[[Row], str]] = {
        "Token cost, in bf16": lambda row: words.cost(row[1].token_cost),
        "Evaluation alone": lambda row: words.percent_interval(row[1].tokens_alone),
    }
    losses: dict[str, Callable[[Row], str]] = {
        "Loss difference, in bf16": lambda row: _loss(row[1].difference),
        "Evaluation alone, nats/token": lambda row: _loss(row[1].loss_alone),
    }
    columns = losses if analysis.plan.target is None else tokens | losses
    return make_table(
        "Each arm evaluated in bf16, with the same weights on the same batches as by its own Fprop, on which "
        f"all other figures rest. In bf16: what it learnt worse than {analysis.baseline}. Evaluation alone: "
        "what its own forward pass adds; 1 + token cost is 1 + cost in bf16, times 1 + evaluation alone. "
        f"Brackets: {words.coverage(analysis.plan.stop)} intervals; of evaluation alone from the differences "
        "within each run, by the arm's own variance.",
        rows,
        {"Arm": lambda row: row[0].name, **columns},
        numeric=range(1, 1 + len(columns)),
    )


def evaluation_notes(analysis: Analysis) -> Iterator[str]:
    """Say of each arm whose own evaluation differs how much of its cost that is, and what is left."""
    for arm in analysis.others:
        if arm.in_bf16 is None:
            continue
        if analysis.plan.target is not None:
            yield from _on_tokens(arm, arm.in_bf16)
        elif _leaves_zero_out(arm.in_bf16.loss_alone):
            yield (
                f"Of the loss difference of {arm.name}, {_loss(arm.in_bf16.loss_alone)} nats/token is its "
                f"evaluation alone; evaluated in bf16 it is {_loss(arm.in_bf16.difference)}."
            )


def _on_tokens(arm: ArmResult, found: InBf16) -> Iterator[str]:
    alone, cost = found.tokens_alone, found.token_cost
    if not _leaves_zero_out(alone):
        return
    left = ""
    if is_settled(arm.token_cost) and cost.kind == "interval" and not is_settled(cost):
        left = ", which holds zero: that it learns worse is not settled"
    share = ""
    if found.share is not None and 0 <= found.share <= 1:
        share = f", {words.share(found.share)} of its log cost"
    yield (
        f"Evaluation alone changes the tokens of {arm.name} by {words.percent_interval(alone)}{share}; "
        f"evaluated in bf16 its token cost is {words.cost(cost)}{left}."
    )


def _leaves_zero_out(found: Interval) -> bool:
    return found.low is not None and found.high is not None and not found.low <= 0 <= found.high


def _loss(found: Interval) -> str:
    return words.loss_interval(found, difference=True)
