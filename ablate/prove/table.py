"""The column "run on the device" of docs/native.md, from the records in docs/devices/.

    python -m ablate.prove.table docs   # writes the column, and the page of each record, anew

How it fails: a record that cannot be read, or of an architecture that has no row, is a ``ValueError``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ablate.base.files import write_bytes_atomic
from ablate.prove.page import in_words, page
from ablate.prove.record import ProofRecord, read_proof

if TYPE_CHECKING:
    from collections.abc import Mapping

_COLUMN = "run on the device"
_NOBODY = "**nobody yet**"


def with_records(text: str, records: Mapping[str, ProofRecord]) -> str:
    """Return the text of docs/native.md with the column as these records have it, by their files' names."""
    cells: dict[str, list[str]] = {}
    for name, record in records.items():
        cell = f"[{record.machine.name}](devices/{name}.md): {in_words(record)}"
        cells.setdefault(record.machine.device.arch, []).append(cell)
    lines, within = text.splitlines(), False
    for number, line in enumerate(lines):
        row = line.strip("| ").split(" | ")
        if row[-1] == _COLUMN:
            within = True
        elif within and not line.startswith("|"):
            within = False
        elif within and not line.startswith("|-"):
            found = cells.pop(row[0].strip("`").lower(), [_NOBODY])
            lines[number] = f"| {' | '.join([*row[:-1], '; '.join(found)])} |"
    if cells:
        raise ValueError(f"the table has no row for {', '.join(cells)}")
    return "\n".join(lines) + "\n"


def read_records(folder: Path) -> dict[str, ProofRecord]:
    """Read every record of a folder, by the name of its file without the ending."""
    return {path.stem: read_proof(path) for path in sorted(folder.glob("*.json"))}


def main(docs: Path) -> None:
    """Write the column and the pages."""
    records, native = read_records(docs / "devices"), docs / "native.md"
    for name, record in records.items():
        write_bytes_atomic(docs / "devices" / f"{name}.md", page(record).encode())
    write_bytes_atomic(native, with_records(native.read_text(encoding="utf-8"), records).encode())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
