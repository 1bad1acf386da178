"""A study file as a tree whose every node knows its place, and the merging of such trees.

An arm is what it inherits with its own entries laid over it. Because merging keeps the nodes themselves, a
fault in a merged configuration still points to the line that brought the wrong value in.

Nodes compare by identity, so that what is derived from one can be remembered under it: five thousand cells
of a grid share most of their sections.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

Path = tuple[str | int, ...]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Node:
    """A place in the file: the path of keys to it, and its line and column, both from 1."""

    path: Path
    line: int
    column: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Scalar(Node):
    """A text, number, yes/no or null; ``text`` is what the file says."""

    value: str | int | float | bool | None
    text: str


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Sequence(Node):
    """A list."""

    items: tuple[Node, ...]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Mapping(Node):
    """Keys and values in the order of the file; ``keys`` holds the places of the keys themselves."""

    entries: dict[str, Node]
    keys: dict[str, Node]


def show_path(path: Path) -> str:
    """Write a path as people do, on one line: ``arms.fprop.recipe.gemms[0]``."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
            continue
        shown = part if part.isprintable() else repr(part)[1:-1]
        shown = shown if shown and shown == shown.strip() else f"'{shown}'"
        text += f".{shown}" if text else shown
    return text


def plain(node: Node) -> Any:
    """Return the node's content as plain Python data."""
    if isinstance(node, Scalar):
        return node.value
    if isinstance(node, Sequence):
        return [plain(item) for item in node.items]
    assert isinstance(node, Mapping)
    return {key: plain(value) for key, value in node.entries.items()}


def find(node: Node, path: Iterable[str | int]) -> tuple[Node, int]:
    """Follow a path as far as it goes; returns the last node met and how many steps were taken."""
    steps = 0
    for part in path:
        below: Node | None = None
        if isinstance(node, Mapping) and isinstance(part, str):
            below = node.entries.get(part)
        elif isinstance(node, Sequence) and isinstance(part, int) and part < len(node.items):
            below = node.items[part]
        if below is None:
            break
        node, steps = below, steps + 1
    return node, steps


def get(node: Node | None, *path: str | int) -> Node | None:
    """Return the node at a path, or None if there is none."""
    if node is None:
        return None
    found, steps = find(node, path)
    return found if steps == len(path) else None


def plain_at(node: Node | None, *path: str) -> Any:
    """Return the content at a path as plain data, None if there is nothing."""
    found = get(node, *path)
    return None if found is None else plain(found)


def entries(node: Node | None) -> dict[str, Node]:
    """Return a mapping's entries; none for anything else."""
    return node.entries if isinstance(node, Mapping) else {}


def nest(path: Iterable[str], value: Node) -> Node:
    """Wrap a value in mappings, so that it lies at ``path``; all of them stand where the value stands."""
    for key in reversed(tuple(path)):
        entries, keys = {key: value}, {key: value}
        value = Mapping(path=value.path, line=value.line, column=value.column, entries=entries, keys=keys)
    return value


def merge(under: Node | None, over: Node) -> Node:
    """Lay ``over`` upon ``under``: mappings merge key by key, anything else replaces."""
    if not (isinstance(under, Mapping) and isinstance(over, Mapping)):
        return over
    merged = dict(under.entries)
    for key, value in over.entries.items():
        merged[key] = merge(merged.get(key), value)
    return Mapping(
        path=over.path, line=over.line, column=over.column, entries=merged, keys=under.keys | over.keys
    )
