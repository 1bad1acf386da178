"""A study's run store → the files of its report.

Each file is written through a temporary one and renamed, and the pages come last: a reader sees an old page
or a new one, never half of it. The same run store gives the same bytes.

How it fails: a damaged run is named in the report's warnings; only a plan that cannot be read stops it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from ablate.base.files import write_bytes_atomic
from ablate.reports.findings.analyse import analyse
from ablate.reports.findings.diagnoses import diagnose_study
from ablate.reports.findings.ends import target_text
from ablate.reports.pages import csv_files
from ablate.reports.pages.document import report_document
from ablate.reports.pages.render import write_pages
from ablate.reports.pages.sections import report_sections
from ablate.reports.read.against import read_against
from ablate.reports.read.load import load_frames
from ablate.reports.words import caveats, words
from ablate.reports.words.method import definitions
from ablate.reports.words.table import to_latex
from ablate.reports.words.tables import arm_table
from ablate.reports.words.verdict import Verdict, write_verdict

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from ablate.store import StudyStore


@dataclass(frozen=True, kw_only=True)
class ReportPaths:
    """What was written, and the verdict to print beside it."""

    html: Path
    markdown: Path
    json: Path
    tables: Path
    figures: Path
    verdict: Verdict
    notices: tuple[str, ...]

    def paths(self) -> tuple[Path, ...]:
        """Return the files and folders written."""
        values = (getattr(self, field.name) for field in fields(self))
        return tuple(value for value in values if isinstance(value, Path))


def write_report(
    store: StudyStore,
    out: Path | None = None,
    *,
    baseline: str | None = None,
    target: float | None = None,
    waive: Collection[str] = (),
    prices: Mapping[str, float] | None = None,
    refresh_sec: int | None = None,
) -> ReportPaths:
    """Write the report of a study, by default into its folder under ``report/``.

    ``baseline``, ``target``: another arm, or another value, than the study names; see ``against``.
    ``waive``: settings in which runs may differ, see ``comparable``. ``prices``: USD for a device-hour by the
    hardware's name. ``refresh_sec``: have a browser load the page again after so many seconds.

    Raises:
        FileNotFoundError: the study never ran here.
        UserError: its plan cannot be read, or there is no such baseline or target.
    """
    folder = store.path / "report" if out is None else out
    frames = read_against(load_frames(store), baseline=baseline, target=target)
    analysis = analyse(frames, waive=waive)
    # Faults name files relative to the study: the report must not depend on where the study lies.
    diagnosed, damaged = diagnose_study(store, analysis)
    faults = tuple(fault.replace(f"{store.path}/", "") for fault in (*frames.faults, *damaged))
    verdict, notices = write_verdict(analysis), caveats.notices(analysis)
    warnings = caveats.warnings(analysis, faults)
    sections = report_sections(analysis, diagnosed, prices or {})
    training = (f"{key} {value}" for key, value in analysis.training.items() if value is not None)
    values = {
        "analysis": analysis,
        "verdict": verdict,
        "notices": notices,
        "warnings": warnings,
        "sections": sections,
        "refresh_sec": refresh_sec,
        "arms": arm_table(analysis),
        "definitions": definitions(analysis),
        "environments": [
            (count, ", ".join(f"{key} {value}" for key, value in environment.items() if value is not None))
            for environment, count in analysis.environments
        ],
        "training": ", ".join(training),
        "target": target_text(analysis.target),
        "ended": words.moment(analysis.last_ended_unix),
    }
    tables = {
        "arms.csv": csv_files.arms_csv(analysis),
        "runs.csv": csv_files.runs_csv(analysis),
        "evaluations.csv": csv_files.evaluations_csv(frames),
    }
    entries = [entry for section in sections for entry in section.entries]
    tables |= {f"{entry.file}.tex": to_latex(entry.table, entry.file) for entry in entries if entry.file}
    for name, body in tables.items():
        write_bytes_atomic(folder / "tables" / name, body.encode())
    document = report_document(analysis, verdict, notices, warnings, diagnosed)
    drawings = [section.drawing for section in sections if section.drawing is not None]
    data, markdown, html = write_pages(folder, "report", values, document, drawings, figures="figures")
    return ReportPaths(
        html=html,
        markdown=markdown,
        json=data,
        tables=folder / "tables",
        figures=folder / "figures",
        verdict=verdict,
        notices=notices,
    )
