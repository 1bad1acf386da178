"""Analysis and report of a study: pure functions on data frames, figures, and the pages made of them.

The way of the data: ``load`` (run store → frames) → ``analyse`` (frames → plain numbers) → ``verdict``
(numbers → sentences) → ``figures`` and ``render`` (→ pictures and pages) → ``write_report`` (→ files).
Nothing before ``load`` knows of files, and nothing after ``analyse`` computes a statistic.

In a notebook::

    from pathlib import Path
    from ablate.reports import analyse, load_frames
    from ablate.store import StudyStore

    analysis = analyse(load_frames(StudyStore(Path("ablate-runs/quickstart"))))
    analysis.arms[1].token_cost
"""

from ablate.reports.findings.analyse import analyse
from ablate.reports.findings.results import Analysis, ArmResult, RunResult
from ablate.reports.pages.write import ReportPaths, write_report
from ablate.reports.read.load import StudyFrames, load_frames
from ablate.reports.statistics.cost import Cost, token_cost
from ablate.run.outcome import Crossing, Outcome, find_crossing

__all__ = [
    "Analysis",
    "ArmResult",
    "Cost",
    "Crossing",
    "Outcome",
    "ReportPaths",
    "RunResult",
    "StudyFrames",
    "analyse",
    "find_crossing",
    "load_frames",
    "token_cost",
    "write_report",
]
