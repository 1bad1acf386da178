"""The grid: factors → cells, exactly and in order, with zipped factors and excluded cells.

How it fails: every fault is added to the collector. A grid with a fault in its notation has no cells, because
half a design would mislead.
"""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pydantic import TypeAdapter, ValidationError

from ablate.study.messages import Faults, children, did_you_mean, got_text, likely, type_at
from ablate.study.sections import SECTIONS, BaseSection
from ablate.study.tree import Mapping, Node, Scalar, Sequence, entries, nest, plain, show_path

if TYPE_CHECKING:
    from collections.abc import Iterable

MAX_CELLS = 100_000


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Level:
    """One value of one factor. ``path``: the factor's, split; ``label``: its part of the arm's name.

    Levels compare by identity, because a factor may hold the same value twice.
    """

    factor: str
    path: tuple[str, ...]
    label: str
    node: Node
    content: str


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Cell:
    """One combination of levels. ``excluded``: the rule that excludes it, if any."""

    name: str
    levels: tuple[Level, ...]
    excluded: str | None


def expand(grid: Mapping, faults: Faults) -> list[Cell]:
    """Return the cells of a grid in the order of the file, the last factor varying fastest."""
    factors = _factors(grid, faults)
    axes = _axes(grid, factors, faults)
    rules = _rules(grid, factors, faults)
    num_cells = math.prod(len(axis) for axis in axes)
    if num_cells > MAX_CELLS:
        faults.add(grid.keys["factors"], f"the grid has {num_cells} cells", f"at most {MAX_CELLS}")
    if faults.any_within("grid") or not factors:
        return []
    naming = {name for name, levels in factors.items() if len(levels) > 1} or set(factors)
    order = {name: i for i, name in enumerate(factors)}
    cells = [
        _cell(sorted(itertools.chain(*levels), key=lambda level: order[level.factor]), rules, naming)
        for levels in itertools.product(*axes)
    ]
    for rule in rules:
        if not any(rule.matches(cell.levels) for cell in cells):
            faults.add(rule.node, "the rule matches no cell")
    return [] if faults.any_within("grid") else cells


def _factors(grid: Mapping, faults: Faults) -> dict[str, list[Level]]:
    factors: dict[str, list[Level]] = {}
    node = grid.entries.get("factors")
    if not isinstance(node, Mapping):
        return factors
    for factor, values in node.entries.items():
        path = tuple(factor.split("."))
        if type_at(BaseSection, path) is None:
            hint = did_you_mean(factor, factor_paths()) or "a field of base, such as training.learning_rate"
            faults.add(node.keys[factor], "unknown factor", hint)
            continue
        levels = _levels(factor, values)
        if not levels:
            faults.add(values, "expected a list of values, or {label: value}")
            continue
        for level in levels:
            check_value(path, level.node, faults)
        factors[factor] = levels
    return factors


def _levels(factor: str, values: Node) -> list[Level]:
    labelled = list(entries(values).items())
    if isinstance(values, Sequence):
        labelled = [(_label(factor, node), node) for node in values.items]
    path = tuple(factor.split("."))
    return [
        Level(factor=factor, path=path, label=label, node=node, content=_content(node))
        for label, node in labelled
    ]


def _content(node: Node) -> str:
    return json.dumps(plain(node), sort_keys=True)


def _label(factor: str, node: Node) -> str:
    """Return a value's label: a recipe's word alone, any other value as ``field=value``."""
    leaf = factor.rsplit(".", 1)[-1]
    if isinstance(node, Sequence):
        return "+".join(_label(factor, item) for item in node.items) or f"no {leaf}"
    if isinstance(node, Mapping):
        return " ".join(_label(f"{factor}.{key}", value) for key, value in node.entries.items()) or leaf
    assert isinstance(node, Scalar)
    in_words = factor.startswith("recipe") or (isinstance(node.value, str) and factor.count(".") == 1)
    text = node.text if node.value is not None else "null"
    return text if in_words else f"{leaf}={text}"


def check_value(path: tuple[str, ...], value: Node, faults: Faults) -> None:
    """Check one value of the field at a path of the base section, at the value's own place."""
    try:
        TypeAdapter(BaseSection).validate_python(plain(nest(path, value)))
    except ValidationError as error:
        faults.add_validation(error, value, skip=len(path), section=BaseSection)


def factor_paths() -> list[str]:
    """Return every path that can be a factor: the base's sections, their fields, and the fields' fields."""
    paths: list[str] = []
    for section in SECTIONS:
        paths.append(section)
        for key, annotation in children(type_at(BaseSection, (section,))).items():
            paths.append(f"{section}.{key}")
            paths += [f"{section}.{key}.{below}" for below in children(annotation)]
    return paths


def _axes(grid: Mapping, factors: dict[str, list[Level]], faults: Faults) -> list[list[tuple[Level, ...]]]:
    """Return the independent axes of the product; zipped factors share an axis."""
    group_of: dict[str, tuple[str, ...]] = {name: (name,) for name in factors}
    zipped = grid.entries.get("zip")
    for group in zipped.items if isinstance(zipped, Sequence) else ():
        items = group.items if isinstance(group, Sequence) else ()
        named = [item for item in items if isinstance(item, Scalar)]
        paths = tuple(str(item.value) for item in named)
        if len(set(paths)) < 2:
            faults.add(group, "a group to zip needs at least two factors")
            continue
        is_known = True
        for item in named:
            path = str(item.value)
            if path not in factors:
                is_known = False
                if path not in entries(grid.entries.get("factors")):
                    faults.add(item, f"'{path}' is no factor of this grid", likely(item, factors))
            elif len(group_of[path]) > 1:
                faults.add(item, f"'{path}' is zipped twice")
        lengths = {path: len(factors[path]) for path in paths if path in factors}
        if is_known and len(set(lengths.values())) > 1:
            shown = ", ".join(f"{path} has {length}" for path, length in lengths.items())
            faults.add(group, "zipped factors need equally many values", shown)
        group_of |= dict.fromkeys((path for path in paths if path in factors), paths)
    groups = dict.fromkeys(group_of.values())
    return [
        list(zip(*(factors[name] for name in group if name in factors), strict=False)) for group in groups
    ]


@dataclass(frozen=True, kw_only=True)
class _Rule:
    """Matches the cells in which each named factor has one of these levels (more than one only if equal)."""

    node: Node
    levels: dict[str, frozenset[Level]]

    def matches(self, levels: Iterable[Level]) -> bool:
        wanted = self.levels
        return all(level in wanted[level.factor] for level in levels if level.factor in wanted)


def _rules(grid: Mapping, factors: dict[str, list[Level]], faults: Faults) -> list[_Rule]:
    rules = []
    written = grid.entries.get("exclude")
    for node in written.items if isinstance(written, Sequence) else ():
        if not isinstance(node, Mapping):
            continue  # reported when the file's shape was checked
        if not node.entries:
            faults.add(node, "an empty rule would exclude every cell")
            continue
        wanted: dict[str, frozenset[Level]] = {}
        for path, value in node.entries.items():
            if path not in factors:
                if path not in entries(grid.entries.get("factors")):
                    hint = did_you_mean(path, factors)
                    faults.add(node.keys[path], f"'{path}' is no factor of this grid", hint)
                continue
            wanted[path] = _matching(factors[path], value)
            if not wanted[path]:
                labels = [level.label for level in factors[path]]
                what = f"no value of the factor '{path}', got {got_text(value)}"
                few = f"its values: {', '.join(labels)}" if len(labels) <= 10 else None
                faults.add(value, what, few or likely(value, labels))
        if len(wanted) == len(node.entries) and all(wanted.values()):
            rules.append(_Rule(node=node, levels=wanted))
    return rules


def _matching(levels: list[Level], value: Node) -> frozenset[Level]:
    content = _content(value)
    label = value.value if isinstance(value, Scalar) else None
    return frozenset(
        level for level in levels if level.content == content or (label and level.label == label)
    )


def _cell(levels: list[Level], rules: list[_Rule], naming: set[str]) -> Cell:
    name = " ".join(level.label for level in levels if level.factor in naming)
    by = next((rule for rule in rules if rule.matches(levels)), None)
    return Cell(
        name=name, levels=tuple(levels), excluded=f"excluded by {show_path(by.node.path)}" if by else None
    )
