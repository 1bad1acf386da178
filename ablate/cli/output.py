"""What several verbs print and write: JSON, and plain tables that are fast for thousands of rows."""

from __future__ import annotations

import json
import shutil
import textwrap
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from ablate.base.errors import UserError, safe_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from ablate.reports import ReportPaths
    from ablate.reports.words.table import Table

_GAP = "  "
_NARROWEST = 8


def terminal_width(otherwise: int = 100) -> int:
    """Return the terminal's columns, or ``otherwise`` without a terminal."""
    return shutil.get_terminal_size((otherwise, 24)).columns


def echo_json(content: Any, **options: Any) -> None:
    """Print one JSON object; ``options`` are those of ``json.dumps``."""
    click.echo(json.dumps(content, indent=1, **options))


def deliver(content: dict[str, Any], out: Path | None, *, as_json: bool) -> bool:
    """Write a measurement to the file of ``--out``; print it and return True for ``--json``."""
    if out is not None:
        with writing_to(out):
            out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    if as_json:
        echo_json(content)
    return as_json


@contextmanager
def writing_to(out: Path) -> Iterator[None]:
    """Turn errors of writing to ``--out`` into a ``UserError``."""
    try:
        yield
    except OSError as error:
        raise UserError(f"--out: cannot write {out}: {error.strerror}") from None


def figure(value: float | None, form: str) -> str:
    """Return a number in a format such as ``.2%``; a dash without one."""
    return "–" if value is None else f"{value:{form}}"


def names_text(names: Sequence[str]) -> str:
    """Return the first three names, and the number of the others."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def table_text(table: Table) -> str:
    """Return a table of the report as text for the terminal."""
    return safe_text(format_table(table.columns, table.rows, width=terminal_width()), keep="\n")


def verdict_lines(written: ReportPaths) -> Iterator[str]:
    """Yield a report's notices and verdict; a matrix stands in the place of the sentences of its arms."""
    verdict = written.verdict
    yield from written.notices
    yield from filter(None, (verdict.lead, verdict.more, verdict.count))
    for table, _ in written.matrices:
        yield f"\n{table_text(table)}\n"
    shown = {arm for _, arms in written.matrices for arm in arms}
    yield from (finding.text for finding in verdict.findings if finding.arm not in shown)
    yield from verdict.notes


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, width: int) -> str:
    """Return a table as text. Columns are as wide as their content; beyond ``width`` the widest wrap."""
    widths = [
        max(_cells(line) for row in (header, *rows) for line in row[i].split("\n"))
        for i in range(len(header))
    ]
    room = width - len(_GAP) * (len(header) - 1)
    while sum(widths) > room and max(widths) > _NARROWEST:
        widest = widths.index(max(widths))
        second = max([_NARROWEST, *widths[:widest], *widths[widest + 1 :]])
        excess = sum(widths) - room
        widths[widest] = max(min(second, widths[widest] - 1), widths[widest] - excess)
    lines = []
    for row in (header, *rows):
        wrapped = [
            [
                part
                for line in cell.split("\n")
                for part in ([line] if _cells(line) <= size else textwrap.wrap(line, size))
            ]
            for cell, size in zip(row, widths, strict=True)
        ]
        for i in range(max(map(len, wrapped))):
            parts = [cell[i] if i < len(cell) else "" for cell in wrapped]
            padded = [part + " " * (size - _cells(part)) for part, size in zip(parts, widths, strict=True)]
            lines.append(_GAP.join(padded).rstrip())
    return "\n".join(lines)


def _cells(text: str) -> int:
    """Return how many places a text takes on the screen; East Asian characters take two."""
    if text.isascii():
        return len(text)
    import unicodedata

    return len(text) + sum(unicodedata.east_asian_width(char) in "WF" for char in text)
