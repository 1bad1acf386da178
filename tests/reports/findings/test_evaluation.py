"""Learnt or inferred: costs by a second evaluation in bf16, held to a computation in numpy and scipy."""

from __future__ import annotations

import numpy as np
import pytest
from click.testing import CliRunner
from scipy import stats
from synthetic_study import arms_of, crossing, parts

from ablate.cli import cli
from ablate.reports import write_report
from ablate.store import StudyStore

TARGET = 1.1
TOKENS = np.arange(50, 1501, 50)
DRAWN = np.random.default_rng(5)
PACES = np.exp(DRAWN.normal(0, 0.03, 4))
LEARNT = 1.08 * np.exp(DRAWN.normal(0, 0.01, 4))
INFERRED = 0.02 + DRAWN.normal(0, 0.002, 4)
WORSE = 0.01


def falling(pace, offset=0.0, slower=1.0):
    """Return a run's evaluations: tokens, loss by its own forward pass, loss in bf16."""
    loss = 4 * (1 + TOKENS * pace / slower / 20) ** -0.4
    return list(
        zip(TOKENS.tolist(), (loss + offset).tolist(), loss.tolist(), strict=True)
    )


def fp4(slower):
    return list(map(falling, PACES, INFERRED, slower))


def once(runs):
    return [[point[:2] for point in points] for points in runs]


CURVES = {
    "bf16": [falling(pace) for pace in PACES],
    "fp4": fp4(LEARNT),
    "backward": [falling(pace / 1.05) for pace in PACES],
}
EACH_ONCE = {name: once(runs) for name, runs in CURVES.items()}


@pytest.fixture
def study(make_study):
    usual = {
        "training": {"schedule": "cosine", "evaluate_in": "both"},
        "target": {"value": TARGET},
        "paired_seeds": True,
        "intervals": "own",
    }
    return lambda curves, **more: make_study(CURVES | curves, **usual | more)


def crossings(runs, column, target=TARGET):
    """Return log tokens to target by one of the two losses."""
    return np.log([crossing(one, target, column) for one in runs])


def inferred(runs, target):
    """Return the mean log of what the own evaluation alone costs."""
    return np.mean(crossings(runs, 1, target) - crossings(runs, 2, target))


@pytest.mark.parametrize("paired", [True, False])
def test_the_two_costs_and_losses_and_what_lies_between_them(study, paired):
    arms = arms_of(study({}, paired_seeds=paired))
    arm, found = arms["fp4"], arms["fp4"].in_bf16
    own, second = (crossings(CURVES["fp4"], column) for column in (1, 2))
    base = crossings(CURVES["bf16"], 1)
    last = {
        name: np.array([run[-1] for run in runs]).T for name, runs in CURVES.items()
    }
    _, last_own, last_second = last["fp4"]

    def compared(x, y):
        test = (
            stats.ttest_rel(x, y) if paired else stats.ttest_ind(x, y, equal_var=False)
        )
        return np.array([np.mean(x) - np.mean(y), *test.confidence_interval()])

    def within(x, y):
        # The baseline's two evaluations are one, so that pairs and no pairs are the same thing.
        return np.array([np.mean(x - y), *stats.ttest_rel(x, y).confidence_interval()])

    for interval, expected in (
        (arm.token_cost, np.expm1(compared(own, base))),
        (found.token_cost, np.expm1(compared(second, base))),
        (found.tokens_alone, np.expm1(within(own, second))),
        (found.difference, compared(last_second, last["bf16"][1])),
        (found.loss_alone, within(last_own, last_second)),
    ):
        assert parts(interval) == pytest.approx(tuple(expected))
    assert arm.final_loss.estimate == pytest.approx(last_own.mean())
    assert found.final_loss.estimate == pytest.approx(last_second.mean())
    share = np.mean(own - second) / np.log1p(arm.token_cost.estimate)
    assert found.share == pytest.approx(share)
    equal = arms["backward"].in_bf16
    assert parts(equal.tokens_alone) == parts(equal.loss_alone) == (0.0, None, None)
    assert equal.share == 0.0


def test_a_baseline_that_infers_worse_itself_is_counted_against_the_arm(study):
    target = TARGET + 0.03
    base = [falling(pace, WORSE) for pace in PACES]
    arm = arms_of(study({"bf16": base}, target={"value": target}))["fp4"]
    expected = np.expm1(inferred(CURVES["fp4"], target) - inferred(base, target))
    assert arm.in_bf16.tokens_alone.estimate == pytest.approx(expected)
    assert arm.in_bf16.loss_alone.estimate == pytest.approx(np.mean(INFERRED) - WORSE)


@pytest.mark.parametrize("alone", ["in bf16", "by its own"])
def test_a_run_that_reaches_the_target_by_one_evaluation_alone(study, alone):
    last = falling(PACES[3] / 1.08, 0.5)
    if alone == "by its own":
        last = [(tokens, second, own) for tokens, own, second in last]
    arm = arms_of(study({"fp4": [*CURVES["fp4"][:3], last]}))["fp4"]
    kinds = ("bound", "interval") if alone == "in bf16" else ("interval", "bound")
    assert (arm.token_cost.kind, arm.in_bf16.token_cost.kind) == kinds
    assert (arm.in_bf16.tokens_alone.estimate, arm.in_bf16.share) == (None, None)
    assert "by both evaluations" in arm.in_bf16.tokens_alone.note
    assert arm.in_bf16.loss_alone.estimate is not None


def test_of_a_cost_that_is_not_settled_no_share_is_told(study):
    arm = arms_of(study({"fp4": fp4((1 / 1.01, 1 / 1.05, 1 / 1.08, 1 / 1.12))}))["fp4"]
    assert arm.token_cost.low < 0 < arm.token_cost.high
    assert arm.in_bf16.tokens_alone.low > 0
    assert arm.in_bf16.share is None


def test_an_arm_stopped_at_a_look_is_held_against_the_same_seeds_of_the_baseline(study):
    even = (1.0, 1.001, 0.999, 1.0005)
    base = [*map(falling, even, (0.01, 0.01, 0.03, 0.03))]
    own = [falling(pace / 1.5, 0.03) for pace in even]
    target = TARGET + 0.1
    store = study(
        {"bf16": base, "fp4": own},
        states={("fp4", 3): "pending"},
        stop={"settled": {"looks": [2, 3, 4]}},
        target={"value": target},
        paired_seeds=False,
    )
    arm = arms_of(store)["fp4"]
    assert arm.stopped.seeds == 2
    expected = np.expm1(inferred(own[:2], target) - inferred(base[:2], target))
    assert arm.in_bf16.tokens_alone.estimate == pytest.approx(expected)
    assert arm.in_bf16.loss_alone.estimate == pytest.approx(0.03 - 0.01)


def test_without_second_evaluations_or_results_there_is_nothing_to_tell(study):
    running = arms_of(study({}, states={("fp4", 3): "running"}))["fp4"]
    assert (running.token_cost.n, running.in_bf16.token_cost.n) == (3, 3)
    mixed = arms_of(study({"fp4": EACH_ONCE["fp4"]}))
    assert mixed["fp4"].in_bf16 is None
    assert mixed["backward"].in_bf16 is not None
    without = arms_of(study({"bf16": EACH_ONCE["bf16"]}))
    assert all(arm.in_bf16 is None for arm in without.values())
    page = write_report(study(EACH_ONCE))
    assert "Learnt or inferred" not in page.markdown.read_text()
    assert "val_loss_bf16" not in (page.tables / "evaluations.csv").read_text()


def test_evaluations_that_were_exported_come_back_with_both_losses(study, tmp_path):
    store = study({})
    table = write_report(store).tables / "evaluations.csv"
    asked = f"import csv {table} --study again --baseline bf16 --paired --columns run=run_id"
    asked += f" --target val_loss={TARGET} --storage {tmp_path}"
    result = CliRunner().invoke(cli, asked.split())
    assert result.exit_code == 0, result.output
    first, again = (
        arms_of(one)["fp4"].in_bf16 for one in (store, StudyStore(tmp_path / "again"))
    )
    assert again.tokens_alone == first.tokens_alone
    assert again.loss_alone.estimate == first.loss_alone.estimate
