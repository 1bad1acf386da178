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
from ablate.study.source import KEY, Path, Source, follow, show_path

if TYPE_CHECKING:
    from collections.abc import Collection

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
    "greater_than": "a number above {gt}",
    "greater_than_equal": "a number from {ge} up",
    "less_than": "a number below {lt}",
    "less_than_equal": "a number up to {le}",
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
    "model": "{{preset: {}}}",
    "recipe": "{{gemms: {}}}",
    "data": "{{source: text, paths: [{}]}}",
    "within": "{{cost: {}}}",
}
"""What to write, by key, for a word or a list where a mapping is expected."""


class Faults:
    """Collects the faults of one file, each once per place, however many arms or aliases lead there."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self._found: dict[tuple[int, int, str], Problem] = {}
        self._syntax = {(problem.line, problem.column) for problem in source.problems}
        self._parts: set[Path] = set()

    def __bool__(self) -> bool:
        return bool(self.source.problems or self._found)

    def any_within(self, *path: str) -> bool:
        """Whether a top-level part of the file, or an entry of one, has a fault."""
        return path in self._parts

    def add(self, path: Path, what: str, hint: str | None = None, *, arm: str | None = None) -> None:
        """Add a fault of the value or key at a path. ``arm``: an arm that has it, if the path names none."""
        self._parts |= {path[:1], path[:2]}
        line, column, _ = self.source.place(path)
        if (line, column) not in self._syntax:
            said = f"{show_path(path)}: {what}" if path else what
            told = "; ".join(filter(None, (hint, arm and f"in arm '{arm}'"))) or None
            problem = Problem(file=self.source.file, line=line, column=column, what=said, hint=told)
            self._found.setdefault((line, column, what), problem)

    def problems(self) -> list[Problem]:
        """Return all faults in the order of the file."""
        found = [*self.source.problems, *self._found.values()]
        return sorted(found, key=lambda p: (p.line or 0, p.column or 0, p.what))

    def add_validation(self, error: ValidationError, path: Path, *, skip: int = 0, section: Any) -> None:
        """Add pydantic's errors of the value at ``path``.

        ``skip``: how many first parts of pydantic's paths lead to the value. ``section``: the validated type,
        whose keys are the expected ones.
        """
        for fault in error.errors(include_url=False, include_input=False):
            # Tags of unions are in brackets, as is the end of a path whose key is at fault, not its value.
            full = tuple(part for part in fault["loc"] if str(part)[:1] != "[")
            wanted, kind, context = (*path, *full[skip:]), fault["type"], fault.get("ctx", {})
            value, steps = follow(self.source.data, wanted)
            at, got, name = wanted[:steps], self.source.got(wanted[:steps]), str(wanted[-1:] and wanted[-1])
            if kind == "unexpected_keyword_argument":
                self.add((*wanted, KEY), "unknown key", _unknown_key(name, full[:-1], section))
            elif kind == "missing":
                self.add(at, f"missing key '{name}'", _MISSING.get(name))
            elif kind == "said":
                _, below = follow(value, context["key"])
                self.add((*at, *context["key"][:below]), context["what"], context["hint"])
            elif at == ("target",) and kind == "dataclass_type":
                loss = value if isinstance(value, int | float) else 3.3
                hint = f"write {{val_loss: {loss}}} for nats per token, or {{perplexity: {loss}}}"
                self.add(at, "a target needs its unit", hint)
            elif kind == "literal_error":
                words = context.get("words") or [
                    w.strip("'") for w in re.split(", | or ", context["expected"])
                ]
                if fault["loc"][-1:] == ("[key]",):
                    at, value, got = (*at, KEY), name, f"'{name}'"
                what = f"expected {one_of(words)}, got {got}"
                close = _close(value, words) if isinstance(value, str) else None
                if isinstance(value, list) and (joined := "+".join(map(str, value))) in words:
                    close = f"write {joined}"
                noun = full[-1]
                if noun in ("recipe", "preset"):  # too many words to list
                    what, listed = f"unknown {noun} {got}", f"expected {one_of(words)}"
                    if len(words) > 20:
                        listed = f"`ablate recipes` lists them{'; or a mapping' * (noun == 'recipe')}"
                    close = close or listed
                self.add(at, what, close)
            else:
                limits = {k: f"{v:.15g}" if isinstance(v, float) else v for k, v in context.items()}
                what = f"expected {_EXPECTED.get(kind, kind.replace('_', ' ')).format_map(limits)}, got {got}"
                self.add(at, what, _mend(kind, value, at, self.source.place(at).text))


def _space(text: str) -> str | None:
    """Return a hint if the space between a key's colon and its value is missing."""
    key, colon, value = text.partition(":")
    is_slip = colon and key.isidentifier() and value and "\n" not in text
    return f"write '{key}: {value}', with a space" if is_slip else None


def _meant(word: str, known: Collection[str]) -> list[str]:
    return [ours for ours, others in _ELSEWHERE.items() if ours in known and word.lower() in others.split()]


def _close(word: str, known: Collection[str]) -> str | None:
    """Return a hint: the known words that others call so, or the closest one."""
    meant = [f"'{one}'" for one in _meant(word, known)]
    return f"did you mean {one_of(meant)}?" if meant else likely(word, known, None)


def _mend(kind: str, value: Any, at: Path, text: str) -> str | None:
    """Return a hint for a slip of notation, such as 1e6 for a whole number, or a quoted number."""
    if kind == "int_type" and isinstance(value, float) and value.is_integer() and value < 1e15:
        return f"write {int(value)}"
    if kind == "int_type" and str(at[-1]).endswith("tokens") and re.fullmatch(r"0?\.\d+|[\d.]+ ?%", text):
        return "a count of tokens, not a share of them"
    if kind in ("list_type", "tuple_type"):
        if at[-1] == "command" and text:
            return f"write {json.dumps(text.split())}"
        text = ", ".join(_meant(text, GEMMS)) or text or "{…}" * isinstance(value, dict)
        return f"write [{text}]" if text and len(text) <= 40 else "write […]"
    if kind in ("dataclass_type", "dict_type") and isinstance(value, str | list):
        form = _FORMS.get(str(at[-1]), "{{recipe: {}}}" if at[:-1] == ("arms",) else "")
        form = form.replace("preset", "hf" if "/" in text else "preset")
        usual = "[fprop, wgrad]" if at[-1] == "recipe" else "…"
        return (isinstance(value, str) and _space(value)) or (form and f"write {form.format(text or usual)}")
    if not isinstance(value, str):
        return None
    if kind in ("int_type", "float_type"):
        if short := re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmbg])", value, re.IGNORECASE):
            thousands = {"k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9}
            return f"write {round(float(short[1]) * thousands[short[2].lower()]):_}"
        return "leave out the quotes" if value.replace("_", "").isdecimal() else None
    if kind == "bool_type":
        word = {"yes": "true", "on": "true", "no": "false", "off": "false"}.get(value.lower())
        return f"write {word}" if word else None
    return None


def _unknown_key(key: str, parent: Path, section: Any) -> str | None:
    """Return a hint: the likely key, or the section that has this key."""
    from ablate.recipes import LayerRecipeSpec, RecipeSpec

    kind = bare(type_at(section, parent))
    here = children(kind)
    if kind is LayerRecipeSpec and key in children(RecipeSpec):
        return "it belongs to the whole recipe"
    if hint := _space(key) or _close(key, here):
        return hint
    if not parent and key in SECTIONS:
        return "it belongs in 'base'"
    for name in SECTIONS:
        there = children(type_at(BaseSection, (name,)))
        for ours in [key] if key in there else _meant(key, there):
            where = name if parent else f"base.{name}"
            return f"it belongs in '{where}'" + (f", as {ours}" if ours != key else "")
    return f"expected {one_of(list(here))}" if 0 < len(here) <= 10 else None


# ---- the types behind the paths -----------------------------------------------------------------------


def children(section: Any) -> dict[str, Any]:
    """Map a section's keys to their types; empty for any other type."""
    found = getattr(bare(section), "__pydantic_fields__", {})
    return {info.alias or name: info.annotation for name, info in found.items()}


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
        if get_origin(section) is list and isinstance(part, int):
            section = get_args(section)[0]
        elif get_origin(section) is dict:
            section = get_args(section)[1]
        else:
            section = children(section).get(str(part))
    return section
