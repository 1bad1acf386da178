"""Two studies side by side."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner
from scipy.special import stdtrit
from synthetic_study import build_study, line, smooth_curve

from ablate.base.errors import UserError
from ablate.cli import cli
from ablate.reports import analyse, load_frames
from ablate.reports.findings.compare import NOT_TOLD, compare
from ablate.reports.words.compare import compare_table
from ablate.store.plan_file import Settled, StopRule


def study(folder, name, cost, seed, seeds=5, **more):
    rng = np.random.default_rng(seed)
    curves = {
        "bf16": [smooth_curve(rng) for _ in range(seeds)],
        "fp4": [smooth_curve(rng, cost=cost) for _ in range(seeds)],
        f"only in {name}": [smooth_curve(rng) for _ in range(seeds)],
    }
    return build_study(folder, curves, study=name, **more)


def both(left, right):
    frames = (load_frames(left), load_frames(right))
    return compare(analyse(frames[0]), analyse(frames[1]), frames)


def call(*arguments):
    return CliRunner().invoke(cli, ["compare", *map(str, arguments)], catch_exceptions=False)


def test_the_ratio_has_welchs_interval_over_all_four_samples(tmp_path):
    left, right = (
        study(tmp_path, name, cost, seed, intervals="own")
        for name, cost, seed in (("a", 0.05, 1), ("b", 0.2, 2))
    )
    found = both(left, right)
    arm = next(one for one in found.arms if one.name == "fp4")
    logs = [
        np.log([run.tokens_to_target for run in one.runs])
        for store in (left, right)
        for one in analyse(load_frames(store)).arms[:2]
    ]
    a_base, a_arm, b_base, b_arm = logs
    difference = (b_arm.mean() - b_base.mean()) - (a_arm.mean() - a_base.mean())
    variances = np.array([sample.var(ddof=1) / len(sample) for sample in logs])
    degrees = variances.sum() ** 2 / (variances**2 / 4).sum()
    half = stdtrit(degrees, 0.975) * np.sqrt(variances.sum())
    expected = np.expm1([difference, difference - half, difference + half])
    assert [arm.ratio.estimate, arm.ratio.low, arm.ratio.high] == pytest.approx(list(expected))
    assert arm.ratio.low > 0


def test_with_seeds_until_settled_the_intervals_are_repeated_ones(tmp_path):
    rule = StopRule(settled=Settled(looks=(2, 5)))
    left, right = study(tmp_path, "a", 0.05, 1), study(tmp_path, "b", 0.05, 2)
    plain = both(left, right)
    right.write_plan(replace(right.plan(), stop=rule))
    ruled = both(left, right)
    assert "with its 95\u00a0% interval" in compare_table(plain).caption
    assert "with its repeated 95\u00a0% interval" in compare_table(ruled).caption
    widths = [found.arms[0].ratio.high - found.arms[0].ratio.low for found in (plain, ruled)]
    assert widths[0] < widths[1]


def test_a_damaged_run_is_left_out_and_named(tmp_path):
    left, right = study(tmp_path, "a", 0.1, 1), study(tmp_path, "b", 0.1, 1)
    run = right.run(right.plan().arms[1].runs[0].id)
    run.metrics_path.write_bytes(run.metrics_path.read_bytes()[:-40])
    done = call("a", "b", "--storage", tmp_path)
    assert f"Left out: {run.path}: metrics.jsonl: altered or cut since the run ended" in done.stderr
    assert both(left, right).arms[0].right.n < both(left, left).arms[0].right.n


def test_a_study_against_its_like_differs_in_nothing(tmp_path):
    found = both(study(tmp_path, "a", 0.1, 1), study(tmp_path, "b", 0.1, 1))
    assert found.differs == {}
    assert found.arms[0].name == "fp4"
    assert found.arms[0].ratio.estimate == 0.0


def test_a_foreign_model_has_no_width_of_the_built_in_one(tmp_path):
    own = {"function": "mine.py:build", "options": {"width": 64}}
    found = both(study(tmp_path, "a", 0.1, 1, model={"width": 64}), study(tmp_path, "b", 0.1, 1, model=own))
    assert found.differs["model.width"] == ("64", NOT_TOLD)
    assert found.differs["model.function"] == ("null", "mine.py:build")
    other = study(tmp_path, "c", 0.1, 1, model={"hf": "x", "pretrained": True})
    hf = both(other, study(tmp_path, "d", 0.1, 1, model=own))
    assert {key for key in hf.differs if key.startswith("model.")} == {
        "model.hf", "model.pretrained", "model.function", "model.options",
    }  # fmt: skip


def test_runs_that_count_in_both_studies_make_no_ratio(tmp_path):
    same = both(study(tmp_path / "1", "a", 0.1, 1), study(tmp_path / "2", "a", 0.1, 1))
    assert [arm.ratio.note for arm in same.arms] == ["runs in common: the two costs are not independent"] * 2
    assert same.arms[0].left.estimate == same.arms[0].right.estimate
    left, right = study(tmp_path, "a", 0.05, 1), study(tmp_path, "b", 0.2, 2)
    plan, of_left = right.plan(), left.plan().arms[0].runs
    for run in of_left:
        shutil.copytree(left.run(run.id).path, right.run(run.id).path)
    right.write_plan(replace(plan, arms=(replace(plan.arms[0], runs=of_left), *plan.arms[1:])))
    found = both(left, right).arms[0]
    assert (found.name, found.ratio.estimate) == ("fp4", None)
    assert found.right.estimate is not None


def test_paired_studies_are_compared_by_their_differences(tmp_path):
    plain = both(study(tmp_path, "a", 0.05, 1), study(tmp_path, "b", 0.2, 2)).arms[0].ratio
    paired = [study(tmp_path / "p", name, cost, seed, paired_seeds=True)
              for name, cost, seed in (("a", 0.05, 1), ("b", 0.2, 2))]  # fmt: skip
    found = both(*paired).arms[0].ratio
    assert found.estimate == pytest.approx(plain.estimate)
    assert found.high != plain.high


def test_arms_of_one_study_alone_and_arms_without_an_estimate(tmp_path):
    left = study(tmp_path, "a", 0.05, 1)
    right = build_study(tmp_path, {"bf16": [line(3, 2, 1)] * 2, "fp4": [line(3, 2.9, 2.8)] * 2}, study="b")
    found = {arm.name: arm for arm in both(left, right).arms}
    assert found["only in a"].right is None
    assert found["only in a"].ratio.estimate is None
    assert found["fp4"].ratio.estimate is None


def test_on_the_command_line(tmp_path):
    study(tmp_path, "a", 0.05, 1)
    study(tmp_path, "b", 0.2, 2, target={"value": 2.3})
    result = call("a", "b", "--storage", tmp_path, "--out", tmp_path / "out")
    assert result.exit_code == 0
    assert "fp4" in result.output
    assert "target" in result.output.partition("The studies differ in")[2]
    page = (tmp_path / "out" / "compare.html").read_text()
    assert "<svg" in page
    assert "a validation loss of 2.3 nats/token" in page
    assert "| fp4 |" in (tmp_path / "out" / "compare.md").read_text()
    document = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert document["studies"] == ["a", "b"]
    printed = call("a", "b", "--storage", tmp_path, "--json")
    assert json.loads(printed.output) == document


def test_folders_of_other_storages(tmp_path):
    left, right = study(tmp_path / "1", "a", 0.05, 1), study(tmp_path / "2", "a", 0.2, 2)
    result = call(left.path, right.path)
    assert result.exit_code == 0
    with pytest.raises(UserError, match="the same study"):
        call(left.path, left.path)
    with pytest.raises(UserError, match="no study 'zzz'"):
        call(left.path, "zzz", "--storage", tmp_path)
