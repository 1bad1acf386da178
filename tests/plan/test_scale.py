"""Ten thousand runs plan in seconds: the benchmark times it; the calls counted here catch a blunder."""

import cProfile
import pstats

import pytest

from ablate.plan import build_plan
from ablate.study import load_study
from tests.benchmark import load_benchmark


@pytest.mark.exhaustive
@pytest.mark.parametrize("which", ["named_arms", "grid"])
def test_ten_thousand_runs(tmp_path, which):
    benchmark = load_benchmark("plan_scale")
    path = tmp_path / "study.yaml"
    path.write_text(getattr(benchmark, which)())
    profile = cProfile.Profile()
    plan = profile.runcall(lambda: build_plan(load_study(path), benchmark.identify))
    # about half of it in the grid, fewer with names
    assert pstats.Stats(profile).total_calls < 600 * 10_000
    ids = {run.id for _, run in plan.runs()}
    assert len(ids) == 10_000
