"""Token cost over the size of the model → ``trend.html``, ``.md``, ``.json`` and its figure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ablate.reports.figures.trend import draw_trend
from ablate.reports.findings.trend import sentences, trend_document, trend_table
from ablate.reports.pages.beside import write_pages
from ablate.reports.words import words
from ablate.reports.words.table import Table

if TYPE_CHECKING:
    from pathlib import Path

    from ablate.reports.findings.trend import Trend


def write_trend(found: Trend, folder: Path) -> tuple[Path, ...]:
    """Write the pages and the figure of a trend into a folder; returns the pages."""
    names = [study.name for study in found.studies]
    values = {
        "title": f"Token cost from {words.parameters(found.studies[0].parameters)} to "
        f"{words.parameters(found.studies[-1].parameters)} parameters",
        "sentences": sentences(found),
        "table_of_arms": trend_table(found),
        "studies": Table(
            caption="Parameters of the baseline's model, all of them; the target that costs are read at.",
            columns=("Study", "Parameters", "Baseline", "Target"),
            rows=tuple(
                (study.name, f"{study.parameters:,}", study.baseline, study.target) for study in found.studies
            ),
            numeric=frozenset({1}),
        ),
        "differences": Table(
            caption="What the studies differ in besides model and target, as their files say it.",
            columns=("Key", *names),
            rows=tuple((key, *each) for key, each in found.differs.items()),
        ),
    }
    return write_pages(folder, "trend", values, document=trend_document(found), drawings=(draw_trend(found),))
