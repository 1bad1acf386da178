"""Studies compared, or a search → ``NAME.html``, ``.md``, ``.json`` and the figures."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ablate.base.files import write_bytes_atomic
from ablate.reports.figures.forest import draw_comparison
from ablate.reports.figures.search import draw_front, draw_importances
from ablate.reports.figures.trend import draw_trend
from ablate.reports.pages.document import comparison_document, search_document, trend_document
from ablate.reports.pages.render import write_pages
from ablate.reports.words import compare, search
from ablate.reports.words.table import Table
from ablate.search.halving import short_tokens

if TYPE_CHECKING:
    from pathlib import Path

    from ablate.reports.findings.compare import Comparison
    from ablate.reports.findings.search import Found
    from ablate.reports.findings.trend import Trend

CONFIRM = "confirm.yaml"


def write_comparison(comparison: Comparison, folder: Path) -> tuple[Path, ...]:
    """Write a comparison's pages and figure into a folder; returns the pages."""
    values = {
        "title": f"{comparison.left} and {comparison.right}",
        "sentences": (),
        "studies": None,
        "tables": [("Token cost", compare.compare_table(comparison))],
        "differences": Table(
            caption="What the two studies differ in, as their files say it.",
            columns=("Key", comparison.left, comparison.right),
            rows=tuple((key, *pair) for key, pair in comparison.differs.items()),
        ),
    }
    drawings = [draw_comparison(comparison)]
    return write_pages(folder, "compare", values, comparison_document(comparison), drawings)


def write_trend(found: Trend, folder: Path) -> tuple[Path, ...]:
    """Write the pages and figure of a trend into a folder; returns the pages."""
    places = compare.place_text(found, 0), compare.place_text(found, len(found.studies) - 1)
    values = {
        "title": f"{len(found.studies)} studies from {places[0]} to {places[1]} "
        f"{'parameters' if found.axis == 'parameters' else 'training tokens'}",
        "sentences": tuple(compare.trend_sentences(found)),
        "tables": compare.trend_tables(found),
        "studies": Table(
            caption="Parameters of the baseline's model, all of them, and its budget in tokens; the target "
            "that costs are read at.",
            columns=("Study", "Parameters", "Tokens", "Baseline", "Target"),
            rows=tuple(
                (study.name, f"{study.parameters:,}", f"{study.tokens:,}", study.baseline, study.target)
                for study in found.studies
            ),
            numeric={1, 2},
        ),
        "differences": Table(
            caption="What else the studies differ in, as their files say it.",
            columns=("Key", *(study.name for study in found.studies)),
            rows=tuple((key, *each) for key, each in found.differs.items()),
        ),
    }
    return write_pages(folder, "compare", values, trend_document(found), [draw_trend(found)])


def write_search(found: Found, folder: Path, confirm: str | None) -> tuple[Path, ...]:
    """Write a search's pages and figures into a folder, and the study that confirms it; returns the pages."""
    values = {
        "found": found,
        "sentences": search.search_sentences(found),
        "front": search.front_table(found),
        "importances": search.importance_table(found),
        "trials": [
            (f"{short_tokens(rung.tokens)} tokens", search.trials_table(found, rung)) for rung in found.rungs
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
    drawings = (draw_front(found), draw_importances(found))
    return write_pages(folder, "search", values, search_document(found), drawings)
