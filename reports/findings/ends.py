"""How each run of a study has ended, and which arms its stop rule has stopped: where a comparison begins.

How it fails: it does not raise; a run without a result is ``missing``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from ablate.reports.statistics.stopping import Stopped, decide, read_rule
from ablate.run.outcome import Outcome, Rule, outcome, target_loss

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from ablate.reports.read.load import StudyFrames


@dataclass(frozen=True, kw_only=True)
class Target:
    """The target as declared, and as a validation loss in nats per token."""

    kind: str
    value: float
    val_loss: float
    rule: Rule


def target_of(plan: Mapping[str, Any]) -> Target:
    """Return the target that a plan's lock file declares."""
    return Target(
        kind=plan["target"]["kind"],
        value=float(plan["target"]["value"]),
        val_loss=target_loss(plan["target"]["kind"], float(plan["target"]["value"])),
        rule=plan["target"].get("crossing", "confirmed"),
    )


def run_ends(
    frames: StudyFrames, target: Target, apart: Collection[str]
) -> Iterator[tuple[dict[str, Any], np.ndarray, np.ndarray, Outcome]]:
    """Yield each run's row, the tokens and losses of its evaluations, and how it ended."""
    evals = {str(run_id): group for run_id, group in frames.evals.groupby("run_id", sort=False)}
    for row in frames.runs.to_dict("records"):
        run_id = str(row["run_id"])
        group = evals.get(run_id)
        tokens = np.empty(0, dtype=np.int64) if group is None else group["tokens"].to_numpy(dtype=np.int64)
        loss = np.empty(0) if group is None else group["val_loss"].to_numpy(dtype=float)
        end = outcome(
            seed=int(row["seed"]),
            state="set apart" if run_id in apart else str(row["state"]),
            tokens=tokens,
            loss=loss,
            target=target.val_loss,
            rule=target.rule,
            budget_tokens=number_in(row["budget_tokens"]) or 0.0,
        )
        yield {str(key): value for key, value in row.items()}, tokens, loss, end


def stopped_arms(plan: Mapping[str, Any], outcomes: Mapping[str, Sequence[Outcome]]) -> dict[str, Stopped]:
    """Return the arms that the plan's rule stops, given how each run of each arm has ended."""
    rule = read_rule(plan)
    if rule is None:
        return {}
    never = frozenset(entry["name"] for entry in plan["arms"] if entry.get("again"))
    paired = bool(plan.get("paired_seeds", False))
    return decide(outcomes, rule, baseline=plan["baseline"], never=never, paired=paired)


def unused_places(outcomes: Sequence[Outcome], stop: Stopped) -> frozenset[int]:
    """Return the places of a stopped arm's runs that count for nothing."""
    if stop.seeds is not None:
        return frozenset(range(stop.seeds, len(outcomes)))
    return frozenset(i for i, run in enumerate(outcomes) if run.end == "missing")


def number_in(value: Any) -> float | None:
    """Return a number out of a data frame's cell, None where it is empty."""
    return None if value is None or pd.isna(value) else float(value)
