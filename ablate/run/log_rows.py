"""Rows of a training log: what a trainer prints, as places, losses and speeds.

A log is read in the format of a known trainer (``ablate.run.log_formats``), by regular expressions with named
groups, or by the keys of JSON: of lines, of a whole file, and of TensorBoard's events.

How it fails: a line that fits nothing is no row. A pattern that cannot work is a ``ValueError`` of one line.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
from typing import TYPE_CHECKING, Any, Literal

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from ablate.base.config_base import Section, key, said
from ablate.base.files import parse_json
from ablate.run.log_formats import FORMATS
from ablate.run.loss_units import LoggedUnit  # noqa: TC001  pydantic reads it

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ablate.run.log_formats import Form

COUNTS = ("tokens", "samples")
"""How far training is, by a count that holds with batches of any size; ``samples`` are sequences."""
PLACES = ("step", *COUNTS)
"""Where in the training a row is."""
VALUES = ("val_loss", "loss", "grad_norm", "lr", "step_ms", "tokens_per_sec", "tokens_per_sec_per_device")
"""What a row may tell; ``step_ms``: milliseconds for an optimizer step."""
_HELD = ("seconds", "ms", "seed", "run")
"""What holds for later rows, too: time since training began, and which run it is."""
ROW = (*PLACES, *VALUES, *_HELD, "set")
"""``set``: the name of the evaluation set."""
BLANKS = frozenset(("", "-", "--", "—", ".", "?", "none", "null", "nil", "na", "n/a", "<na>", "#n/a", r"\n"))
"""What stands, in small letters, where there is no value. NaN may be one, or a loss."""
_GROUPED = re.compile(r"[-+]?\d{1,3}(?:([,_])\d{3})(?:\1\d{3})*(?:\.\d*)?")
LARGEST = 1 << 62
"""Places and tokens are below it."""

Evaluations = Literal["rows", "changes"]
"""Which rows with a validation loss are evaluations: all, or those that show another one than before."""

if TYPE_CHECKING:
    PresetName = str
else:  # from the registry itself, so that the schema and the hints always agree
    PresetName = Literal[*FORMATS]


@dataclass(frozen=True, kw_only=True, eq=False, config=ConfigDict(extra="forbid"))
class LogSource(Section):
    """Where the rows of a command come from; one of the four ways."""

    preset: PresetName | None = key(None, "the log of a known trainer")
    patterns: list[str] = key(
        list,
        "regular expressions whose groups name what they find, such as (?P<step>…) and (?P<val_loss>…)",
    )
    jsonl: dict[str, str] = key(dict, "lines of JSON: {our name: their key}, such as {val_loss: eval/loss}")
    tensorboard: dict[str, str] = key(dict, "event files: {our name: their tag}; file: their folder")
    file: str | None = key(
        None, "the file to read, as a path or glob that may hold {run_dir}; default: what the command prints"
    )
    set: str | None = key(None, "which evaluation set counts, where the log has several")
    unit: LoggedUnit | None = key(None, "the unit of its losses; default: the trainer's, else nats")
    evaluations: Evaluations | None = key(
        None,
        "which rows with a validation loss are evaluations: rows (each) or changes (the trainer repeats the "
        "last one); default: told by their distances",
    )

    @property
    def form(self) -> Form:
        """How the file holds its rows."""
        if self.preset is not None:
            return FORMATS[self.preset].form
        if self.tensorboard:
            return "events"
        return "json lines" if self.jsonl else "lines"

    @property
    def keys(self) -> Mapping[str, Sequence[str]]:
        """Our names, and the keys that may hold them."""
        if self.preset == "ablate":
            return {name: (name,) for name in ROW}
        if self.preset is not None:
            return FORMATS[self.preset].keys
        keys = {name: (theirs,) for name, theirs in (self.jsonl or self.tensorboard).items()}
        return {"step": ("step",), **keys} if self.tensorboard else keys

    @property
    def identity(self) -> str:
        """What a run's id holds of it: how a log is read, as JSON."""
        fields = {
            name: getattr(self, name) for name in ("preset", "patterns", "jsonl", "tensorboard", "file")
        }
        chosen = {name: getattr(self, name) for name in ("set", "unit", "evaluations")}
        fields |= {name: value for name, value in chosen.items() if value is not None}
        return json.dumps(fields, sort_keys=True, separators=(",", ":"))

    @property
    def loss_unit(self) -> LoggedUnit:
        """The unit of its validation losses."""
        return self.unit or (FORMATS[self.preset].unit if self.preset else "nats")

    @property
    def place(self) -> str | None:
        """The file or folder to read, None for what the command prints."""
        return "{run_dir}/rows.jsonl" if self.preset == "ablate" else self.file

    def __post_init__(self) -> None:
        ways = [name for name in ("preset", "patterns", "jsonl", "tensorboard") if getattr(self, name)]
        if len(ways) != 1:
            got = " and ".join(ways) or "none"
            raise said(f"expected one of preset, patterns, jsonl and tensorboard, got {got}", None)
        if self.form in ("json", "csv", "events") and self.file is None:
            place = "tb" if self.form == "events" else f"**/{FORMATS[str(self.preset)].files[0]}"
            raise said("the rows are in a file", f"name it: file: '{{run_dir}}/{place}'", ways[0])
        if self.preset is None:
            self._check_names(ways[0])

    def _check_names(self, way: str) -> None:
        names: dict[str, tuple[str | int, ...]] = {}
        for name in self.jsonl or self.tensorboard:
            names[name] = (way, name)
        for index, pattern in enumerate(self.patterns):
            names |= dict.fromkeys(compiled(pattern, way, index).groupindex, (way, index))
        for name, place in names.items():
            if name not in ROW:
                raise said(f"'{name}' is no part of a row", f"expected {', '.join(ROW)}", *place)
        if "val_loss" not in names:
            raise said("nothing reads val_loss", "a validation loss", way)

    @property
    def has_place(self) -> bool:
        """Whether something reads where in the training a row is."""
        names = {*self.keys}.union(*(re.compile(pattern).groupindex for pattern in self.patterns))
        return self.preset is not None or not names.isdisjoint(PLACES)


def compiled(pattern: str, *place: str | int) -> re.Pattern[str]:
    """Compile a regular expression of a study; an error is at the key ``place``."""
    try:
        return re.compile(pattern)
    except re.error as error:
        raise said(f"no regular expression: {error}", None, *place) from None


class LogReader:
    """Turns lines of a log into rows, in the order in which they stand: numbers by name, and texts.

    A place keeps its value until another is found, because some trainers print it on a line of its own; so
    does what holds (time, seed, run). A row without a loss tells the count at a step. ``not_read`` is a
    validation loss that is no number.
    """

    def __init__(self, source: LogSource) -> None:
        patterns = FORMATS[source.preset].patterns if source.preset else source.patterns
        self._patterns = [re.compile(pattern, re.MULTILINE) for pattern in patterns]
        self._keys = source.keys
        self._form = source.form
        self._only = FORMATS[source.preset].only if source.preset else None
        self._set = source.set
        self._has_place = source.has_place
        self._place: dict[str, float] = {}
        self._held: dict[str, Any] = {}
        self.sets: dict[str, None] = {}
        """Names of the evaluation sets that the log has, in their order."""

    def may_hold_rows(self, lines: str) -> bool:
        """Tell quickly whether a text of many lines may hold a row."""
        return any(pattern.search(lines) for pattern in self._patterns) or (bool(self._keys) and "{" in lines)

    def rows(self, text: str) -> Iterator[dict[str, Any]]:
        """Yield the rows of one line, or of a whole file in the forms that are read as one."""
        values: dict[str, Any] = {}
        for pattern in self._patterns:
            if match := pattern.search(text):
                values |= {name: value for name, value in match.groupdict().items() if value is not None}
        if values:
            yield from self._row(values)
        if self._keys:
            for entry in _entries(text, self._form):
                yield from self.rows_of(entry)

    def rows_of(self, entry: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the rows of one object of JSON, or of one line of a table."""
        if self._only is not None:
            self._place = {}  # such an entry tells its own
        if self._only is None or entry.get(self._only[0]) == self._only[1]:
            for values in self._values(entry):
                yield from self._row(values)

    def _values(self, entry: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield what an entry holds by our names; more than once if it has several evaluation sets."""
        values: dict[str, Any] = {}
        for name, theirs in self._keys.items():
            values[name] = next((value for one in theirs if (value := deep(entry, one)) is not None), None)
        yield values
        for name in self._keys.get("val_loss", ()):
            if "*" in name and values["val_loss"] is None:
                form = re.compile(re.escape(name).replace(r"\*", "(.+)"))
                for theirs, value in entry.items():
                    if match := form.fullmatch(theirs):
                        yield {**values, "val_loss": value, "set": match[1], "loss": None}

    def _row(self, values: dict[str, Any]) -> Iterator[dict[str, Any]]:
        row: dict[str, Any] = {}
        for name, value in values.items():
            if name in _HELD:
                self._hold(name, value)
            elif name == "set":
                row |= {name: value} if value else {}
            elif (read := number(value)) is not None:
                row[name] = read
            elif name == "val_loss" and not is_blank(value):
                row["not_read"] = value
        has_count = self._find_place(row)
        self._keep_wanted_set(row)
        has_value = not {"val_loss", "loss", "not_read"}.isdisjoint(row) or is_nan(row.get("grad_norm"))
        if (self._place or not self._has_place) and (has_value or has_count):
            yield {**self._held, **self._place, **row}

    def _find_place(self, row: dict[str, Any]) -> bool:
        """Move the places of a row to those that hold; tell whether one is a count."""
        places = {name: row.pop(name) for name in PLACES if name in row}
        places = {
            name: int(value) if value.is_integer() else value
            for name, value in places.items()
            if 0 <= value < LARGEST
        }
        if "step" in places and places["step"] != self._place.get("step"):
            self._place = {}
        self._place |= places
        return not places.keys().isdisjoint(COUNTS)

    def _keep_wanted_set(self, row: dict[str, Any]) -> None:
        if "val_loss" not in row:
            return
        name = row.get("set")
        if name is not None:
            self.sets[name] = None
        if self._set is not None and not is_set(name, self._set):
            del row["val_loss"]

    def _hold(self, name: str, value: Any) -> None:
        """Keep what holds for later rows; the first seed counts."""
        if value is not None and not (name == "seed" and "seed" in self._held):
            self._held[name] = value


def is_set(name: str | None, wanted: str) -> bool:
    """Tell whether an evaluation set is the wanted one, by its name or the last part of it."""
    return name is not None and wanted in (name, re.split(r"[-_/ ]", name)[-1])


def _entries(text: str, form: Form) -> Sequence[Mapping[str, Any]]:
    """Return the objects of a line or a file; none if it is not of this form."""
    if form == "csv":
        return [row for row in csv.DictReader(io.StringIO(text)) if None not in {*row, *row.values()}]
    try:
        content = parse_json(text[text.index("{") :])
    except ValueError:
        return ()
    entries = deep(content, "log_history") or [content]
    return [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else ()


def deep(content: Any, name: str) -> Any:
    """Find a key, or a path of keys with dots; None if there is no such key."""
    if isinstance(content, dict) and name in content:
        return content[name]
    value = content
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def number(value: Any) -> float | None:
    """Read a number, also with separators of thousands (1,234.5); None if it is none."""
    if type(value) is str and "_" not in value:
        try:
            return float(value)
        except ValueError:
            pass  # it may still be one, as others write it
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    text = value.strip("'\" ,;") if isinstance(value, str) else value
    if isinstance(text, str) and ("," in text or "_" in text):
        if not _GROUPED.fullmatch(text):
            return None
        text = text.replace(",", "").replace("_", "")
    try:
        return float(text)
    except (ValueError, OverflowError):
        return None


def is_nan(value: Any) -> bool:
    """Tell whether a value is the number NaN."""
    return isinstance(value, float) and math.isnan(value)


def is_blank(value: Any) -> bool:
    """Tell whether a value says that there is none."""
    return value is None or (isinstance(value, str) and value.strip().lower() in BLANKS)
