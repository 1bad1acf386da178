"""Analysis and report of a study: run store → frames → plain numbers → sentences, figures, pages.

In a notebook ``ablate.open_study`` is the shorter way; this is what it calls::

    from pathlib import Path
    from ablate.reports import analyse, load_frames
    from ablate.store import StudyStore

    analysis = analyse(load_frames(StudyStore(Path("ablate-runs/quickstart"))))
    analysis.arms[1].token_cost
"""

from ablate.reports.findings.analyse import analyse
from ablate.reports.findings.results import Analysis
from ablate.reports.pages.write import ReportPaths, write_report
from ablate.results.frames import load_frames

__all__ = ["Analysis", "ReportPaths", "analyse", "load_frames", "write_report"]
