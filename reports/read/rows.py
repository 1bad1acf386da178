"""The rows of files, as values by column: CSV, JSON lines, and the charts that W&B exports.

How it fails: every reader adds a line to ``faults`` for a row that it cannot use, and reads the rest; a file
that cannot be opened is an ``OSError``.
"""

from __future__ import annotations

import csv
import itertools
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ablate.base.errors import UserError, safe_text
from ablate.base.files import parse_json
from ablate.run.log_rows import number
from ablate.run.log_text import open_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

_COMPUTED = ("=", "+", "-", "@", "\t", "\r")
"""A text that begins with one of these is a formula in a spreadsheet."""
_BOUNDS = ("__MIN", "__MAX")
"""What W&B adds to the name of a column that holds the least or largest of several points."""

Row = tuple[int, Mapping[str, Any]]
"""A line's number, and its values by column."""


def inert(value: Any) -> Any:
    """Put a ' before a text that a spreadsheet would take for a formula; ``read_csv`` removes it.

    Characters that do not print become visible. Values that are not text are returned unchanged.
    """
    if not isinstance(value, str):
        return value
    text = safe_text(value, keep="\n\r\t")
    if text.lstrip("'").startswith(_COMPUTED):
        return f"'{text}"
    return text


def _as_written(cell: str) -> str:
    if cell.startswith("'") and cell.lstrip("'").startswith(_COMPUTED):
        return cell[1:]
    return cell


def _is_text(cell: str) -> bool:
    """Tell whether a text was UTF-8: other bytes are read as lone surrogates (``surrogateescape``)."""
    return cell.isascii() or not any("\udc80" <= letter <= "\udcff" for letter in cell)


def read_csv(path: Path, faults: list[str]) -> Iterator[Row]:
    """Yield a CSV's rows, as texts, with their line numbers."""
    with open_text(path, newline="") as file:
        reader = csv.DictReader(file)
        try:
            for row in reader:
                place = f"{path}:{reader.line_num}"
                if None in row or None in row.values():
                    num_fields = len(reader.fieldnames or ())
                    faults.append(f"{place}: expected {num_fields} fields")
                elif not all(map(_is_text, row.values())):
                    faults.append(f"{place}: not UTF-8")
                else:
                    cells = {name: _as_written(cell) for name, cell in row.items()}
                    yield reader.line_num, cells
        except csv.Error as error:
            faults.append(f"{path}:{reader.line_num}: {error}")


def read_jsonl(path: Path, faults: list[str]) -> Iterator[Row]:
    """Yield the objects of a file of JSON lines, or of one JSON array, with their line or place from 1."""
    with open_text(path) as file:
        first = next(file, "")
        lines: Iterable[str] = itertools.chain([first], file)
        if first.lstrip().startswith("["):
            text = first + file.read()
            try:
                lines = [json.dumps(entry) for entry in parse_json(text)]
            except ValueError:
                lines = text.splitlines()
        for line_number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            fault = "not a JSON object"
            try:
                row = parse_json(line)
            except ValueError as error:
                row = None
                fault = f"not JSON: {error}" if _is_text(line) else "not UTF-8"
            if isinstance(row, dict):
                yield line_number, row
            else:
                faults.append(f"{path}:{line_number}: {fault}")


def read_wandb_chart(
    path: Path, faults: list[str], metric: str | None = None
) -> Iterator[Row]:
    """Yield the rows of a chart's CSV export as (tokens, val_loss, run).

    Its columns are the step, then for each run ``RUN - METRIC``, ``RUN - METRIC__MIN`` and ``…__MAX``.

    Raises:
        UserError: its values are means of several points, so that they are no evaluations of a run.
    """
    runs: dict[str, str] = {}  # by the column of their values
    for line_number, row in read_csv(path, faults):
        step, *columns = row
        if not runs:
            metrics = set()
            for column in columns:
                run, _, metric_of_run = column.rpartition(" - ")
                if (
                    run
                    and not column.endswith(_BOUNDS)
                    and metric in (None, metric_of_run)
                ):
                    runs[column] = run
                    metrics.add(metric_of_run)
            if len(metrics) != 1:
                listed = safe_text(", ".join(sorted(metrics))) or "none"
                faults.append(
                    f"{path}:1: expected columns 'RUN - METRIC' of one metric, found: {listed} (--metric)"
                )
                return
        for column, run in runs.items():
            low, high = (number(row.get(column + bound)) for bound in _BOUNDS)
            if low is not None and high is not None and low < high:
                raise UserError(
                    f"{path}:{line_number}: '{run}' is a mean of values from {low:g} to {high:g}, so its "
                    "seeds are gone (export the chart without grouping, and without sampling)"
                )
            yield (
                line_number,
                {"tokens": row[step], "val_loss": row[column], "run": run},
            )
