"""Studies compared, or a search → ``NAME.html``, ``.md``, ``.json`` and the figures."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ablate.base.files import write_bytes_atomic
from ablate.reports.figures.forest import draw_comparison
from ablate.reports.figures.panels import draw_trend
from ablate.reports.figures.search import draw_front
from ablate.reports.pages.document import comparison_document, search_document
from ablate.reports.pages.render import write_pages
from ablate.reports.words import compare, search
from ablate.reports.words.format import make_table, tokens
from ablate.search.halving import short_tokens

if TYPE_CHECKING:
    from pathlib import Path

    from ablate.reports.findings.compare import Comparison
    from ablate.reports.findings.search import Found

CONFIRM = "confirm.yaml"


def write_comparison(found: Comparison, folder: Path) -> tuple[Path, ...]:
    """Write ``compare.json``, ``.md`` and ``.html`` of studies, and the figure; return the three."""
    names = [study.name for study in found.studies]
    title, drawn, studies = " and ".join(names), draw_comparison, None
    if found.axis:
        drawn = draw_trend
        title = (
            f"{len(names)} studies from {tokens(found.places[0])} to {tokens(found.places[-1])} "
            f"{compare.UNITS[found.axis]}"
        )
        studies = make_table(
            "Parameters of the baseline's model, all of them, and its budget in tokens; the target that "
            "costs are read at.",
            [
                {
                    "Study": study.name,
                    "Parameters": f"{study.parameters:,}",
                    "Tokens": f"{study.tokens:,}",
                    "Baseline": study.baseline,
                    "Target": study.target,
                }
                for study in found.studies
            ],
            {1, 2},
        )
    differences = make_table(
        "What the studies differ in, as their files say it.",
        [{"Key": key, **dict(zip(names, each, strict=True))} for key, each in found.differs.items()],
    )
    values = {
        "title": title,
        "sentences": tuple(compare.trend_sentences(found)),
        "tables": compare.compare_tables(found),
        "studies": studies,
        "differences": differences,
    }
    return write_pages(folder, "compare", values, comparison_document(found), [drawn(found)])


def write_search(found: Found, folder: Path, confirm: str | None) -> tuple[Path, ...]:
    """Write ``search.json``, ``.md`` and ``.html`` and the figure; return the three.

    ``confirm``: the text of a study that confirms the front, for ``confirm.yaml``; None removes that file.
    """
    values = {
        "found": found,
        "sentences": search.search_sentences(found),
        "front": search.front_table(found),
        "importances": search.importance_table(found),
        "trials": [
            (f"{short_tokens(rung.tokens)} tokens", search.trials_table(found, rung)) for rung in found.rungs
        ],
        "dropped": make_table(
            "Cells of the grid and arms that are no candidates.",
            [{"Name": name, "Why": why} for name, why in found.dropped],
        ),
        "confirm": None if confirm is None else str(folder / CONFIRM),
    }
    if confirm is None:
        (folder / CONFIRM).unlink(missing_ok=True)
    else:
        write_bytes_atomic(folder / CONFIRM, confirm.encode())
    return write_pages(folder, "search", values, search_document(found), [draw_front(found)])
