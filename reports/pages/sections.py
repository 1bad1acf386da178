"""What a report shows, in order: its sections with their tables and figures, each made once a report.

HTML, Markdown and LaTeX are written from this one list. A section without anything to show is left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ablate.reports.figures import draw_figures
from ablate.reports.figures.diagnoses import draw_diagnoses
from ablate.reports.words import speed_tables, tables
from ablate.reports.words.diagnoses import diagnosis_sentences, diagnosis_table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ablate.reports.figures.canvas import Drawing
    from ablate.reports.findings.diagnoses import ArmDiagnosis
    from ablate.reports.findings.results import Analysis
    from ablate.reports.words.table import Table


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A table of a section. ``file``: its LaTeX's name without ending, None where it has none.

    ``heading`` stands over it; ``label`` names it to a reader who does not see it.
    """

    file: str | None
    heading: str | None
    label: str
    table: Table


@dataclass(frozen=True, kw_only=True)
class Section:
    """A section of the page: tables, a figure, or sentences. ``short``: its title among the page's links."""

    name: str
    short: str
    title: str
    entries: tuple[Entry, ...] = ()
    drawing: Drawing | None = None
    sentences: tuple[str, ...] = ()


def report_sections(
    analysis: Analysis, diagnosed: Sequence[ArmDiagnosis], prices: Mapping[str, float]
) -> tuple[Section, ...]:
    """Make every table and figure of a report. ``prices``: USD for a device-hour by the hardware's name."""
    drawings = (*draw_figures(analysis), *draw_diagnoses(diagnosed))
    own, llama = "Modelled, at this study's shapes", "Modelled, at the shapes of Llama 3.1 8B"
    found = (
        _section(
            "arms",
            "Arms against the baseline",
            ("arms", None, tables.headline(analysis)),
            ("stopped", "Stopped early", tables.stop_table(analysis)),
            ("steps", "What each further GEMM adds", tables.step_table(analysis)),
            ("effects", "Effects of the factors", tables.effect_table(analysis)),
            ("power", "What the seeds could show", tables.power_table(analysis)),
            short="Arms",
        ),
        _section("tuning", "Tuning", ("tuning", None, tables.tuning_table(analysis))),
        *(Section(name=one.name, short=one.title, title=one.title, drawing=one) for one in drawings),
        _section("restricted", "Restricted means", ("restricted", None, tables.reached_table(analysis))),
        _section(
            "diagnostics",
            "What the diagnostics found",
            ("diagnoses", None, diagnosis_table(diagnosed)),
            short="Findings of the diagnostics",
            sentences=tuple(sentence for arm in diagnosed for sentence in diagnosis_sentences(arm)),
        ),
        _section(
            "cost",
            "Cost and break-even",
            ("measured", "Measured", speed_tables.measured_table(analysis, prices)),
            ("modelled", own, speed_tables.modelled_table(analysis, prices)),
            ("modelled-8b", llama, speed_tables.large_table(analysis)),
            (None, "How good the model is", speed_tables.check_table(analysis)),
            short="Cost",
        ),
        _section(
            "published",
            "Published figures beside ours",
            ("published", None, tables.published_table(analysis)),
            short="Published",
            label="Published figures",
        ),
        _section("runs", "Every run", (None, None, tables.run_table(analysis)), short="Runs"),
    )
    return tuple(one for one in found if one.entries or one.drawing)


def _section(
    name: str,
    title: str,
    *rows: tuple[str | None, str | None, Table | None],
    short: str | None = None,
    label: str | None = None,
    sentences: tuple[str, ...] = (),
) -> Section:
    """Make a section of the tables that there are; ``rows``: file, heading and table of each.

    A table without a heading is named by the ``label``, else by the section's title.
    """
    entries = tuple(
        Entry(file=file, heading=heading, label=heading or label or title, table=table)
        for file, heading, table in rows
        if table is not None
    )
    return Section(name=name, short=short or title, title=title, entries=entries, sentences=sentences)
