"""``search:`` in a study file: the section that makes it a search, and the sections that it excludes.

A search compares recipes at equal data, model and training, so its arms and factors set recipes alone. Its
budgets replace ``training.tokens``; the arms are checked at the first budget, which is the smallest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ablate.study.grid import items
from ablate.study.search_space import Search, SearchCell
from ablate.study.sections import SECTIONS
from ablate.study.source import KEY, get

if TYPE_CHECKING:
    from ablate.study.arms import Arms
    from ablate.study.faults import Faults
    from ablate.study.sections import StudyFile
    from ablate.study.source import Path

_OF_STUDIES = (
    "paired_seeds", "intervals", "baseline_again", "tune", "stop", "diagnostics", "keep_weights",
)  # fmt: skip
_OWN = ("recipe", "resources")
"""The sections that an arm of a search may set: the compared one, and one that changes no result."""


def check_search(file: StudyFile | None, found: Arms, faults: Faults) -> Search | None:
    """Return the search that a file describes, None for an ordinary study; adds faults."""
    data = faults.source.data
    if "search" not in data:
        return None
    excluded: dict[Path, str] = {(key,): "it belongs to a study" for key in _OF_STUDIES}
    excluded |= {
        ("seeds",): "search.seed is the seed of its runs",
        ("base", "training", "tokens"): "search.budgets says it",
        ("base", "fork"): "it belongs to a study",
    }
    for path, hint in excluded.items():
        if get(data, *path) is not None:
            faults.add((*path, KEY), f"a search has no '{path[-1]}'", hint)
    arms = dict(items(data.get("arms")))
    for name, arm in arms.items():
        for section in [key for key, _ in items(arm) if key in SECTIONS and key not in _OWN]:
            what = f"a search compares recipes: '{name}' must not set {section}"
            faults.add(("arms", name, section, KEY), what, "set it in base, for all of them")
    for factor, _ in items(get(data, "grid", "factors")):
        if factor.split(".")[0] != "recipe":
            what = f"a search compares recipes: '{factor}' is no part of one"
            faults.add(("grid", "factors", factor, KEY), what)
    if file is None or file.search is None:
        return None
    labels: dict[str, dict[str, None]] = {}
    for cell, _ in found.cells:
        for level in cell.levels:
            labels.setdefault(level.factor, {})[level.label] = None
    return Search(
        **vars(file.search),
        factors={factor: tuple(own) for factor, own in labels.items()},
        cells=tuple(
            SearchCell(levels={level.factor: level.label for level in cell.levels}, arm=arm)
            for cell, arm in found.cells
            if arm is not None
        ),
        named=tuple(arms),
    )
