"""A comparison of two studies → ``compare.html``, ``.md``, ``.json`` and its figure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ablate.reports.figures.compare import draw_comparison
from ablate.reports.findings.compare import compare_document, compare_table
from ablate.reports.pages.beside import write_pages
from ablate.reports.words.table import Table

if TYPE_CHECKING:
    from pathlib import Path

    from ablate.reports.findings.compare import Comparison


def write_comparison(comparison: Comparison, folder: Path) -> tuple[Path, ...]:
    """Write a comparison's pages and figure into a folder; returns the pages."""
    drawing = draw_comparison(comparison)
    values = {
        "comparison": comparison,
        "table_of_arms": compare_table(comparison),
        "differences": Table(
            caption="What the two studies differ in, as their files say it.",
            columns=("Key", comparison.left, comparison.right),
            rows=tuple((key, *pair) for key, pair in comparison.differs.items()),
        ),
        "drawing": drawing,
    }
    return write_pages(
        folder,
        "compare",
        values,
        document=compare_document(comparison),
        drawings=() if drawing is None else (drawing,),
    )
