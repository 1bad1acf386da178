"""Ten thousand runs plan in seconds. The benchmark holds the target; this bound only catches a blunder."""

from __future__ import annotations

import importlib.util
import sys
import time
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


@pytest.mark.parametrize("which", ["named_arms", "grid"])
def test_ten_thousand_runs(benchmark, tmp_path, which):
    path = tmp_path / "study.yaml"
    path.write_text(getattr(benchmark, which)())
    start = time.process_time()
    plan = build_plan(load_study(path), benchmark.identify)
    assert time.process_time() - start < 2
    ids = {run.id for _, run in plan.runs()}
    assert len(ids) == 10_000
