"""The report's figures with full precision, as CSV."""

from __future__ import annotations

import csv
import io
from typing import TYPE_CHECKING, Any

from ablate.reports.read.load import EVAL_COLUMNS, StudyFrames

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ablate.reports.findings.analyse import Analysis


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
        header, [[getattr(run, name) for name in header] for arm in analysis.every_arm for run in arm.runs]
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
