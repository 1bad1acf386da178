"""Faults of a study file, in the words of its author.

pydantic finds the faults. Here each gets its place in the file, a line that says what was expected, and the
likely word. The look-ups run only for files with faults.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import fields, is_dataclass
from functools import cache
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Union, get_args, get_origin, get_type_hints

from pydantic import Field

from ablate.base.errors import Problem, one_of
from ablate.study.sections import MAX_SEEDS, SECTIONS, BaseSection
from ablate.study.tree import Mapping, Node, Path, Scalar, Sequence, find, show_path

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pydantic import ValidationError
    from pydantic_core import ErrorDetails

_EXPECTED = {
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "a mapping",
    "dataclass_type": "a mapping",
    "finite_number": "a finite number",
    "greater_than": "a number above {gt}",
    "greater_than_equal": "a number from {ge} up",
    "less_than": "a number below {lt}",
    "less_than_equal": "a number up to {le}",
    "seeds": f"a count from 1 to {MAX_SEEDS}, or a list of seeds",
    "too_short": "at least one entry",
    "count_or_share": "a whole number of blocks, or a share of them between 0 and 1",
    "diagnosed_layers": "a list of patterns of layer names, or 'ends and middle'",
}


class Faults:
    """Collects the problems of one file.

    A fault is kept once for each place, however many arms or aliases lead there.
    """

    def __init__(self, file: str, known: Iterable[Problem] = ()) -> None:
        self._file = file
        self._found: dict[tuple[int, int, str], tuple[Node, str | None, dict[str | None, None]]] = {}
        self._known = list(known)
        self._taken = {(problem.line, problem.column) for problem in self._known}
        self._parts: set[str | int] = set()

    def __bool__(self) -> bool:
        return bool(self._known or self._found)

    def any_within(self, part: str) -> bool:
        """Whether a top-level part of the file has a fault."""
        return part in self._parts

    def add(self, node: Node, what: str, hint: str | None = None, *, arm: str | None = None) -> None:
        """Add a fault at a node. ``arm`` names an affected arm, if the node's place does not."""
        self._parts.update(node.path[:1])
        if (node.line, node.column) in self._taken:
            return  # this place already has a syntax error
        _, _, arms = self._found.setdefault((node.line, node.column, what), (node, hint, {}))
        arms[arm] = None

    def problems(self) -> list[Problem]:
        """Return all faults in the order of the file."""
        found = [
            Problem(
                file=self._file,
                line=line,
                column=column,
                what=f"{show_path(node.path)}: {what}" if node.path else what,
                hint=_with_arms(hint, arms),
            )
            for (line, column, what), (node, hint, arms) in self._found.items()
        ]
        return sorted(self._known + found, key=lambda p: (p.line or 0, p.column or 0, p.what))

    def add_validation(self, error: ValidationError, root: Node, *, skip: int = 0, section: Any) -> None:
        """Add pydantic's errors about ``root``; the first ``skip`` parts of their paths are not in the tree.

        ``section``: the validated type, from which the expected words are taken.
        """
        for fault in error.errors(include_url=False, include_input=False):
            self._add_one(fault, root, skip=skip, section=section)

    def _add_one(self, fault: ErrorDetails, root: Node, *, skip: int, section: Any) -> None:
        kind, full, context = fault["type"], fault["loc"], fault.get("ctx", {})
        full = tuple(part for part in full if not str(part).startswith("["))  # the tags of a union
        loc = full[skip:]
        node, _ = find(root, loc)
        if kind == "unexpected_keyword_argument":
            parent, _ = find(root, loc[:-1])
            key = parent.keys[str(loc[-1])] if isinstance(parent, Mapping) else node
            self.add(key, "unknown key", unknown_key_hint(str(full[-1]), full[:-1], section))
        elif kind == "missing":
            self.add(node, f"missing key '{loc[-1]}'", _MISSING.get(str(loc[-1])))
        elif show_path(node.path) == "target" and kind == "dataclass_type":
            got = node.text if isinstance(node, Scalar) and isinstance(node.value, int | float) else "3.3"
            hint = f"write {{val_loss: {got}}} for nats per token, or {{perplexity: {got}}}"
            self.add(node, "a target needs its unit", hint)
        elif kind == "literal_error":
            words = context.get("words") or [w.strip("'") for w in re.split(", | or ", context["expected"])]
            what, close = f"expected {one_of(words)}, got {got_text(node)}", likely(node, words)
            noun = "recipe" if full[-2:-1] == ("what_if",) else full[-1]
            if noun in ("recipe", "preset"):  # too many words to list
                mapping = "; or a mapping" if noun == "recipe" else ""
                what = f"unknown {noun} {got_text(node)}"
                close = close or f"`ablate recipes` lists them{mapping}"
            self.add(node, what, close)
        else:
            limits = {k: f"{v:.15g}" if isinstance(v, float) else v for k, v in context.items()}
            what = f"expected {_EXPECTED.get(kind, kind.replace('_', ' ')).format_map(limits)}"
            if kind == "too_short":
                self.add(node, what)
            else:
                self.add(node, f"{what}, got {got_text(node)}", _mend(kind, node))


_MISSING = {
    "target": "write target: {val_loss: …} or target: {perplexity: …}; or null, for none yet",
    "baseline": "name the arm that costs are stated against",
    "name": "it names the study's folder",
    "factors": "path of a field: its values",
}


def _with_arms(hint: str | None, arms: dict[str | None, None]) -> str | None:
    if None in arms:
        return hint  # the place already names the arm
    first = next(iter(arms))
    shown = f"in arm '{first}'" if len(arms) == 1 else f"in {len(arms)} arms, first '{first}'"
    return f"{hint}; {shown}" if hint else shown


def got_text(node: Node) -> str:
    """Describe the node's content in a few characters."""
    if isinstance(node, Mapping):
        return "a mapping"
    if isinstance(node, Sequence):
        return "a list"
    assert isinstance(node, Scalar)
    if node.value is None:
        return "nothing"
    text = node.value if isinstance(node.value, str) else node.text
    text = text if len(text) <= 40 else text[:39] + "…"
    return repr(text) if isinstance(node.value, str) else text


def did_you_mean(word: str, words: Iterable[str]) -> str | None:
    """Return a hint with the closest word, None if no word is close."""
    lowered = {known.lower(): known for known in words}
    close = difflib.get_close_matches(word.lower(), lowered, n=1, cutoff=0.6)
    return f"did you mean '{lowered[close[0]]}'?" if close else None


def likely(node: Node, words: Iterable[str]) -> str | None:
    """Return a hint with the word that the node's text probably means."""
    value = node.value if isinstance(node, Scalar) else None
    return did_you_mean(value, words) if isinstance(value, str) else None


_SHORT_NUMBER = re.compile(r"(\d+(?:\.\d+)?)\s*([kmbg])", re.IGNORECASE)
_THOUSANDS = {"k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9}


def _space(text: str) -> str | None:
    """Return a hint for a key and a value without a space between them, as YAML wants it."""
    key, colon, value = text.partition(":")
    return f"write '{key}: {value}', with a space" if colon and key.isidentifier() and value else None


def _mend(kind: str, node: Node) -> str | None:
    """Return a hint for a slip of notation: 1e6 for a whole number, or a quoted number."""
    if not isinstance(node, Scalar):
        return None
    if kind == "int_type" and isinstance(node.value, float) and node.value.is_integer() and node.value < 1e15:
        return f"write {int(node.value)}"
    if kind in ("int_type", "float_type") and isinstance(node.value, str):
        if short := _SHORT_NUMBER.fullmatch(node.value):
            return f"write {round(float(short[1]) * _THOUSANDS[short[2].lower()]):_}"
        return "leave out the quotes" if node.value.isdecimal() else None
    if kind == "dataclass_type" and isinstance(node.value, str):
        return _space(node.value)
    if kind == "bool_type" and isinstance(node.value, str):
        word = {"yes": "true", "on": "true", "no": "false", "off": "false"}.get(node.value.lower())
        return f"write {word}" if word else None
    if kind in ("list_type", "tuple_type"):
        return f"write [{node.text}]" if node.text and len(node.text) <= 40 else "write […]"
    return None


_USUAL = {"lr": "learning_rate", "hidden_size": "width", "d_model": "width"}
"""Other projects' names of our keys."""


def unknown_key_hint(key: str, parent: Path, section: Any) -> str | None:
    """Return a hint with the likely key, or with the section that has such a key."""
    from ablate.recipes import LayerRecipeSpec, RecipeSpec

    kind = bare(type_at(section, parent))
    here = children(kind)
    if kind is LayerRecipeSpec and key in children(RecipeSpec):
        return "it belongs to the whole recipe"
    if hint := _space(key):
        return hint
    if close := did_you_mean(_USUAL.get(key, key), here):
        return close
    if not parent and key in SECTIONS:
        return "it belongs in 'base'"
    for name in SECTIONS:
        if _USUAL.get(key, key) in children(type_at(BaseSection, (name,))):
            where = name if parent else f"base.{name}"
            return f"it belongs in '{where}'" + (f", as {_USUAL[key]}" if key in _USUAL else "")
    return f"expected {one_of(list(here))}" if 0 < len(here) <= 10 else None


# ---- the types behind the paths -----------------------------------------------------------------------


def children(section: Any) -> dict[str, Any]:
    """Return a section's keys and their types; empty for any other type."""
    section = bare(section)
    return _children(section) if isinstance(section, type) and is_dataclass(section) else {}


@cache
def _children(section: type[Any]) -> dict[str, Any]:
    hints = get_type_hints(section, include_extras=True)
    said = {name: info.description for name, info in section.__pydantic_fields__.items()}
    return {
        one.name.rstrip("_"): Annotated[
            hints[one.name],
            Field(**{**one.metadata, "alias": None, "description": said[one.name]}),
        ]
        for one in fields(section)
    }


def bare(annotation: Any) -> Any:
    """Strip ``Annotated`` and ``| None``."""
    while True:
        if get_origin(annotation) is Annotated:
            annotation = get_args(annotation)[0]
        elif get_origin(annotation) in (Union, UnionType):
            annotation = next(arg for arg in get_args(annotation) if arg is not type(None))
        else:
            return annotation


def type_at(section: Any, path: Path) -> Any:
    """Return the type of the field at a path, None if there is no such field."""
    for part in path:
        section = bare(section)
        arguments = get_args(section)
        if get_origin(section) is list and isinstance(part, int):
            section = arguments[0]
        elif get_origin(section) is dict:
            section = arguments[1]
        else:
            section = children(section).get(str(part))
    return section
