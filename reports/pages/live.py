"""What the page's script shows of the convergence figure: curves to point at, and costs at other targets.

Every number is computed here, as the report's own are; the script looks them up and writes them. The curves
are for pointing at alone, so that very long ones are thinned.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ablate.reports.words import words
from ablate.reports.words.table import Table
from ablate.results.cost import mean_tokens

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ablate.reports.figures.canvas import Drawing
    from ablate.reports.findings.results import Analysis
    from ablate.results.cost import Cost
    from ablate.results.losses import Curve
    from ablate.run.outcome import Outcome
    from ablate.store.plan_file import Target

_MOST_POINTS = 200
_FIGURES = ("Tokens to target", "Token cost", "hit / cens. / div.")


@dataclass(frozen=True, kw_only=True)
class Live:
    """``table``: the arms, with their figures at the study's own target; ``data``: what the script looks up.

    ``steps``: the number of targets, of which ``own`` is the study's; 0 where none can be moved.
    """

    table: Table
    data: dict[str, Any] = field(default_factory=dict)
    steps: int = 0
    own: int = 0


def live_values(analysis: Analysis, drawing: Drawing) -> Live:
    """Return what the script shows of a convergence figure, which is of the arms of this analysis."""
    names = [arm.name for arm in analysis.arms]
    targets, moved = _moved(analysis)
    own = _place(targets, analysis)
    grids: dict[tuple[int, ...], int] = {}
    runs = []
    for curve in analysis.curves:
        if len(curve.tokens):
            tokens, loss = _thinned(curve)
            grid = grids.setdefault(tokens, len(grids))
            runs.append([names.index(curve.arm), curve.seed, grid, loss])
    data = {
        "arms": names,
        "axes": [vars(axis) for axis in drawing.axes],
        "grids": list(grids),
        "runs": runs,
        "targets": targets,
        "labels": [_label(target, analysis.plan.target) for target in targets],
        "own": own,
        "moved": moved,
    }
    return Live(table=_table(names, moved, own), data=data, steps=len(targets), own=own)


def _thinned(curve: Curve) -> tuple[tuple[int, ...], list[float]]:
    """Return tokens and losses, as the words have them, of as many evaluations as a figure can show."""
    count = len(curve.tokens)
    places = np.unique(np.linspace(0, count - 1, min(count, _MOST_POINTS)).round().astype(int))
    return (
        tuple(int(tokens) for tokens in curve.tokens[places]),
        [round(float(loss), 4) if math.isfinite(loss) else 0.0 for loss in curve.loss[places]],
    )


def _moved(analysis: Analysis) -> tuple[list[float], list[list[list[str]] | None]]:
    """Return the targets that the baseline's whole curve passes, and each arm's figures there as text."""
    found = [arm for arm in analysis.others if arm.moved is not None and not arm.counted_from]
    if not found or analysis.plan.target is None:
        return [], [None for _ in analysis.arms]
    # Arms that were stopped early have fewer runs of the baseline beside them.
    most = max(found, key=lambda arm: len(arm.moved.base_ends[0]) if arm.moved else 0).moved
    assert most is not None
    rows: dict[str, list[list[str]]] = {
        analysis.baseline: [[_tokens(ends), "baseline", _counts(ends)] for ends in most.base_ends]
    }
    for arm in found:
        assert arm.moved is not None
        pairs = zip(arm.moved.ends, arm.moved.costs, strict=True)
        rows[arm.name] = [[_tokens(ends), _cost(cost), _counts(ends)] for ends, cost in pairs]
    return list(most.targets), [rows.get(arm.name) for arm in analysis.arms]


def _place(targets: Sequence[float], analysis: Analysis) -> int:
    """Return which of the targets is the study's own, or the nearest to it."""
    if not targets or analysis.plan.target is None:
        return 0
    own = analysis.plan.target.val_loss
    return min(range(len(targets)), key=lambda i: abs(targets[i] - own))


def _label(loss: float, target: Target | None) -> str:
    if target is not None and target.kind == "perplexity":
        return f"perplexity {math.exp(loss):.4g} ({loss:.4f} nats/token)"
    return f"{loss:.4f} nats/token"


def _tokens(ends: Sequence[Outcome]) -> str:
    """Return the mean tokens to target without its interval, or the bound there is."""
    mean = mean_tokens(ends)
    return words.tokens_interval(mean) if mean.estimate is None else words.tokens(mean.estimate)


def _cost(cost: Cost) -> str:
    """Return a token cost without its interval: of a target that was picked from the curves it has none."""
    return words.cost(cost) if cost.estimate is None else words.percent(cost.estimate)


def _counts(ends: Sequence[Outcome]) -> str:
    return " / ".join(str(sum(run.end == end for run in ends)) for end in ("hit", "censored", "diverged"))


def _table(names: Sequence[str], moved: Sequence[list[list[str]] | None], own: int) -> Table:
    columns = ("Arm", *_FIGURES) if any(moved) else ("Arm",)
    rows = (
        (name, *((rows[own] if rows else [words.DASH] * len(_FIGURES)) if any(moved) else ()))
        for name, rows in zip(names, moved, strict=True)
    )
    return Table(caption="", columns=columns, rows=tuple(rows), numeric=range(1, len(columns)))
