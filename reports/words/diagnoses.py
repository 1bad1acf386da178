"""What the diagnostics found: a sentence for each finding, and one table to compare arms and GEMMs by.

How it fails: it does not raise; what was not measured is a dash.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ablate.reports.words import words
from ablate.reports.words.table import Table

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ablate.reports.findings.diagnoses import ArmDiagnosis, GemmSummary, OperandSummary
    from ablate.reports.statistics.intervals import Interval

_WORTH_A_WORD = 0.0005
"""The share of an operand's elements from which that they clip or become zero is told: it shows as 0.1 %."""


def diagnosis_sentences(arm: ArmDiagnosis) -> tuple[str, ...]:
    """Return the findings on one arm."""
    return tuple(sentence for one in arm.gemms for sentence in _sentences(arm.arm, one))


def diagnosis_table(arms: Sequence[ArmDiagnosis]) -> Table | None:
    """Return the figures of each arm's GEMMs; None where nothing was diagnosed."""
    if not arms:
        return None
    return Table(
        caption=(
            "Means over layers, steps and then runs, with 95 % intervals over runs. Relative error: norm of "
            "the error of the GEMM's output over that of the exact product. Gain: slope of the output on the "
            "exact one. Bias: share of the error's energy that all draws of the recipe's randomness have in "
            "common. Later: share that is the same at the next diagnosis. Clipped, zeroed: shares of the "
            "elements of the two operands. Over noise: energy of Wgrad's error over that of the data's noise."
        ),
        columns=("GEMM", "Relative error", "Gain", "Bias", "Later", "Clipped", "Zeroed", "Over noise"),
        rows=tuple(_row(arm.arm, one) for arm in arms for one in arm.gemms),
        numeric=frozenset(range(1, 8)),
    )


def _row(arm: str, one: GemmSummary) -> tuple[str, ...]:
    error = words.share(one.relative_error.estimate)
    low, high = one.relative_error.low, one.relative_error.high
    if low is not None and high is not None:
        # An error is never below zero, though the t interval of a few runs may be.
        error += f" [{100 * max(low, 0.0):.1f}, {100 * high:.1f}]"
    later = one.likeness[0].cosine.estimate if one.likeness else None
    noise = one.over_data_noise.estimate
    return (
        f"{arm}: {one.gemm.capitalize()}",
        error,
        words.DASH if one.gain.estimate is None else f"{one.gain.estimate:.3f}",
        words.share(1.0 if one.draws == 1 else _not_negative(one.bias_share.estimate)),
        words.share(_not_negative(later)),
        _shares(one.operands, "clipped"),
        _shares(one.operands, "zeroed"),
        words.DASH if noise is None else f"{noise:.3g}",
    )


def _not_negative(value: float | None) -> float | None:
    """Return an unbiased estimate of a share, which may come out a little under zero, as a share."""
    return None if value is None else max(value, 0.0)


def _shares(operands: Sequence[OperandSummary], field: str) -> str:
    """Return a share of each operand: ``dy 0.9, x 1.8 %``."""
    known = [(one.operand, value) for one in operands if (value := getattr(one, field)) is not None]
    if not known:
        return words.DASH
    return ", ".join(f"{name} {100 * value:.1f}" for name, value in known) + f"{words.NBSP}%"


def _sentences(arm: str, one: GemmSummary) -> Iterable[str]:
    gemm = one.gemm.capitalize()
    if one.relative_error.estimate is None:
        return
    text = f"{arm}: {gemm}'s output errs by {_with_range(one.relative_error)}"
    if one.gain.estimate is not None:
        text += f" with gain {one.gain.estimate:.3f}"
    if one.draws == 1:
        text += "; nothing in it is drawn, so that on a step all of the error is bias"
    elif one.bias_share.estimate is not None:
        share = max(one.bias_share.estimate, 0.0)
        text += f"; {words.share(share)} of the error's energy is the same in every draw of the randomness"
    if one.likeness:
        after = one.likeness[0]
        alike = max(after.cosine.estimate or 0.0, 0.0)
        text += f"; {words.share(alike)} is still the same {words.tokens(after.tokens)} tokens later"
    yield f"{text}. Largest in {one.worst_layer}: {words.share(one.worst_error)}."
    for operand in one.operands:
        if operand.zeroed is None or operand.clipped is None:
            continue
        if max(operand.zeroed, operand.clipped) >= _WORTH_A_WORD:
            text = f"{arm}: of {gemm}'s {operand.operand} {words.share(operand.clipped)} of the elements "
            text += f"clip and {words.share(operand.zeroed)} become zero"
            crests = operand.crest_before, operand.crest_after
            if None not in crests and crests[0] != crests[1]:
                text += "; the rotation takes the crest factor of a block from {:.2f} to {:.2f}".format(
                    *crests
                )
            yield f"{text}."
    if one.over_data_noise.estimate is not None:
        yield (
            f"{arm}: the energy of {gemm}'s error is {one.over_data_noise.estimate:.3g} times that of the "
            f"data's noise in as many tokens, and the gradient's norm is under √3 times the error in "
            f"{one.under_sqrt3:,} of {one.cells:,} measurements."
        )


def _with_range(value: Interval) -> str:
    text = words.share(value.estimate)
    if value.low is None or value.high is None:
        return text
    low = max(value.low, 0.0)  # an error is never below zero, though the t interval of a few runs may be
    return f"{text} (95{words.NBSP}% interval {words.share(low)} to {words.share(value.high)})"
