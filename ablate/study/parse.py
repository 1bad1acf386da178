"""Bytes of a study file → a tree with places, or every fault of its syntax.

ruamel.yaml's composer reads YAML 1.2. The tree is built here and not by ruamel's constructors, because those
turn dates into objects, accept recursive aliases and lose the places of merged keys.

How it fails: broken syntax raises ``UserError``. Faults that leave the rest readable, such as a key given
twice, are returned as a list of problems beside the tree.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError
from ruamel.yaml.nodes import MappingNode, ScalarNode, SequenceNode
from ruamel.yaml.reader import ReaderError

from ablate.base.errors import Problem, UserError
from ablate.study.tree import Mapping, Node, Path, Scalar, Sequence, show_path

if TYPE_CHECKING:
    from pathlib import Path as FilePath

MAX_BYTES = 2**20
MAX_NODES = 200_000
MAX_DEPTH = 50
"""Limits for a file that is not a study: a data file named by mistake, or aliases that multiply."""

_TAG = "tag:yaml.org,2002:"


def read_tree(path: FilePath, shown: str) -> tuple[Mapping, list[Problem]]:
    """Read a file into a tree; return it with its faults. ``shown``: the file's name in messages.

    Raises:
        UserError: the file cannot be read, or is not YAML, or is not a mapping.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL character in the name
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise UserError(f"cannot be read: {reason}", file=shown) from None
    if len(content) > MAX_BYTES:
        raise UserError(f"larger than {MAX_BYTES >> 20} MiB: not a study file", file=shown)
    return parse(content, shown)


def parse(content: bytes, shown: str) -> tuple[Mapping, list[Problem]]:
    """Parse the bytes of a file into a tree; see ``read_tree``."""
    root = _compose(_decode(content, shown), shown)
    if root is None:
        raise UserError(Problem(file=shown, line=1, column=1, what="the file is empty"))
    builder = _Builder(shown)
    tree = builder.build(root, ())
    if not isinstance(tree, Mapping):
        what = "a study is a mapping of keys to values"
        raise UserError(Problem(file=shown, line=tree.line, column=tree.column, what=what))
    return tree, builder.problems


def parse_value(text: str, path: Path, shown: str) -> Node:
    """Parse the YAML text of one value, to stand at ``path``; raises ``UserError`` at its faults."""
    root = _compose(text, shown)
    if root is None:
        raise UserError(Problem(file=shown, what="no value", hint="write null for none"))
    builder = _Builder(shown)
    value = builder.build(root, path)
    if builder.problems:
        raise UserError(*builder.problems)
    return value


def _decode(content: bytes, shown: str) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = content[: error.start]
        line_start = before.rfind(b"\n") + 1
        column = len(before[line_start:].decode("utf-8", "replace")) + 1
        what = f"not UTF-8 text (byte 0x{content[error.start]:02x})"
        raise UserError(Problem(file=shown, line=before.count(b"\n") + 1, column=column, what=what)) from None


def _compose(text: str, shown: str) -> Any:
    yaml = YAML(typ="safe", pure=True)
    yaml.composer.warn_double_anchors = False  # YAML allows it, and the warning would not name a place
    try:
        return yaml.compose(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        what, hint = _wording(error)
        line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
    except ReaderError as error:
        line, column = _place(text, error.position)
        what, hint = f"a character that YAML does not allow: {text[error.position]!r}", None
    except RecursionError:
        line, column, what, hint = 1, 1, f"nested more than {MAX_DEPTH} deep", None
    except Exception as error:  # ruamel lets other errors through, such as ValueError for "\\U00110000"
        escape = re.search(r"\\U(?!0010|000)[0-9a-fA-F]{8}", text)
        line, column = _place(text, escape.start() if escape else 0)
        what = "not valid YAML: an escape that is no character" if escape else "not valid YAML"
        hint = f"{type(error).__name__}: {error}".splitlines()[0][:80]
    raise UserError(Problem(file=shown, line=line, column=column, what=what, hint=hint))


def _place(text: str, position: int) -> tuple[int, int]:
    """Return line and column, from 1, of a position in the text."""
    return text.count("\n", 0, position) + 1, position - (text.rfind("\n", 0, position) + 1) + 1


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
    begin = error.context_mark
    if context and begin and error.problem_mark and begin.line != error.problem_mark.line:
        context += f" that begins on line {begin.line + 1}"
    hint = next((hint for start, hint in _HINTS.items() if problem.startswith(start)), context)
    return f"not valid YAML: {problem}", hint


def _is_unicode(text: str) -> bool:
    """Whether a text can be encoded: an escape in quotes can give half a surrogate pair."""
    return not any("\ud800" <= char <= "\udfff" for char in text)


class _Builder:
    """Builds the tree from composed nodes; keeps the problems and the count of nodes meanwhile."""

    def __init__(self, shown: str) -> None:
        self.problems: list[Problem] = []
        self._shown = shown
        self._open: set[int] = set()  # ids, because ruamel's nodes may not be hashable
        self._num_nodes = 0

    def build(self, node: Any, path: Path) -> Node:
        self._num_nodes += 1
        if self._num_nodes > MAX_NODES:
            raise UserError(self._problem(node, f"more than {MAX_NODES} values; are there nested aliases?"))
        mark = node.start_mark
        place: dict[str, Any] = {"path": path, "line": mark.line + 1, "column": mark.column + 1}
        if len(self._open) > MAX_DEPTH:
            raise UserError(self._problem(node, f"nested more than {MAX_DEPTH} deep"))
        if id(node) in self._open:
            raise UserError(self._problem(node, f"{show_path(path)}: an alias that contains itself"))
        self._open.add(id(node))
        try:
            if isinstance(node, ScalarNode):
                return Scalar(**place, value=self._scalar(node, path), text=str(node.value))
            self._refuse_tag(node, path, _TAG + ("seq" if isinstance(node, SequenceNode) else "map"))
            if isinstance(node, SequenceNode):
                items = tuple(self.build(item, (*path, i)) for i, item in enumerate(node.value))
                return Sequence(**place, items=items)
            return self._mapping(node, path, place)
        finally:
            self._open.discard(id(node))

    def _mapping(self, node: MappingNode, path: Path, place: dict[str, Any]) -> Mapping:
        entries: dict[str, Node] = {}
        keys: dict[str, Node] = {}
        merged: list[Mapping] = []
        for key_node, value_node in node.value:
            if isinstance(key_node, ScalarNode) and str(key_node.tag) == _TAG + "merge":
                merged += self._merge_sources(value_node, path)
                continue
            if not isinstance(key_node, ScalarNode):
                self._add(key_node, f"{show_path((*path, '?'))}: a key must be text")
                continue
            key = str(key_node.value)
            key_path = (*path, key)
            if str(key_node.tag) not in (_TAG + "str", _TAG + "timestamp", _TAG + "value"):
                self._add(key_node, f"{show_path(key_path)}: the key {key or 'null'} is not text", "quote it")
            if not _is_unicode(key):
                self._add(key_node, f"{show_path(key_path)}: an escape that is no character")
            if key in entries:
                what = f"{show_path(key_path)}: key given twice"
                self._add(key_node, what, f"first on line {keys[key].line}")
                continue
            mark = key_node.start_mark
            keys[key] = Node(path=key_path, line=mark.line + 1, column=mark.column + 1)
            start, end = value_node.start_mark, value_node.end_mark
            if isinstance(value_node, ScalarNode) and start.index == end.index:
                value_node.start_mark = mark  # an empty value has the place of its key, not of the next line
            entries[key] = self.build(value_node, key_path)
        for source in merged:  # the mapping's own keys win, then the source named first
            entries = source.entries | entries
            keys = source.keys | keys
        return Mapping(**place, entries=entries, keys=keys)

    def _merge_sources(self, node: Any, path: Path) -> list[Mapping]:
        sources = []
        for source in node.value if isinstance(node, SequenceNode) else [node]:
            if isinstance(source, MappingNode):
                built = self.build(source, path)
                assert isinstance(built, Mapping)
                sources.append(built)
            else:
                self._add(source, f"{show_path((*path, '<<'))}: expected an alias of a mapping")
        return sources

    def _scalar(self, node: ScalarNode, path: Path) -> str | int | float | bool | None:
        tag, text = str(node.tag), str(node.value)
        if tag == _TAG + "null":
            return None
        if tag == _TAG + "bool":
            return text.lower() in ("true", "yes", "on", "y")
        if tag in (_TAG + "int", _TAG + "float"):
            return self._number(node, path, tag, text)
        self._refuse_tag(node, path, _TAG + "str")
        if not _is_unicode(text):
            self._add(node, f"{show_path(path)}: an escape that is no character: {text[:40]!r}")
        return text

    def _number(self, node: ScalarNode, path: Path, tag: str, text: str) -> int | float | str:
        digits = text.replace("_", "").lower()
        try:
            if tag == _TAG + "float":
                special = {".inf": math.inf, "+.inf": math.inf, "-.inf": -math.inf, ".nan": math.nan}
                return special[digits] if digits in special else float(digits)
            base = {"0x": 16, "0o": 8, "0b": 2}.get(digits.lstrip("+-")[:2], 10)
            return int(digits, base)
        except ValueError:
            self._add(node, f"{show_path(path)}: {text[:40]!r} is not a number that can be read")
            return text

    def _refuse_tag(self, node: Any, path: Path, expected: str) -> None:
        # YAML 1.2's core schema has no dates and no '=': both are text.
        tag = str(node.tag).replace(_TAG, "!!")
        if str(node.tag) not in (expected, _TAG + "timestamp", _TAG + "value", _TAG + "merge"):
            self._add(node, f"{show_path(path)}: the tag {tag} has no meaning here", "leave it out")

    def _add(self, node: Any, what: str, hint: str | None = None) -> None:
        problem = self._problem(node, what, hint)
        if not any((p.line, p.column) == (problem.line, problem.column) for p in self.problems):
            self.problems.append(problem)  # only once: an alias leads to the same place again

    def _problem(self, node: Any, what: str, hint: str | None = None) -> Problem:
        mark = node.start_mark
        return Problem(file=self._shown, line=mark.line + 1, column=mark.column + 1, what=what, hint=hint)
