"""The report's figures with full precision, as CSV."""

from __future__ import annotations

import csv
import io
from typing import TYPE_CHECKING, Any

from ablate.reports.read.load import EVAL_COLUMNS, StudyFrames

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ablate.reports.findings.results import Analysis


RUN_FIGURES = (
    "run_id", "arm", "seed", "state", "end", "tokens", "tokens_to_target", "left_bound", "last_loss",
    "seconds", "tokens_per_sec", "backend_mode", "message",
)  # fmt: skip


def arm_rows(analysis: Analysis) -> list[dict[str, Any]]:
    """Return the headline table with full precision, one row an arm."""
    rows = []
    for arm in analysis.arms:
        row: dict[str, Any] = {"arm": arm.name, "recipe": arm.recipe}
        row |= {name: getattr(arm, name) for name in ("n", "hit", "censored", "diverged", "missing")}
        intervals = {name: getattr(arm, name) for name in ("tokens_to_target", "token_cost", "final_loss")}
        for name, interval in (intervals | {"loss_difference": arm.difference.interval}).items():
            row |= {f"{name}_{part}": getattr(interval, part) for part in ("estimate", "low", "high")}
        row |= {"token_cost_kind": arm.token_cost.kind, "loss_difference_tokens": arm.difference.tokens}
        rows.append(row)
    return rows


def run_rows(analysis: Analysis) -> list[dict[str, Any]]:
    """Return the ledger with full precision, one row a run."""
    return [
        {name: getattr(run, name) for name in RUN_FIGURES} for arm in analysis.every_arm for run in arm.runs
    ]


def arms_csv(analysis: Analysis) -> str:
    """Return one line an arm."""
    rows = arm_rows(analysis)
    return _csv(list(rows[0]), rows)


def runs_csv(analysis: Analysis) -> str:
    """Return one line a run."""
    return _csv(RUN_FIGURES, run_rows(analysis))


def evaluations_csv(frames: StudyFrames) -> str:
    """Return every evaluation."""
    text: str = frames.evals.to_csv(index=False, columns=list(EVAL_COLUMNS), lineterminator="\n")
    return text


def _csv(columns: Sequence[str], rows: list[dict[str, Any]]) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()
