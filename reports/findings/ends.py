"""How each run of a study has ended, and which arms its stop rule has stopped: where a comparison begins.

How it fails: it does not raise; a run without a result is ``missing``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from ablate.reports.statistics.stopping import Stopped, decide
from ablate.run.outcome import Outcome, outcome

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from ablate.reports.read.load import StudyFrames
    from ablate.store.lock import LockedPlan, Target


def target_text(target: Target) -> str:
    """Return the target with its unit."""
    if target.kind == "perplexity":
        return f"a validation perplexity of {target.value:g} ({target.val_loss:.4f} nats/token)"
    return f"a validation loss of {target.value:g} nats/token"


def run_ends(
    frames: StudyFrames, apart: Collection[str]
) -> Iterator[tuple[dict[str, Any], np.ndarray, np.ndarray, Outcome]]:
    """Yield each run's row, the tokens and losses of its evaluations, and how it ended."""
    target = frames.plan.target
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
            rule=target.crossing,
            budget_tokens=number_in(row["budget_tokens"]) or 0.0,
        )
        yield {str(key): value for key, value in row.items()}, tokens, loss, end


def stopped_arms(plan: LockedPlan, outcomes: Mapping[str, Sequence[Outcome]]) -> dict[str, Stopped]:
    """Return the arms that the plan's rule stops, given how each run of each arm has ended."""
    if plan.stop is None:
        return {}
    never = frozenset(arm.name for arm in plan.arms if arm.again)
    return decide(outcomes, plan.stop, baseline=plan.baseline, never=never, paired=plan.paired_seeds)


def unused_places(outcomes: Sequence[Outcome], stop: Stopped) -> frozenset[int]:
    """Return the places of a stopped arm's runs that count for nothing."""
    if stop.seeds is not None:
        return frozenset(range(stop.seeds, len(outcomes)))
    return frozenset(i for i, run in enumerate(outcomes) if run.end == "missing")


def number_in(value: Any) -> float | None:
    """Return a number out of a data frame's cell, None where it is empty."""
    return None if value is None or pd.isna(value) else float(value)
