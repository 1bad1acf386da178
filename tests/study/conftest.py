from __future__ import annotations

import os

import pytest

from ablate.base.errors import UserError
from ablate.study import load_study


@pytest.fixture
def study(tmp_path, monkeypatch):
    """Write a study file's text and load it."""
    monkeypatch.chdir(tmp_path)

    def load(text: str | bytes):
        path = tmp_path / "study.yaml"
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return load_study("study.yaml")

    return load


@pytest.fixture
def problems(study):
    """Load a study file's text, which must fail, and return its lines without the file's name."""

    def lines(text: str | bytes) -> list[str]:
        with pytest.raises(UserError) as caught:
            study(text)
        shown = [str(problem) for problem in caught.value.problems]
        assert all(line.startswith("study.yaml:") for line in shown)
        assert not any(os.linesep in line for line in shown)
        return [line.removeprefix("study.yaml:").lstrip() for line in shown]

    return lines
