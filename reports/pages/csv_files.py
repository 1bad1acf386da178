"""The report's figures with full precision, as CSV."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pandas as pd

from ablate.reports.read.tables import inert

if TYPE_CHECKING:
    from ablate.reports.findings.results import Analysis


RUN_FIGURES = (
    "run_id", "arm", "seed", "state", "end", "tokens", "tokens_to_target", "left_bound", "last_loss",
    "seconds", "tokens_per_sec", "backend_mode", "message",
)  # fmt: skip


def arm_frame(analysis: Analysis) -> pd.DataFrame:
    """Return the headline table with full precision, one row an arm."""
    rows = []
    for arm in analysis.arms:
        row: dict[str, Any] = {"arm": arm.name, "recipe": arm.recipe}
        row |= {name: getattr(arm, name) for name in ("n", "hit", "censored", "diverged", "missing")}
        intervals = {name: getattr(arm, name) for name in ("tokens_to_target", "token_cost", "final_loss")}
        for name, interval in (intervals | {"loss_difference": arm.difference}).items():
            row |= {f"{name}_{part}": getattr(interval, part) for part in ("estimate", "low", "high")}
        row |= {"token_cost_kind": arm.token_cost.kind, "loss_difference_tokens": arm.difference.tokens}
        row["counted_from_tokens"] = arm.counted_from
        rows.append(row)
    return pd.DataFrame(rows, dtype=object)


def run_frame(analysis: Analysis) -> pd.DataFrame:
    """Return the ledger with full precision, one row a run."""
    runs = (run for arm in analysis.every_arm for run in arm.runs)
    rows = [[getattr(run, name) for name in RUN_FIGURES] for run in runs]
    return pd.DataFrame(rows, columns=list(RUN_FIGURES), dtype=object)


def csv_text(frame: pd.DataFrame) -> str:
    """Return a frame as CSV, one line a row; a text that a spreadsheet would compute gets a ' in front."""
    text: str = frame.map(inert).to_csv(index=False, lineterminator="\n")
    return text
