"""Faults of a study file, in the words of its author.

pydantic finds most of them. Here each gets its place in the file, a line that says what was expected, and the
likely word. The look-ups run only for files with faults.
"""

from __future__ import annotations

import json
import re
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Union, get_args, get_origin

from ablate.base.errors import Problem, likely, one_of
from ablate.recipes import GEMMS
from ablate.study.sections import MAX_SEEDS, SECTIONS, BaseSection
from ablate.study.source import KEY, Path, Source, show_path

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from pydantic import ValidationError

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
    "greater_than": "a number above {gt:.16g}",
    "greater_than_equal": "a number from {ge:.16g} up",
    "less_than": "a number below {lt:.16g}",
    "less_than_equal": "a number up to {le:.16g}",
    "seeds": f"a count from 1 to {MAX_SEEDS}, or a list of seeds",
    "too_short": "at least one entry",
    "count_or_share": "a whole number of blocks, or a share of them such as 15% or 0.15",
    "diagnosed_layers": "a list of patterns of layer names, or 'ends and middle'",
}
_MISSING = {
    "target": "write target: {val_loss: …} or target: {perplexity: …}; or null, for none yet",
    "baseline": "name the arm that costs are stated against",
    "name": "it names the study's folder",
    "factors": "path of a field: its values",
}
_UNKNOWN = {
    "hadamard": "write stabiliser: none, rht or dht; hadamard_size: 16 beside it is the size",
}
_ELSEWHERE = {
    "learning_rate": "lr max_lr peak_lr",
    "tokens": "steps max_steps num_steps iterations epochs",
    "seq_len": "context context_length block_size max_length",
    "eval_every_tokens": "eval_every eval_interval eval_steps",
    "width": "hidden hidden_size hidden_dim d_model dim n_embd",
    "cpus": "cores",
    "gpus": "device devices",
    "from_fraction": "from start",
    "stabiliser": "rounding",
    "from": "base parent extends",
    "perplexity": "ppl",
    "fprop": "all forward fwd y",
    "dgrad": "all backward bwd dx",
    "wgrad": "all backward bwd dw",
    "rht": "hadamard",
    "dht": "hadamard",
    "sr": "stochastic",
    "hf": "gpt2 huggingface",
    "mxfp4": "fp4",
    "nvfp4": "fp4",
    "nvidia-nvfp4": "nvfp4",
    "bf16": "fp32 float32",
}
"""Our words → what others call the same."""
_FORMS = {
    "arms": "{{bf16: {{recipe: bf16}}, …}}",
    "an arm": "{{recipe: {}}}",
    "model": "{{preset: {}}}",
    "a model on the hub": "{{hf: {}}}",
    "recipe": "{{gemms: {}}}",
    "data": "{{source: text, paths: [{}]}}",
    "within": "{{cost: {}}}",
}
"""What to write, by key, for a word or a list where a mapping is expected."""
_FLAGS = {"yes": "true", "on": "true", "no": "false", "off": "false"}
_THOUSANDS = {"k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9}


class Faults:
    """Collects the faults of one file, each once per place, however many arms or aliases lead there."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self._problems: dict[tuple[int | None, int | None, str], Problem] = {}
        self._faulty: set[Path] = set()

    def __bool__(self) -> bool:
        return bool(self.source.problems or self._problems)

    def any_within(self, *path: str) -> bool:
        """Whether a top-level part of the file, or an entry of one, has a fault."""
        return path in self._faulty

    def add(
        self,
        path: Path,
        message: str,
        hint: str | None = None,
        *,
        arm: str | None = None,
    ) -> None:
        """Add a fault of the value or key at a path. ``arm``: an arm that has it, if the path names none."""
        self._faulty |= {path[:1], path[:2]}
        text = f"{show_path(path)}: {message}" if path else message
        if arm is not None:
            hint = f"{hint}; in arm '{arm}'" if hint else f"in arm '{arm}'"
        problem = self.source.problem(path, text, hint)
        place = (problem.line, problem.column)
        if place not in self.source.problems:
            self._problems.setdefault((*place, message), problem)

    def problems(self) -> list[Problem]:
        """Return all faults in the order of the file."""
        problems = [*self.source.problems.values(), *self._problems.values()]
        return sorted(problems, key=lambda p: (p.line or 0, p.column or 0, p.what))

    def add_validation(
        self,
        error: ValidationError,
        section: Any,
        *,
        prefix: Path = (),
        find: Callable[[Path], Path] | None = None,
    ) -> None:
        """Add the errors that pydantic found in a value.

        ``section``: the type whose keys are the expected ones; ``prefix`` leads in it to the value. ``find``:
        where the file has the value at a path of ``section``, or the one around it; default: at that path.
        """
        find = find or self.source.nearest
        for fault in error.errors(include_url=False, include_input=False):
            # Tags of unions are in brackets, as is the end of a path whose key is at fault, not its value.
            path = (*prefix, *(key for key in fault["loc"] if str(key)[:1] != "["))
            kind = fault["type"]
            context = fault.get("ctx", {})
            place = find(path)
            if kind == "unexpected_keyword_argument":
                hint = _unknown_key(str(path[-1]), path[:-1], section)
                self.add((*place, KEY), "unknown key", hint)
            elif kind == "missing":
                hint = _MISSING.get(str(path[-1]))
                self.add(place, f"missing key '{path[-1]}'", hint)
            elif kind == "said":
                place = find((*path, *context["key"]))
                self.add(place, context["what"], context["hint"])
            elif kind == "literal_error":
                if fault["loc"][-1:] == ("[key]",):
                    place = (*place, KEY)
                words = context.get("words") or [
                    word.strip("'") for word in re.split(", | or ", context["expected"])
                ]
                self._add_word(place, path[-1], words)
            elif kind == "dataclass_type" and place == ("target",):
                self._add_target(place)
            else:
                self._add_value(place, kind, context, children(type_at(section, path)))

    def _add_word(self, place: Path, noun: Any, words: list[str]) -> None:
        """Add the fault of a value called ``noun``, or of a key, that is none of these words."""
        if place[-1] is KEY:
            value = noun
            got = f"'{noun}'"
        else:
            value = self.source.get(*place)
            got = self.source.got(place)
        message = f"expected {one_of(words)}, got {got}"
        hint = None
        if isinstance(value, str):
            hint = _close(value, words)
        elif value is None:
            hint = "write none" if "none" in words else "leave it out"
        elif isinstance(value, list):
            joined = "+".join(map(str, value))
            hint = f"write {joined}" if joined in words else None
        if noun in ("recipe", "preset"):  # too many words to list
            message = f"unknown {noun} {got}"
            listed = f"expected {one_of(words)}"
            if len(words) > 20:
                listed = "`ablate recipes` lists them"
                listed += "; or a mapping" if noun == "recipe" else ""
            hint = hint or listed
        self.add(place, message, hint)

    def _add_target(self, place: Path) -> None:
        value = self.source.get(*place)
        loss = value if isinstance(value, int | float) else 3.3
        hint = (
            f"write {{val_loss: {loss}}} for nats per token, or {{perplexity: {loss}}}"
        )
        self.add(place, "a target needs its unit", hint)

    def _add_value(
        self, place: Path, kind: str, context: dict[str, Any], keys: Collection[str]
    ) -> None:
        """Add the fault of a value; ``keys``: those of the mapping that is expected there, if it is one."""
        expected = _EXPECTED.get(kind, kind.replace("_", " ")).format_map(context)
        text = self.source.place(place).text
        hint = _mend(kind, self.source.get(*place), place, text)
        if hint is None and keys:
            pairs = [f"{key}: …" for key in keys]
            pairs[3:] = ["…"] * (len(pairs) > 3)
            hint = f"write {{{', '.join(pairs)}}}"
        self.add(place, f"expected {expected}, got {self.source.got(place)}", hint)


def _space(text: str) -> str | None:
    """Return a hint if the space between a key's colon and its value is missing."""
    key, colon, value = text.partition(":")
    is_slip = colon and key.isidentifier() and value and "\n" not in text
    if is_slip:
        return f"write '{key}: {value}', with a space"
    return None


def _meant(word: str, known: Collection[str]) -> list[str]:
    """Return the known words that others call so."""
    return [
        name
        for name, others in _ELSEWHERE.items()
        if name in known and word.lower() in others.split()
    ]


def _close(word: str, known: Collection[str]) -> str | None:
    """Return a hint: the known words that others call so, or the closest one."""
    meant = [f"'{name}'" for name in _meant(word, known)]
    if meant:
        return f"did you mean {one_of(meant)}?"
    return likely(word, known, None)


def _mend(kind: str, value: Any, place: Path, text: str) -> str | None:
    """Return a hint for a slip of notation, such as 1e6 for a whole number, or a quoted number."""
    key = str(place[-1]) if place else ""
    if value is None:
        return "leave it out"
    if kind in ("list_type", "tuple_type"):
        return _mend_list(key, value, text)
    if kind in ("dataclass_type", "dict_type"):
        return _mend_mapping(place, value, text)
    if kind == "int_type":
        if isinstance(value, float) and value.is_integer() and value < 1e15:
            return f"write {int(value)}"
        if key.endswith("tokens") and re.fullmatch(r"0?\.\d+|[\d.]+ ?%", text):
            return "a count of tokens, not a share of them"
    if kind in ("int_type", "float_type") and isinstance(value, str):
        return _mend_number(value)
    if kind == "bool_type" and isinstance(value, str):
        word = _FLAGS.get(value.lower())
        return f"write {word}" if word else None
    return None


def _mend_list(key: str, value: Any, text: str) -> str:
    if key == "command" and text:
        return f"write {json.dumps(text.split())}"
    if isinstance(value, dict):
        text = "{…}"
    gemms = _meant(text, GEMMS)
    if gemms:
        text = ", ".join(gemms)
    return f"write [{text}]" if 0 < len(text) <= 40 else "write […]"


def _mend_mapping(place: Path, value: Any, text: str) -> str | None:
    key = str(place[-1])
    if not isinstance(value, str | list) and key != "within":
        return None
    if isinstance(value, str) and (hint := _space(value)):
        return hint
    form = _FORMS["an arm"] if place[:-1] == ("arms",) else _FORMS.get(key, "")
    if key == "model" and "/" in text:
        form = _FORMS["a model on the hub"]
    if not text:
        text = "[fprop, wgrad]" if key == "recipe" else "…"
    return f"write {form.format(text)}" if form else None


def _mend_number(value: str) -> str | None:
    short = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmbg])", value, re.IGNORECASE)
    if short:
        number = float(short[1]) * _THOUSANDS[short[2].lower()]
        return f"write {round(number):_}"
    if value.replace("_", "").isdecimal():
        return "leave out the quotes"
    return None


def _unknown_key(key: str, parent: Path, section: Any) -> str | None:
    """Return a hint: the likely key, or the section that has this key."""
    from ablate.recipes import LayerRecipeSpec, RecipeSpec

    kind = bare(type_at(section, parent))
    known = children(kind)
    if kind is LayerRecipeSpec and key in children(RecipeSpec):
        return "it belongs to the whole recipe"
    if hint := _UNKNOWN.get(key) or _space(key) or _close(key, known):
        return hint
    if not parent and key in SECTIONS:
        return "it belongs in 'base'"
    for name in SECTIONS:
        keys = children(type_at(BaseSection, (name,)))
        place = name if parent else f"base.{name}"
        if key in keys:
            return f"it belongs in '{place}'"
        names = _meant(key, keys)
        if names:
            return f"it belongs in '{place}', as {names[0]}"
    if 0 < len(known) <= 10:
        return f"expected {one_of(list(known))}"
    return None


# ---- the types behind the paths -----------------------------------------------------------------------


def children(section: Any) -> dict[str, Any]:
    """Map a section's keys to their types; empty for any other type."""
    fields = getattr(bare(section), "__pydantic_fields__", {})
    return {info.alias or name: info.annotation for name, info in fields.items()}


def bare(annotation: Any) -> Any:
    """Strip ``Annotated`` and ``| None``."""
    while True:
        if get_origin(annotation) is Annotated:
            annotation = get_args(annotation)[0]
        elif get_origin(annotation) in (Union, UnionType):
            annotation = next(
                arg for arg in get_args(annotation) if arg is not type(None)
            )
        else:
            return annotation


def type_at(section: Any, path: Path) -> Any:
    """Return the type of the field at a path, None if there is no such field."""
    for key in path:
        section = bare(section)
        if get_origin(section) is list and isinstance(key, int):
            section = get_args(section)[0]
        elif get_origin(section) is dict:
            section = get_args(section)[1]
        else:
            section = children(section).get(str(key))
    return section
