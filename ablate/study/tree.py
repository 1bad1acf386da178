"""A study file as a tree whose nodes know their places, and the merging of such trees.

An arm is its inherited content with its own entries laid over it. Merging keeps the nodes, so a fault in a
merged configuration points to the line of the wrong value.

Nodes compare by identity, so that results can be cached by node: thousands of cells of a grid share most of
their sections.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

Path = tuple[str | int, ...]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Node:
    """A place in the file: the path of keys to it, and its line and column, both from 1.

    Line 0: it stands in no file, but in the ``--set`` of that number (``settings``).
    """

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
    """Return a path as text: ``arms.fprop.recipe.gemms[0]``."""
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
    """Follow a path as far as it exists; return the last node found and the number of steps taken."""
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
    """Return the node at a path, None if there is no node."""
    if node is None:
        return None
    found, steps = find(node, path)
    return found if steps == len(path) else None


def plain_at(node: Node | None, *path: str) -> Any:
    """Return the content at a path as plain data, None if there is no node."""
    found = get(node, *path)
    return None if found is None else plain(found)


def entries(node: Node | None) -> dict[str, Node]:
    """Return a mapping's entries; empty for any other node."""
    return node.entries if isinstance(node, Mapping) else {}


def nest(path: Iterable[str], value: Node) -> Node:
    """Wrap a value in mappings, so that it lies at ``path``; they all have the value's place."""
    for key in reversed(tuple(path)):
        entries, keys = {key: value}, {key: value}
        value = Mapping(path=value.path, line=value.line, column=value.column, entries=entries, keys=keys)
    return value


def merge(under: Node | None, over: Node) -> Node:
    """Lay ``over`` over ``under``: mappings merge key by key, any other node replaces."""
    if not (isinstance(under, Mapping) and isinstance(over, Mapping)):
        return over
    merged = dict(under.entries)
    for key, value in over.entries.items():
        merged[key] = merge(merged.get(key), value)
    return Mapping(
        path=over.path, line=over.line, column=over.column, entries=merged, keys=under.keys | over.keys
    )
