"""Inheritance: the merged nodes of each named arm and each cell of the grid.

How it fails: an arm with a broken or circular chain of ``from`` gets no draft. The fault is reported at the
break, and the rest of the arm is not checked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ablate.study.grid import Cell, expand
from ablate.study.merge import Draft, override_section
from ablate.study.messages import Faults, got_text, likely
from ablate.study.sections import SECTIONS
from ablate.study.tree import Mapping, Node, Scalar, entries, get, nest, plain, plain_at

if TYPE_CHECKING:
    from collections.abc import Iterable


class Drafts:
    """Drafts the arms of one file. ``named`` follows the order of the file."""

    def __init__(self, root: Mapping, faults: Faults) -> None:
        self._root = root
        self._faults = faults
        self._merged: dict[tuple[Node | None, Node], Node] = {}
        base = entries(root.entries.get("base"))
        sections = {s: override_section(s, None, base[s]) for s in SECTIONS if s in base}
        self.base = Draft(
            name="base", description=None, node=root, lineage=(("base",),), sections=sections, factors={}
        )
        self._arms = get(root, "arms")
        self._drafts: dict[str, Draft] = {}

    def named(self) -> dict[str, Draft]:
        """Return the named arms whose inheritance is sound."""
        written = entries(self._arms)
        for name, node in written.items():
            self._draft(name, ())
            self._parent_name(node, written)
        return {name: self._drafts[name] for name in written if name in self._drafts}

    def _parent_name(self, node: Node, likely_arms: Iterable[str]) -> str | None:
        source = get(node, "from")
        if not (isinstance(source, Scalar) and isinstance(source.value, str)):
            return None
        if source.value not in entries(self._arms):
            hint = likely(source, likely_arms)
            self._faults.add(source, f"no arm {got_text(source)} to inherit from", hint)
        return source.value

    def _draft(self, name: str, trail: tuple[str, ...]) -> Draft | None:
        """Resolve one arm's inheritance; None if the chain is broken."""
        if name in self._drafts:
            return self._drafts[name]
        node = get(self._arms, name)
        if node is None:
            return None
        if name in trail:
            self._report_circle(trail[trail.index(name) :])
            return None
        source = plain_at(node, "from")
        parent = self._draft(source, (*trail, name)) if isinstance(source, str) else self.base
        if parent is None:
            return None
        sections, factors = dict(parent.sections), dict(parent.factors)
        for section, override in entries(node).items():
            if section in SECTIONS:
                sections[section] = self._lay_over(section, sections.get(section), override)
                _set_factors(factors, (section,), override)
        description = plain_at(node, "description")
        assert isinstance(self._arms, Mapping)
        self._drafts[name] = Draft(
            name=name,
            description=description if isinstance(description, str) else None,
            node=self._arms.keys[name],
            lineage=(("arms", name), *parent.lineage),
            sections=sections,
            factors=factors,
        )
        return self._drafts[name]

    def _report_circle(self, circle: tuple[str, ...]) -> None:
        order = list(entries(self._arms))
        start = circle.index(min(circle, key=order.index))
        circle = circle[start:] + circle[: start + 1]
        node = get(self._arms, circle[0], "from")
        assert node is not None
        self._faults.add(node, f"arms inherit in a circle: {' → '.join(circle)}")

    def cells(self, named: dict[str, Draft]) -> list[tuple[Cell, Draft]]:
        """Return the cells of the grid, including excluded ones."""
        grid = get(self._root, "grid")
        if not isinstance(grid, Mapping):
            return []
        cells = expand(grid, self._faults)
        source = self._parent_name(grid, named)
        parent = self.base if source is None else named.get(source)
        if parent is None:
            return []
        return [(cell, self._cell(cell, grid.keys["factors"], parent)) for cell in cells]

    def _cell(self, cell: Cell, node: Node, parent: Draft) -> Draft:
        sections, factors = dict(parent.sections), dict(parent.factors)
        for level in sorted(cell.levels, key=lambda level: len(level.path)):  # inner fields after outer ones
            section, *path = level.path
            sections[section] = self._lay_over(section, sections.get(section), level.node, path)
        for level in cell.levels:
            _set_factors(factors, level.path, level.node)
        lineage = (("grid",), *parent.lineage)
        return Draft(
            name=cell.name, description=None, node=node, lineage=lineage, sections=sections, factors=factors
        )

    def _lay_over(self, section: str, under: Node | None, over: Node, path: Iterable[str] = ()) -> Node:
        """Merge two nodes, once for each pair: cells of a grid share most pairs."""
        if (under, over) not in self._merged:
            self._merged[under, over] = override_section(section, under, nest(path, over))
        return self._merged[under, over]


def _set_factors(factors: dict[str, Any], path: tuple[str, ...], node: Node) -> None:
    """Record the leaves that an arm sets; setting a mapping replaces the records of its parts."""
    if isinstance(node, Mapping) and node.entries:
        for key, value in node.entries.items():
            _set_factors(factors, (*path, key), value)
        return
    name = ".".join(path)
    for part in [part for part in factors if part.startswith(f"{name}.")]:
        del factors[part]
    factors[name] = plain(node)
