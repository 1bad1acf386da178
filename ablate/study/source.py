"""The text of a study as plain data, and beside it the place of each value.

ruamel.yaml's composer reads YAML 1.2. The data are built here and not by ruamel, which turns dates into
objects, accepts recursive aliases and loses the places of merged keys.

``--set KEY=VALUE`` replaces values of the file before anything is checked: the same rules apply to both, and
a fault in a setting names ``--set``.

How it fails: broken syntax, or a setting that leads to no place, raises ``UserError``. Faults that leave the
rest readable, such as a key given twice, are kept in ``Source.problems``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError
from ruamel.yaml.nodes import MappingNode, ScalarNode, SequenceNode
from ruamel.yaml.reader import ReaderError

from ablate.base.errors import Problem, UserError, likely, with_type

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path as FilePath

Path = tuple[str | int | None, ...]
"""The keys that lead to a value; with ``KEY`` at its end, the key itself."""
KEY = None
_ROOT: Path = ()

MAX_BYTES = 2**20
MAX_NODES = 200_000
MAX_DEPTH = 50
"""Limits for a file that is not a study: a data file named by mistake, or aliases that multiply."""

_TAG = "tag:yaml.org,2002:"


class Place(NamedTuple):
    """Line and column, from 1, and the text of a scalar. Line 0: ``column`` is the number of a ``--set``."""

    line: int
    column: int
    text: str = ""


@dataclass(kw_only=True)
class Source:
    """What a file says, the places of its values, and the faults of its syntax."""

    file: str
    data: Any = None
    places: dict[Path, Place] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def get(self, *path: Any) -> Any:
        """Return the value at a path, None if there is none."""
        found, steps = follow(self.data, path)
        return found if steps == len(path) else None

    def items(self, *path: Any) -> list[tuple[str, Any]]:
        """Return the items of the mapping at a path; empty for any other value."""
        value = self.get(*path)
        return list(value.items()) if isinstance(value, dict) else []

    def entries(self, *path: Any) -> list[tuple[Any, Any]]:
        """Return (key, value) of the mapping, or (index, value) of the list, at a path; else empty."""
        value = self.get(*path)
        return list(enumerate(value)) if isinstance(value, list) else self.items(*path)

    def place(self, path: Path) -> Place:
        """Return the place of a value, or of the nearest one around it."""
        while path not in self.places:
            path = path[:-1]
        return self.places[path]

    def got(self, path: Path) -> str:
        """Describe a value for a message, in about 40 characters at most."""
        value = self.get(*path)
        if value is None:
            return "nothing"
        if isinstance(value, dict | list):
            return f"{'a' if value else 'an empty'} {'mapping' if isinstance(value, dict) else 'list'}"
        text = value if isinstance(value, str) else self.place(path).text
        text = text if len(text) <= 40 else text[:39] + "…"
        return repr(text) if isinstance(value, str) else text


def follow(value: Any, path: Iterable[Any]) -> tuple[Any, int]:
    """Follow a path as far as it exists; return the last value found and the number of steps taken."""
    steps = 0
    for part in path:
        is_index = isinstance(value, list) and isinstance(part, int) and part < len(value)
        if is_index or (isinstance(value, dict) and part in value):
            value = value[part]
        else:
            break
        steps += 1
    return value, steps


def show_path(path: Path) -> str:
    """Return a path as text: ``arms.fprop.recipe.gemms[0]``."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        elif part is not None:
            shown = part if part.isprintable() else repr(part)[1:-1]
            shown = shown if shown and shown == shown.strip() else f"'{shown}'"
            text += f".{shown}" if text else shown
    return text


def read_content(path: FilePath) -> bytes:
    """Read a file.

    Raises:
        UserError: the file cannot be read, or is no text of this length.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL character in the name
        raise UserError(f"cannot be read: {getattr(error, 'strerror', None) or error}", file=path) from None
    if len(content) > MAX_BYTES:
        raise UserError(f"larger than {MAX_BYTES >> 20} MiB: not a study file", file=path)
    return content


def parse(content: bytes, shown: str, path: Path = ()) -> Source:
    """Parse the bytes of a file, or of the value for ``path``; ``shown``: the file's name in messages.

    Raises:
        UserError: the content is not YAML, or not a mapping.
    """
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        what = f"not UTF-8 text (byte 0x{content[error.start]:02x})"
        raise _error(shown, what, before=content[: error.start].decode("utf-8", "replace")) from None
    if escape := _NO_CHARACTER.search(text):
        raise _error(shown, f"an escape that is no character: {escape[0]}", before=text[: escape.start()])
    yaml = YAML(typ="safe", pure=True)
    yaml.composer.warn_double_anchors = False  # YAML allows it, and the warning would not name a place
    if (root := _compose(yaml, text, shown)) is None:
        raise _error(shown, "the file is empty")
    source = Source(file=shown)
    source.data = _Builder(yaml.constructor, source).build(root, path)
    if not path and not isinstance(source.data, dict):
        raise _error(shown, "a study is a mapping of keys to values", mark=root.start_mark)
    return source


def _error(file: str, what: str, hint: str | None = None, *, before: str = "", mark: Any = None) -> UserError:
    """Make an error whose place is the end of the text ``before``, or ruamel's mark."""
    line, column = before.count("\n"), len(before) - (before.rfind("\n") + 1)
    if mark is not None:
        line, column = mark.line, mark.column
    return UserError(Problem(file=file, line=line + 1, column=column + 1, what=what, hint=hint))


_NO_CHARACTER = re.compile(r"\\u[dD][89a-fA-F][0-9a-fA-F]{2}|\\U(?!0010|000)[0-9a-fA-F]{8}")
"""Escapes of half a surrogate pair, or beyond Unicode."""
_HINTS = {
    "'\\t'": "indent with spaces",
    "another document": "a study file holds one",
    "mapping values are not allowed here": "a ': ' inside a text needs quotes; or check "
    "the indentation, and the line before for a ':' without a space",
    "found character": "quote the text",
    "found undefined alias": "a text that starts with '*' needs quotes",
}
"""What to do, by a part of ruamel's message."""


def _compose(yaml: YAML, text: str, shown: str) -> Any:
    try:
        return yaml.compose(text)
    except MarkedYAMLError as error:
        problem = str(error.problem or error.context or "cannot be parsed").strip()
        context = str(error.context) if error.context else None
        if context and error.context_mark:
            context += f" on line {error.context_mark.line + 1}"
        hint = next((hint for part, hint in _HINTS.items() if part in problem), context)
        mark = error.problem_mark or error.context_mark
        raise _error(shown, f"not valid YAML: {problem}", hint, mark=mark) from None
    except ReaderError as error:
        what = f"a character that YAML does not allow: {text[error.position]!r}"
        raise _error(shown, what, before=text[: error.position]) from None
    except RecursionError:
        raise _error(shown, f"more than {MAX_DEPTH} levels") from None
    except Exception as error:  # ruamel lets other errors through
        raise _error(shown, "not valid YAML", with_type(error)[:80]) from None


_NOUNS = {"bool": "a yes or no", "int": "a number", "float": "a number"}


def _kind(node: Any) -> str:
    return str(node.tag).removeprefix(_TAG)


class _Builder:
    """Builds plain data from composed nodes, and notes their places in the source."""

    def __init__(self, constructor: Any, source: Source) -> None:
        self._constructor = constructor
        self._source = source
        self._num_nodes = 0

    def build(self, node: Any, path: Path, depth: int = 0) -> Any:
        self._num_nodes += 1
        kind, is_scalar, mark = _kind(node), isinstance(node, ScalarNode), node.start_mark
        if self._num_nodes > MAX_NODES or depth > MAX_DEPTH:
            what = f"more than {MAX_NODES} values or {MAX_DEPTH} levels; are there nested aliases?"
            raise _error(self._source.file, what, mark=mark)
        # YAML 1.2's core schema has no dates and no '=': both are text.
        scalars = ("str", "null", "timestamp", "value", "merge", *_NOUNS)
        if kind not in (scalars if is_scalar else ("seq",) if isinstance(node, SequenceNode) else ("map",)):
            tag = str(node.tag).replace(_TAG, "!!")
            self._add(node, path, f"the tag {tag} has no meaning here", "leave it out")
        text = str(node.value) if is_scalar else ""
        self._source.places[path] = Place(mark.line + 1, mark.column + 1, text)
        if isinstance(node, SequenceNode):
            return [self.build(item, (*path, index), depth + 1) for index, item in enumerate(node.value)]
        if not is_scalar:
            return self._mapping(node, path, depth + 1)
        if kind in _NOUNS:
            try:
                return getattr(self._constructor, f"construct_yaml_{kind}")(node)
            except (ValueError, KeyError, IndexError):
                self._add(node, path, f"{text[:40]!r} is not {_NOUNS[kind]} that can be read")
        return None if kind == "null" else text

    def _mapping(self, node: MappingNode, path: Path, depth: int) -> dict[str, Any]:
        merged: list[Any] = []
        for key_node, value in node.value:
            if _kind(key_node) == "merge":
                merged += value.value if isinstance(value, SequenceNode) else [value]
        found: dict[str, Any] = {}
        for source in reversed(merged):  # the mapping's own keys win, then the source named first
            if isinstance(source, MappingNode):
                place = self._source.places[path]
                found |= self.build(source, path, depth)
                self._source.places[path] = place
            else:
                self._add(source, (*path, "<<"), "expected an alias of a mapping")
        own: dict[str, int] = {}
        for key_node, value in node.value:
            key, mark, kind = str(key_node.value), key_node.start_mark, _kind(key_node)
            if kind == "merge":
                continue
            if not isinstance(key_node, ScalarNode):
                self._add(key_node, (*path, "?"), "a key must be text")
                continue
            if kind not in ("str", "timestamp", "value"):
                is_group = key.isdecimal() and not value.value  # 60,000 in braces
                hint = "a number has no comma: write 60_000" if is_group else "quote it"
                self._add(key_node, (*path, key), f"the key {key or 'null'} is not text", hint)
            if key in own:
                self._add(key_node, (*path, key), "key given twice", f"first on line {own[key]}")
                continue
            own[key] = mark.line + 1
            self._source.places[*path, key, KEY] = Place(mark.line + 1, mark.column + 1)
            if not value.value and value.start_mark.index == value.end_mark.index:
                value.start_mark = mark  # an empty value has the place of its key, not of the next line
            found[key] = self.build(value, (*path, key), depth)
        return found

    def _add(self, node: Any, path: Path, what: str, hint: str | None = None) -> None:
        error = _error(self._source.file, f"{show_path(path)}: {what}", hint, mark=node.start_mark)
        (problem,), problems = error.problems, self._source.problems
        if not any((p.line, p.column) == (problem.line, problem.column) for p in problems):
            problems.append(problem)  # only once: an alias leads to the same place again


# ---- --set --------------------------------------------------------------------------------------------


def put_settings(source: Source, settings: Iterable[str]) -> None:
    """Replace values of the file by settings, each ``KEY=VALUE``.

    Raises:
        UserError: a setting cannot be read, or its key leads to no place.
    """
    known: set[str] = set()
    for number, text in enumerate(settings, 1):
        key, equals, value = text.partition("=")
        key = key.strip()
        if not equals or not all(key.split(".")):
            hint = "expected KEY=VALUE, such as base.training.learning_rate=1e-3"
            raise _refused(f"'{text}' sets nothing", hint)
        if key in known:
            raise _refused(f"{key} is given twice")
        known.add(key)
        _put(source, key, value, number)


def _put(source: Source, key: str, text: str, number: int) -> None:
    under, path, parts = source.data, _ROOT, key.split(".")
    while True:
        # Names of arms and factors may have dots: the longest known name, else one part or a new factor.
        there = [length for length in range(len(parts), 0, -1) if ".".join(parts[:length]) in under]
        length = (there or [len(parts) if path == ("grid", "factors") else 1])[0]
        step, parts = ".".join(parts[:length]), parts[length:]
        if path == ("arms",) and step not in under:
            listed = f"arms: {', '.join(under)}" if under else "the study has none"
            raise _refused(f"{key}: no arm '{step}'", likely(step, under, listed))
        path = (*path, step)
        source.places.setdefault((*path, KEY), Place(0, number))
        if not parts:
            break
        if under.get(step) is None:
            under[step], source.places[path] = {}, Place(0, number)
        if not isinstance(under[step], dict):
            what = f"{key}: {show_path(path)} is {source.got(path)}, which has no keys"
            raise _refused(what, f"set it whole: {show_path(path)}=…")
        under = under[step]
    if not text.strip():
        raise _refused(f"{key}: no value", "write null for none")
    try:
        parsed = parse(text.encode("utf-8", "surrogatepass"), "--set", path)
        problems: Sequence[Problem] = parsed.problems
    except UserError as error:
        problems = error.problems
    for first in problems:
        raise _refused(f"{key}: {first.what.removeprefix(f'{show_path(path)}: ')}", first.hint)
    for old in [old for old in source.places if old[: len(path)] == path and old != (*path, KEY)]:
        del source.places[old]
    under[step] = parsed.data
    source.places |= {at: place._replace(line=0, column=number) for at, place in parsed.places.items()}


def _refused(what: str, hint: str | None = None) -> UserError:
    return UserError(Problem(file="--set", what=what, hint=hint))
