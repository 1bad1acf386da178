"""The studies are those of the report's tests."""

from __future__ import annotations

import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
# pytest imports test modules one by one (importlib mode): their helpers have to be found.
sys.path[:0] = [str(TESTS / "reports"), str(TESTS / "results")]

from synthetic_study import make_study  # noqa: E402, F401
