"""A run that is stopped anywhere and goes on from its checkpoint ends with the same bits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ablate.run.config import ModelConfig
from ablate.store.checkpoints import load_newest, save_manifest, save_part
from ablate.train import Snapshot
from tests.curves import after, curve
from tests.exhaustive import rest_exhaustive

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
USUAL = ("MXFP4, SR and RHT, signs a call", "FP8 with delayed scales", "weights de-oscillated")
"""Those with the most state beside the weights."""


@pytest.fixture
def config(make_config):
    def make(recipe, **training):
        return make_config(
            RECIPES[recipe], tokens=128 * 12, seq_len=64, batch_size=2, micro_batch_size=1,
            eval_every_tokens=256, eval_tokens=128, warmup_tokens=256, schedule="cosine", backend="auto",
            seed=3, **training,
        )  # fmt: skip

    return make


class Folder:
    """Checkpoints as the worker keeps them: through files."""

    def __init__(self, path, every=10**9):
        self.path, self.every, self.last = path, every, {}

    def load(self):
        found, _ = load_newest(self.path / "c")
        return found and Snapshot(step=found.step, tensors=found.tensors, numbers=found.numbers)

    def due(self, tokens):
        self.asked = tokens
        return tokens // 128 % self.every == 0

    def save(self, snapshot):
        assert self.asked == 128 * snapshot.step  # at a stop, too: others may begin with this state
        self.last = {name: tensor.clone() for name, tensor in snapshot.tensors.items()}
        part = save_part(self.path / "c", snapshot.step, snapshot.tensors)
        save_manifest(self.path / "c", snapshot.step, [part], numbers=snapshot.numbers, rows={})


class Killed(BaseException):
    pass


def killed_after(steps):
    """Kill a run after so many steps."""
    stop = after(steps)

    def ask():
        if stop():
            raise Killed

    return ask


@pytest.mark.parametrize("name", rest_exhaustive([*RECIPES][:-1], USUAL.__contains__))
def test_stopped_again_and_again_it_ends_with_the_same_rows_weights_and_optimizer(
    tmp_path, config, tokens, name
):
    whole, parts = Folder(tmp_path / "whole", every=11), Folder(tmp_path / "parts")
    result, rows = curve(config(name), tokens, checkpoints=whole)
    assert result.state == "finished"
    found = []
    for steps in (1, 2, 4, 3, 0):
        parts.every = 10**9 if steps else 11
        end, part = curve(config(name), tokens, checkpoints=parts, should_stop=after(steps))
        found += part
        assert end.state == ("interrupted" if steps else "finished")
    assert (end, found) == (result, rows)
    assert whole.last.keys() == parts.last.keys()
    assert all(torch.equal(tensor, parts.last[key]) for key, tensor in whole.last.items())
    kinds = [key.split(".")[0] for key in whole.last] + [key.split(".")[-1] for key in whole.last]
    assert "optimizer" in kinds
    assert ("amax_history" in kinds) == ("delayed" in name)
    assert kinds.count("deoscillation") == 2 * 8 * ("de-oscillated" in name)


def test_de_oscillation_changes_the_run_and_says_how_many_weights_it_reset(config, tokens):
    _, rows = curve(config("weights de-oscillated"), tokens)
    _, plain = curve(config("the same without"), tokens)
    reset = {row["step"]: row.get("weights_reset") for row in rows if row["kind"] == "train"}
    # The window begins after 200 tokens, in step 2; windows end after steps 5, 8 and 11.
    assert reset[1] is None
    assert {step for step, count in reset.items() if count} == {5, 8, 11}
    assert [row for row in rows if row["step"] > 5] != [row for row in plain if row["step"] > 5]
    assert all("weights_reset" not in row for row in plain)


def test_a_kill_between_checkpoints_goes_back_to_the_last_and_repeats_the_same_rows(tmp_path, config, tokens):
    whole, folder = config("MXFP4, SR and RHT, signs a call"), Folder(tmp_path, every=4)
    _, rows = curve(whole, tokens)
    for steps in (3, 6, 7):  # the last from step 4 on
        with pytest.raises(Killed):
            curve(whole, tokens, checkpoints=folder, should_stop=killed_after(steps))
    last = folder.load().step
    assert last == 8
    assert curve(whole, tokens, checkpoints=folder)[1] == [row for row in rows if row["step"] > last]


def test_the_count_of_bad_evaluations_goes_on(tmp_path, config, tokens):
    bad = config("bf16", divergence_loss=0.1, divergence_evals=4)
    result, _ = curve(bad, tokens)
    assert result.state == "diverged"
    folder = Folder(tmp_path)
    curve(bad, tokens, checkpoints=folder, should_stop=after(5))
    assert curve(bad, tokens, checkpoints=folder)[0] == result


@pytest.mark.parametrize(
    ("recipe", "model", "said"),
    [
        ("bf16", {}, "a snapshot of another recipe: deoscillation"),
        ("weights de-oscillated", {"layers": 1}, r"another model: model\.blocks\.1"),
        ("weights de-oscillated", {"ffn": 128}, "differs in shape"),
    ],
)
def test_a_snapshot_of_another_recipe_or_model_is_refused(tmp_path, config, tokens, recipe, model, said):
    folder = Folder(tmp_path)
    curve(config("weights de-oscillated"), tokens, checkpoints=folder, should_stop=after(4))
    shape = {"width": 64, "layers": 2, "heads": 2, "ffn": 96} | model
    with pytest.raises(ValueError, match=said):
        curve(replace(config(recipe), model=ModelConfig(**shape)), tokens, checkpoints=folder)
