"""A study's run store → the files of its report.

Each file is written to a temporary one and renamed, and the pages come last: a reader sees an old page or a
new one, never half of it. The same run store gives the same bytes. HTML, Markdown and LaTeX are written from
one list of sections; an empty section is left out.

How it fails: a damaged run is named in the report's warnings; only a plan that cannot be read stops it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ablate.base.files import write_bytes_atomic
from ablate.reports.figures import Drawing, draw_figures, drawn_arms
from ablate.reports.figures.diagnoses import draw_diagnoses
from ablate.reports.findings.analyse import analyse
from ablate.reports.findings.compare import target_text
from ablate.reports.findings.diagnoses import diagnose_study
from ablate.reports.pages.document import arm_frame, csv_text, report_document, run_frame
from ablate.reports.pages.render import definitions, latex, write_pages
from ablate.reports.read.rebase import read_against
from ablate.reports.words import caveats, tables
from ablate.reports.words import format as words
from ablate.reports.words.diagnoses import diagnosis_table
from ablate.reports.words.format import Table
from ablate.reports.words.verdict import Finding, Verdict, write_verdict
from ablate.results.cost import mean_tokens
from ablate.results.frames import load_frames

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from ablate.reports.findings.results import Analysis
    from ablate.run.outcome import Outcome
    from ablate.store import StudyStore
    from ablate.store.plan_file import Target


_MOST_POINTS = 200


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
    # Faults name files relative to the study, so that the report does not depend on the study's place.
    diagnosed, damaged = diagnose_study(store, analysis)
    faults = tuple(fault.replace(f"{store.path}/", "") for fault in (*frames.faults, *damaged))
    verdict, notices = write_verdict(analysis), tuple(caveats.notices(analysis))
    warnings = caveats.warnings(analysis, faults)
    matrices = tuple(tables.matrix_tables(analysis, verdict.findings))
    in_matrix = {text for table in matrices for text in table.sentences}
    findings = tuple(one for one in verdict.findings if one.text not in in_matrix)
    first, *figures = draw_figures(analysis) or [None]
    parts = (
        first,
        tables.arms_table(analysis),
        *figures,
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
    )
    curves = next((one for one in parts if isinstance(one, Drawing) and one.name == "convergence"), None)
    values = {
        "analysis": analysis,
        "verdict": verdict,
        "findings": findings,
        "notices": notices,
        "warnings": warnings,
        "matrices": matrices,
        "live": curves and _live_data(drawn_arms(analysis), curves),
        "refresh_sec": refresh_sec,
        "arms": tables.design_table(analysis),
        "definitions": definitions(analysis),
        "target": target_text(analysis.plan),
        "ended": words.moment(analysis.last_ended_unix),
    }
    document = report_document(analysis, verdict, notices, warnings, diagnosed)
    texts = {
        "arms.csv": csv_text(arm_frame(analysis)),
        "runs.csv": csv_text(run_frame(analysis)),
        "evaluations.csv": csv_text(frames.evals),
    }
    named = [*matrices, *(one for one in parts if isinstance(one, Table) and one.rows)]
    texts |= {f"{table.name}.tex": latex(table) for table in named}
    for name, body in texts.items():
        write_bytes_atomic(folder / "tables" / name, body.encode())
    data, markdown, html = write_pages(
        folder, "report", values, document, parts, template="report", figures="figures/"
    )
    return ReportPaths(
        html=html,
        markdown=markdown,
        json=data,
        tables=folder / "tables",
        figures=folder / "figures",
        verdict=verdict,
        matrices=matrices,
        findings=findings,
        notices=notices,
    )


def _live_data(analysis: Analysis, drawing: Drawing) -> dict[str, Any]:
    """Compute the data of the page's script for a convergence figure of this analysis.

    Every number is computed here, like the report's own. ``runs``: arm, seed, tokens and losses, thinned, as
    they are only shown under the pointer. ``moved``: of each arm tokens to target, token cost and ends, as
    text, at each of the ``targets``; without intervals, which a target picked from the curves cannot have.
    ``own``: the index of the target nearest to the study's own.
    """
    names = [arm.name for arm in analysis.arms]
    found = {arm.name: arm.moved for arm in analysis.others if arm.moved and not arm.counted_from}
    # Arms that were stopped early are compared with fewer runs of the baseline.
    most = max(found.values(), key=lambda one: len(one.base_ends[0]), default=None)
    targets = most.targets if most else ()

    def figures(runs: Sequence[Outcome], cost_text: str) -> list[str]:
        to_target = words.interval(mean_tokens(runs), words.tokens)
        return [to_target.partition(" [")[0], cost_text.partition(" [")[0], words.ends(runs)]

    moved = {name: [[words.DASH] * 3] * len(targets) for name in names}
    for name, one in found.items():
        moved[name] = list(map(figures, one.ends, map(words.cost, one.costs)))
    if most:
        moved[analysis.baseline] = [figures(ends, "baseline") for ends in most.base_ends]
    own = analysis.plan.target.val_loss if analysis.plan.target else 0.0
    label = f"{{:.4f}} {analysis.plan.unit}"
    if analysis.plan.loss_unit == "nats":
        label += " (perplexity {:.4g})"
    runs = []
    for curve in analysis.curves:
        shown = slice(None, None, 1 + len(curve.tokens) // _MOST_POINTS)
        losses = np.nan_to_num(curve.loss[shown], posinf=0.0).round(4).tolist()
        runs.append([names.index(curve.arm), curve.seed, curve.tokens[shown].tolist(), losses])
    return {
        "arms": names,
        "axes": drawing.axes,
        "runs": runs,
        "targets": targets,
        "unit": analysis.plan.unit,
        "labels": [label.format(at, math.exp(at)) for at in targets],
        "own": min(range(len(targets)), key=lambda i: abs(targets[i] - own), default=0),
        "moved": moved,
    }
