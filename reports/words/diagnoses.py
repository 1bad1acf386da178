"""What the diagnostics found: a sentence for each finding, and one table to compare arms and GEMMs."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from ablate.reports.words.format import (
    NBSP,
    Column,
    interval,
    make_table,
    number,
    share,
    tokens,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ablate.reports.findings.diagnoses import ArmDiagnosis, GemmSummary
    from ablate.reports.words.format import Table
    from ablate.results.intervals import Interval

_WORTH_A_WORD = 0.0005
"""Smaller shares of elements that clip or become zero are not mentioned: they would show as 0.0 %."""


class _Row(NamedTuple):
    arm: ArmDiagnosis
    gemm: GemmSummary


def diagnosis_sentences(arm: ArmDiagnosis) -> tuple[str, ...]:
    """Say what was found on each of the arm's GEMMs, and how unevenly its experts are loaded."""
    sentences: list[str] = []
    for gemm in arm.gemms:
        sentences += _sentences(gemm)
    if arm.busiest is not None:
        times = interval(arm.busiest, "{:.2f}".format)
        sentences.append(
            f"the busiest expert of a layer has {times} times the mean expert's tokens."
        )
    return tuple(f"{arm.arm}: {sentence}" for sentence in sentences)


def diagnosis_table(arms: Sequence[ArmDiagnosis]) -> Table:
    """Make the table, one row for each arm and GEMM."""
    sentences: list[str] = []
    for arm in arms:
        sentences += diagnosis_sentences(arm)
    return make_table(
        "diagnostics",
        "What the diagnostics found",
        f"Means over layers, steps and then runs, with 95{NBSP}% intervals over runs. Relative error: norm "
        "of the error of the GEMM's output over that of the exact product. Gain: slope of the output on the "
        "exact one. Bias: share of the error's energy that all draws of the recipe's randomness have in "
        "common. Later: share that is the same at the next diagnosis. Clipped, zeroed: shares of the "
        "elements of the two operands. Over noise: energy of Wgrad's error over that of the data's noise.",
        [
            Column("GEMM", lambda row: f"{row.arm.arm}: {row.gemm.gemm.capitalize()}"),
            number("Relative error", "gemm.relative_error", _share_interval),
            number("Gain", "gemm.gain.estimate", "{:.3f}".format),
            number("Bias", _bias),
            number("Later", "gemm.alike", _share),
            number("Clipped", partial(_of_operands, "clipped")),
            number("Zeroed", partial(_of_operands, "zeroed")),
            number(
                "Over noise", "gemm.error_over_data_noise.estimate", "{:.3g}".format
            ),
        ],
        [_Row(arm, gemm) for arm in arms for gemm in arm.gemms],
        sentences=tuple(sentences),
    )


def _bias(row: _Row) -> str:
    if row.gemm.draws == 1:
        return share(1.0)
    return _share(row.gemm.bias_share)


def _of_operands(field: str, row: _Row) -> str | None:
    """Write a share of each operand's elements."""
    texts = []
    for operand in row.gemm.operands:
        value = getattr(operand, field)
        if value is not None:
            texts.append(f"{operand.operand} {share(value)}")
    return ", ".join(texts) or None


def _share(value: Interval) -> str:
    """Write a share, which is not below zero: its unbiased estimate, or a t interval of few runs, may be."""
    return share(_from_zero(value).estimate)


def _share_interval(value: Interval) -> str:
    return interval(_from_zero(value), share)


def _from_zero(value: Interval) -> Interval:
    return value.each(lambda part: max(part, 0.0))


def _sentences(summary: GemmSummary) -> Iterator[str]:
    """Say what was found on one GEMM."""
    gemm = summary.gemm.capitalize()
    if summary.relative_error.estimate is None:
        return
    text = f"{gemm}'s output errs by {_share_interval(summary.relative_error)}"
    if summary.gain.estimate is not None:
        text += f" with gain {summary.gain.estimate:.3f}"
    if summary.draws == 1:
        text += "; nothing in it is drawn, so that on a step all of the error is bias"
    elif summary.bias_share.estimate is not None:
        same = _share(summary.bias_share)
        text += f"; {same} of the error's energy is the same in every draw of the randomness"
    if summary.alike:
        text += f"; {_share(summary.alike)} is still the same {tokens(summary.alike.tokens_later)} tokens later"
    yield f"{text}. Largest in {summary.largest.layer}: {share(summary.largest.relative_error)}."
    in_bf16 = summary.zeros_bf16.estimate
    if (summary.zeros.estimate or 0) - (in_bf16 or 0) >= _WORTH_A_WORD:
        zeros = interval(summary.zeros, share)
        yield f"of {gemm}'s output {zeros} of the elements are exactly zero, in bf16 {share(in_bf16)}."
    for operand in summary.operands:
        if max(operand.zeroed or 0, operand.clipped or 0) < _WORTH_A_WORD:
            continue
        text = f"of {gemm}'s {operand.operand} {share(operand.clipped)} of the elements clip and "
        text += f"{share(operand.zeroed)} become zero"
        before = operand.crest_before
        after = operand.crest_after
        if before and after and before != after:
            text += f"; the rotation takes the crest factor of a block from {before:.2f} to {after:.2f}"
        yield f"{text}."
    if summary.error_over_data_noise.estimate is not None:
        yield (
            f"the energy of {gemm}'s error is {summary.error_over_data_noise.estimate:.3g} times that of "
            f"the data's noise in as many tokens, and the gradient's norm is under √3 times the error in "
            f"{summary.under_sqrt3:,} of {summary.measurements:,} measurements."
        )
