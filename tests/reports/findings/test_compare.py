"""Studies side by side: two of them, and several over the size of the model or the budget."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import asdict, replace

import numpy as np
import pytest
from click.testing import CliRunner
from scipy import stats
from synthetic_study import build_study, line, rewrite, smooth_curve
from texts import check_words

from ablate.base.errors import UserError
from ablate.cli import cli
from ablate.recipes import PRESETS
from ablate.reports import analyse, load_frames
from ablate.reports.figures.panels import draw_comparison
from ablate.reports.findings.compare import NOT_TOLD, compare, line_through
from ablate.reports.read.rebase import target_after
from ablate.reports.words.compare import comparison_sentences, line_tables, study_tables
from ablate.results.intervals import (
    NO_SPREAD,
    difference,
    exponential,
    mean_estimate,
    t_interval,
)
from ablate.results.losses import LossDifference
from ablate.store.plan_file import Settled, StopRule

WIDTHS = (32, 64, 128)
FP4 = {"fp4": 0.1}
RULE = StopRule(settled=Settled(looks=(2, 5)))


def study(folder, name, costs=FP4, seed=0, seeds=2, **more):
    """A study with a curve for each seed of the baseline and of the arms with these costs."""
    rng = np.random.default_rng(seed)
    curves = {}
    for arm, cost in ({"bf16": 0.0} | costs).items():
        curves[arm] = [smooth_curve(rng, cost=cost) for _ in range(seeds)]
    return build_study(folder, curves, study=name, **more)


def model(width):
    return {"width": width, "layers": 2, "heads": 4, "ffn": 2 * width + 64}


def sized(folder, width, costs=FP4, **more):
    usual = {"name": f"w{width}", "seed": width, "model": model(width)}
    return study(folder, costs=costs, **usual | more)


def falling(folder, seeds=5):
    """A cost that falls with size, one that does not, and their studies."""
    costs = zip(WIDTHS, (0.30, 0.20, 0.10), strict=True)
    return [
        sized(folder, width, {"steep": cost, "flat": 0.05}, seeds=seeds)
        for width, cost in costs
    ]


def compared(*stores, **plan):
    """Compare studies; ``plan``: what is changed in the plan of each."""
    frames = []
    for store in stores:
        frame = load_frames(store)
        frames.append(replace(frame, plan=replace(frame.plan, **plan)))
    return compare([analyse(frame) for frame in frames], frames)


def call(*arguments):
    return CliRunner(env={"COLUMNS": "80"}).invoke(
        cli, ["compare", *map(str, arguments)], catch_exceptions=False
    )


def said_of(found):
    lines = []
    for table in (*line_tables(found), *study_tables(found)):
        rows = (table.columns, *table.rows, [table.caption])
        lines += [" | ".join(row) for row in rows]
    return [*lines, *comparison_sentences(found)]


def refusal(ask):
    with pytest.raises(UserError) as caught:
        ask()
    (problem,) = caught.value.problems
    assert "\n" not in str(problem)
    return str(problem)


# ---- two -------------------------------------------------------------------------------------------------


def test_of_two_studies_the_change_is_that_of_their_ratio_with_the_errors_of_both(
    tmp_path,
):
    left = study(tmp_path, "a", {"fp4": 0.05, "only here": 0.0}, 1, 5)
    right = study(tmp_path, "b", {"fp4": 0.2}, 2, 5)
    found = compared(left, right)
    a, b = found.arms[0].token_cost.points
    ratio = found.arms[0].token_cost.change
    assert ratio.estimate == pytest.approx((1 + b.estimate) / (1 + a.estimate) - 1)
    assert ratio == exponential(t_interval(difference(b.figure, a.figure)), minus=1.0)
    assert found.left_out == {"only here": "in one study only"}
    never = build_study(
        tmp_path,
        {"bf16": [line(3, 2, 1)] * 2, "fp4": [line(3, 2.9, 2.8)] * 2},
        study="c",
    )
    check_words("an arm that does not reach one target", said_of(compared(left, never)))


def test_with_seeds_until_settled_intervals_are_repeated_ones(tmp_path):
    stores = falling(tmp_path)[:2]
    stores[1].write_plan(replace(stores[1].plan(), stop=RULE))
    check_words("two studies, one with looks", said_of(compared(*stores)))


def test_an_arm_whose_recipe_of_one_name_was_another_is_named(tmp_path):
    """As of two versions of ``ablate``, whose presets differ."""
    recipes = [asdict(PRESETS[name].recipe) for name in ("amd-fdw", "amd-fdw-sr")]
    stores = [
        study(tmp_path, f"s{i}", resolved={"fp4": recipe})
        for i, recipe in enumerate(recipes)
    ]
    texts = tuple(json.dumps(recipe, sort_keys=True) for recipe in recipes)
    assert compared(*stores).differs == {"fp4: recipe": texts}


def test_of_foreign_models_only_what_makes_them_is_compared(tmp_path):
    built = study(tmp_path, "built", model={"width": 64})
    function = {"function": "mine.py:build", "options": {"width": 64}}
    own = study(tmp_path, "own", model=function)
    foreign = compared(built, own).differs
    # a foreign model has no width of the built-in one
    assert foreign["model.width"] == ("64", NOT_TOLD)
    assert foreign["model.function"] == ("null", "mine.py:build")
    hf = study(tmp_path, "hf", model={"hf": "x", "pretrained": True})
    assert set(compared(hf, own).differs) == {
        "model.hf", "model.pretrained", "model.function", "model.options",
    }  # fmt: skip


@pytest.mark.parametrize("shared", [0, 1], ids=["the baseline's", "the arm's"])
def test_an_arm_with_runs_in_two_of_the_studies_has_no_line(tmp_path, shared):
    costs = {"fp4": 0.05, "other": 0.2}
    left, right = (sized(tmp_path, width, costs) for width in (32, 64))
    arms = list(right.plan().arms)
    arms[shared] = left.plan().arms[shared]
    for run in arms[shared].runs:
        shutil.copytree(left.run(run.id).path, right.run(run.id).path)
    right.write_plan(replace(right.plan(), arms=tuple(arms)))
    why = "runs in common: what the studies show is not independent"
    if shared:
        assert compared(left, right).left_out == {"fp4": why}
    else:
        assert f"fp4: {why}; other: {why}" in refusal(lambda: compared(left, right))


def test_on_the_command_line(tmp_path):
    stores = falling(tmp_path)[:2]
    names = [store.path.name for store in stores]
    run = stores[0].run(stores[0].plan().arms[1].runs[0].id)
    run.metrics_path.write_bytes(run.metrics_path.read_bytes()[:-40])
    asked = (*names[::-1], "--storage", tmp_path)
    result = call(*asked, "--out", tmp_path / "out")
    assert result.exit_code == 0
    assert f"Left out: {run.path}: metrics.jsonl: altered or cut" in result.stderr
    json_file, page, html = (
        (tmp_path / "out" / f"compare.{kind}").read_text()
        for kind in ("json", "md", "html")
    )
    assert json.loads(call(*asked, "--json").stdout) == json.loads(json_file)
    table = ("Arm " + result.stdout.partition("Arm ")[2]).split("\n\n")[0].splitlines()
    assert max(map(len, table)) <= 80
    assert all(name in table[0] for name in names)
    assert "](compare.svg)" in page
    assert "<svg" in html
    assert "model.width" in result.stdout
    assert "steep: its token cost" in result.stdout


def test_studies_of_one_name_in_several_storages_and_what_is_refused(tmp_path):
    stores = [sized(tmp_path / str(width), width, name="same") for width in WIDTHS]
    paths = [str(store.path) for store in stores]
    studies = json.loads(call(*paths, "--json").stdout)["studies"]
    assert [study["name"] for study in studies] == paths
    for arguments, said in (
        (paths[:1], "name two studies at least"),
        (paths[:1] * 2, "the same study"),
        ([paths[0], "zzz", "--storage", tmp_path], "no study 'zzz'"),
        ([*paths, "--out", stores[0].plan_path / "out"], "--out: cannot write "),
    ):
        assert said in refusal(lambda: call(*arguments))  # noqa: B023


# ---- more ------------------------------------------------------------------------------------------------


def test_the_slope_and_its_interval_are_those_reckoned_by_hand():
    places = (100_000, 350_000, 2_000_000)
    rng = np.random.default_rng(1)
    drawn = []
    figures = []
    for i in (1, 2, 3):
        arm, base = rng.normal(0.4 - i / 10, i / 100, 5), rng.normal(0.0, 0.01, 5)
        drawn.append((arm, base))
        figure = difference(mean_estimate(arm), mean_estimate(base))
        figures.append(LossDifference(figure=figure))
    found = line_through(figures, places, 0.05)
    x = np.log10(places)
    weights = (x - x.mean()) / ((x - x.mean()) ** 2).sum()
    values = np.array([arm.mean() - base.mean() for arm, base in drawn])
    parts = weights[:, None] ** 2 * np.var(drawn, ddof=1, axis=2) / 5
    degrees = parts.sum() ** 2 / (parts**2 / 4).sum()
    slope = weights @ values
    ends = stats.t.interval(0.95, degrees, loc=slope, scale=math.sqrt(parts.sum()))
    change = found.change
    assert (change.estimate, change.low, change.high) == pytest.approx((slope, *ends))
    assert found.intercept + found.slope * x.mean() == pytest.approx(values.mean())
    figures[1] = LossDifference(figure=mean_estimate([0.2] * 5))
    change = line_through(figures, places, 0.05).change
    assert (change.low, change.high, change.note) == (None, None, NO_SPREAD)


def test_without_targets_loss_gaps_are_compared(tmp_path):
    found = compared(*falling(tmp_path, seeds=2), target=None)
    titles = [table.title for table in line_tables(found) if table.rows]
    assert titles == ["Loss gap", "Arm against arm"]


def test_studies_of_one_size_are_set_over_their_budgets(tmp_path):
    stores = []
    for tokens in (1_000_000, 2_000_000, 4_000_000):
        training = {"tokens": tokens, "schedule": "cosine"}
        name = f"b{tokens}"
        stores.append(sized(tmp_path, 64, name=name, training=training, seeds=5))
    check_words("studies of several budgets", said_of(compared(*stores)))


@pytest.mark.parametrize(
    ("studies", "said"),
    [
        ([(32, {"a": 0.1}, {}), (64, {"b": 0.1}, {})], "a: in one study only; b: in one study only"),
        ([(32, {}, {}), (64, {}, {})], "a baseline alone"),
        ([(64, FP4, {"name": name}) for name in "abc"], "parameters and a budget of 1,000,000 tokens"),
        *[
            ([(32, FP4, {}), (64, FP4, {}), (64, FP4, {"name": "odd", "model": odd})], "odd: the size of its")
            for odd in (None, {"hf": "gpt2"}, {"function": "mine.py:model"})
        ],
    ],
)  # fmt: skip
def test_what_cannot_be_compared(tmp_path, studies, said):
    stores = [sized(tmp_path, width, costs, **more) for width, costs, more in studies]
    assert said in refusal(lambda: compared(*stores))


def test_losses_in_two_units_are_not_compared_and_in_one_it_is_named(tmp_path):
    first, second = (sized(tmp_path, width, loss_unit="bits") for width in WIDTHS[:2])
    found = compared(first, second)
    caption = line_tables(found)[1].caption
    assert caption.startswith("Validation loss (bits/token) minus that of bf16")
    second.write_plan(replace(second.plan(), loss_unit="nats"))
    said = refusal(lambda: compared(first, second))
    assert "losses in bits/token and nats/token cannot be compared" in said


def test_the_size_of_a_model_that_another_trainer_builds_is_not_known(tmp_path):
    stores = [sized(tmp_path, width) for width in WIDTHS]
    for _, entry in stores[0].plan().runs():
        run = stores[0].run(entry.id)
        rewrite(run, run.config_path, trainer="mine.py:train")
    said = refusal(lambda: compared(*stores))
    assert said.startswith("w32: the size of its model is not known")


def test_what_else_differs_is_named_and_not_refused(tmp_path):
    stores = []
    for width, target, tokens, rate, preset in (
        (32, 2.2, 1_000_000, 0.004, "amd-fdw"),
        (64, 2.1, 2_000_000, 0.004, "amd-fdw-sr"),
        (128, 2.1, 2_000_000, 0.008, "amd-fdw-sr"),
    ):
        differs = {
            "training.learning_rate": (0.002, rate),
            "backend": ("auto", "reference"),
        }
        store = sized(
            tmp_path, width, seeds=5, target={"value": target}, training={"tokens": tokens},
            recipes={"bf16": preset}, resolved={"bf16": asdict(PRESETS[preset].recipe)},
            differs={"fp4": differs},
        )  # fmt: skip
        stores.append(store)
    check_words("studies that differ in more than size", said_of(compared(*stores)))


def test_arms_that_some_studies_lack_or_cannot_tell(tmp_path):
    never = [line(3.0, 2.9, 2.8, every=50_000)] * 2
    fp4 = [smooth_curve(np.random.default_rng(seed)) for seed in (0, 1)]
    curves = {"bf16": fp4, "fp4": fp4, "wide": fp4, "never": never}
    stores = []
    for name, width, *more in (
        ("a", 32, "late", "twice"),
        ("b", 32, "twice"),
        ("c", 64, "one"),
        ("d", 128, "late"),
    ):
        store = build_study(
            tmp_path, curves | dict.fromkeys(more, fp4), study=name, model=model(width),
            own_model={"wide": {"ffn": 512}},
        )  # fmt: skip
        stores.append(store)
    check_words("arms that some studies lack", said_of(compared(*stores)))


def test_costs_over_another_arm_where_the_baselines_have_come_to(tmp_path):
    stores = falling(tmp_path)
    names = [store.path.name for store in stores]
    over_flat = ("--storage", tmp_path, "--json", "--baseline", "flat")
    found = json.loads(call(*names, *over_flat, "--after", "400_000").stdout)
    assert [arm["name"] for arm in found["arms"]] == ["bf16", "steep"]
    for store, told in zip(stores, found["studies"], strict=True):
        target = target_after(load_frames(store), 400_000)
        assert told["baseline"] == "flat"
        assert told["target"] == f"a validation loss of {target:g} nats/token"


# ---- words -----------------------------------------------------------------------------------------------


def test_what_grows_or_shrinks_is_said_of_each_arm_and_the_rest_in_one_sentence(
    tmp_path,
):
    found = compared(*falling(tmp_path)[::-1])
    caption = draw_comparison(found).caption
    check_words("studies of several sizes", [caption, *said_of(found)])
    few = falling(tmp_path / "one", seeds=1)[:2]
    costs = {"steep": 0.2, "flat": 0.05}
    again = sized(tmp_path / "one", 64, costs, name="again", seeds=1)
    check_words("two sizes, one seed", said_of(compared(*few, again)))
