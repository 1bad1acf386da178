"""Runs that fork, and runs that begin with another's state: the same bits as trained whole."""

from __future__ import annotations

import pytest

from ablate.base.errors import UserError
from tests.curves import Kept, curve, forked
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


def of_steps(rows, *steps):
    return [row for row in rows if row["step"] in range(*steps)]


def without_evaluation(rows, step):
    return [row for row in rows if (row["step"], row["kind"]) != (step, "eval")]


@pytest.mark.parametrize(
    "name", rest_exhaustive(("late", "fork", "oscillates"), "fork".__eq__)
)
def test_begun_with_the_common_state_a_run_ends_with_the_bits_of_a_whole_one(
    make_config, trained, name
):
    base = make_config(FPROP if name == "oscillates" else None)
    child = make_config({"late": LATE, "fork": FP4, "oscillates": OSCILLATES}[name])
    if name == "fork":
        child = forked(child, base, 16 * STEP)
    (rows, whole), (base_rows, common) = trained(child), trained(base)
    # the same recipe so far; the evaluation after step 16 is its own
    assert_equal(common[15], whole[15])
    later, states = trained(child, common[15])
    assert of_steps(base_rows, 16) + later == rows
    assert_equal(states[31], whole[31])
    assert rows != base_rows


@pytest.mark.exhaustive
def test_a_fork_goes_on_in_the_window_of_the_run_that_it_leaves(make_config, trained):
    parent = make_config(OSCILLATES)
    rows, whole = trained(forked(parent, parent, 18 * STEP))
    base_rows, base = trained(parent)
    assert_equal(whole[31], base[31])
    assert without_evaluation(rows, 18) == base_rows
    plain = forked(make_config(FPROP), parent, 18 * STEP)
    later_rows, states = trained(plain)
    assert of_steps(later_rows, 18) == of_steps(base_rows, 18)
    assert not any(name.startswith("deoscillation.") for name in states[18].tensors)
    assert_equal(trained(plain, base[17])[1][31], states[31])


def test_a_fork_is_a_phase_that_begins_there(make_config, trained):
    fork = forked(make_config(FP4), make_config(), 16 * STEP)
    assert trained(fork)[0] == trained(make_config(LATE))[0]


@pytest.mark.exhaustive
def test_a_parent_with_phases_of_its_own_is_followed_to_the_fork(make_config, trained):
    parent = make_config(AHEAD)
    rows, states = trained(forked(make_config(FP4), parent, 20 * STEP))
    base, as_base = trained(parent)
    assert_equal(states[19], as_base[19])
    assert of_steps(rows, 20) == of_steps(base, 20)
    assert of_steps(rows, 21, 99) != of_steps(base, 21, 99)


@pytest.mark.exhaustive
def test_from_the_fork_on_its_own_settings_hold_and_it_is_evaluated_there(
    make_config, trained
):
    parent = make_config()
    child = make_config(
        learning_rate=1e-4, weight_decay=0.0, eval_every_tokens=2 * STEP
    )
    rows, states = trained(forked(child, parent, 13 * STEP))
    base, as_base = trained(parent)
    assert_equal(states[12], as_base[12])
    evaluated = [row["step"] for row in rows if row["kind"] == "eval"]
    assert evaluated == [8, 13, *range(14, 33, 2)]
    later = of_steps(rows, 14, 99)
    assert {row["lr"] for row in later if row["kind"] == "train"} == {1e-4}
    same, _ = trained(forked(parent, parent, 13 * STEP))
    assert without_evaluation(same, 13) == base


def test_what_diverges_before_the_fork_is_no_result_of_the_arm(make_config, tokens):
    hot = {"divergence_loss": 0.1, "divergence_evals": 1}
    early = forked(make_config(FP4), make_config(**hot), 16 * STEP)
    fault = "diverged after 4,096 tokens, before the fork: validation loss abo"
    with pytest.raises(UserError, match=fault):
        curve(early, tokens)
    late = forked(make_config(FP4, **hot), make_config(), 16 * STEP)
    assert curve(late, tokens)[0].tokens > 16 * STEP
