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

from ablate.base.errors import Problem, UserError, cut, likely, safe_text, with_type

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path as FilePath

Path = tuple[str | int | None, ...]
"""The keys that lead to a value; with ``KEY`` at its end, the key itself."""
KEY = None

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
    problems: dict[tuple[int | None, int | None], Problem] = field(default_factory=dict)

    def get(self, *path: Any) -> Any:
        """Return the value at a path, None if there is none."""
        value, steps = follow(self.data, path)
        return value if steps == len(path) else None

    def nearest(self, path: Path) -> Path:
        """Return a path as far as the file has it."""
        _, steps = follow(self.data, path)
        return path[:steps]

    def mapping(self, *path: Any) -> dict[str, Any]:
        """Return the mapping at a path; empty for any other value."""
        value = self.get(*path)
        return value if isinstance(value, dict) else {}

    def entries(self, *path: Any) -> dict[Any, Any]:
        """Return the mapping, or a list's values by index, at a path; else empty."""
        value = self.get(*path)
        if isinstance(value, list):
            return dict(enumerate(value))
        return self.mapping(*path)

    def place(self, path: Path) -> Place:
        """Return the place of a value, or of the nearest one around it."""
        while path not in self.places:
            path = path[:-1]
        return self.places[path]

    def problem(self, path: Path, what: str, hint: str | None = None) -> Problem:
        """Make a problem of the value or key at a path, or of the nearest value around it."""
        line, column, _ = self.place(path)
        return Problem(file=self.file, line=line, column=column, what=what, hint=hint)

    def got(self, path: Path) -> str:
        """Describe a value for a message, in about 40 characters at most."""
        value = self.get(*path)
        if value is None:
            return "nothing"
        if isinstance(value, dict):
            return "a mapping" if value else "an empty mapping"
        if isinstance(value, list):
            return "a list" if value else "an empty list"
        if isinstance(value, str):
            return repr(cut(value, 40))
        return cut(self.place(path).text, 40)


def follow(value: Any, path: Iterable[Any]) -> tuple[Any, int]:
    """Follow a path as far as it exists; return the last value found and the number of steps taken."""
    steps = 0
    for key in path:
        is_index = isinstance(value, list) and isinstance(key, int) and key < len(value)
        is_key = isinstance(value, dict) and key in value
        if not (is_index or is_key):
            break
        value = value[key]
        steps += 1
    return value, steps


def show_path(path: Path) -> str:
    """Return a path as text: ``arms.fprop.recipe.gemms[0]``."""
    text = ""
    for key in path:
        if isinstance(key, int):
            text += f"[{key}]"
        elif key is not KEY:
            shown = safe_text(key)
            if not shown or shown != shown.strip():
                shown = f"'{shown}'"
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
        raise UserError(
            f"cannot be read: {getattr(error, 'strerror', None) or error}", file=path
        ) from None
    if len(content) > MAX_BYTES:
        raise UserError(
            f"larger than {MAX_BYTES >> 20} MiB: not a study file", file=path
        )
    return content


def parse(content: bytes, shown: str, path: Path = ()) -> Source:
    """Parse the bytes of a file, or of the value for ``path``; ``shown``: the file's name in messages.

    Raises:
        UserError: the content is not YAML, or not a mapping.
    """
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = content[: error.start].decode("utf-8", "replace")
        raise _error_after(
            before, shown, f"not UTF-8 text (byte 0x{content[error.start]:02x})"
        ) from None
    escape = _NO_CHARACTER.search(text)
    if escape is not None:
        message = f"an escape that is no character: {escape[0]}"
        raise _error_after(text[: escape.start()], shown, message)
    yaml = YAML(typ="safe", pure=True)
    yaml.composer.warn_double_anchors = (
        False  # YAML allows it, and the warning would not name a place
    )
    root = _compose(yaml, text, shown)
    if root is None:
        raise _error_after("", shown, "the file is empty")
    source = Source(file=shown)
    source.data = _Builder(yaml.constructor, source).build(root, path)
    if not path and not isinstance(source.data, dict):
        message = "a study is a mapping of keys to values"
        raise UserError(_problem_at(root.start_mark, shown, message))
    return source


def _error_after(
    before: str, file: str, message: str, hint: str | None = None
) -> UserError:
    """Make an error whose place is the end of the text ``before``."""
    line = before.count("\n") + 1
    column = len(before) - before.rfind("\n")
    return UserError(
        Problem(file=file, line=line, column=column, what=message, hint=hint)
    )


def _problem_at(mark: Any, file: str, message: str, hint: str | None = None) -> Problem:
    """Make a problem at ruamel's mark."""
    line = mark.line + 1
    column = mark.column + 1
    return Problem(file=file, line=line, column=column, what=message, hint=hint)


_NO_CHARACTER = re.compile(
    r"\\u[dD][89a-fA-F][0-9a-fA-F]{2}|\\U(?!0010|000)[0-9a-fA-F]{8}"
)
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
        hint = str(error.context) if error.context else None
        if hint and error.context_mark:
            hint += f" on line {error.context_mark.line + 1}"
        for part, advice in _HINTS.items():
            if part in problem:
                hint = advice
                break
        mark = error.problem_mark or error.context_mark
        message = f"not valid YAML: {problem}"
        raise UserError(_problem_at(mark, shown, message, hint)) from None
    except ReaderError as error:
        message = f"a character that YAML does not allow: {text[error.position]!r}"
        raise _error_after(text[: error.position], shown, message) from None
    except RecursionError:
        raise _error_after("", shown, f"more than {MAX_DEPTH} levels") from None
    except Exception as error:  # ruamel lets other errors through
        raise _error_after("", shown, "not valid YAML", with_type(error)[:80]) from None


_NOUNS = {"bool": "a yes or no", "int": "a number", "float": "a number"}
# YAML 1.2's core schema has no dates and no '=': both are text.
_TEXT_KINDS = ("str", "timestamp", "value")


def _kind(node: Any) -> str:
    return str(node.tag).removeprefix(_TAG)


class _Builder:
    """Builds plain data from composed nodes, and notes their places in the source."""

    def __init__(self, constructor: Any, source: Source) -> None:
        self._constructor = constructor
        self._source = source
        self._num_nodes = 0

    def build(self, node: Any, path: Path, depth: int = 0) -> Any:
        mark = node.start_mark
        self._num_nodes += 1
        if self._num_nodes > MAX_NODES or depth > MAX_DEPTH:
            message = f"more than {MAX_NODES} values or {MAX_DEPTH} levels; are there nested aliases?"
            raise UserError(_problem_at(mark, self._source.file, message))
        text = str(node.value) if isinstance(node, ScalarNode) else ""
        self._source.places[path] = Place(mark.line + 1, mark.column + 1, text)
        if isinstance(node, SequenceNode):
            self._check_tag(node, path, "seq")
            return [
                self.build(item, (*path, index), depth + 1)
                for index, item in enumerate(node.value)
            ]
        if isinstance(node, MappingNode):
            self._check_tag(node, path, "map")
            return self._mapping(node, path, depth + 1)
        self._check_tag(node, path, "null", "merge", *_TEXT_KINDS, *_NOUNS)
        kind = _kind(node)
        if kind in _NOUNS:
            try:
                return getattr(self._constructor, f"construct_yaml_{kind}")(node)
            except (ValueError, KeyError, IndexError):
                message = f"{text[:40]!r} is not {_NOUNS[kind]} that can be read"
                self._add(node, path, message)
        return None if kind == "null" else text

    def _check_tag(self, node: Any, path: Path, *kinds: str) -> None:
        if _kind(node) not in kinds:
            tag = str(node.tag).replace(_TAG, "!!")
            self._add(node, path, f"the tag {tag} has no meaning here", "leave it out")

    def _mapping(self, node: MappingNode, path: Path, depth: int) -> dict[str, Any]:
        mapping = self._merged(node, path, depth)
        lines: dict[str, int] = {}
        for key_node, value in node.value:
            key = str(key_node.value)
            kind = _kind(key_node)
            mark = key_node.start_mark
            if kind == "merge":
                continue
            if not isinstance(key_node, ScalarNode):
                self._add(key_node, (*path, "?"), "a key must be text")
                continue
            if kind not in _TEXT_KINDS:
                is_group = key.isdecimal() and not value.value  # 60,000 in braces
                hint = "a number has no comma: write 60_000" if is_group else "quote it"
                message = f"the key {key or 'null'} is not text"
                self._add(key_node, (*path, key), message, hint)
            if key in lines:
                hint = f"first on line {lines[key]}"
                self._add(key_node, (*path, key), "key given twice", hint)
                continue
            lines[key] = mark.line + 1
            self._source.places[*path, key, KEY] = Place(mark.line + 1, mark.column + 1)
            if not value.value and value.start_mark.index == value.end_mark.index:
                value.start_mark = mark  # an empty value has the place of its key, not of the next line
            mapping[key] = self.build(value, (*path, key), depth)
        return mapping

    def _merged(self, node: MappingNode, path: Path, depth: int) -> dict[str, Any]:
        """Build what the mapping merges (``<<``): its own keys win over it, and the source named first."""
        merged: list[Any] = []
        for key_node, value in node.value:
            if _kind(key_node) == "merge":
                merged += value.value if isinstance(value, SequenceNode) else [value]
        mapping: dict[str, Any] = {}
        place = self._source.places[path]
        for source in reversed(merged):
            if isinstance(source, MappingNode):
                mapping |= self.build(source, path, depth)
            else:
                self._add(source, (*path, "<<"), "expected an alias of a mapping")
        self._source.places[path] = place
        return mapping

    def _add(
        self, node: Any, path: Path, message: str, hint: str | None = None
    ) -> None:
        """Add a fault, once for each place: an alias leads to the same place again."""
        text = f"{show_path(path)}: {message}"
        problem = _problem_at(node.start_mark, self._source.file, text, hint)
        self._source.problems.setdefault((problem.line, problem.column), problem)


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
        if not value.strip():
            raise _refused(f"{key}: no value", "write null for none")
        parent, path = _find_key(source, key, number)
        parent[path[-1]] = _read_value(source, key, value, path, number)


def _find_key(source: Source, key: str, number: int) -> tuple[dict[Any, Any], Path]:
    """Follow a setting's key; return the mapping that has it or gets it, and its path in the file."""
    parent = source.data
    path: Path = ()
    words = key.split(".")
    while True:
        step = _next_step(words, parent, path)
        words = words[step.count(".") + 1 :]
        if path == ("arms",) and step not in parent:
            listed = f"arms: {', '.join(parent)}" if parent else "the study has none"
            raise _refused(f"{key}: no arm '{step}'", likely(step, parent, listed))
        path = (*path, step)
        source.places.setdefault((*path, KEY), Place(0, number))
        if not words:
            return parent, path
        if parent.get(step) is None:
            parent[step] = {}
            source.places[path] = Place(0, number)
        parent = parent[step]
        if not isinstance(parent, dict):
            message = (
                f"{key}: {show_path(path)} is {source.got(path)}, which has no keys"
            )
            raise _refused(message, f"set it whole: {show_path(path)}=…")


def _next_step(words: list[str], parent: dict[str, Any], path: Path) -> str:
    """Names of arms and factors may have dots: take the longest known name, else a word or a new factor."""
    for length in range(len(words), 0, -1):
        name = ".".join(words[:length])
        if name in parent:
            return name
    if path == ("grid", "factors"):
        return ".".join(words)
    return words[0]


def _read_value(source: Source, key: str, text: str, path: Path, number: int) -> Any:
    """Read a setting's value; its places replace those of the value in the file."""
    try:
        parsed = parse(text.encode("utf-8", "surrogatepass"), "--set", path)
        problems = tuple(parsed.problems.values())
    except UserError as error:
        problems = error.problems
    if problems:
        message = problems[0].what.removeprefix(f"{show_path(path)}: ")
        raise _refused(f"{key}: {message}", problems[0].hint)
    for place in list(source.places):
        if place[: len(path)] == path and place != (*path, KEY):
            del source.places[place]
    for place, written in parsed.places.items():
        source.places[place] = written._replace(line=0, column=number)
    return parsed.data


def _refused(message: str, hint: str | None = None) -> UserError:
    return UserError(Problem(file="--set", what=message, hint=hint))
