"""The grid: factors → cells, exactly and in order, with zipped factors and excluded cells.

How it fails: every fault is added to the collector. A grid with a fault in its notation has no cells, because
half a design would mislead.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, NamedTuple

from ablate.base.errors import likely, safe_text
from ablate.study.faults import children, type_at
from ablate.study.parts import Part
from ablate.study.sections import SECTIONS, BaseSection
from ablate.study.source import KEY, Path, show_path

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ablate.study.faults import Faults
    from ablate.study.parts import Sections
    from ablate.study.source import Source

MAX_CELLS = 100_000
_FACTORS = ("grid", "factors")


class Level(NamedTuple):
    """One value of one factor: what it sets in an arm, and its part of the arm's name."""

    factor: str
    part: Part
    label: str


class Cell(NamedTuple):
    """One combination of levels. ``excluded``: why it is left out, None if it is not."""

    name: str
    levels: tuple[Level, ...]
    excluded: str | None


Factors = dict[str, list[Level]]


def expand(faults: Faults, sections: Sections) -> list[Cell]:
    """Return the grid's cells, the last factor varying fastest; none if the grid has a fault."""
    factors = _factors(faults, sections)
    axes = _axes(factors, faults)
    rules = dict(_rules(factors, faults))
    num_cells = math.prod(len(axis) for axis in axes)
    if num_cells > MAX_CELLS:
        faults.add(
            (*_FACTORS, KEY), f"the grid has {num_cells} cells", f"at most {MAX_CELLS}"
        )
    if faults.any_within("grid") or not factors:
        return []
    named = [name for name, levels in factors.items() if len(levels) > 1]
    order = list(factors)
    cells = []
    matching: set[Path] = set()
    for combination in itertools.product(*axes):
        levels = sorted(
            itertools.chain(*combination), key=lambda level: order.index(level.factor)
        )
        reason = None
        for place, wanted in rules.items():
            if all(level in wanted.get(level.factor, levels) for level in levels):
                matching.add(place)
                reason = reason or f"excluded by {show_path(place)}"
        labels = [level.label for level in levels if level.factor in (named or order)]
        cells.append(Cell(" ".join(labels), tuple(levels), reason))
    for place in rules.keys() - matching:
        faults.add(place, "the rule matches no cell")
    return [] if faults.any_within("grid") else cells


def _factors(faults: Faults, sections: Sections) -> Factors:
    source = faults.source
    factors: Factors = {}
    for factor in source.mapping(*_FACTORS):
        path = tuple(factor.split("."))
        place = (*_FACTORS, factor)
        if type_at(BaseSection, path) is None:
            otherwise = "a field of base, such as training.learning_rate"
            hint = likely(factor, factor_paths(), otherwise)
            faults.add((*place, KEY), "unknown factor", hint)
            continue
        levels = []
        for key in source.entries(*place):
            part = Part((*place, key), path)
            sections.check(part)
            label = key
            if not isinstance(key, str):
                label = _label(factor, part.written_at, source)
            levels.append(Level(factor, part, label))
        if levels:
            factors[factor] = levels
        else:
            faults.add(place, "expected a list of values, or {label: value}")
    return factors


def _label(factor: str, place: Path, source: Source) -> str:
    """Label a value: words and what belongs to a recipe alone, any other value as ``field=value``."""
    field = factor.rsplit(".", 1)[-1]
    value = source.get(*place)
    if isinstance(value, list):
        labels = [
            _label(factor, (*place, index), source) for index in range(len(value))
        ]
        return "+".join(labels) or f"no {field}"
    if isinstance(value, dict):
        labels = [_label(f"{factor}.{key}", (*place, key), source) for key in value]
        return " ".join(labels) or field
    text = "null" if value is None else source.place(place).text
    is_word = isinstance(value, str) and factor.count(".") == 1
    if is_word or factor.startswith("recipe"):
        return text
    return f"{field}={text}"


def factor_paths() -> list[str]:
    """List every path that can be a factor: the base's sections, their fields, and the fields' fields."""
    paths: list[str] = []
    for section in SECTIONS:
        paths.append(section)
        for key, annotation in children(type_at(BaseSection, (section,))).items():
            path = f"{section}.{key}"
            paths += [path, *(f"{path}.{below}" for below in children(annotation))]
    return paths


def _axes(factors: Factors, faults: Faults) -> list[list[tuple[Level, ...]]]:
    """Return the independent axes of the product; zipped factors share an axis."""
    group_of: dict[str, tuple[str, ...]] = {name: (name,) for name in factors}
    for number, group in faults.source.entries("grid", "zip").items():
        place = ("grid", "zip", number)
        names = [str(name) for name in group] if isinstance(group, list) else []
        if len(set(names)) < 2:
            faults.add(place, "a group to zip needs at least two factors")
            continue
        known = []
        for index, name in enumerate(names):
            if _is_known((*place, index), name, factors, faults):
                known.append(name)
                if len(group_of[name]) > 1:
                    faults.add((*place, index), f"'{name}' is zipped twice")
        if len(known) == len(names) and len({len(factors[name]) for name in known}) > 1:
            counts = ", ".join(f"{name} has {len(factors[name])}" for name in known)
            faults.add(place, "zipped factors need equally many values", counts)
        group_of |= dict.fromkeys(known, tuple(dict.fromkeys(known)))
    axes = []
    for names_of_axis in dict.fromkeys(group_of.values()):
        levels = [factors[name] for name in names_of_axis]
        # Factors of unequal length are a fault, and the grid then has no cells.
        axes.append(list(zip(*levels, strict=False)))
    return axes


def _is_known(place: Path, name: str, factors: Factors, faults: Faults) -> bool:
    # otherwise the factor has a fault already
    if name not in faults.source.mapping(*_FACTORS):
        message = f"'{safe_text(name)}' is no factor of this grid"
        faults.add(place, message, likely(name, factors, None))
    return name in factors


def _rules(factors: Factors, faults: Faults) -> Iterator[tuple[Path, Factors]]:
    """Yield each ``exclude`` rule's place and its levels by factor: one, or all that have its value."""
    source = faults.source
    for number, rule in source.entries("grid", "exclude").items():
        place: Path = ("grid", "exclude", number)
        if rule == {}:
            faults.add(place, "an empty rule would exclude every cell")
        wanted: Factors = {}
        for name, value in source.mapping(*place).items():
            if not _is_known((*place, name, KEY), name, factors, faults):
                continue
            wanted[name] = []
            for level in factors[name]:
                if value in (level.label, source.get(*level.part.written_at)):
                    wanted[name].append(level)
            if not wanted[name]:
                labels = ", ".join(level.label for level in factors[name][:10])
                got = source.got((*place, name))
                message = f"no value of the factor '{name}', got {got}"
                hint = f"its values: {safe_text(labels)}"
                faults.add((*place, name), message, hint)
        if wanted:
            yield place, wanted
