"""The diagnostics of all arms in one table, a row for each arm and GEMM: what the sentences say, to compare.

How it fails: it does not raise; what was not measured is a dash.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ablate.reports.words import words
from ablate.reports.words.table import Table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ablate.reports.findings.diagnoses import ArmDiagnosis, GemmSummary, OperandSummary


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
