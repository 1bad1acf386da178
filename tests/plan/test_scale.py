"""Ten thousand runs plan in seconds: the benchmark times it; the calls counted here catch a blunder."""

from __future__ import annotations

import cProfile
import importlib.util
import pstats
import sys
from pathlib import Path

import pytest

from ablate.plan import build_plan
from ablate.study import load_study

SOURCE = Path(__file__).parents[2] / "benchmarks" / "plan_scale.py"


@pytest.fixture(scope="module")
def benchmark():
    spec = importlib.util.spec_from_file_location("plan_scale", SOURCE)
    module = importlib.util.module_from_spec(spec)
    sys.modules["plan_scale"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.exhaustive
@pytest.mark.parametrize("which", ["named_arms", "grid"])
def test_ten_thousand_runs(benchmark, tmp_path, which):
    path = tmp_path / "study.yaml"
    path.write_text(getattr(benchmark, which)())
    profile = cProfile.Profile()
    plan = profile.runcall(lambda: build_plan(load_study(path), benchmark.identify))
    assert pstats.Stats(profile).total_calls < 600 * 10_000  # about half of it in the grid, fewer with names
    ids = {run.id for _, run in plan.runs()}
    assert len(ids) == 10_000
