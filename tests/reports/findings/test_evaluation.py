"""Learnt or inferred: costs by a second evaluation in bf16, held to a computation in numpy and scipy."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner
from scipy import stats

from ablate.cli import cli
from ablate.reports import analyse, load_frames, write_report
from ablate.reports.figures import draw_figures
from ablate.reports.pages.render import definitions
from ablate.reports.words.cost_tables import evaluation_table
from ablate.reports.words.verdict import write_verdict
from ablate.store import StudyStore

TARGET = 1.1
TOKENS = np.arange(50, 1501, 50)
DRAWN = np.random.default_rng(5)
PACES = np.exp(DRAWN.normal(0, 0.03, 4))
LEARNT = 1.08 * np.exp(DRAWN.normal(0, 0.01, 4))
INFERRED = 0.02 + DRAWN.normal(0, 0.002, 4)


def falling(pace, offset=0.0):
    """Return a run's evaluations: tokens, loss by its own forward pass, loss in bf16."""
    loss = 4 * (1 + TOKENS * pace / 20) ** -0.4
    return [(int(t), float(one + offset), float(one)) for t, one in zip(TOKENS, loss, strict=True)]


CURVES = {
    "bf16": [falling(pace) for pace in PACES],
    "fp4": [falling(pace / slow, off) for pace, slow, off in zip(PACES, LEARNT, INFERRED, strict=True)],
    "backward": [falling(pace / 1.05) for pace in PACES],
}


def crossing(points, column, target=TARGET):
    tokens, loss = (np.array(points).T)[[0, column]]
    return float(np.interp(-target, -loss, np.log(tokens)))


@pytest.fixture
def study(make_study):
    usual = {"training": {"schedule": "cosine", "evaluate_in": "both"}, "target": {"value": TARGET}}
    return lambda curves=CURVES, **more: make_study(
        curves, **usual | {"paired_seeds": True, "intervals": "own"} | more
    )


def arms_of(store, **options):
    return {arm.name: arm for arm in analyse(load_frames(store), **options).arms}


@pytest.mark.parametrize("paired", [True, False])
def test_the_two_costs_and_what_lies_between_them(study, paired):
    arm = arms_of(study(paired_seeds=paired))["fp4"]
    own, second, base = (
        np.array([crossing(points, column) for points in CURVES[name]])
        for name, column in (("fp4", 1), ("fp4", 2), ("bf16", 1))
    )
    assert arm.token_cost.estimate == pytest.approx(np.exp(np.mean(own - base)) - 1)
    found = arm.in_bf16
    assert found.token_cost.estimate == pytest.approx(np.exp(np.mean(second - base)) - 1)
    expected = (
        stats.ttest_1samp(second - base, 0) if paired else stats.ttest_ind(second, base, equal_var=False)
    )
    interval = expected.confidence_interval()
    assert (found.token_cost.low, found.token_cost.high) == pytest.approx(np.exp(tuple(interval)) - 1)
    # The baseline's two evaluations are one, so that pairs and no pairs are the same thing.
    alone = stats.ttest_1samp(own - second, 0).confidence_interval()
    assert found.tokens_alone.estimate == pytest.approx(np.exp(np.mean(own - second)) - 1)
    assert (found.tokens_alone.low, found.tokens_alone.high) == pytest.approx(np.exp(tuple(alone)) - 1)
    total = 1 + arm.token_cost.estimate
    assert (1 + found.token_cost.estimate) * (1 + found.tokens_alone.estimate) == pytest.approx(total)
    assert found.share == pytest.approx(np.mean(own - second) / np.log(total))


def test_final_losses_by_both(study):
    arm = arms_of(study())["fp4"]
    own, second, base = (
        np.array([points[-1][column] for points in CURVES[name]])
        for name, column in (("fp4", 1), ("fp4", 2), ("bf16", 1))
    )
    assert arm.final_loss.estimate == pytest.approx(own.mean())
    assert arm.in_bf16.final_loss.estimate == pytest.approx(second.mean())
    assert arm.in_bf16.difference.estimate == pytest.approx(np.mean(second - base))
    alone = stats.ttest_1samp(own - second, 0).confidence_interval()
    assert arm.in_bf16.loss_alone.estimate == pytest.approx(np.mean(INFERRED))
    assert (arm.in_bf16.loss_alone.low, arm.in_bf16.loss_alone.high) == pytest.approx(tuple(alone))


def test_a_baseline_that_infers_worse_itself_is_counted_against_the_arm(study):
    offset = 0.01
    curves = CURVES | {"bf16": [falling(pace, offset) for pace in PACES]}
    arm = arms_of(study(curves, target={"value": TARGET + 0.03}))["fp4"]
    gaps = [
        [crossing(points, 1, TARGET + 0.03) - crossing(points, 2, TARGET + 0.03) for points in curves[name]]
        for name in ("fp4", "bf16")
    ]
    between = np.mean(gaps[0]) - np.mean(gaps[1])
    assert arm.in_bf16.tokens_alone.estimate == pytest.approx(np.exp(between) - 1)
    assert arm.in_bf16.loss_alone.estimate == pytest.approx(np.mean(INFERRED) - offset)


def test_equal_evaluations_leave_nothing_to_evaluation_and_have_no_interval(study):
    found = arms_of(study())["backward"].in_bf16
    assert found.token_cost.estimate == pytest.approx(0.05, rel=0.2)
    assert (found.tokens_alone.estimate, found.tokens_alone.low, found.share) == (0.0, None, 0.0)
    assert (found.loss_alone.estimate, found.loss_alone.low) == (0.0, None)


def test_a_run_that_reaches_the_target_in_bf16_alone(study):
    slow = [*CURVES["fp4"][:3], falling(PACES[3] / 1.08, 0.5)]
    arm = arms_of(study(CURVES | {"fp4": slow}))["fp4"]
    assert arm.token_cost.kind == "bound"
    assert arm.in_bf16.token_cost.kind == "interval"
    assert (arm.in_bf16.tokens_alone.estimate, arm.in_bf16.share) == (None, None)
    assert "by both evaluations" in arm.in_bf16.tokens_alone.note
    assert arm.in_bf16.loss_alone.estimate is not None


def test_a_run_that_reaches_the_target_by_its_own_evaluation_alone(study):
    worse_in_bf16 = [(tokens, own, own + 0.5) for tokens, own, _ in CURVES["fp4"][3]]
    arm = arms_of(study(CURVES | {"fp4": [*CURVES["fp4"][:3], worse_in_bf16]}))["fp4"]
    assert arm.token_cost.kind == "interval"
    assert arm.in_bf16.token_cost.kind == "bound"
    assert (arm.in_bf16.tokens_alone.estimate, arm.in_bf16.share) == (None, None)


def test_of_a_cost_that_is_not_settled_no_share_is_told(study):
    equal = [
        falling(pace * slow, off)
        for pace, slow, off in zip(PACES, (1.01, 1.05, 1.08, 1.12), INFERRED, strict=True)
    ]
    arm = arms_of(study(CURVES | {"fp4": equal}))["fp4"]
    assert arm.token_cost.low < 0 < arm.token_cost.high
    assert arm.in_bf16.tokens_alone.low > 0
    assert arm.in_bf16.share is None


def test_an_arm_stopped_at_a_look_is_held_against_the_same_seeds_of_the_baseline(study):
    rule = {"settled": {"looks": [2, 3, 4]}}
    even = (1.0, 1.001, 0.999, 1.0005)
    curves = {
        "bf16": [falling(pace, offset) for pace, offset in zip(even, (0.01, 0.01, 0.03, 0.03), strict=True)],
        "fp4": [falling(pace / 1.5, 0.03) for pace in even],
    }
    states = {("fp4", 3): "pending"}
    store = study(curves, states=states, stop=rule, target={"value": TARGET + 0.1}, paired_seeds=False)
    arm = arms_of(store)["fp4"]
    assert arm.stopped.seeds == 2
    gaps = [
        [crossing(points, 1, TARGET + 0.1) - crossing(points, 2, TARGET + 0.1) for points in curves[name][:2]]
        for name in ("fp4", "bf16")
    ]
    assert arm.in_bf16.tokens_alone.estimate == pytest.approx(np.exp(np.mean(gaps[0]) - np.mean(gaps[1])) - 1)
    assert arm.in_bf16.loss_alone.estimate == pytest.approx(0.03 - 0.01)


def once(points):
    return [point[:2] for point in points]


@pytest.mark.parametrize(
    ("evaluate_in", "said"),
    [
        ("recipe", "tells them apart"),
        ("bf16", "of what was learnt"),
        ("both", "once more"),
        (None, None),
    ],
)
def test_the_report_says_what_it_was_evaluated_in(study, evaluate_in, said):
    training = {"schedule": "constant"} | ({} if evaluate_in is None else {"evaluate_in": evaluate_in})
    found = dict(definitions(analyse(load_frames(study(training=training)))))
    assert (said in found["Evaluation"]) if said else ("Evaluation" not in found)


def test_the_figure_of_differences_has_a_line_for_what_was_learnt(study):
    drawn = {one.name: one for one in draw_figures(analyse(load_frames(study())))}["difference"]
    assert "learnt worse" in drawn.caption
    once_evaluated = study({name: [once(points) for points in own] for name, own in CURVES.items()})
    plain = {one.name: one for one in draw_figures(analyse(load_frames(once_evaluated)))}["difference"]
    assert "learnt" not in plain.caption


def test_without_second_evaluations_there_is_nothing_to_tell(study):
    mixed = arms_of(study(CURVES | {"fp4": [once(points) for points in CURVES["fp4"]]}))
    assert mixed["fp4"].in_bf16 is None
    assert mixed["backward"].in_bf16 is not None
    lone = study(CURVES | {"bf16": [once(points) for points in CURVES["bf16"]]})
    assert {arm.in_bf16 for arm in arms_of(lone).values()} == {None}
    store = study({name: [once(points) for points in own] for name, own in CURVES.items()})
    assert not evaluation_table(analyse(load_frames(store))).rows
    page = write_report(store)
    assert "Learnt or inferred" not in page.markdown.read_text()
    assert "val_loss_bf16" not in (page.tables / "evaluations.csv").read_text()


def test_a_stopped_run_does_not_count_by_either(study):
    states = {("fp4", 3): "running"}
    arm = arms_of(study(states=states))["fp4"]
    assert (arm.token_cost.n, arm.in_bf16.token_cost.n) == (3, 3)
    assert arm.in_bf16.tokens_alone.estimate is not None


def test_the_verdict_says_what_is_evaluation_alone(study):
    sentences = [one for one in write_verdict(analyse(load_frames(study()))).notes if "valuat" in one]
    assert len(sentences) == 1
    assert sentences[0].startswith("Evaluation alone changes the tokens of fp4 by +")
    assert "evaluated in bf16 its token cost is +" in sentences[0]
    assert "holds zero" not in sentences[0]
    unlearnt = CURVES | {
        "fp4": [
            falling(pace * slow, off)
            for pace, slow, off in zip(PACES, (1.01, 0.99, 0.985, 1.012), INFERRED, strict=True)
        ]
    }
    (sentence,) = (
        one for one in write_verdict(analyse(load_frames(study(unlearnt)))).notes if "valuat" in one
    )
    assert "evaluated in bf16 its token cost is" in sentence


def test_without_a_target_losses_are_told_apart(study):
    frames = load_frames(study())
    analysis = analyse(replace(frames, plan=replace(frames.plan, target=None)))
    notes = write_verdict(analysis).notes
    assert "Token cost, in bf16" not in evaluation_table(analysis).columns
    assert any(note.startswith("Of the loss difference of fp4, +0.02") for note in notes)


def test_every_page_and_the_json_have_it(study):
    page = write_report(study())
    for path in (page.markdown, page.html):
        text = path.read_text()
        assert "Learnt or inferred" in text
        assert "with every linear layer in bf16" in text
    assert "Evaluation alone" in (page.tables / "evaluation.tex").read_text()
    arms = {arm["name"]: arm for arm in json.loads(page.json.read_text())["arms"]}
    assert arms["bf16"]["in_bf16"] is None
    assert set(arms["fp4"]["in_bf16"]) == {
        "token_cost", "tokens_alone", "share", "final_loss", "difference", "loss_alone",
    }  # fmt: skip


def test_evaluations_that_were_exported_come_back_with_both_losses(study, tmp_path):
    table = write_report(study()).tables / "evaluations.csv"
    asked = ["--baseline", "bf16", "--paired", "--target", f"val_loss={TARGET}", "--columns", "run=run_id"]
    result = CliRunner().invoke(
        cli, ["import", "csv", str(table), "--study", "again", *asked, "--storage", str(tmp_path)]
    )
    assert result.exit_code == 0, result.output
    first, again = (
        arms_of(study())["fp4"].in_bf16,
        arms_of(StudyStore(tmp_path / "again"))["fp4"].in_bf16,
    )
    assert again.tokens_alone == first.tokens_alone
    assert again.loss_alone.estimate == first.loss_alone.estimate
