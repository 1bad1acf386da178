"""Token cost and loss gap over the size of the model or the budget, of studies that are alike but for it."""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict, replace

import numpy as np
import pytest
from click.testing import CliRunner
from scipy import stats
from synthetic_study import build_study, line, rewrite, smooth_curve

from ablate.base.errors import UserError
from ablate.cli import cli
from ablate.recipes import PRESETS
from ablate.reports import analyse, load_frames
from ablate.reports.figures.panels import draw_trend
from ablate.reports.findings.trend import _line, trend
from ablate.reports.read.rebase import read_against, target_after
from ablate.reports.words.compare import differences_text, trend_sentences, trend_tables
from ablate.results.intervals import difference, mean_estimate
from ablate.store import RunDir
from ablate.store.plan_file import Settled, StopRule

WIDTHS = (32, 64, 128)


def model(width):
    return {"width": width, "layers": 2, "heads": 4, "ffn": 2 * width + 64}


def parameters(width):
    """Count two blocks of 4 w² in the attention and 3 f w beside it, 5 norms of w, 256 w embedded."""
    return 2 * (4 * width**2 + 3 * (2 * width + 64) * width) + 5 * width + 256 * width


def study(folder, width, costs, *, seed=0, seeds=5, **more):
    """A study at that width, with a curve for each seed of the baseline and of the arms with these costs."""
    rng = np.random.default_rng(1000 * seed + width)
    curves = {
        name: [smooth_curve(rng, cost=cost) for _ in range(seeds)]
        for name, cost in ({"bf16": 0.0} | costs).items()
    }
    return build_study(folder, curves, **({"study": f"w{width}", "model": model(width)} | more))


def of(*stores):
    frames = [load_frames(store) for store in stores]
    return trend([analyse(frame) for frame in frames], frames)


def costs_of(found):
    return dict(trend_tables(found))["Token cost"]


def call(*arguments, columns=80):
    runner = CliRunner(env={"COLUMNS": str(columns)})
    return runner.invoke(cli, ["compare", *map(str, arguments)], catch_exceptions=False)


def refused(*arguments):
    return refusal(lambda: call(*arguments))


def refusal(ask):
    with pytest.raises(UserError) as caught:
        ask()
    (problem,) = caught.value.problems
    assert "\n" not in str(problem)
    return str(problem)


def falling(folder, **more):
    """A cost that falls with size, one that does not, and their studies."""
    return [
        study(folder, width, {"steep": cost, "flat": 0.05}, **more)
        for width, cost in zip(WIDTHS, (0.30, 0.20, 0.10), strict=True)
    ]


def test_the_slope_and_its_interval_are_those_reckoned_by_hand(tmp_path):
    stores = falling(tmp_path, intervals="own")
    values, variances, degrees = [], [], []
    for store in stores:
        base, steep, _ = (
            np.log([run.tokens_to_target for run in arm.runs]) for arm in analyse(load_frames(store)).arms
        )
        values.append(steep.mean() - base.mean())
        variances.append([sample.var(ddof=1) / 5 for sample in (steep, base)])
        degrees.append([4, 4])
    x = np.log10([parameters(width) for width in WIDTHS])
    weights = (x - x.mean()) / ((x - x.mean()) ** 2).sum()
    parts = weights[:, None] ** 2 * np.array(variances)
    satterthwaite = parts.sum() ** 2 / (parts**2 / degrees).sum()
    slope = np.polynomial.polynomial.polyfit(x, values, 1)[1]
    low, high = stats.t.interval(0.95, satterthwaite, loc=slope, scale=math.sqrt(parts.sum()))
    arm = of(*stores).arms[0]
    found = arm.cost.change
    assert arm.name == "steep"
    assert [found.estimate, found.low, found.high] == pytest.approx(list(np.expm1([slope, low, high])))
    assert found.high < 0
    assert arm.cost.intercept + arm.cost.slope * x.mean() == pytest.approx(np.mean(values))


def test_loss_gaps_have_a_line_of_their_own_without_a_target_too(tmp_path):
    stores = falling(tmp_path, intervals="own")
    for store in stores:
        store.write_plan(replace(store.plan(), target=None))
    gaps, variances = [], []
    for store in stores:
        curves = analyse(load_frames(store)).curves
        base, steep = (
            np.array([one.loss[-1] for one in curves if one.arm == name]) for name in ("bf16", "steep")
        )
        gaps.append(steep.mean() - base.mean())
        variances.append(steep.var(ddof=1) / 5 + base.var(ddof=1) / 5)
    x = np.log10([parameters(width) for width in WIDTHS])
    weights = (x - x.mean()) / ((x - x.mean()) ** 2).sum()
    found = of(*stores)
    ((title, table),) = trend_tables(found)
    assert title == "Loss gap"
    change = found.arms[0].gap.change
    assert change.estimate == pytest.approx(weights @ gaps)
    assert change.high - change.low > 2 * 1.96 * math.sqrt(weights**2 @ variances)
    assert table.rows[0][0] == "steep"
    assert any(
        text.startswith("steep: its loss gap shrinks with size: it changes by −")
        for text in trend_sentences(found)
    )


def test_studies_of_one_size_are_set_over_their_budgets(tmp_path):
    stores = [
        study(
            tmp_path,
            64,
            {"fp4": cost},
            study=f"b{tokens}",
            training={"tokens": tokens, "schedule": "cosine"},
            seed=tokens,
        )
        for tokens, cost in ((1_000_000, 0.1), (2_000_000, 0.2), (4_000_000, 0.4))
    ]
    found = of(*stores)
    assert found.axis == "tokens"
    assert found.places == (1_000_000, 2_000_000, 4_000_000)
    assert found.differs == {}
    assert any(text.startswith("fp4: its token cost grows with budget: ") for text in trend_sentences(found))
    assert costs_of(found).columns[1] == "b1000000 (1\u00a0M)"


def test_studies_stand_by_size_whatever_the_order_of_their_names(tmp_path):
    stores = falling(tmp_path)
    found, turned = of(*stores), of(*stores[::-1])
    assert [one.parameters for one in found.studies] == [parameters(width) for width in WIDTHS]
    assert turned.studies == found.studies
    assert turned.arms == found.arms


def test_what_is_settled_is_said_of_each_arm_and_the_rest_in_one_sentence(tmp_path):
    found = of(*falling(tmp_path))
    first, *rest = trend_sentences(found)
    assert re.match(r"steep: its token cost shrinks with size: .* changes by −\d+(\.\d)?\u00a0% \[−", first)
    assert "over 3 studies from 41.1\u00a0k to 410\u00a0k" in first
    assert next(one for one in rest if "flat" in one).startswith("Inconclusive, for the interval holds zero")
    grown = of(*(study(tmp_path / "g", w, {"up": c}) for w, c in zip(WIDTHS, (0.05, 0.2, 0.4), strict=True)))
    assert next(trend_sentences(grown)).startswith("up: its token cost grows with size")


@pytest.mark.parametrize("places", [(10**5, 10**6, 10**7), (10**5, 2 * 10**5, 10**8)])
@pytest.mark.parametrize("spreads", [(0.01, 0.01, 0.01), (0.04, 0.01, 0.005), (0.005, 0.01, 0.06)])
def test_the_interval_holds_the_truth_as_often_as_it_says(places, spreads):
    rng = np.random.default_rng(5)
    slope, repeats, held = -0.04, 2000, 0
    for _ in range(repeats):
        results = []
        for size, spread in zip(places, spreads, strict=True):
            arm = rng.normal(0.5 + slope * math.log10(size), spread, 5)
            base = rng.normal(0.0, 0.01, 5)
            log_ratio = difference(mean_estimate(arm), mean_estimate(base))
            results.append(log_ratio)
        found = _line([], results, places, 0.05).change
        held += found.low <= slope <= found.high
    # By Satterthwaite's way it is 94.5 to 95.5 % here; the normal quantile would hold it in 89 to 93 %.
    error = 3 * math.sqrt(0.05 * 0.95 / repeats)
    assert 0.945 - error <= held / repeats <= 0.955 + error


def test_one_study_alone_and_the_same_one_twice_are_refused(tmp_path):
    store = study(tmp_path, 32, {"fp4": 0.1})
    assert "name two studies at least" in refused("w32", "--storage", tmp_path)
    assert "the same study" in refused("w32", "w32", "--storage", tmp_path)
    assert "the same study" in refused("w32", store.path, "--storage", tmp_path)
    assert "no study 'zzz'" in refused("w32", "zzz", "--storage", tmp_path)


def test_a_folder_that_cannot_be_written_is_said(tmp_path):
    falling(tmp_path)
    (tmp_path / "file").touch()
    text = refused("w32", "w64", "--storage", tmp_path, "--out", tmp_path / "file" / "out")
    assert text.startswith("--out: cannot write ")


def test_studies_of_one_size_and_budget_have_no_trend(tmp_path):
    for name in ("a", "b", "c"):
        study(tmp_path, 64, {"fp4": 0.1}, study=name, training={"schedule": "cosine"})
    text = refused("a", "b", "c", "--storage", tmp_path)
    assert "models of 123,200 parameters and a budget of 1,000,000 tokens" in text
    assert "ablate compare A B" in text


def test_without_an_arm_in_common_there_is_no_trend(tmp_path):
    stores = [study(tmp_path, width, {f"arm {width}": 0.1}) for width in WIDTHS[:2]]
    assert "arm 32: in one study only; arm 64: in one study only" in refusal(lambda: of(*stores))
    alone = [study(tmp_path / "alone", width, {}) for width in WIDTHS[:2]]
    assert "a baseline alone" in refusal(lambda: of(*alone))


@pytest.mark.parametrize("model", [None, {"hf": "gpt2"}, {"function": "mine.py:model"}], ids=str)
def test_a_size_that_the_files_do_not_tell_is_refused(tmp_path, model):
    stores = [study(tmp_path, 32, {"fp4": 0.1}), study(tmp_path, 64, {"fp4": 0.1}, study="odd", model=model)]
    assert refusal(lambda: of(*stores)).startswith("odd: the size of its model is not known")


def test_the_size_of_a_model_that_another_trainer_builds_is_not_known(tmp_path):
    trained = study(tmp_path, 64, {"fp4": 0.1}, study="trained")
    for path in trained.path.glob("runs/*"):
        run = RunDir(path)
        rewrite(run, run.config_path, trainer="mine.py:train")
    text = refusal(lambda: of(trained, study(tmp_path, 32, {"fp4": 0.1})))
    assert text.startswith("trained: the size of its model is not known")


def test_studies_that_share_runs_are_not_independent(tmp_path):
    small, large, _ = falling(tmp_path)
    again = study(tmp_path, 64, {"steep": 0.1}, study="again")
    plan = again.plan()
    runs = large.plan().arms[0].runs
    for run in runs:
        source, target = large.run(run.id).path, again.run(run.id).path
        target.mkdir(parents=True)
        for path in source.iterdir():
            if path.is_file():
                (target / path.name).write_bytes(path.read_bytes())
    again.write_plan(replace(plan, arms=(replace(plan.arms[0], runs=runs), *plan.arms[1:])))
    with pytest.raises(UserError, match="w64 and again have runs in common"):
        of(small, large, again)


def test_what_else_differs_is_named_and_not_refused(tmp_path):
    stores = [
        study(
            tmp_path,
            width,
            {"fp4": 0.1},
            target={"value": target},
            training={"tokens": tokens},
            own_training={"fp4": {"learning_rate": rate}},
            recipes={"fp4": preset},
            resolved={"fp4": asdict(PRESETS[preset].recipe)},
        )
        for width, target, tokens, rate, preset in (
            (32, 2.2, 1_000_000, 0.004, "amd-fdw"),
            (64, 2.1, 2_000_000, 0.008, "amd-fdw-sr"),
        )
    ]
    found = of(*stores)
    targets, more = differences_text(found)
    assert targets == (
        "Targets: w32: a validation loss of 2.2 nats/token; w64: a validation loss of 2.1 nats/token."
    )
    # The arm's own budget differs as the baseline's does, and is not named again.
    assert more == (
        "The studies differ in more than the model: training.tokens 1,000,000 / 2,000,000; "
        "fp4: training.learning_rate 0.004 / 0.008; fp4: recipe amd-fdw / amd-fdw-sr."
    )


def test_studies_that_differ_in_the_model_alone_have_nothing_named(tmp_path):
    found = of(*falling(tmp_path))
    assert found.differs == {}
    assert differences_text(found)[0].startswith("Targets: w32: a validation loss of 2.2 nats/token;")


def test_an_arm_that_one_study_lacks_has_the_line_of_the_others(tmp_path):
    costs = ({"fp4": 0.3, "late": 0.1}, {"fp4": 0.2}, {"fp4": 0.1, "late": 0.2})
    found = of(*(study(tmp_path, width, each) for width, each in zip(WIDTHS, costs, strict=True)))
    late = {arm.name: arm for arm in found.arms}["late"]
    assert late.cost.points[1] is None
    ends = [late.cost.points[i].log_ratio.value for i in (0, 2)]
    slope = (ends[1] - ends[0]) / math.log10(parameters(128) / parameters(32))
    assert late.cost.change.estimate == pytest.approx(math.expm1(slope))
    assert next(row for row in costs_of(found).rows if row[0] == "late")[2] == "–"
    assert any(text.startswith("late: ") and "over 2 studies" in text for text in trend_sentences(found))


def test_arms_without_a_line_are_left_out_with_the_reason(tmp_path):
    costs = {"fp4": 0.1, "wide": 0.0, "never": 0.1, "once": 0.1}
    stores = []
    for width in WIDTHS[:2]:
        rng = np.random.default_rng(width)
        curves = {name: [smooth_curve(rng, cost=c) for _ in range(3)] for name, c in costs.items()}
        curves["never"] = [line(3.0, 2.9, 2.8, every=50_000)] * 3
        if width == 64:
            curves["once"] = curves["never"]
            curves["one"] = curves["fp4"]
        curves = {"bf16": [smooth_curve(rng) for _ in range(3)]} | curves
        fields = {"model": model(width), "own_model": {"wide": {"ffn": 512}}}
        stores.append(build_study(tmp_path, curves, study=f"w{width}", **fields))
    found = of(*stores)
    assert [arm.name for arm in found.arms if arm.cost is not None] == ["fp4"]
    assert [arm.name for arm in found.arms if arm.gap is not None] == ["fp4", "never", "once"]
    assert found.left_out == {
        "wide": "it changes the model itself",
        "one": "in one study only",
    }
    assert any(
        text.startswith("Left out: wide (it changes the model itself), ") for text in trend_sentences(found)
    )


def test_two_studies_of_one_size_among_others(tmp_path):
    both = {"fp4": 0.2, "here": 0.1}
    stores = [
        study(tmp_path, 32, both),
        study(tmp_path, 32, both, study="again", seed=3),
        study(tmp_path, 128, {"fp4": 0.1}),
    ]
    found = of(*stores)
    assert len(found.arms[0].cost.points) == 3
    assert found.left_out == {"here": "it has not two estimates at two places"}
    assert any(text.startswith("There are two sizes alone") for text in trend_sentences(found))


def test_a_span_below_a_tenfold_is_said(tmp_path):
    stores = falling(tmp_path)
    assert "The sizes span a factor of 9.98: a tenfold lies beyond them." in trend_sentences(of(*stores))
    wider = study(tmp_path, 256, {"steep": 0.1, "flat": 0.05})
    assert not any("span" in text for text in trend_sentences(of(*stores, wider)))


def test_one_seed_gives_a_line_without_an_interval(tmp_path):
    found = of(*falling(tmp_path, seeds=1))
    change = found.arms[0].cost.change
    assert change.estimate < 0
    assert (change.low, change.high) == (None, None)
    assert any(
        text.startswith("No interval: token cost of steep (n = 1: no interval), ")
        for text in trend_sentences(found)
    )


def test_with_seeds_until_settled_the_intervals_are_repeated_ones(tmp_path):
    rule = StopRule(settled=Settled(looks=(2, 5)))
    stores = falling(tmp_path)
    plain = of(*stores)
    stores[1].write_plan(replace(stores[1].plan(), stop=rule))
    ruled = of(*stores)
    assert "Brackets: 95\u00a0%" in costs_of(plain).caption
    assert "Brackets: repeated 95\u00a0%" in costs_of(ruled).caption
    widths = [found.arms[0].cost.change.high - found.arms[0].cost.change.low for found in (plain, ruled)]
    assert widths[0] < widths[1]


@pytest.mark.exhaustive
def test_on_the_command_line(tmp_path):
    falling(tmp_path)
    names = [f"w{width}" for width in WIDTHS]
    result = call(*names[::-1], "--storage", tmp_path, "--out", tmp_path / "out")
    assert result.exit_code == 0
    pages, _, rest = result.output.partition("Arm ")
    table = ("Arm " + rest).split("\n\n")[0].splitlines()
    assert [path.rsplit("/", 1)[1] for path in pages.split()] == [
        "compare.json",
        "compare.md",
        "compare.html",
    ]
    assert max(map(len, table)) <= 80
    assert re.search(r"w32 .*w64 .*w128 .*Change per", table[0])
    assert "(41.1\u00a0k)" in table[0]
    assert "steep: its token cost shrinks with size" in result.output
    document = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert [one["name"] for one in document["studies"]] == names
    assert [one["parameters"] for one in document["studies"]] == [parameters(width) for width in WIDTHS]
    assert document["arms"][0]["token_cost"]["per_tenfold"]["high"] < 0
    assert json.loads(call(*names, "--storage", tmp_path, "--json").output) == document


@pytest.mark.exhaustive
def test_costs_over_another_arm_than_the_baseline(tmp_path):
    own = of(*falling(tmp_path))
    names = [f"w{width}" for width in WIDTHS]
    told = call(*names, "--storage", tmp_path, "--baseline", "flat", "--out", tmp_path / "out")
    other = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert [one["baseline"] for one in other["studies"]] == ["flat"] * 3
    assert [arm["name"] for arm in other["arms"]] == ["bf16", "steep"]
    steep, flat = own.arms
    assert (steep.name, flat.name) == ("steep", "flat")
    for i in range(3):
        ratio = (1 + steep.cost.points[i].estimate) / (1 + flat.cost.points[i].estimate) - 1
        assert other["arms"][1]["token_cost"]["points"][i]["estimate"] == pytest.approx(ratio)
    assert "over flat in each study" in " ".join(told.output.split())
    assert "no arm 'stepe' in study 'w32'" in refused(*names, "--storage", tmp_path, "--baseline", "stepe")


def test_studies_are_read_where_their_baselines_have_come_to(tmp_path):
    stores = falling(tmp_path)
    names = [f"w{width}" for width in WIDTHS]
    read = call(*names, "--storage", tmp_path, "--json", "--after", "400_000", "--baseline", "flat")
    found = json.loads(read.output)
    for store, one in zip(stores, found["studies"], strict=True):
        frames = load_frames(store)
        value = target_after(frames, 400_000)
        assert value != frames.plan.target.value
        assert one["target"].replace("\u00a0", " ") == f"a validation loss of {value:g} nats/token"
    assert "tokens is outside what 'bf16'" in refused(*names, "--storage", tmp_path, "--after", "1")


def test_baselines_of_several_names_are_named_for_each_study(tmp_path):
    stores = falling(tmp_path)
    frames = [load_frames(store) for store in stores]
    frames[0] = read_against(frames[0], baseline="flat")
    found = trend([analyse(frame) for frame in frames], frames)
    assert found.against == "the study's own baseline"
    assert [study.baseline for study in found.studies] == ["flat", "bf16", "bf16"]
    assert "baseline" in found.differs


@pytest.mark.exhaustive
def test_the_pages_hold_the_figure_and_say_what_it_shows(tmp_path):
    falling(tmp_path)
    call(*(f"w{width}" for width in WIDTHS), "--storage", tmp_path, "--out", tmp_path / "out")
    page = (tmp_path / "out" / "compare.html").read_text()
    assert "Content-Security-Policy" in page
    assert '<a class="skip" href="#arms">' in page
    assert re.search(r'<svg [^>]*role="img" aria-label="Small charts of token cost[^"]*steep: \+\d', page)
    assert "shrinks with size" in page
    text = (tmp_path / "out" / "compare.md").read_text()
    assert "](trend.svg)" in text
    assert "| steep |" in text
    assert (tmp_path / "out" / "trend.png").read_bytes().startswith(b"\x89PNG")
    svg = (tmp_path / "out" / "trend.svg").read_text()
    assert "41.1\u00a0k" in svg
    assert ">parameters<" in svg


def test_the_caption_tells_the_seeds(tmp_path):
    found = of(*falling(tmp_path))
    drawing = draw_trend(found)
    assert "n\u00a0=\u00a05 a point" in drawing.caption
    assert draw_trend(found).svg == drawing.svg


def test_folders_of_other_storages(tmp_path):
    stores = [
        study(tmp_path / str(width), width, {"fp4": cost}, study="same")
        for width, cost in ((32, 0.3), (64, 0.2), (128, 0.1))
    ]
    result = call(*(store.path for store in stores), "--json")
    names = [one["name"] for one in json.loads(result.output)["studies"]]
    assert names == [str(store.path) for store in stores]
