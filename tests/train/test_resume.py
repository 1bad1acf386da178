"""A run that is stopped anywhere and goes on from its checkpoint ends with the same bits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.curves import Kept, after, curve, losses
from tests.exhaustive import rest_exhaustive
from tests.tensors import assert_same

STEP = 64 * 2
ALL = ["fprop", "dgrad", "wgrad"]
RECIPES = {
    "bf16": "bf16",
    "MXFP4, SR and RHT, signs a call": "tseng",
    "NVFP4, fixed signs, SR": "nvidia-nvfp4",
    "FP8 with delayed scales": "te-hybrid-fp8-delayed",
    "signs a step, a phase": {
        "gemms": ALL, "stabiliser": "rht", "hadamard_size": 16, "signs": "step",
        "phases": [{"from_fraction": 0.5, "recipe": "bf16"}],
    },
    "weights de-oscillated": {
        "gemms": ALL, "deoscillate": {"window": 3, "threshold": 1.2, "from_tokens": 200},
    },
    "the same without": {"gemms": ALL},
}  # fmt: skip
USUAL = (
    "MXFP4, SR and RHT, signs a call",
    "FP8 with delayed scales",
    "weights de-oscillated",
)
"""Those with the most state beside the weights."""


@pytest.fixture
def config(make_config):
    def make(recipe, **training):
        return make_config(
            RECIPES[recipe], tokens=12 * STEP, seq_len=64, batch_size=2, micro_batch_size=1,
            eval_every_tokens=256, eval_tokens=128, warmup_tokens=256, schedule="cosine", backend="auto",
            seed=3, **training,
        )  # fmt: skip

    return make


@pytest.mark.parametrize("name", rest_exhaustive([*RECIPES][:-1], USUAL.__contains__))
def test_stopped_again_and_again_it_ends_with_the_same_rows_weights_and_optimizer(
    config, tokens, name
):
    whole, parts = Kept([11 * STEP]), Kept([11 * STEP])
    result, rows = curve(config(name), tokens, checkpoints=whole)
    assert result.state == "finished"
    rows_of_parts = []
    for steps in (1, 2, 4, 3, 0):
        stop = {"checkpoints": parts, "should_stop": after(steps)}
        end, part = curve(config(name), tokens, **stop)
        rows_of_parts += part
        if steps:
            assert end.state == "interrupted"
            # at a stop, too: others may begin with this state
            assert parts.asked == end.tokens
    assert (end, rows_of_parts) == (result, rows)
    assert_same(parts.last.tensors, whole.last.tensors)
    names = " ".join(whole.last.tensors)
    assert "optimizer." in names
    assert ("amax_history" in names) == ("delayed" in name)
    assert names.count("deoscillation.") == 2 * 8 * ("de-oscillated" in name)


def test_de_oscillation_changes_the_run_and_says_how_many_weights_it_reset(
    config, tokens
):
    _, rows = curve(config("weights de-oscillated"), tokens)
    _, plain = curve(config("the same without"), tokens)
    assert rows != plain
    # The window begins after 200 tokens, in step 2; windows end after steps 5, 8 and 11.
    assert "weights_reset" not in rows[0]
    assert [row["step"] for row in rows if row.get("weights_reset")] == [5, 8, 11]
    assert all("weights_reset" not in row for row in plain)


def test_a_kill_between_checkpoints_goes_back_to_the_last_and_repeats_the_same_rows(
    config, tokens
):
    whole = config("MXFP4, SR and RHT, signs a call")
    snapshots = Kept([4 * STEP, 8 * STEP])
    _, rows = curve(whole, tokens)
    for steps in (3, 6, 7):  # the last from step 4 on
        killed = iter([False] * (steps - 1)).__next__
        with pytest.raises(StopIteration):  # asked once more than it can answer
            curve(whole, tokens, checkpoints=snapshots, should_stop=killed)
    assert snapshots.last.step == 8
    _, later = curve(whole, tokens, checkpoints=snapshots)
    assert later == [row for row in rows if row["step"] > 8]


def test_evaluations_above_the_bound_are_counted_on_and_end_a_run_as_diverged(
    config, tokens
):
    bad = config("bf16", divergence_loss=0.1, divergence_evals=4)
    result, rows = curve(bad, tokens)
    assert (result.state, result.tokens, len(losses(rows))) == ("diverged", 4 * 256, 4)
    assert result.message == "validation loss above 0.1 nats/token for 4 evaluations"
    snapshots = Kept()
    curve(bad, tokens, checkpoints=snapshots, should_stop=after(5))
    assert curve(bad, tokens, checkpoints=snapshots)[0] == result


@pytest.mark.parametrize(
    ("recipe", "model", "said"),
    [
        ("bf16", {}, "a snapshot of another recipe: deoscillation"),
        ("weights de-oscillated", {"layers": 1}, r"another model: model\.blocks\.1"),
        ("weights de-oscillated", {"ffn": 128}, "differs in shape"),
    ],
)
def test_a_snapshot_of_another_recipe_or_model_is_refused(
    config, tokens, recipe, model, said
):
    snapshots = Kept()
    parent = config("weights de-oscillated")
    curve(parent, tokens, checkpoints=snapshots, should_stop=after(4))
    other = replace(config(recipe), model=replace(parent.model, **model))
    with pytest.raises(ValueError, match=said):
        curve(other, tokens, checkpoints=snapshots)
