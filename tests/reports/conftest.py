"""Fixtures of the report's tests. The studies themselves are made in ``synthetic_study``."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

# pytest imports test modules one by one (importlib mode): their helpers have to be found.
sys.path.insert(0, str(Path(__file__).parent))

from synthetic_study import Points, build_study, ladder_study, wide_study

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ablate.store import StudyStore


@pytest.fixture
def make_study(tmp_path: Path) -> Callable[..., StudyStore]:
    number = itertools.count()

    def make(curves: Mapping[str, Sequence[Points]], **more: Any) -> StudyStore:
        return build_study(tmp_path / f"storage{next(number)}", curves, **more)

    return make


@pytest.fixture
def ladder(tmp_path: Path) -> StudyStore:
    return ladder_study(tmp_path)


@pytest.fixture
def wide(tmp_path: Path) -> StudyStore:
    return wide_study(tmp_path)
