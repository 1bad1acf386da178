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
        Section(
            name="arms",
            short="Arms",
            title="Arms against the baseline",
            entries=_entries(
                ("arms", None, "Arms against the baseline", tables.headline(analysis)),
                ("stopped", "Stopped early", None, tables.stop_table(analysis)),
                ("steps", "What each further GEMM adds", None, tables.step_table(analysis)),
                ("effects", "Effects of the factors", None, tables.effect_table(analysis)),
                ("power", "What the seeds could show", None, tables.power_table(analysis)),
            ),
        ),
        Section(
            name="tuning",
            short="Tuning",
            title="Tuning",
            entries=_entries(("tuning", None, "Tuning", tables.tuning_table(analysis))),
        ),
        *(Section(name=one.name, short=one.title, title=one.title, drawing=one) for one in drawings),
        Section(
            name="restricted",
            short="Restricted means",
            title="Restricted means",
            entries=_entries(("restricted", None, "Restricted means", tables.reached_table(analysis))),
        ),
        Section(
            name="diagnostics",
            short="Findings of the diagnostics",
            title="What the diagnostics found",
            entries=_entries(("diagnoses", None, "What the diagnostics found", diagnosis_table(diagnosed))),
            sentences=tuple(sentence for arm in diagnosed for sentence in diagnosis_sentences(arm)),
        ),
        Section(
            name="cost",
            short="Cost",
            title="Cost and break-even",
            entries=_entries(
                ("measured", "Measured", None, speed_tables.measured_table(analysis, prices)),
                ("modelled", own, None, speed_tables.modelled_table(analysis, prices)),
                ("modelled-8b", llama, None, speed_tables.large_table(analysis)),
                (None, "How good the model is", None, speed_tables.check_table(analysis)),
            ),
        ),
        Section(
            name="published",
            short="Published",
            title="Published figures beside ours",
            entries=_entries(("published", None, "Published figures", tables.published_table(analysis))),
        ),
        Section(
            name="runs",
            short="Runs",
            title="Every run",
            entries=_entries((None, None, "Every run", tables.run_table(analysis))),
        ),
    )
    return tuple(one for one in found if one.entries or one.drawing)


def _entries(*rows: tuple[str | None, str | None, str | None, Table | None]) -> tuple[Entry, ...]:
    """Return the tables that there are; one without a label goes by its heading."""
    return tuple(
        Entry(file=file, heading=heading, label=label or heading or "", table=table)
        for file, heading, label, table in rows
        if table is not None
    )
