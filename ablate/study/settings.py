"""``--set KEY=VALUE``: values of the command line in the place of a study file's.

The key is a path with dots, as messages show it; the value is YAML. A value becomes a part of the tree before
anything is checked, so it is held against the same rules as the file, and a fault in it names ``--set``.

How it fails: ``UserError`` for what is no ``KEY=VALUE``, and for a path that leads to no place of the file.
A key that the study does not know is a fault like one in the file.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ablate.base.errors import Problem, UserError
from ablate.study.messages import did_you_mean, got_text
from ablate.study.parse import parse_value
from ablate.study.tree import Mapping, Node, Scalar, Sequence, show_path

if TYPE_CHECKING:
    from collections.abc import Collection
    from collections.abc import Sequence as Many

    from ablate.study.messages import Faults
    from ablate.study.study import ResolvedArm
    from ablate.study.tree import Path

_EXAMPLE = "expected KEY=VALUE, such as base.training.learning_rate=1e-3"


@dataclass(frozen=True, kw_only=True)
class _Setting:
    """One ``--set``. ``number``: its place on the command line, from 1."""

    number: int
    key: str
    value: str


def with_settings(root: Mapping, settings: Many[str]) -> Mapping:
    """Return a study's tree with these settings, each ``KEY=VALUE``.

    Raises:
        UserError: a setting that cannot be read, or whose key leads to no place.
    """
    known: set[str] = set()
    for number, text in enumerate(settings, 1):
        key, equals, value = text.partition("=")
        key = key.strip()
        if not equals or not all(key.split(".")):
            raise _refused(f"'{text}' sets nothing", _EXAMPLE)
        if key in known:
            raise _refused(f"{key} is given twice")
        known.add(key)
        tree = _put(root, key.split("."), _Setting(number=number, key=key, value=value), ())
        assert isinstance(tree, Mapping)
        root = tree
    return root


def check_settings(root: Mapping, arms: Collection[ResolvedArm], faults: Faults) -> None:
    """Add a fault for each setting of the base that every arm overrides: it would change nothing."""
    base = root.entries.get("base")
    for node in _set_nodes(base) if base is not None else ():
        path = [str(part) for part in node.path[1:]]
        above = {".".join(path[:length]) for length in range(1, len(path) + 1)}
        if arms and all(above & arm.factors.keys() for arm in arms):
            faults.add(node, "changes nothing: every arm has a value of its own")


def _set_nodes(node: Node) -> list[Node]:
    if isinstance(node, Mapping):
        return [found for below in node.entries.values() for found in _set_nodes(below)]
    return [node] if node.line == 0 else []


def _put(under: Node | None, parts: list[str], setting: _Setting, path: Path) -> Node:
    """Return the node at ``path`` with the setting in it; ``parts``: what is left of the setting's key."""
    if not parts:
        return _value(setting, path)
    if under is None or (isinstance(under, Scalar) and under.value is None):
        under = Mapping(path=path, line=0, column=setting.number, entries={}, keys={})
    if not isinstance(under, Mapping):
        what = f"{setting.key}: {show_path(path)} is {got_text(under)}, which has no keys"
        raise _refused(what, f"set it whole: {show_path(path)}=…")
    key, rest = _next_key(under, parts, path)
    if path == ("arms",) and key not in under.entries:
        listed = f"arms: {', '.join(under.entries)}" if under.entries else "the study has none"
        raise _refused(f"{setting.key}: no arm '{key}'", did_you_mean(key, under.entries) or listed)
    below = _put(under.entries.get(key), rest, setting, (*path, key))
    return replace(under, entries=under.entries | {key: below}, keys={key: below} | under.keys)


def _next_key(node: Mapping, parts: list[str], path: Path) -> tuple[str, list[str]]:
    """Return the key that comes next, and the parts after it: names of arms and factors may have dots."""
    for length in range(len(parts), 0, -1):
        if (key := ".".join(parts[:length])) in node.entries:
            return key, parts[length:]
    if path == ("grid", "factors"):
        return ".".join(parts), []
    return parts[0], parts[1:]


def _value(setting: _Setting, path: Path) -> Node:
    try:
        value = parse_value(setting.value, path, "--set")
    except UserError as error:
        first = error.problems[0]
        what = first.what.removeprefix(f"{show_path(path)}: ")
        raise _refused(f"{setting.key}: {what}", first.hint) from None
    return _placed(value, setting.number)


def _placed(node: Node, number: int) -> Node:
    """Give a value and all in it the place of a setting."""
    if isinstance(node, Mapping):
        entries = {key: _placed(value, number) for key, value in node.entries.items()}
        keys = {key: replace(value, line=0, column=number) for key, value in node.keys.items()}
        return replace(node, line=0, column=number, entries=entries, keys=keys)
    if isinstance(node, Sequence):
        return replace(node, line=0, column=number, items=tuple(_placed(item, number) for item in node.items))
    return replace(node, line=0, column=number)


def _refused(what: str, hint: str | None = None) -> UserError:
    return UserError(Problem(file="--set", what=what, hint=hint))
