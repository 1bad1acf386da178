"""A study's run store → the files of its report.

Each file is written to a temporary one and renamed, and the pages come last: a reader sees an old page or a
new one, never half of it. The same run store gives the same bytes. HTML, Markdown and LaTeX are written from
one list of sections; an empty section is left out.

How it fails: a damaged run is named in the report's warnings; only a plan that cannot be read stops it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ablate.base.files import write_bytes_atomic
from ablate.reports.figures import Drawing, draw_figures
from ablate.reports.figures.diagnoses import draw_diagnoses
from ablate.reports.findings.analyse import analyse
from ablate.reports.findings.compare import target_text
from ablate.reports.findings.diagnoses import diagnose_study
from ablate.reports.pages.document import (
    arm_frame,
    csv_text,
    report_document,
    run_frame,
)
from ablate.reports.pages.live import live_data
from ablate.reports.pages.render import definitions, latex, write_pages
from ablate.reports.read.rebase import read_against
from ablate.reports.words import caveats, tables
from ablate.reports.words.diagnoses import diagnosis_table
from ablate.reports.words.effects import effect_tables
from ablate.reports.words.format import Table, moment
from ablate.reports.words.trained import trained
from ablate.reports.words.verdict import write_verdict
from ablate.results.frames import load_frames

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from ablate.reports.findings.diagnoses import ArmDiagnosis
    from ablate.reports.findings.results import Analysis
    from ablate.reports.words.judge import Finding
    from ablate.reports.words.verdict import Verdict
    from ablate.results.frames import StudyFrames
    from ablate.store import StudyStore
    from ablate.store.plan_file import Target


@dataclass(frozen=True, kw_only=True)
class ReportPaths:
    """What was written, and the verdict to print; ``findings``: those that are not in ``matrices``."""

    html: Path
    markdown: Path
    json: Path
    tables: Path
    figures: Path
    verdict: Verdict
    matrices: tuple[Table, ...]
    findings: tuple[Finding, ...]
    notices: tuple[str, ...]


def write_report(
    store: StudyStore,
    out: Path | None = None,
    *,
    baseline: str | None = None,
    target: float | Target | None = None,
    refresh_sec: int | None = None,
) -> ReportPaths:
    """Write the report of a study, by default into ``report/`` in its folder.

    ``baseline``, ``target``: another arm, or another value, than the study names; see ``read.rebase``.
    ``refresh_sec``: a browser reloads the page after so many seconds; None: never.

    Raises:
        FileNotFoundError: the study never ran here.
        UserError: its plan cannot be read, or does not allow that baseline or target, or others can change
            its folder.
    """
    folder = out
    if folder is None:
        store.refuse_unsafe()
        folder = store.path / "report"
    frames = read_against(load_frames(store), baseline=baseline, target=target)
    analysis = analyse(frames)
    diagnosed, damaged = diagnose_study(store, analysis)
    # Faults name files relative to the study, so that the report does not depend on the study's place.
    faults = tuple(
        fault.replace(f"{store.path}/", "") for fault in (*frames.faults, *damaged)
    )
    verdict = write_verdict(analysis)
    notices = tuple(caveats.notices(analysis))
    warnings = caveats.warnings(analysis, faults)
    matrices = tuple(tables.matrix_tables(analysis, verdict.findings))
    in_matrix = {text for table in matrices for text in table.sentences}
    findings = tuple(
        finding for finding in verdict.findings if finding.text not in in_matrix
    )
    parts = _sections(analysis, diagnosed, verdict)
    _write_tables(folder / "tables", frames, analysis, (*matrices, *parts))
    json, markdown, html = write_pages(
        folder,
        "report",
        {
            "analysis": analysis,
            "verdict": verdict,
            "findings": findings,
            "notices": notices,
            "warnings": warnings,
            "matrices": matrices,
            "live": live_data(analysis, parts),
            "refresh_sec": refresh_sec,
            "arms": tables.design_table(analysis),
            "definitions": definitions(analysis),
            "target": target_text(analysis.plan),
            "trained": trained(analysis),
            "ended": moment(analysis.last_ended_unix),
        },
        report_document(analysis, verdict, notices, warnings, diagnosed),
        parts,
        template="report",
        figures="figures/",
    )
    return ReportPaths(
        html=html,
        markdown=markdown,
        json=json,
        tables=folder / "tables",
        figures=folder / "figures",
        verdict=verdict,
        matrices=matrices,
        findings=findings,
        notices=notices,
    )


def _write_tables(
    folder: Path,
    frames: StudyFrames,
    analysis: Analysis,
    parts: Sequence[Table | Drawing | None],
) -> None:
    """Write what other programs read: CSV of arms, runs and evaluations, and each table of the page in LaTeX."""
    texts = {
        "arms.csv": csv_text(arm_frame(analysis)),
        "runs.csv": csv_text(run_frame(analysis)),
        "evaluations.csv": csv_text(frames.evals),
    }
    for part in parts:
        if isinstance(part, Table) and part.rows:
            texts[f"{part.name}.tex"] = latex(part)
    for name, text in texts.items():
        write_bytes_atomic(folder / name, text.encode())


def _sections(
    analysis: Analysis, diagnosed: Sequence[ArmDiagnosis], verdict: Verdict
) -> list[Table | Drawing | None]:
    """Make the tables and figures in the page's order."""
    drawings = draw_figures(analysis)
    effects = [drawing for drawing in drawings if drawing.name == "effects"]
    others = drawings[len(effects) :]
    return [
        *effects,
        *effect_tables(analysis),
        *others[:1],
        tables.arms_table(analysis),
        tables.pair_table(analysis, verdict.least),
        *others[1:],
        tables.step_table(analysis),
        tables.power_table(analysis),
        tables.evaluation_table(analysis),
        tables.tuning_table(analysis),
        *draw_diagnoses(diagnosed),
        diagnosis_table(diagnosed),
        tables.measured_table(analysis),
        tables.modelled_table(analysis),
        tables.published_table(analysis),
        tables.run_table(analysis),
    ]
