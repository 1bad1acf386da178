"""The text of a study as plain data, and beside it the place of each value.

ruamel.yaml's composer reads YAML 1.2. The data are built here and not by ruamel, which turns dates into
objects, accepts recursive aliases and loses the places of merged keys.

``--set KEY=VALUE`` puts values of the command line in the place of the file's before anything is checked:
they are held against the same rules, and a fault in one names ``--set``.

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

from ablate.base.errors import Problem, UserError, likely

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
    """Line and column, from 1, and the text of a scalar. Line 0: in the ``--set`` of that number."""

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

    def place(self, path: Path) -> Place:
        """Return the place of a value, or of the nearest one around it."""
        while path not in self.places:
            path = path[:-1]
        return self.places[path]

    def got(self, path: Path) -> str:
        """Describe a value in a few characters."""
        value = get(self.data, *path)
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


def get(value: Any, *path: Any) -> Any:
    """Return the value at a path, None if there is none."""
    found, steps = follow(value, path)
    return found if steps == len(path) else None


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


def read_source(path: FilePath, shown: str) -> Source:
    """Read a file; ``shown``: its name in messages.

    Raises:
        UserError: the file cannot be read, or is not YAML, or is not a mapping.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL character in the name
        raise UserError(f"cannot be read: {getattr(error, 'strerror', None) or error}", file=shown) from None
    if len(content) > MAX_BYTES:
        raise UserError(f"larger than {MAX_BYTES >> 20} MiB: not a study file", file=shown)
    return parse(content, shown)


def parse(content: bytes, shown: str) -> Source:
    """Parse the bytes of a file; see ``read_source``."""
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line, column = _place(content[: error.start].decode("utf-8", "replace"))
        what = f"not UTF-8 text (byte 0x{content[error.start]:02x})"
        raise UserError(Problem(file=shown, line=line, column=column, what=what)) from None
    return _parse(text, shown)


def _parse(text: str, shown: str, path: Path = ()) -> Source:
    """Parse a file, or a value that is to stand at ``path``."""
    yaml = YAML(typ="safe", pure=True)
    root = _compose(yaml, text, shown)
    if root is None:
        raise UserError(Problem(file=shown, line=1, column=1, what="the file is empty"))
    source = Source(file=shown)
    source.data = _Builder(yaml, source).build(root, path)
    if not path and not isinstance(source.data, dict):
        line, column, _ = source.places[()]
        what = "a study is a mapping of keys to values"
        raise UserError(Problem(file=shown, line=line, column=column, what=what))
    return source


def _compose(yaml: YAML, text: str, shown: str) -> Any:
    yaml.composer.warn_double_anchors = False  # YAML allows it, and the warning would not name a place
    try:
        return yaml.compose(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        what, hint = _wording(error)
        line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
    except ReaderError as error:
        line, column = _place(text[: error.position])
        what, hint = f"a character that YAML does not allow: {text[error.position]!r}", None
    except RecursionError:
        line, column, what, hint = 1, 1, f"nested more than {MAX_DEPTH} deep", None
    except Exception as error:  # ruamel lets other errors through, such as ValueError for "\\U00110000"
        escape = re.search(r"\\U(?!0010|000)[0-9a-fA-F]{8}", text)
        line, column = _place(text[: escape.start()] if escape else "")
        what = "not valid YAML: an escape that is no character" if escape else "not valid YAML"
        hint = f"{type(error).__name__}: {error}".splitlines()[0][:80]
    raise UserError(Problem(file=shown, line=line, column=column, what=what, hint=hint))


def _place(before: str) -> tuple[int, int]:
    """Return line and column, from 1, of what follows a text."""
    return before.count("\n") + 1, len(before) - (before.rfind("\n") + 1) + 1


_HINTS = {
    "mapping values are not allowed here": "a ': ' inside a text needs quotes; or check "
    "the indentation, and the line before for a ':' without a space",
    "found character": "quote the text",
    "found undefined alias": "a text that starts with '*' needs quotes",
}
"""What to do, by the start of ruamel's message."""


def _wording(error: MarkedYAMLError) -> tuple[str, str | None]:
    problem = str(error.problem or error.context or "cannot be parsed").strip()
    if "'\\t'" in problem:
        return "not valid YAML: a tab where only spaces may indent", "indent with spaces"
    if problem == "but found another document":
        return "a second YAML document", "a study file holds one"
    context = str(error.context) if error.context else None
    if context and error.context_mark:
        context += f" on line {error.context_mark.line + 1}"
    hint = next((hint for start, hint in _HINTS.items() if problem.startswith(start)), context)
    return f"not valid YAML: {problem}", hint


class _Builder:
    """Builds plain data from composed nodes, and notes their places in the source."""

    def __init__(self, yaml: YAML, source: Source) -> None:
        self._constructor = yaml.constructor
        self._source = source
        self._open: set[int] = set()  # ids, because ruamel's nodes may not be hashable
        self._num_nodes = 0

    def build(self, node: Any, path: Path) -> Any:
        self._num_nodes += 1
        if self._num_nodes > MAX_NODES:
            raise UserError(self._problem(node, f"more than {MAX_NODES} values; are there nested aliases?"))
        if len(self._open) > MAX_DEPTH:
            raise UserError(self._problem(node, f"nested more than {MAX_DEPTH} deep"))
        if id(node) in self._open:
            raise UserError(self._problem(node, f"{show_path(path)}: an alias that contains itself"))
        mark, text = node.start_mark, str(node.value) if isinstance(node, ScalarNode) else ""
        self._source.places[path] = Place(mark.line + 1, mark.column + 1, text)
        self._open.add(id(node))
        try:
            if isinstance(node, ScalarNode):
                return self._scalar(node, path, text)
            self._refuse_tag(node, path, "seq" if isinstance(node, SequenceNode) else "map")
            if isinstance(node, SequenceNode):
                return [self.build(item, (*path, index)) for index, item in enumerate(node.value)]
            return self._mapping(node, path)
        finally:
            self._open.discard(id(node))

    def _mapping(self, node: MappingNode, path: Path) -> dict[str, Any]:
        merged: list[Any] = []
        for key_node, value_node in node.value:
            if str(key_node.tag) == _TAG + "merge":
                merged += value_node.value if isinstance(value_node, SequenceNode) else [value_node]
        found: dict[str, Any] = {}
        for source in reversed(merged):  # the mapping's own keys win, then the source named first
            if isinstance(source, MappingNode):
                place = self._source.places[path]
                found |= self.build(source, path)
                self._source.places[path] = place
            else:
                self._add(source, f"{show_path((*path, '<<'))}: expected an alias of a mapping")
        own: dict[str, Place] = {}
        for key_node, value_node in node.value:
            if str(key_node.tag) == _TAG + "merge":
                continue
            if not isinstance(key_node, ScalarNode):
                self._add(key_node, f"{show_path((*path, '?'))}: a key must be text")
                continue
            key, mark = str(key_node.value), key_node.start_mark
            shown = show_path((*path, key))
            if str(key_node.tag) not in (_TAG + "str", _TAG + "timestamp", _TAG + "value"):
                self._add(key_node, f"{shown}: the key {key or 'null'} is not text", "quote it")
            self._check_unicode(key_node, path, key)
            if key in own:
                self._add(key_node, f"{shown}: key given twice", f"first on line {own[key].line}")
                continue
            own[key] = self._source.places[*path, key, KEY] = Place(mark.line + 1, mark.column + 1)
            if (
                isinstance(value_node, ScalarNode)
                and value_node.start_mark.index == value_node.end_mark.index
            ):
                value_node.start_mark = mark  # an empty value has the place of its key, not of the next line
            found[key] = self.build(value_node, (*path, key))
        return found

    def _scalar(self, node: ScalarNode, path: Path, text: str) -> str | int | float | bool | None:
        kind = str(node.tag).removeprefix(_TAG)
        if kind == "null":
            return None
        if kind in ("bool", "int", "float"):
            try:
                value: bool | float = getattr(self._constructor, f"construct_yaml_{kind}")(node)
            except (ValueError, KeyError, IndexError):
                noun = "a yes or no" if kind == "bool" else "a number"
                self._add(node, f"{show_path(path)}: {text[:40]!r} is not {noun} that can be read")
                return text
            return value
        self._refuse_tag(node, path, "str")
        self._check_unicode(node, path, text)
        return text

    def _check_unicode(self, node: ScalarNode, path: Path, text: str) -> None:
        if any("\ud800" <= char <= "\udfff" for char in text):  # half of a surrogate pair, by an escape
            self._add(node, f"{show_path(path)}: an escape that is no character: {text[:40]!r}")

    def _refuse_tag(self, node: Any, path: Path, expected: str) -> None:
        # YAML 1.2's core schema has no dates and no '=': both are text.
        if str(node.tag).removeprefix(_TAG) not in (expected, "timestamp", "value", "merge"):
            tag = str(node.tag).replace(_TAG, "!!")
            self._add(node, f"{show_path(path)}: the tag {tag} has no meaning here", "leave it out")

    def _add(self, node: Any, what: str, hint: str | None = None) -> None:
        problem, problems = self._problem(node, what, hint), self._source.problems
        if not any((p.line, p.column) == (problem.line, problem.column) for p in problems):
            problems.append(problem)  # only once: an alias leads to the same place again

    def _problem(self, node: Any, what: str, hint: str | None = None) -> Problem:
        line, column = node.start_mark.line + 1, node.start_mark.column + 1
        return Problem(file=self._source.file, line=line, column=column, what=what, hint=hint)


# ---- --set --------------------------------------------------------------------------------------------


def put_settings(source: Source, settings: Iterable[str]) -> None:
    """Put settings, each ``KEY=VALUE``, in the place of the file's values.

    Raises:
        UserError: a setting that cannot be read, or whose key leads to no place.
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
        step, parts = _next_key(under, parts, path)
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
        parsed = _parse(text, "--set", path)
        problems: Sequence[Problem] = parsed.problems
    except UserError as error:
        problems = error.problems
    for first in problems:
        raise _refused(f"{key}: {first.what.removeprefix(f'{show_path(path)}: ')}", first.hint)
    for old in [old for old in source.places if old[: len(path)] == path and old != (*path, KEY)]:
        del source.places[old]
    under[step] = parsed.data
    source.places |= {at: place._replace(line=0, column=number) for at, place in parsed.places.items()}


def _next_key(under: dict[str, Any], parts: list[str], path: Path) -> tuple[str, list[str]]:
    """Return the key that comes next, and the parts after it: names of arms and factors may have dots."""
    for length in range(len(parts), 0, -1):
        if (key := ".".join(parts[:length])) in under:
            return key, parts[length:]
    length = len(parts) if path == ("grid", "factors") else 1
    return ".".join(parts[:length]), parts[length:]


def _refused(what: str, hint: str | None = None) -> UserError:
    return UserError(Problem(file="--set", what=what, hint=hint))
