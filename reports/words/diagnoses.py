"""What the diagnostics found: a sentence for each finding, and one table to compare arms and GEMMs by."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ablate.reports.words import words
from ablate.reports.words.table import Table, make_table

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ablate.reports.findings.diagnoses import ArmDiagnosis, GemmSummary, OperandSummary
    from ablate.results.intervals import Interval

_WORTH_A_WORD = 0.0005
"""The share of an operand's elements from which that they clip or become zero is told: it shows as 0.1 %."""


def diagnosis_sentences(arm: ArmDiagnosis) -> tuple[str, ...]:
    """Return the findings on one arm."""
    return tuple(sentence for one in arm.gemms for sentence in _sentences(_who(arm), one))


def _who(arm: ArmDiagnosis) -> str:
    """Return whose figures these are: the arm's, or those of another recipe on its tensors."""
    return arm.arm if arm.what_if is None else f"what if {arm.what_if}, on tensors of {arm.arm}"


def diagnosis_table(arms: Sequence[ArmDiagnosis]) -> Table:
    """Return the figures of each arm's GEMMs."""
    other = any(arm.what_if is not None for arm in arms)
    return make_table(
        "Means over layers, steps and then runs, with 95 % intervals over runs. Relative error: norm of "
        "the error of the GEMM's output over that of the exact product. Gain: slope of the output on the "
        "exact one. Bias: share of the error's energy that all draws of the recipe's randomness have in "
        "common. Later: share that is the same at the next diagnosis. Clipped, zeroed: shares of the "
        "elements of the two operands. Over noise: energy of Wgrad's error over that of the data's noise."
        + (" What if: a recipe that trained nothing, measured on the tensors of an arm." if other else ""),
        [(_who(arm), one) for arm in arms for one in arm.gemms],
        {
            "GEMM": lambda row: f"{row[0]}: {row[1].gemm.capitalize()}",
            "Relative error": lambda row: _error(row[1].relative_error),
            "Gain": lambda row: _number(row[1].gain, ".3f"),
            "Bias": lambda row: words.share(1.0 if row[1].draws == 1 else _not_negative(row[1].bias_share)),
            "Later": lambda row: words.share(_not_negative(row[1].alike[0]) if row[1].alike else None),
            "Clipped": lambda row: _shares(row[1].operands, "clipped"),
            "Zeroed": lambda row: _shares(row[1].operands, "zeroed"),
            "Over noise": lambda row: _number(row[1].error_over_data_noise, ".3g"),
        },
        numeric=range(1, 8),
    )


def _error(value: Interval) -> str:
    text = words.share(value.estimate)
    if value.low is None or value.high is None:
        return text
    # An error is never below zero, though the t interval of a few runs may be.
    return f"{text} [{100 * max(value.low, 0.0):.1f}, {100 * value.high:.1f}]"


def _number(value: Interval, form: str) -> str:
    return words.DASH if value.estimate is None else format(value.estimate, form)


def _not_negative(value: Interval) -> float | None:
    """Return an unbiased estimate of a share, which may come out a little under zero, as a share."""
    return None if value.estimate is None else max(value.estimate, 0.0)


def _shares(operands: Sequence[OperandSummary], field: str) -> str:
    """Return a share of each operand: ``dy 0.9, x 1.8 %``."""
    known = ((one.operand, getattr(one, field)) for one in operands)
    text = ", ".join(f"{name} {100 * value:.1f}" for name, value in known if value is not None)
    return f"{text}{words.NBSP}%" if text else words.DASH


def _sentences(arm: str, one: GemmSummary) -> Iterator[str]:
    gemm = one.gemm.capitalize()
    error = one.relative_error
    if error.estimate is None:
        return
    text = f"{arm}: {gemm}'s output errs by {words.share(error.estimate)}"
    if error.low is not None and error.high is not None:
        low, high = words.share(max(error.low, 0.0)), words.share(error.high)
        text += f" (95{words.NBSP}% interval {low} to {high})"
    if one.gain.estimate is not None:
        text += f" with gain {one.gain.estimate:.3f}"
    if one.draws == 1:
        text += "; nothing in it is drawn, so that on a step all of the error is bias"
    elif one.bias_share.estimate is not None:
        share = words.share(_not_negative(one.bias_share))
        text += f"; {share} of the error's energy is the same in every draw of the randomness"
    if one.alike:
        alike = words.share(_not_negative(one.alike[0]) or 0.0)
        text += f"; {alike} is still the same {words.tokens(one.alike[0].tokens_later)} tokens later"
    yield f"{text}. Largest in {one.largest.layer}: {words.share(one.largest.relative_error)}."
    for operand in one.operands:
        zeroed, clipped = operand.zeroed, operand.clipped
        if zeroed is None or clipped is None or max(zeroed, clipped) < _WORTH_A_WORD:
            continue
        text = f"{arm}: of {gemm}'s {operand.operand} {words.share(clipped)} of the elements clip and "
        text += f"{words.share(zeroed)} become zero"
        before, after = operand.crest_before, operand.crest_after
        if before is not None and after is not None and before != after:
            text += f"; the rotation takes the crest factor of a block from {before:.2f} to {after:.2f}"
        yield f"{text}."
    if one.error_over_data_noise.estimate is not None:
        yield (
            f"{arm}: the energy of {gemm}'s error is {one.error_over_data_noise.estimate:.3g} times that of "
            f"the data's noise in as many tokens, and the gradient's norm is under √3 times the error in "
            f"{one.under_sqrt3:,} of {one.measurements:,} measurements."
        )
