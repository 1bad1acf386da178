"""Runs that fork, and runs that begin with another's state: the same bits as trained whole."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ablate.base.errors import UserError
from ablate.run.config import Fork
from ablate.train import train
from tests.curves import Kept, curve
from tests.exhaustive import rest_exhaustive
from tests.tensors import assert_same

STEP = 512
FP4 = {"gemms": ["fprop", "dgrad", "wgrad"], "stabiliser": "sr+rht", "signs": "call"}
LATE = {"phases": [{"from_tokens": 16 * STEP, "recipe": FP4}]}
FPROP = {"gemms": ["fprop"]}
OSCILLATES = FPROP | {
    "deoscillate": {"window": 3, "threshold": 1.2, "from_tokens": 16 * STEP}
}
AHEAD = FP4 | {"phases": [{"from_fraction": 0.5, "recipe": "bf16"}]}


@pytest.fixture
def trained(tokens):
    def run(config, start=None):
        """Return the rows, and the state after each step; ``start``: such of another run."""
        snapshots = Kept(range(99 * STEP), start)
        result, rows = curve(config, tokens, checkpoints=snapshots)
        assert result.state == "finished"
        return rows, snapshots.after

    return run


def assert_equal(one, other):
    for state in (one, other):
        state.numbers["window"]["seconds"] = 0.0  # the machine's own
    assert one.numbers == other.numbers
    assert_same(one.tensors, other.tensors)


def forked(child, parent, step=16):
    return replace(
        child,
        fork=Fork(tokens=step * STEP, recipe=parent.recipe, training=parent.training),
    )


@pytest.mark.parametrize(
    "name", rest_exhaustive(("late", "fork", "oscillates"), "fork".__eq__)
)
def test_begun_with_the_common_state_a_run_ends_with_the_bits_of_a_whole_one(
    make_config, trained, name
):
    base = make_config(FPROP if name == "oscillates" else None)
    child = make_config({"late": LATE, "fork": FP4, "oscillates": OSCILLATES}[name])
    child = forked(child, base) if name == "fork" else child
    (rows, whole), (base_rows, common) = trained(child), trained(base)
    # the same recipe so far; the evaluation after step 16 is its own
    assert_equal(common[15], whole[15])
    later, states = trained(child, common[15])
    begun = [row for row in rows if row["step"] <= 15]
    assert begun == [row for row in base_rows if row["step"] <= 15]
    assert [*begun, *later] == rows
    assert_equal(states[31], whole[31])
    assert rows != base_rows


@pytest.mark.exhaustive
def test_a_fork_goes_on_in_the_window_of_the_run_that_it_leaves(make_config, trained):
    parent = make_config(OSCILLATES)
    (rows, whole), (base_rows, base) = (
        trained(config) for config in (forked(parent, parent, 18), parent)
    )
    assert_equal(whole[31], base[31])
    assert [
        row for row in rows if (row["step"], row["kind"]) != (18, "eval")
    ] == base_rows
    plain = forked(make_config(FPROP), parent, 18)
    later_rows, states = trained(plain)
    assert [row for row in later_rows if row["step"] < 18] == [
        row for row in base_rows if row["step"] < 18
    ]
    assert not any(name.startswith("deoscillation.") for name in states[18].tensors)
    assert_equal(trained(plain, base[17])[1][31], states[31])


def test_a_fork_is_a_phase_that_begins_there(make_config, trained):
    assert (
        trained(forked(make_config(FP4), make_config()))[0]
        == trained(make_config(LATE))[0]
    )


@pytest.mark.exhaustive
def test_a_parent_with_phases_of_its_own_is_followed_to_the_fork(make_config, trained):
    parent = make_config(AHEAD)
    (rows, states), (base, as_base) = (
        trained(forked(make_config(FP4), parent, 20)),
        trained(parent),
    )
    assert_equal(states[19], as_base[19])
    assert [row for row in rows if row["step"] < 20] == [
        row for row in base if row["step"] < 20
    ]
    assert [row for row in rows if row["step"] > 20] != [
        row for row in base if row["step"] > 20
    ]


@pytest.mark.exhaustive
def test_from_the_fork_on_its_own_settings_hold_and_it_is_evaluated_there(
    make_config, trained
):
    parent = make_config()
    child = make_config(
        learning_rate=1e-4, weight_decay=0.0, eval_every_tokens=2 * STEP
    )
    (rows, states), (base, as_base) = (
        trained(forked(child, parent, 13)),
        trained(parent),
    )
    assert_equal(states[12], as_base[12])
    assert [row["step"] for row in rows if row["kind"] == "eval"] == [
        8,
        13,
        *range(14, 33, 2),
    ]
    assert {
        row["lr"] for row in rows if row["step"] > 13 and row["kind"] == "train"
    } == {1e-4}
    same, _ = trained(forked(parent, parent, 13))
    assert [row for row in same if (row["step"], row["kind"]) != (13, "eval")] == base


def test_what_diverges_before_the_fork_is_no_result_of_the_arm(make_config, tokens):
    hot, plain = {"divergence_loss": 0.1, "divergence_evals": 1}, make_config(FP4)
    with pytest.raises(
        UserError,
        match="diverged after 4,096 tokens, before the fork: validation loss abo",
    ):
        train(forked(plain, make_config(**hot)), lambda _: None, tokens=tokens)
    late = forked(make_config(FP4, **hot), make_config())
    assert train(late, lambda _: None, tokens=tokens).tokens > 16 * STEP
