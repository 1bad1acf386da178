"""The grid: factors → cells, exactly and in order, with zipped factors and excluded cells.

How it fails: every fault is added to the collector. A grid with a fault in its notation has no cells, because
half a design would mislead.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, NamedTuple

from pydantic import TypeAdapter, ValidationError

from ablate.base.errors import likely, safe_text
from ablate.study.faults import Faults, children, type_at
from ablate.study.sections import SECTIONS, BaseSection
from ablate.study.source import KEY, Path, Source, show_path

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_CELLS = 100_000
_FACTORS = ("grid", "factors")


class Level(NamedTuple):
    """One value of one factor: its place in the file, and its part of the arm's name."""

    factor: str
    where: Path
    label: str


class Cell(NamedTuple):
    """One combination of levels. ``excluded``: why it is left out, None if it is not."""

    name: str
    levels: tuple[Level, ...]
    excluded: str | None


Factors = dict[str, list[Level]]


def expand(faults: Faults) -> list[Cell]:
    """Return the grid's cells, the last factor varying fastest; none if the grid has a fault."""
    factors = _factors(faults)
    axes = _axes(factors, faults)
    rules = dict(_rules(factors, faults))
    num_cells = math.prod(len(axis) for axis in axes)
    if num_cells > MAX_CELLS:
        faults.add((*_FACTORS, KEY), f"the grid has {num_cells} cells", f"at most {MAX_CELLS}")
    if faults.any_within("grid") or not factors:
        return []
    naming = {name for name, levels in factors.items() if len(levels) > 1} or set(factors)
    order = list(factors)
    cells, used = [], set()
    for combination in itertools.product(*axes):
        levels = sorted(itertools.chain(*combination), key=lambda level: order.index(level.factor))
        by = [
            at
            for at, wanted in rules.items()
            if all(one in wanted[one.factor] for one in levels if one.factor in wanted)
        ]
        used |= set(by)
        name = " ".join(level.label for level in levels if level.factor in naming)
        cells.append(Cell(name, tuple(levels), f"excluded by {show_path(by[0])}" if by else None))
    for at in rules.keys() - used:
        faults.add(at, "the rule matches no cell")
    return [] if faults.any_within("grid") else cells


def _factors(faults: Faults) -> Factors:
    factors: Factors = {}
    for factor, _ in faults.source.items(*_FACTORS):
        path, at = tuple(factor.split(".")), (*_FACTORS, factor)
        if type_at(BaseSection, path) is None:
            hint = likely(factor, factor_paths(), "a field of base, such as training.learning_rate")
            faults.add((*at, KEY), "unknown factor", hint)
            continue
        keys = [key for key, _ in faults.source.entries(*at)]
        if not keys:
            faults.add(at, "expected a list of values, or {label: value}")
            continue
        factors[factor] = []
        for key in keys:
            check_value(path, (*at, key), faults)
            label = key if isinstance(key, str) else _label(factor, (*at, key), faults.source)
            factors[factor].append(Level(factor, (*at, key), label))
    return factors


def _label(factor: str, where: Path, source: Source) -> str:
    """Label a value: words and what belongs to a recipe alone, any other value as ``field=value``."""
    leaf, value = factor.rsplit(".", 1)[-1], source.get(*where)
    if isinstance(value, list):
        parts = (_label(factor, (*where, index), source) for index in range(len(value)))
        return "+".join(parts) or f"no {leaf}"
    if isinstance(value, dict):
        return " ".join(_label(f"{factor}.{key}", (*where, key), source) for key in value) or leaf
    in_words = factor.startswith("recipe") or (isinstance(value, str) and factor.count(".") == 1)
    text = "null" if value is None else source.place(where).text
    return text if in_words else f"{leaf}={text}"


def check_value(path: Path, where: Path, faults: Faults) -> None:
    """Check the file's value at ``where`` by the rules for the base's field at ``path``; add its faults."""
    value = faults.source.get(*where)
    for key in reversed(path):
        value = {key: value}
    try:
        TypeAdapter(BaseSection).validate_python(value)
    except ValidationError as error:
        faults.add_validation(error, where, skip=len(path), section=BaseSection)


def factor_paths() -> list[str]:
    """List every path that can be a factor: the base's sections, their fields, and the fields' fields."""
    paths: list[str] = []
    for section in SECTIONS:
        paths.append(section)
        for key, annotation in children(type_at(BaseSection, (section,))).items():
            paths += [f"{section}.{key}", *(f"{section}.{key}.{below}" for below in children(annotation))]
    return paths


def _axes(factors: Factors, faults: Faults) -> list[list[tuple[Level, ...]]]:
    """Return the independent axes of the product; zipped factors share an axis."""
    group_of: dict[str, tuple[str, ...]] = {name: (name,) for name in factors}
    for number, group in faults.source.entries("grid", "zip"):
        at = ("grid", "zip", number)
        named = [str(name) for name in group] if isinstance(group, list) else []
        if len(set(named)) < 2:
            faults.add(at, "a group to zip needs at least two factors")
            continue
        known = []
        for index, name in enumerate(named):
            if _is_known((*at, index), name, factors, faults):
                known.append(name)
                if len(group_of[name]) > 1:
                    faults.add((*at, index), f"'{name}' is zipped twice")
        if len(known) == len(named) and len({len(factors[name]) for name in known}) > 1:
            shown = ", ".join(f"{name} has {len(factors[name])}" for name in known)
            faults.add(at, "zipped factors need equally many values", shown)
        group_of |= dict.fromkeys(known, tuple(dict.fromkeys(known)))
    groups = dict.fromkeys(group_of.values())
    # Factors of unequal length are a fault, and the grid then has no cells.
    return [list(zip(*(factors[name] for name in group), strict=False)) for group in groups]


def _is_known(at: Path, name: str, factors: Factors, faults: Faults) -> bool:
    if name not in dict(faults.source.items(*_FACTORS)):  # otherwise the factor has a fault already
        faults.add(at, f"'{safe_text(name)}' is no factor of this grid", likely(name, factors, None))
    return name in factors


def _rules(factors: Factors, faults: Faults) -> Iterator[tuple[Path, Factors]]:
    """Yield each ``exclude`` rule's place and its levels by factor: one, or all that have its value."""
    source = faults.source
    for number, rule in source.entries("grid", "exclude"):
        at: Path = ("grid", "exclude", number)
        if rule == {}:
            faults.add(at, "an empty rule would exclude every cell")
        wanted: Factors = {}
        for name, value in source.items(*at):
            if not _is_known((*at, name, KEY), name, factors, faults):
                continue
            levels = factors[name]
            wanted[name] = [one for one in levels if value in (one.label, source.get(*one.where))]
            if not wanted[name]:
                labels = ", ".join(level.label for level in levels[:10])
                what = f"no value of the factor '{name}', got {source.got((*at, name))}"
                faults.add((*at, name), what, f"its values: {labels}")
        if wanted:
            yield at, wanted
