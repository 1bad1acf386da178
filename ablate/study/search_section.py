"""``search:`` in a study file: the section that makes it a search, and the sections that it excludes.

A search compares recipes at equal data, model and training, so its arms and factors set recipes alone. Its
budgets replace ``training.tokens``; the arms are checked at the first budget, which is the smallest.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from pydantic.dataclasses import dataclass

from ablate.study.sections import SECTIONS, SearchSection
from ablate.study.tree import Mapping, Scalar, Sequence, entries, get, merge, nest

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ablate.study.grid import Cell
    from ablate.study.messages import Faults
    from ablate.study.sections import StudyFile

_OF_STUDIES = (
    "seeds",
    "paired_seeds",
    "intervals",
    "baseline_again",
    "tune",
    "stop",
    "diagnostics",
    "keep_weights",
)
_OWN = ("recipe", "resources")
"""The sections that an arm of a search may set: the compared one, and one that changes no result."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchCell:
    """A cell of the grid: the labels of its levels by factor, and its arm."""

    levels: dict[str, str]
    arm: str


@dataclass(frozen=True, kw_only=True)
class Search(SearchSection):
    """A search with its recipes: the factors' labels, the grid's cells, and ``named``, the arms outside it.

    ``lines``: (line, column) of the whole section and of keys, for faults that only planning can find.
    """

    factors: dict[str, tuple[str, ...]]
    cells: tuple[SearchCell, ...]
    named: tuple[str, ...]
    lines: dict[str, tuple[int, int]]


def with_first_budget(root: Mapping) -> Mapping:
    """Return the file with the search's first budget as its token budget; unchanged if it has none."""
    budgets = get(root, "search", "budgets")
    if not (isinstance(budgets, Sequence) and budgets.items and isinstance(budgets.items[0], Scalar)):
        return root
    merged = merge(root, nest(("base", "training", "tokens"), budgets.items[0]))
    assert isinstance(merged, Mapping)
    return merged


def check_search(
    root: Mapping, file: StudyFile | None, cells: Iterable[tuple[Cell, str | None]], faults: Faults
) -> Search | None:
    """Return the search that a file describes, None for an ordinary study; adds faults."""
    node = get(root, "search")
    if not isinstance(node, Mapping):
        return None
    for key in _OF_STUDIES:
        if key in root.entries:
            hint = "search.seed is the seed of its runs" if key == "seeds" else "it belongs to a study"
            faults.add(root.keys[key], f"a search has no '{key}'", hint)
    training = get(root, "base", "training")
    if isinstance(training, Mapping) and "tokens" in training.entries:
        faults.add(training.keys["tokens"], "a search has no token budget here", "search.budgets says it")
    if (fork := get(root, "base", "fork")) is not None:
        faults.add(fork, "a search has no forks", "it belongs to a study")
    for name, arm in entries(get(root, "arms")).items():
        for section in SECTIONS:
            if isinstance(arm, Mapping) and section in arm.entries and section not in _OWN:
                what = f"a search compares recipes: '{name}' must not set {section}"
                faults.add(arm.keys[section], what, "set it in base, for all of them")
    factors = get(root, "grid", "factors")
    for factor in entries(factors):
        if factor.split(".")[0] != "recipe":
            assert isinstance(factors, Mapping)
            faults.add(factors.keys[factor], f"a search compares recipes: '{factor}' is no part of one")
    budgets = get(node, "budgets")
    items = budgets.items if isinstance(budgets, Sequence) else ()
    amounts = [item for item in items if isinstance(item, Scalar)]
    for before, after in itertools.pairwise(amounts):
        if isinstance(before.value, int) and isinstance(after.value, int) and before.value >= after.value:
            faults.add(after, f"a budget of {after.text} after one of {before.text}", "budgets rise")
    if file is None or file.search is None:
        return None
    labels: dict[str, dict[str, None]] = {}
    kept = []
    for cell, arm_name in cells:
        levels = {level.factor: level.label for level in cell.levels}
        for factor, label in levels.items():
            labels.setdefault(factor, {})[label] = None
        if arm_name is not None:
            kept.append(SearchCell(levels=levels, arm=arm_name))
    return Search(
        **vars(file.search),
        factors={factor: tuple(found) for factor, found in labels.items()},
        cells=tuple(kept),
        named=tuple(entries(get(root, "arms"))),
        lines={
            "search": (node.line, node.column),
            **{key: (value.line, value.column) for key, value in node.entries.items()},
        },
    )
