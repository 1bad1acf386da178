"""What a run's end means to a search, and which searches may be gone on with."""

from __future__ import annotations

import math

import pytest

from ablate.base.errors import UserError
from ablate.plan import to_lock
from ablate.search.halving import DIVERGED
from ablate.search.ledger import Trial
from ablate.search.plan import plan_search
from ablate.search.recipes import arm_name, check_same, result_of, tried_plan
from ablate.store import Status, StudyStore
from ablate.study import load_study

SEARCH = """\
name: s
baseline: bf16
target: {{val_loss: 2.0}}
base: {{model: {{ffn: 384}}}}
arms: {{bf16: {{recipe: bf16}}, tseng: {{recipe: tseng}}}}
grid:
  factors: {{recipe.gemms: {{F: [fprop], D: [dgrad]}}, recipe.stabiliser: [none, sr]}}
search: {{hardware: B200, trials: {trials}, budgets: {budgets}, objective: {objective}, seed: {seed}}}
"""


@pytest.fixture
def planned(tmp_path):
    def make(objective="loss", *, trials=4, budgets="[100_000, 200_000]", seed=3):
        path = tmp_path / "s.yaml"
        path.write_text(SEARCH.format(objective=objective, trials=trials, budgets=budgets, seed=seed))
        return plan_search(load_study(path))

    return make


@pytest.fixture
def store(tmp_path):
    return StudyStore(tmp_path / "runs" / "s")


def end(store, planned, name, curve, state="finished", budget=100_000):
    run = store.run(planned.arm(budget, name).runs[0].id)
    run.create({})
    for step, (tokens, loss) in enumerate(curve):
        run.append_metric({"kind": "eval", "tokens": tokens, "step": step, "val_loss": loss})
    run.write_status(Status(state=state, message="why"))


def test_the_loss_at_the_end_of_the_budget(planned, store):
    found = planned()
    end(store, found, "bf16", [(50_000, 2.5), (100_000, 2.25)])
    assert result_of(found, store, 100_000, "bf16").values == (2.25, 1.0)
    end(store, found, "tseng", [], state="failed")
    assert result_of(found, store, 100_000, "tseng").failed == "why"


def test_a_diverged_run_is_told_as_its_bound(planned, store):
    found = planned()
    end(store, found, "F sr", [(50_000, 9.9)], state="diverged")
    result = result_of(found, store, 100_000, "F sr")
    assert result.values == (1.5 * math.log(256), found.times["F sr"])
    assert result.violation == DIVERGED
    end(store, found, "bf16", [(50_000, 9.9)], state="diverged")
    with pytest.raises(UserError, match="the baseline 'bf16' diverged"):
        result_of(found, store, 100_000, "bf16")


def test_the_token_cost_is_against_the_baselines_run(planned, store):
    found = planned("token_cost")
    end(store, found, "bf16", [(40_000, 3.0), (60_000, 1.0), (100_000, 0.9)])
    end(store, found, "tseng", [(40_000, 3.0), (80_000, 1.0), (100_000, 0.9)])
    assert result_of(found, store, 100_000, "bf16").values[0] == 0.0
    result = result_of(found, store, 100_000, "tseng")
    assert (result.values[0], result.violation) == (pytest.approx(60_000 / 50_000 - 1), None)


def test_a_missed_target_is_a_bound_with_a_violation(planned, store):
    found = planned("token_cost")
    end(store, found, "bf16", [(40_000, 3.0), (60_000, 1.0), (100_000, 0.9)])
    end(store, found, "tseng", [(50_000, 3.0), (100_000, 2.3)])
    result = result_of(found, store, 100_000, "tseng")
    assert (result.values[0], result.violation) == (pytest.approx(1.0), pytest.approx(0.3))
    end(store, found, "D none", [(50_000, 9.0)], state="diverged")
    assert result_of(found, store, 100_000, "D none").violation == DIVERGED


def test_a_baseline_that_misses_the_target_ends_the_search(planned, store):
    found = planned("token_cost")
    end(store, found, "bf16", [(50_000, 3.0), (100_000, 2.3)])
    with pytest.raises(UserError, match="does not reach the target within 100,000 tokens"):
        result_of(found, store, 100_000, "bf16")


def test_the_lock_file_holds_what_was_tried_alone(planned):
    found = planned()
    first, second = (
        [Trial(number=n, params={}, attrs={"candidate": name}, state="open") for n, name in enumerate(names)]
        for names in (("bf16", "F sr"), ("bf16",))
    )
    lock = to_lock(tried_plan(found, [first, second]))
    assert [arm.name for arm in lock.arms] == ["bf16 @ 100k", "F sr @ 100k", "bf16 @ 200k"]
    assert lock.baseline == "bf16 @ 100k"
    assert [arm.name for arm in tried_plan(found, [(), ()]).arms] == ["bf16 @ 100k"]
    assert arm_name(planned(budgets="[100_000]"), 100_000, "bf16") == "bf16"


def test_candidates_are_arms_and_cells(planned):
    grid = planned().halving.grid
    assert grid.by_name["F sr"].levels == {"recipe.gemms": "F", "recipe.stabiliser": "sr"}
    assert grid.by_name["tseng"].levels == {}
    assert grid.first == ("bf16", "tseng")


def test_another_search_of_the_name_is_refused(planned, store):
    check_same(planned(), store)
    check_same(planned(trials=6), store)
    with pytest.raises(UserError, match="with other seed, recipes"):
        check_same(planned(seed=4), store)
    with pytest.raises(UserError, match="with other budgets, recipes"):
        check_same(planned(budgets="[100_000]"), store)
    with pytest.raises(UserError, match="with other objective "):
        check_same(planned("token_cost"), store)


def test_a_study_of_the_name_is_refused(planned, store):
    (store.path / "runs").mkdir(parents=True)
    with pytest.raises(UserError, match="holds a study of this name"):
        check_same(planned(), store)
