"""What the diagnostics found: a sentence for each finding, and one table to compare arms and GEMMs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ablate.reports.words.format import DASH, NBSP, interval, make_table, share, tokens

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ablate.reports.findings.diagnoses import ArmDiagnosis, GemmSummary
    from ablate.reports.words.format import Table
    from ablate.results.intervals import Interval

_WORTH_A_WORD = 0.0005
"""Smaller shares of elements that clip or become zero are not mentioned: they would show as 0.0 %."""


def diagnosis_sentences(arm: ArmDiagnosis) -> tuple[str, ...]:
    """Say what was found on each of the arm's GEMMs, and how unevenly its experts are loaded."""
    found = [said for gemm in arm.gemms for said in _sentences(gemm)]
    if arm.busiest is not None:
        times = interval(arm.busiest, lambda value: f"{value:.2f}")
        found.append(f"the busiest expert of a layer has {times} times the mean expert's tokens.")
    return tuple(f"{arm.arm}: {said}" for said in found)


def diagnosis_table(arms: Sequence[ArmDiagnosis]) -> Table:
    """Make the table, one row for each arm and GEMM."""

    def number(value: float | None, form: str) -> str:
        return DASH if value is None else format(value, form)

    def shares(gemm: GemmSummary, field: str) -> str:
        known = ((one.operand, getattr(one, field)) for one in gemm.operands)
        return ", ".join(f"{name} {share(value)}" for name, value in known if value is not None) or DASH

    return make_table(
        "diagnostics",
        "What the diagnostics found",
        f"Means over layers, steps and then runs, with 95{NBSP}% intervals over runs. Relative error: norm "
        "of the error of the GEMM's output over that of the exact product. Gain: slope of the output on the "
        "exact one. Bias: share of the error's energy that all draws of the recipe's randomness have in "
        "common. Later: share that is the same at the next diagnosis. Clipped, zeroed: shares of the "
        "elements of the two operands. Over noise: energy of Wgrad's error over that of the data's noise.",
        [
            {
                "GEMM": f"{arm.arm}: {gemm.gemm.capitalize()}",
                "Relative error": interval(_from_zero(gemm.relative_error), share),
                "Gain": number(gemm.gain.estimate, ".3f"),
                "Bias": share(1.0 if gemm.draws == 1 else _from_zero(gemm.bias_share).estimate),
                "Later": share(_from_zero(gemm.alike).estimate) if gemm.alike else None,
                "Clipped": shares(gemm, "clipped"),
                "Zeroed": shares(gemm, "zeroed"),
                "Over noise": number(gemm.error_over_data_noise.estimate, ".3g"),
            }
            for arm in arms
            for gemm in arm.gemms
        ],
        range(1, 8),
        sentences=tuple(sentence for arm in arms for sentence in diagnosis_sentences(arm)),
    )


def _from_zero(value: Interval) -> Interval:
    """Clip a share at zero: its unbiased estimate, or a t interval of few runs, may be below."""
    return value.each(lambda part: max(part, 0.0))


def _sentences(one: GemmSummary) -> Iterator[str]:
    gemm = one.gemm.capitalize()
    if one.relative_error.estimate is None:
        return
    text = f"{gemm}'s output errs by {interval(_from_zero(one.relative_error), share)}"
    if one.gain.estimate is not None:
        text += f" with gain {one.gain.estimate:.3f}"
    if one.draws == 1:
        text += "; nothing in it is drawn, so that on a step all of the error is bias"
    elif one.bias_share.estimate is not None:
        same = share(_from_zero(one.bias_share).estimate)
        text += f"; {same} of the error's energy is the same in every draw of the randomness"
    if one.alike:
        alike = share(_from_zero(one.alike).estimate)
        text += f"; {alike} is still the same {tokens(one.alike.tokens_later)} tokens later"
    yield f"{text}. Largest in {one.largest.layer}: {share(one.largest.relative_error)}."
    if (one.zeros.estimate or 0) - (one.zeros_bf16.estimate or 0) >= _WORTH_A_WORD:
        zeros, in_bf16 = interval(one.zeros, share), share(one.zeros_bf16.estimate)
        yield f"of {gemm}'s output {zeros} of the elements are exactly zero, in bf16 {in_bf16}."
    for operand in one.operands:
        if max(operand.zeroed or 0, operand.clipped or 0) < _WORTH_A_WORD:
            continue
        text = f"of {gemm}'s {operand.operand} {share(operand.clipped)} of the elements clip and "
        text += f"{share(operand.zeroed)} become zero"
        if operand.crest_before and operand.crest_after and operand.crest_before != operand.crest_after:
            text += (
                f"; the rotation takes the crest factor of a block from {operand.crest_before:.2f} to "
                f"{operand.crest_after:.2f}"
            )
        yield f"{text}."
    if one.error_over_data_noise.estimate is not None:
        yield (
            f"the energy of {gemm}'s error is {one.error_over_data_noise.estimate:.3g} times that of "
            f"the data's noise in as many tokens, and the gradient's norm is under √3 times the error in "
            f"{one.under_sqrt3:,} of {one.measurements:,} measurements."
        )
