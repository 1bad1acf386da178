"""A study's run store → the files of its report.

Each file is written through a temporary one and renamed, and the pages come last: a reader sees an old page
or a new one, never half of it. The same run store gives the same bytes. HTML, Markdown and LaTeX are written
from one list of sections; a section without anything to show is left out.

How it fails: a damaged run is named in the report's warnings; only a plan that cannot be read stops it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ablate.base.files import parse_json, write_bytes_atomic
from ablate.reports.figures import draw_figures, drawn_arms
from ablate.reports.figures.diagnoses import draw_diagnoses
from ablate.reports.findings.analyse import analyse
from ablate.reports.findings.compare import target_text
from ablate.reports.findings.diagnoses import diagnose_study
from ablate.reports.pages.csv_files import arm_frame, csv_text, run_frame
from ablate.reports.pages.document import report_document
from ablate.reports.pages.live import live_values
from ablate.reports.pages.render import write_pages
from ablate.reports.read.rebase import read_against
from ablate.reports.words import caveats, speed_tables, tables, words
from ablate.reports.words.diagnoses import diagnosis_sentences, diagnosis_table
from ablate.reports.words.evaluation import evaluation_table
from ablate.reports.words.matrix import matrix_tables
from ablate.reports.words.method import definitions
from ablate.reports.words.table import to_latex
from ablate.reports.words.verdict import Verdict, write_verdict
from ablate.results.frames import load_frames

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from pathlib import Path

    from ablate.reports.figures.canvas import Drawing
    from ablate.reports.findings.diagnoses import ArmDiagnosis
    from ablate.reports.findings.results import Analysis
    from ablate.reports.words.table import Table
    from ablate.store import StudyStore


_QUESTION = ("baseline", "target", "paired_seeds", "intervals")
"""Keys of ``report.json`` whose values two reports must share to answer one question."""


@dataclass(frozen=True, kw_only=True)
class PageSection:
    """A section of the page: tables, a figure, or sentences. ``short``: its title among the page's links.

    ``tables``: each with its LaTeX's name without ending (None where it has none) and the heading over it.
    ``label`` names one without a heading to a reader who does not see it. Default of both: the title.
    """

    name: str
    title: str
    short: str | None = None
    label: str | None = None
    tables: tuple[tuple[str | None, str | None, Table | None], ...] = ()
    drawing: Drawing | None = None
    sentences: tuple[str, ...] = ()

    @property
    def shown(self) -> list[tuple[str | None, str | None, Table]]:
        """The tables that have anything to show."""
        return [(file, head, table) for file, head, table in self.tables if table and table.rows]


@dataclass(frozen=True, kw_only=True)
class ReportPaths:
    """What was written, and the verdict to print beside it. ``matrices``: each with the arms in it."""

    html: Path
    markdown: Path
    json: Path
    tables: Path
    figures: Path
    verdict: Verdict
    matrices: tuple[tuple[Table, tuple[str, ...]], ...]
    notices: tuple[str, ...]

    def paths(self) -> tuple[Path, ...]:
        """Return the files and folders written."""
        return (self.html, self.markdown, self.json, self.tables, self.figures)


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

    A report of another question that is there moves to ``former-reports/``.
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
    verdict, notices = write_verdict(analysis), tuple(caveats.notices(analysis))
    warnings = caveats.warnings(analysis, faults)
    matrices = matrix_tables(analysis, verdict.findings)
    sections = _sections(analysis, diagnosed, prices or {})
    curves = next((one.drawing for one in sections if one.name == "convergence"), None)
    training = (f"{key} {value}" for key, value in analysis.plan.training.items() if value is not None)
    values = {
        "analysis": analysis,
        "verdict": verdict,
        "notices": notices,
        "warnings": warnings,
        "matrices": matrices,
        "sections": sections,
        "live": None if curves is None else live_values(drawn_arms(analysis), curves),
        "refresh_sec": refresh_sec,
        "arms": tables.arm_table(analysis),
        "definitions": definitions(analysis),
        "environments": [
            (count, ", ".join(f"{key} {value}" for key, value in environment.items() if value is not None))
            for environment, count in analysis.environments
            if environment
        ],
        "training": ", ".join(training),
        "target": target_text(analysis.plan.target),
        "ended": words.moment(analysis.last_ended_unix),
    }
    texts = {
        "arms.csv": csv_text(arm_frame(analysis)),
        "runs.csv": csv_text(run_frame(analysis)),
        "evaluations.csv": csv_text(frames.evals),
    }
    shown = [table for section in sections for table in section.shown]
    texts |= {f"{file}.tex": to_latex(table, file) for file, _, table in shown if file}
    for i, table in enumerate(matrices, 1):
        file = "matrix" if i == 1 else f"matrix-{i}"
        texts[f"{file}.tex"] = to_latex(table, file)
    document = report_document(analysis, verdict, notices, warnings, diagnosed)
    kept = _keep_another_question(folder, document) if out is None else ()
    for name, body in texts.items():
        write_bytes_atomic(folder / "tables" / name, body.encode())
    drawings = [section.drawing for section in sections]
    data, markdown, html = write_pages(folder, "report", values, document, drawings, figures="figures")
    return ReportPaths(
        html=html,
        markdown=markdown,
        json=data,
        tables=folder / "tables",
        figures=folder / "figures",
        verdict=verdict,
        matrices=tuple(zip(matrices, (one.names for one in analysis.matrices), strict=False)),
        notices=(*notices, *kept),
    )


def _keep_another_question(report: Path, document: Mapping[str, Any]) -> tuple[str, ...]:
    """Move a report that asks otherwise than this document out of its way; return what to say of it."""
    try:
        before = parse_json((report / "report.json").read_bytes())
        asks = parse_json(json.dumps({key: document[key] for key in _QUESTION}).encode())
        if not isinstance(before, dict) or all(before.get(key) == asks[key] for key in _QUESTION):
            return ()
    except (OSError, ValueError):
        return ()
    folder = report.parent / "former-reports"
    folder.mkdir(exist_ok=True)
    numbers = (int(path.name) for path in folder.iterdir() if path.name.isdecimal())
    kept = report.rename(folder / str(max(numbers, default=0) + 1))
    place = (kept / "report.html").relative_to(report.parents[1])
    return (f"The report of another question is kept: {place}.",)


def _sections(
    analysis: Analysis, diagnosed: Sequence[ArmDiagnosis], prices: Mapping[str, float]
) -> tuple[PageSection, ...]:
    """Make every table and figure of a report. ``prices``: USD for a device-hour by the hardware's name."""
    drawings = (*draw_figures(analysis), *draw_diagnoses(diagnosed))
    found = (
        PageSection(
            name="arms",
            title="Arms against the baseline",
            short="Arms",
            tables=(
                ("arms", None, tables.headline(analysis)),
                ("stopped", "Stopped early", tables.stop_table(analysis)),
                ("steps", "What each further GEMM adds", tables.step_table(analysis)),
                ("effects", "Effects of the factors", tables.effect_table(analysis)),
                ("power", "What the seeds could show", tables.power_table(analysis)),
            ),
        ),
        PageSection(
            name="evaluation",
            title="Learnt or inferred",
            tables=(("evaluation", None, evaluation_table(analysis)),),
        ),
        PageSection(name="tuning", title="Tuning", tables=(("tuning", None, tables.tuning_table(analysis)),)),
        *(PageSection(name=one.name, title=one.title, drawing=one) for one in drawings),
        PageSection(
            name="diagnostics",
            title="What the diagnostics found",
            short="Findings of the diagnostics",
            tables=(("diagnoses", None, diagnosis_table(diagnosed)),),
            sentences=tuple(sentence for arm in diagnosed for sentence in diagnosis_sentences(arm)),
        ),
        PageSection(
            name="cost",
            title="Cost and break-even",
            short="Cost",
            tables=(
                (
                    "measured",
                    "As logged" if analysis.timing.kind == "logged" else "Measured",
                    speed_tables.measured_table(analysis, prices),
                ),
                (
                    "modelled",
                    "Modelled, at this study's shapes",
                    speed_tables.modelled_table(analysis, prices),
                ),
            ),
        ),
        PageSection(
            name="published",
            title="Published figures beside ours",
            short="Published",
            label="Published figures",
            tables=(("published", None, tables.published_table(analysis)),),
        ),
        PageSection(
            name="runs", title="Every run", short="Runs", tables=((None, None, tables.run_table(analysis)),)
        ),
    )
    return tuple(one for one in found if one.shown or one.drawing)
