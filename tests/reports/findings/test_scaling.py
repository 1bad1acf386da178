"""Which losses of studies go into the scaling law, and ``ablate trend`` with it."""

from __future__ import annotations

import csv
import json

import numpy as np
import pytest
from click.testing import CliRunner
from scaling_coverage import Design, simulated
from synthetic_study import build_study

from ablate.base.errors import UserError
from ablate.base.files import read_record, write_record
from ablate.cli import cli
from ablate.reports import analyse, load_frames
from ablate.reports.findings.scaling import FINAL, READ, study_points
from ablate.reports.findings.speed import read_configs
from ablate.reports.statistics import law_fit

WIDTHS = (32, 64, 128)
SIZES = {32: 100_000, 64: 400_000, 128: 1_600_000}
BUDGETS = (400_000, 800_000, 1_200_000)
COSTS = {"bf16": (1.0, 1.0), "fp4": (0.8, 0.9)}


@pytest.fixture(autouse=True)
def few(monkeypatch):
    monkeypatch.setattr(law_fit, "REPLICATES", 200)


def curve(rng, size, arm, *, last, every=50_000):
    eff_n, eff_d = COSTS[arm]
    off = rng.normal(0, 0.003)
    return [
        (at, 1.2 + 60 / (size * eff_n) ** 0.45 + 40 / (at * eff_d) ** 0.35 + off + rng.normal(0, 0.001))
        for at in range(every, last + 1, every)
    ]


def study(folder, width, *, name=None, last=1_000_000, seed=0, short=None, **more):
    """``short``: the tokens at which the last run of fp4 ends."""
    rng = np.random.default_rng(100 * seed + width)
    curves = {arm: [curve(rng, SIZES[width], arm, last=last) for _ in range(3)] for arm in COSTS}
    if short is not None:
        curves["fp4"][2] = curves["fp4"][2][: short // 50_000]
    model = {"width": width, "layers": 2, "heads": 4, "ffn": 2 * width + 64}
    training = {"tokens": last} | more.pop("training", {})
    return build_study(folder, curves, study=name or f"w{width}", model=model, training=training, **more)


def points_of(*stores):
    frames = [load_frames(store) for store in stores]
    configs = [read_configs(frame.configs) for frame in frames]
    sizes = [int(store.path.name.rpartition("w")[2].partition("-")[0]) for store in stores]
    return study_points(sizes, [analyse(frame) for frame in frames], configs, set())


def call(*arguments):
    return CliRunner().invoke(cli, ["trend", *map(str, arguments)], catch_exceptions=False)


def refused(*arguments):
    with pytest.raises(UserError) as caught:
        call(*arguments)
    (problem,) = caught.value.problems
    assert "\n" not in str(problem)
    return str(problem)


def test_at_a_constant_rate_one_budget_is_read_at_five_places(tmp_path):
    points, what, left_out = points_of(*(study(tmp_path, width) for width in WIDTHS))
    assert what == READ
    assert left_out == {}
    assert sorted({one.tokens for one in points}) == [250_000, 350_000, 500_000, 700_000, 1_000_000]
    assert len(points) == 3 * 2 * 3 * 5
    assert len({one.run for one in points}) == 3 * 2 * 3


def test_nothing_is_read_in_the_decay(tmp_path):
    decay = {"schedule": "wsd", "decay_tokens": 200_000}
    points, what, _ = points_of(*(study(tmp_path, width, training=decay) for width in WIDTHS))
    assert what == READ
    assert max(one.tokens for one in points) == 800_000


def test_final_losses_serve_where_there_are_three_sizes_and_budgets(tmp_path):
    cosine = {"schedule": "cosine"}
    stores = [
        study(tmp_path, width, name=f"w{width}-{last}", last=last, seed=last, training=cosine)
        for width in WIDTHS
        for last in (300_000, 600_000, 1_200_000)
    ]
    points, what, _ = points_of(*stores)
    assert what == FINAL
    assert {one.tokens for one in points} == {300_000, 600_000, 1_200_000}
    assert len(points) == 9 * 2 * 3


def test_with_one_budget_a_size_runs_are_read_on_the_way(tmp_path):
    stores = [study(tmp_path, width, last=last) for width, last in zip(WIDTHS, BUDGETS, strict=True)]
    points, what, _ = points_of(*stores)
    assert what == READ
    assert {max(one.tokens for one in points if one.parameters == width) for width in WIDTHS} == set(BUDGETS)
    assert len(points) == 3 * 2 * 3 * 5


def test_a_run_without_a_result_is_not_read(tmp_path):
    stores = [study(tmp_path, width, short=600_000, states={("fp4", 2): "interrupted"}) for width in WIDTHS]
    points, what, _ = points_of(*stores)
    assert what == READ
    assert max(one.tokens for one in points) == 1_000_000
    assert {one.seed for one in points if one.arm == "fp4"} == {0, 1}


def test_a_run_that_did_not_use_its_budget_has_no_final_loss(tmp_path):
    stores = [
        study(tmp_path, width, training={"schedule": "cosine", "tokens": 1_000_000 + 500_000 * (width == 64)})
        for width in WIDTHS
    ]
    points, what, _ = points_of(*stores)
    assert what == FINAL
    assert {one.parameters for one in points} == {32, 128}


def test_losses_of_schedules_of_several_shapes_are_no_one_laws(tmp_path):
    stores = [study(tmp_path, 32, training={"schedule": "cosine"}), study(tmp_path, 64), study(tmp_path, 128)]
    assert "follow schedules of several shapes" in points_of(*stores)


def test_an_arm_with_a_diverged_run_is_left_out_there(tmp_path):
    stores = [study(tmp_path, 32, states={("fp4", 1): "diverged"}), *(study(tmp_path, w) for w in (64, 128))]
    points, _, left_out = points_of(*stores)
    assert left_out == {"fp4 in w32": "1 of 3 runs diverged"}
    assert not [one for one in points if one.arm == "fp4" and one.parameters == 32]


def test_a_seed_that_two_studies_have_at_one_size_and_budget_counts_once(tmp_path):
    points, _, _ = points_of(study(tmp_path, 32), study(tmp_path, 32, name="again-w32"))
    assert len(points) == 2 * 3 * 5


def test_logs_of_others_are_for_a_table(tmp_path):
    stores = [study(tmp_path, 32, imported=True), study(tmp_path, 64)]
    assert "the logs of w32 do not tell its budgets" in points_of(*stores)


def test_the_verb_tells_factors_beside_the_trend(tmp_path):
    for width in WIDTHS:
        study(tmp_path, width, paired_seeds=True)
    names = [f"w{width}" for width in WIDTHS]
    sizes = ",".join(str(SIZES[width]) for width in WIDTHS)
    options = ["--storage", tmp_path, "--parameters", sizes, "--at", "100M,2B"]
    result = call(*names, *options, "--out", tmp_path / "out")
    assert result.exit_code == 0
    assert "Change per" in result.output
    assert "Scaling law: L = " in result.output
    assert "extrapolated, 62.5 times the largest size and 2,000 times the largest budget" in " ".join(
        result.output.split()
    )
    found = json.loads((tmp_path / "out" / "trend.json").read_text())
    assert [one["parameters"] for one in found["studies"]] == list(SIZES.values())
    law = found["scaling"]
    assert law["losses"] == READ
    assert law["paired_seeds"] is True
    (arm,) = law["arms"]
    assert arm["eff_n"]["low"] < 0.8 < arm["eff_n"]["high"]
    assert arm["eff_d"]["low"] < 0.9 < arm["eff_d"]["high"]
    assert law["at"][0]["extrapolated"] is True
    assert law["at"][0]["arms"][1]["name"] == "fp4"
    assert len(law["cells"]) == 30
    page = (tmp_path / "out" / "trend.html").read_text()
    assert ">At 100\u00a0M parameters and 2.00\u00a0B tokens: extrapolated</h3>" in page
    assert 'aria-label="Small charts of loss gaps over training tokens' in page
    text = (tmp_path / "out" / "trend.md").read_text()
    assert "](law.svg)" in text
    assert (tmp_path / "out" / "law.png").read_bytes().startswith(b"\x89PNG")
    turned = call(*names[::-1], "--storage", tmp_path, "--json", "--at", "100M,2B", "--parameters",
                  ",".join(sizes.split(",")[::-1]))  # fmt: skip
    assert json.loads(turned.output) == found


def test_studies_of_one_size_and_several_budgets_have_a_law_over_tokens(tmp_path):
    study(tmp_path, 64)
    study(tmp_path, 64, name="long", last=2_000_000, seed=1)
    result = call("w64", "long", "--storage", tmp_path)
    assert "Change per" not in result.output
    assert (
        "It is over tokens alone, and its factor stands for all that an arm costs: eff_N needs losses"
        in result.output
    )
    document = json.loads(call("w64", "long", "--storage", tmp_path, "--json").output)
    assert list(document) == ["scaling"]
    assert "--at: these losses cannot carry a law over sizes and budgets: eff_N needs" in refused(
        "w64", "long", "--storage", tmp_path, "--at", "1B,2B"
    )


def test_studies_without_a_target_have_a_law_and_no_trend(tmp_path):
    stores = [study(tmp_path, width) for width in WIDTHS]
    stores += [
        study(tmp_path, width, name=f"c{width}", training={"schedule": "cosine"}) for width in WIDTHS[:2]
    ]
    for store in stores:
        write_record(store.plan_path, read_record(store.plan_path) | {"target": None})
    names = [f"w{width}" for width in WIDTHS]
    result = call(*names, "--storage", tmp_path)
    assert "No trend: the studies have no target (to read them at one place: --after" in result.stderr
    assert result.stdout.startswith("Scaling law: L = ")
    assert list(json.loads(call(*names, "--storage", tmp_path, "--json").stdout)) == ["scaling"]
    assert "Change per" in call(*names, "--storage", tmp_path, "--after", "500_000").stdout
    assert "no trend: the studies have no target" in refused("c32", "c64", "--storage", tmp_path)


def test_without_a_law_the_trend_says_what_is_missing(tmp_path):
    for width in WIDTHS[:2]:
        study(tmp_path, width, training={"schedule": "cosine"})
    result = call("w32", "w64", "--storage", tmp_path, "--out", tmp_path / "out")
    assert "law.svg" not in (tmp_path / "out" / "trend.md").read_text()
    assert "No scaling law: eff_N needs" in (tmp_path / "out" / "trend.html").read_text()
    assert (
        "No scaling law: eff_N needs losses at 3 sizes at least, and the baseline has 2 sizes"
        in result.output
    )
    document = json.loads(call("w32", "w64", "--storage", tmp_path, "--json").output)
    assert "eff_D needs losses at 3 budgets" in document["scaling"]["why_not"]


def test_logs_of_others_have_a_trend_at_sizes_that_the_user_names(tmp_path):
    for width in WIDTHS:
        study(tmp_path, width, imported=True)
    names = [f"w{width}" for width in WIDTHS]
    result = call(*names, "--storage", tmp_path, "--parameters", "100k,0.4M,1_600_000")
    assert "(0.1\u00a0M)" in result.output
    assert "No scaling law: the logs of w32" in result.output
    assert "expected 3 numbers, one a study in the order named, got 2" in refused(
        *names, "--storage", tmp_path, "--parameters", "1M,2M"
    )


def losses(folder, design=None, **changes):
    design = design or Design(seeds=2)
    rows = [vars(one) for one in simulated(design, np.random.default_rng(1))]
    path = folder / "sweep.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("arm", "parameters", "tokens", "seed", "val_loss"))
        for own in rows:
            row = own | {key: change(own) for key, change in changes.items()}
            writer.writerow([row[name] for name in ("arm", "parameters", "tokens", "seed", "loss")])
    return path


def test_a_table_of_final_losses_gets_the_law_alone(tmp_path):
    result = call("--losses", losses(tmp_path), "--baseline", "bf16", "--paired", "--out", tmp_path / "out")
    assert result.exit_code == 0
    assert "of 96 runs: final losses in sweep.csv" in result.output
    assert "mean over 16 sizes × budgets of the same weight, its interval over pairs" in " ".join(
        result.output.split()
    )
    page = (tmp_path / "out" / "trend.html").read_text()
    assert "Losses over sizes and budgets" in page
    assert '<a class="skip" href="#law">' in page
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "law.png", "law.svg", "trend.html", "trend.json", "trend.md",
    ]  # fmt: skip


def test_a_baseline_alone_has_a_law_and_no_table_of_factors(tmp_path):
    path = losses(tmp_path)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([lines[0], *(line for line in lines if line.startswith("bf16"))]))
    result = call("--losses", path, "--baseline", "bf16", "--out", tmp_path / "out", "--at", "240M,4.8B")
    assert "Loss gap: " not in result.output
    assert "within the sizes and budgets seen" in " ".join(result.output.split())
    assert json.loads((tmp_path / "out" / "trend.json").read_text())["scaling"]["arms"] == []


def test_the_report_names_the_arms_whose_gaps_are_not_the_laws(tmp_path):
    grows = losses(tmp_path, loss=lambda row: row["loss"] + 3e-11 * row["tokens"] * (row["arm"] == "less"))
    text = " ".join(call("--losses", grows, "--baseline", "bf16", "--at", "1B,20B").output.split())
    assert "The factors do not tell where these arms cost more and where less" in text
    assert "Of less do not believe it: the law misses their gaps." in text
    plain = call("--losses", losses(tmp_path), "--baseline", "bf16").output
    assert "do not tell where" not in plain


def test_what_cannot_be_asked_of_a_table_is_refused(tmp_path):
    path = losses(tmp_path)
    table = ("--losses", path)
    assert "which arm is the baseline" in refused(*table)
    assert "no arm 'fp8' in sweep.csv (arms: bf16, smaller, less)" in refused(*table, "--baseline", "fp8")
    assert "STUDY has no meaning beside it" in refused("w32", *table, "--baseline", "bf16")
    assert "--after has no meaning" in refused(*table, "--baseline", "bf16", "--after", "100")
    assert "--storage has no meaning" in refused(*table, "--baseline", "bf16", "--storage", tmp_path)
    assert "--parameters has no meaning" in refused(*table, "--baseline", "bf16", "--parameters", "1M")
    assert "--at: '8B' is no size and budget" in refused(*table, "--baseline", "bf16", "--at", "8B")
    assert "--at: 'x' is no count" in refused(*table, "--baseline", "bf16", "--at", "8B,x")
    few = losses(tmp_path, Design(seeds=1, sizes=(10**8,), budgets=(10**9, 2 * 10**9)))
    assert "no scaling law: eff_N needs losses" in refused("--losses", few, "--baseline", "bf16")
    assert "--at: these losses cannot carry a law" in refused(
        "--losses", few, "--baseline", "bf16", "--at", "8B,160B"
    )
    assert "expected two studies at least, or --losses" in refused("--storage", tmp_path)
    study(tmp_path, 32)
    study(tmp_path, 64)
    assert "--paired is for --losses" in refused("w32", "w64", "--paired", "--storage", tmp_path)
