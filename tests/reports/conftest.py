"""Fixtures of the report's tests. The studies themselves are made in ``synthetic_study``."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

import pytest

# pytest imports test modules one by one (importlib mode): their helpers have to be found.
sys.path.insert(0, str(Path(__file__).parent))

from synthetic_study import build_study, ladder_study, line, make_study, wide_study  # noqa: F401

from ablate.reports import write_report
from ablate.reports.figures import canvas


@pytest.fixture(autouse=True)
def without_png(monkeypatch):
    """Make no PNG: each takes as long as its SVG, and the one test that looks at them undoes this."""
    monkeypatch.setattr(canvas, "to_png", lambda _: b"\x89PNG")


def long_words_study(folder):
    """A study whose names and messages have no place to break; an arm's name would end the page's script."""
    name = (
        "mxfp4_everywhere_with_a_name_that_does_not_break_" * 3
        + "</script><img/src=x/onerror=alert(1)>"
    )
    return build_study(
        folder,
        {"a": [line(3, 2, 1)], name: [line(3, 2, 1.2)]},
        study="a_study_with_a_rather_long_name_that_has_no_space_in_it_at_all",
        states={(name, 0): "diverged"},
        messages={(name, 0): "x" * 300},
        description="y" * 200,
        target={"value": 1.5},
    )


STUDIES = {"ladder": ladder_study, "wide": wide_study, "long_words": long_words_study}


@pytest.fixture(scope="session")
def written(tmp_path_factory):
    """Return the report of a study by name, written once a session: to be read, not to be changed."""

    @cache
    def report(study):
        return write_report(STUDIES[study](tmp_path_factory.mktemp(study)))

    return report


@pytest.fixture
def ladder(tmp_path):
    return ladder_study(tmp_path)
