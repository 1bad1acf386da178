"""Runs that fork, and runs that begin with another's state: the same bits as trained whole."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ablate.base.errors import UserError
from ablate.recipes import RecipeSpec
from ablate.run.config import Fork
from ablate.train import Snapshot, train
from tests.exhaustive import rest_exhaustive

STEP = 512
FP4 = RecipeSpec(gemms=["fprop", "dgrad", "wgrad"], stabiliser="sr+rht", signs="call")
LATE = RecipeSpec(phases=[{"from_tokens": 16 * STEP, "recipe": FP4}])
OSCILLATES = RecipeSpec(
    gemms=["fprop"], deoscillate={"window": 3, "threshold": 1.2, "from_tokens": 16 * STEP}
)
AHEAD = RecipeSpec(**vars(FP4) | {"phases": [{"from_fraction": 0.5, "recipe": "bf16"}]})


class States:
    """Keeps the state after each step in memory; begins with ``start``."""

    def __init__(self, start=None):
        self.start, self.after = start, {}

    def load(self):
        return self.start

    def due(self, _tokens):
        return True

    def save(self, snapshot):
        tensors = {name: tensor.clone() for name, tensor in snapshot.tensors.items()}
        self.after[snapshot.step] = Snapshot(step=snapshot.step, tensors=tensors, numbers=snapshot.numbers)


def trained(config, tokens, start=None):
    rows, states = [], States(start)
    assert train(config, rows.append, tokens=tokens, checkpoints=states).state == "finished"
    return [
        {key: value for key, value in row.items() if key != "tokens_per_sec"} for row in rows
    ], states.after


def assert_equal(one, other):
    assert one.tensors.keys() == other.tensors.keys()
    assert all(torch.equal(tensor, other.tensors[name]) for name, tensor in one.tensors.items())
    assert without_seconds(one) == without_seconds(other)


def without_seconds(snapshot):
    window = {key: value for key, value in snapshot.numbers["window"].items() if key != "seconds"}
    return snapshot.numbers | {"window": window}


def forked(make_config, recipe, step=16, **training):
    parent = make_config()
    fork = Fork(tokens=step * STEP, recipe=parent.recipe, training=parent.training)
    return replace(make_config(recipe, **training), fork=fork)


@pytest.mark.parametrize("name", rest_exhaustive(("late", "fork"), "fork".__eq__))
def test_begun_with_the_common_state_a_run_ends_with_the_bits_of_a_whole_one(make_config, tokens, name):
    own = make_config(LATE) if name == "late" else forked(make_config, FP4)
    rows, whole = trained(own, tokens)
    base_rows, base = trained(make_config(), tokens)
    assert_equal(base[15], whole[15])  # both have bf16 so far, and the evaluation after step 16 is FP4's
    later, states = trained(own, tokens, base[15])
    common = [row for row in rows if row["step"] <= 15]
    assert common == [row for row in base_rows if row["step"] <= 15]
    assert [*common, *later] == rows
    assert_equal(states[31], whole[31])
    assert rows != base_rows


@pytest.mark.exhaustive
def test_runs_part_where_de_oscillation_begins_in_one_of_them(make_config, tokens):
    own, other = make_config(OSCILLATES), make_config(RecipeSpec(gemms=["fprop"]))
    (rows, whole), (base_rows, base) = (trained(config, tokens) for config in (own, other))
    assert_equal(base[15], whole[15])
    later, states = trained(own, tokens, base[15])
    assert [*(row for row in rows if row["step"] <= 15), *later] == rows
    assert_equal(states[31], whole[31])
    assert rows != base_rows


@pytest.mark.exhaustive
def test_a_fork_goes_on_in_the_window_of_the_run_that_it_leaves(make_config, tokens):
    parent = make_config(OSCILLATES)
    own = replace(parent, fork=Fork(tokens=18 * STEP, recipe=parent.recipe, training=parent.training))
    (rows, whole), (base_rows, base) = (trained(config, tokens) for config in (own, parent))
    assert_equal(whole[31], base[31])
    assert [row for row in rows if (row["step"], row["kind"]) != (18, "eval")] == base_rows
    plain = replace(make_config(RecipeSpec(gemms=["fprop"])), fork=own.fork)
    left, states = trained(plain, tokens)
    assert [row for row in left if row["step"] < 18] == [row for row in base_rows if row["step"] < 18]
    assert not any(name.startswith("deoscillation.") for name in states[18].tensors)
    _, resumed = trained(plain, tokens, base[17])
    assert_equal(resumed[31], states[31])


def test_a_fork_is_a_phase_that_begins_there(make_config, tokens):
    as_fork, _ = trained(forked(make_config, FP4), tokens)
    as_phase, _ = trained(make_config(LATE), tokens)
    assert as_fork == as_phase


@pytest.mark.exhaustive
def test_a_parent_with_rules_and_phases_of_its_own_is_followed_to_the_fork(make_config, tokens):
    parent = make_config(AHEAD)
    own = replace(
        make_config(FP4), fork=Fork(tokens=20 * STEP, recipe=parent.recipe, training=parent.training)
    )
    rows, states = trained(own, tokens)
    base, as_base = trained(parent, tokens)
    assert_equal(states[19], as_base[19])
    assert [row for row in rows if row["step"] < 20] == [row for row in base if row["step"] < 20]
    assert [row for row in rows if row["step"] > 20] != [row for row in base if row["step"] > 20]


@pytest.mark.exhaustive
def test_from_the_fork_on_its_own_settings_hold_and_it_is_evaluated_there(make_config, tokens):
    own = forked(
        make_config, RecipeSpec(), step=13, learning_rate=1e-4, weight_decay=0.0, eval_every_tokens=2 * STEP
    )
    rows, states = trained(own, tokens)
    base, as_base = trained(make_config(), tokens)
    assert_equal(states[12], as_base[12])
    assert [row["step"] for row in rows if row["kind"] == "eval"] == [8, 13, *range(14, 33, 2)]
    assert {row["lr"] for row in rows if row["step"] > 13 and row["kind"] == "train"} == {1e-4}
    same, _ = trained(forked(make_config, RecipeSpec(), step=13), tokens)
    assert [row for row in same if (row["step"], row["kind"]) != (13, "eval")] == base


def test_what_diverges_before_the_fork_is_no_result_of_the_arm(make_config, tokens):
    hot = make_config(divergence_loss=0.1, divergence_evals=1)
    own = replace(make_config(FP4), fork=Fork(tokens=16 * STEP, recipe=hot.recipe, training=hot.training))
    with pytest.raises(
        UserError, match="diverged after 4,096 tokens, before the fork: validation loss above"
    ):
        train(own, lambda _: None, tokens=tokens)
    late = forked(make_config, FP4, divergence_loss=0.1, divergence_evals=1)
    assert train(late, lambda _: None, tokens=tokens).tokens > 16 * STEP
