"""Rows of a training log: what a trainer prints, as places, losses and speeds.

A log is read in the format of a known trainer (``ablate.run.log_formats``), by regular expressions with named
groups, or by the keys of JSON: of lines, of a whole file, and of TensorBoard's events.

How it fails: a line that fits nothing is no row. A pattern that cannot work is a ``ValueError`` of one line.
"""

from __future__ import annotations

import csv
import io
import math
import re
from typing import TYPE_CHECKING, Any, Literal

from ablate.base.config_base import Section, key, said, section
from ablate.base.files import parse_json
from ablate.run.log_formats import FORMATS, PLACES, ROW, Format
from ablate.run.loss_units import LoggedUnit  # noqa: TC001  pydantic reads it

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ablate.run.log_formats import Form

TIMES = {"ms": 1e3, "seconds": 1.0}
"""Times since training began, and how many of their units a second has."""
BLANKS = frozenset(
    (
        "",
        "-",
        "--",
        "—",
        ".",
        "?",
        "none",
        "null",
        "nil",
        "na",
        "n/a",
        "<na>",
        "#n/a",
        r"\n",
    )
)
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


@section
class LogSource(Section):
    """Where the rows of a command come from; one of the four ways."""

    preset: PresetName | None = key(None, "the log of a known trainer")
    patterns: list[str] = key(
        list,
        "regular expressions whose groups name what they find, such as (?P<step>…) and (?P<val_loss>…)",
    )
    jsonl: dict[str, str] = key(
        dict, "lines of JSON: {our name: their key}, such as {val_loss: eval/loss}"
    )
    tensorboard: dict[str, str] = key(
        dict, "event files: {our name: their tag}; file: their folder"
    )
    file: str | None = key(
        None,
        "the file to read, as a path or glob that may hold {run_dir}; default: what the command prints",
    )
    set: str | None = key(
        None, "which evaluation set counts, where the log has several"
    )
    unit: LoggedUnit | None = key(
        None, "the unit of its losses; default: the trainer's, else nats"
    )
    evaluations: Evaluations | None = key(
        None,
        "which rows with a validation loss are evaluations: rows (each) or changes (the trainer repeats the "
        "last one); default: told by their distances",
    )

    @property
    def format(self) -> Format:
        """How the log is read: as the trainer writes it, or as the section says."""
        if self.preset is not None:
            return FORMATS[self.preset]
        keys = {
            name: (their_name,)
            for name, their_name in (self.jsonl or self.tensorboard).items()
        }
        if self.tensorboard:
            return Format(form="events", keys={"step": ("step",), **keys})
        return Format(
            form="json lines" if keys else "lines",
            patterns=tuple(self.patterns),
            keys=keys,
        )

    @property
    def loss_unit(self) -> LoggedUnit:
        """The unit of its validation losses."""
        return self.unit or self.format.unit

    @property
    def place(self) -> str | None:
        """The file or folder to read, None for what the command prints."""
        if self.preset == "ablate":
            return "{run_dir}/rows.jsonl"
        return self.file

    def __post_init__(self) -> None:
        ways = [
            name
            for name in ("preset", "patterns", "jsonl", "tensorboard")
            if getattr(self, name)
        ]
        if len(ways) != 1:
            got = " and ".join(ways) or "none"
            raise said(
                f"expected one of preset, patterns, jsonl and tensorboard, got {got}",
                None,
            )
        (way,) = ways
        log_format = self.format
        if log_format.form in ("json", "csv", "events") and self.file is None:
            place = "tb" if log_format.form == "events" else f"**/{log_format.files[0]}"
            raise said(
                "the rows are in a file", f"name it: file: '{{run_dir}}/{place}'", way
            )
        names: dict[str, tuple[str | int, ...]] = {
            name: (way, name) for name in log_format.keys
        }
        for index, pattern in enumerate(self.patterns):
            names |= dict.fromkeys(
                compiled(pattern, way, index).groupindex, (way, index)
            )
        for name, place_of_name in names.items():
            if name not in ROW:
                raise said(
                    f"'{name}' is no part of a row",
                    f"expected {', '.join(ROW)}",
                    *place_of_name,
                )
        if self.preset is None and "val_loss" not in names:
            raise said("nothing reads val_loss", "a validation loss", way)

    @property
    def has_place(self) -> bool:
        """Whether something reads where in the training a row is."""
        names = {*self.format.keys}
        for pattern in self.format.patterns:
            names |= {*re.compile(pattern).groupindex}
        return not names.isdisjoint(PLACES)


def compiled(pattern: str, *place: str | int) -> re.Pattern[str]:
    """Compile a regular expression of a study; an error is at the key ``place``."""
    try:
        return re.compile(pattern)
    except re.error as error:
        raise said(f"no regular expression: {error}", None, *place) from None


class LogReader:
    """Turns lines of a log into rows, in the order in which they stand: numbers by name, and texts.

    A place keeps its value until another is found, because some trainers print it on a line of its own; so
    do times, seed and run. A row without a loss tells the count at a step. ``not_read`` is a validation loss
    that is no number.
    """

    def __init__(self, source: LogSource) -> None:
        self._format = source.format
        self._patterns = [
            re.compile(pattern, re.MULTILINE) for pattern in self._format.patterns
        ]
        self._set = source.set
        self._has_place = source.has_place
        self._place: dict[str, float] = {}
        self._held: dict[str, Any] = {}
        self.sets: dict[str, None] = {}
        """Names of the evaluation sets that the log has, in their order."""

    def may_hold_rows(self, lines: str) -> bool:
        """Tell quickly whether a text of many lines may hold a row."""
        if self._format.keys:
            return "{" in lines
        return any(pattern.search(lines) for pattern in self._patterns)

    def rows(self, text: str) -> Iterator[dict[str, Any]]:
        """Yield the rows of one line, or of a whole file in the forms that are read as one."""
        if self._format.keys:
            for entry in _entries(text, self._format.form):
                yield from self.rows_of(entry)
            return
        values: dict[str, Any] = {}
        for pattern in self._patterns:
            if match := pattern.search(text):
                values |= {
                    name: value
                    for name, value in match.groupdict().items()
                    if value is not None
                }
        if values and (row := self._row(values)):
            yield row

    def rows_of(self, entry: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the rows of one object of JSON, or of one line of a table; one for each evaluation set."""
        if self._format.only is not None:
            self._place = {}  # such an entry tells its own
            name, value = self._format.only
            if entry.get(name) != value:
                return
        values = {name: _first(entry, keys) for name, keys in self._format.keys.items()}
        variants = [values]
        if values["val_loss"] is None:
            for key_of_sets in self._format.keys["val_loss"]:
                if "*" not in key_of_sets:
                    continue
                pattern = re.compile(re.escape(key_of_sets).replace(r"\*", "(.+)"))
                for name, value in entry.items():
                    if match := pattern.fullmatch(name):
                        variants.append(
                            {**values, "val_loss": value, "set": match[1], "loss": None}
                        )
        for variant in variants:
            if row := self._row(variant):
                yield row

    def _row(self, values: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the row that values make; None if they tell neither a loss nor a count."""
        row: dict[str, Any] = {}
        for name, value in values.items():
            if name in ("run", "seed"):
                # the first seed counts
                if value is not None and not (name == "seed" and "seed" in self._held):
                    self._held[name] = value
            elif name == "set":
                if value:
                    row["set"] = value
            elif (read := number(value)) is not None:
                if name in TIMES:
                    self._held[name] = read
                else:
                    row[name] = read
            elif name == "val_loss" and not is_blank(value):
                row["not_read"] = value
        has_count = self._find_place(row)
        if "val_loss" in row:
            if "set" in row:
                self.sets[row["set"]] = None
            if self._set is not None and not is_set(row.get("set"), self._set):
                del row["val_loss"]
        has_value = (
            "val_loss" in row
            or "loss" in row
            or "not_read" in row
            or is_nan(row.get("grad_norm"))
        )
        if (self._place or not self._has_place) and (has_value or has_count):
            return {**self._held, **self._place, **row}
        return None

    def _find_place(self, row: dict[str, Any]) -> bool:
        """Move the places of a row to those that hold; tell whether one is a count of tokens or samples."""
        places: dict[str, float] = {}
        for name in PLACES:
            place = row.pop(name, None)
            if place is not None and 0 <= place < LARGEST:
                places[name] = int(place) if place.is_integer() else place
        if "step" in places and places["step"] != self._place.get("step"):
            self._place = {}
        self._place |= places
        return "tokens" in places or "samples" in places


def is_set(name: str | None, wanted: str) -> bool:
    """Tell whether an evaluation set is the wanted one, by its name or the last part of it."""
    return name is not None and wanted in (name, re.split(r"[-_/ ]", name)[-1])


def _entries(text: str, form: Form) -> Sequence[Mapping[str, Any]]:
    """Return the objects of a line or a file; none if it is not of this form."""
    if form == "csv":
        return [
            row
            for row in csv.DictReader(io.StringIO(text))
            if None not in {*row, *row.values()}
        ]
    try:
        content = parse_json(text[text.index("{") :])
    except ValueError:
        return ()
    entries = content.get("log_history") or [content]
    if isinstance(entries, list):
        return [entry for entry in entries if isinstance(entry, dict)]
    return ()


def _first(entry: Mapping[str, Any], keys: Sequence[str]) -> Any:
    """Return the value of the first key, or path of keys with dots, that an entry has; else None."""
    for key_or_path in keys:
        value: Any = entry
        for part in [key_or_path] if key_or_path in entry else key_or_path.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        if value is not None:
            return value
    return None


def number(value: Any) -> float | None:
    """Read a number, also with separators of thousands (1,234.5); None if it is none."""
    if isinstance(value, str):
        value = value.strip("'\" ,;")
        if "," in value or "_" in value:
            if not _GROUPED.fullmatch(value):
                return None
            value = value.replace(",", "").replace("_", "")
    elif isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


def is_nan(value: Any) -> bool:
    """Tell whether a value is the number NaN."""
    return isinstance(value, float) and math.isnan(value)


def is_blank(value: Any) -> bool:
    """Tell whether a value says that there is none."""
    return value is None or (isinstance(value, str) and value.strip().lower() in BLANKS)
