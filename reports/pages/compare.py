"""Studies compared, or a search → ``NAME.html``, ``.md``, ``.json`` and the figures."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ablate.base.files import write_bytes_atomic
from ablate.reports.figures.panels import draw_comparison, draw_front
from ablate.reports.pages.document import plain
from ablate.reports.pages.render import write_pages
from ablate.reports.words import compare, search
from ablate.reports.words.format import Column, make_table, tokens

if TYPE_CHECKING:
    from pathlib import Path

    from ablate.reports.findings.compare import Comparison
    from ablate.reports.findings.search import SearchResult

CONFIRM = "confirm.yaml"


def write_comparison(comparison: Comparison, folder: Path) -> tuple[Path, ...]:
    """Write ``compare.json``, ``.md`` and ``.html`` of studies, and the figure; return the three."""
    title = " and ".join(study.name for study in comparison.studies)
    if comparison.axis:
        title = (
            f"{len(comparison.studies)} studies from {tokens(comparison.places[0])} to "
            f"{tokens(comparison.places[-1])} {compare.UNITS[comparison.axis]}"
        )
    values = {
        "title": f"Side by side: {title}",
        "sentences": list(compare.comparison_sentences(comparison)),
    }
    parts = (
        *compare.line_tables(comparison),
        draw_comparison(comparison),
        *compare.study_tables(comparison),
    )
    return write_pages(folder, "compare", values, plain(comparison), parts)


def write_search(
    found: SearchResult, folder: Path, confirm: str | None
) -> tuple[Path, ...]:
    """Write ``search.json``, ``.md`` and ``.html`` and the figure; return the three.

    ``confirm``: the text of a study that confirms the front, for ``confirm.yaml``; None removes that file.
    """
    sentences = [found.description or "", *search.search_sentences(found)]
    if confirm is None:
        (folder / CONFIRM).unlink(missing_ok=True)
    else:
        write_bytes_atomic(folder / CONFIRM, confirm.encode())
        sentences.append(f"To confirm: ablate run {folder / CONFIRM}")
    dropped = make_table(
        "dropped",
        "What was no candidate",
        "Cells of the grid and arms that are no candidates.",
        [Column("Name", "name"), Column("Why", "reason")],
        found.dropped,
    )
    parts = (
        search.front_table(found),
        draw_front(found),
        search.importance_table(found),
        *(search.trials_table(found, rung) for rung in found.rungs),
        dropped,
    )
    values = {"title": f"A search over recipes: {found.name}", "sentences": sentences}
    return write_pages(folder, "search", values, plain(found), parts)
