"""A search → ``search.html``, ``.md``, ``.json``, its figures, ``confirm.yaml`` where it found anything."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ablate.base.files import write_bytes_atomic
from ablate.reports.figures.search import draw_front, draw_importances
from ablate.reports.findings.search import (
    front_table,
    importance_table,
    search_document,
    sentences,
    trials_table,
)
from ablate.reports.pages.beside import write_pages
from ablate.reports.words.table import Table
from ablate.search.halving import short_tokens

if TYPE_CHECKING:
    from pathlib import Path

    from ablate.reports.findings.search import Found

CONFIRM = "confirm.yaml"


def write_search(found: Found, folder: Path, confirm: str | None) -> tuple[Path, ...]:
    """Write a search's pages and figures into a folder, and the study that confirms it; returns the pages."""
    drawings = [one for one in (draw_front(found), draw_importances(found)) if one is not None]
    values = {
        "found": found,
        "sentences": sentences(found),
        "front": front_table(found),
        "importances": importance_table(found),
        "trials": [
            (f"{short_tokens(rung.tokens)} tokens", trials_table(found, rung)) for rung in found.rungs
        ],
        "dropped": Table(
            caption="Cells of the grid and arms that are no candidates.",
            columns=("Name", "Why"),
            rows=found.dropped,
        ),
        "confirm": None if confirm is None else str(folder / CONFIRM),
    }
    if confirm is None:
        (folder / CONFIRM).unlink(missing_ok=True)
    else:
        write_bytes_atomic(folder / CONFIRM, confirm.encode())
    return write_pages(folder, "search", values, document=search_document(found), drawings=drawings)
