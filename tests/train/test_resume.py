"""A run that is stopped anywhere and goes on from its checkpoint ends with the same bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ablate.recipes import PRESETS, Recipe, RecipeSpec, resolve
from ablate.run.config import DataConfig, ModelConfig, RunConfig, TrainingConfig
from ablate.store.checkpoints import load_newest, save_manifest, save_part
from ablate.train import Snapshot, train
from tests.exhaustive import rest_exhaustive

RECIPES = {
    "bf16": Recipe(),
    "MXFP4, SR and RHT, signs a call": PRESETS["tseng"].recipe,
    "NVFP4, fixed signs, SR": PRESETS["nvidia-nvfp4"].recipe,
    "FP8 with delayed scales": PRESETS["te-hybrid-fp8-delayed"].recipe,
    "signs a step, a phase": resolve(
        RecipeSpec(
            gemms=["fprop", "dgrad", "wgrad"], stabiliser="rht", hadamard_size=16, signs="step",
            phases=[{"from_fraction": 0.5, "recipe": "bf16"}],
        )
    ),
    "weights de-oscillated": resolve(
        RecipeSpec(
            gemms=["fprop", "dgrad", "wgrad"],
            deoscillate={"window": 3, "threshold": 1.2, "from_tokens": 200},
        )
    ),
}  # fmt: skip
USUAL = ("MXFP4, SR and RHT, signs a call", "FP8 with delayed scales", "weights de-oscillated")
"""Those with the most state beside the weights."""


def config(recipe, **training):
    return RunConfig(
        model=ModelConfig(width=64, layers=2, heads=2, ffn=96), data=DataConfig(), data_digest="x",
        vocab_size=64,
        training=TrainingConfig(
            tokens=128 * 12, seq_len=64, batch_size=2, micro_batch_size=1, eval_every_tokens=256,
            eval_tokens=128, warmup_tokens=256, schedule="cosine", **training,
        ),
        recipe=recipe, backend="auto", seed=3,
    )  # fmt: skip


@pytest.fixture(scope="module")
def tokens():
    rng = np.random.default_rng(0)
    return rng.integers(0, 64, 4000, dtype=np.uint16), rng.integers(0, 64, 400, dtype=np.uint16)


class Folder:
    """Checkpoints as the worker keeps them: through files."""

    def __init__(self, path, every=1):
        self.path, self.every = path, every
        self.last = None

    def load(self):
        found, _ = load_newest(self.path / "c")
        return found and Snapshot(step=found.step, tensors=found.tensors, numbers=found.numbers)

    def due(self, tokens):
        return tokens // 128 % self.every == 0

    def save(self, snapshot):
        self.last = {name: tensor.clone() for name, tensor in snapshot.tensors.items()}
        part = save_part(self.path / "c", snapshot.step, snapshot.tensors)
        save_manifest(self.path / "c", snapshot.step, [part], numbers=snapshot.numbers, rows={})


def without_speed(rows):
    return [{key: value for key, value in row.items() if key != "tokens_per_sec"} for row in rows]


def run(config, tokens, checkpoints, stop_after=None):
    """Train until so many steps are done; return the rows and the result."""
    rows = []
    asked = [0]

    def stop():
        asked[0] += 1
        return asked[0] == stop_after

    return rows, train(config, rows.append, tokens=tokens, should_stop=stop, checkpoints=checkpoints)


@pytest.mark.parametrize("name", rest_exhaustive(RECIPES, USUAL.__contains__))
def test_stopped_again_and_again_it_ends_with_the_same_bits(tmp_path, tokens, name):
    rows, result = run(config(RECIPES[name]), tokens, None)
    assert result.state == "finished"
    pieces = Folder(tmp_path, every=10**9)
    found = []
    for steps in (1, 2, 4, 3, None):
        part, end = run(config(RECIPES[name]), tokens, pieces, steps)
        found += part
        assert end.state == ("interrupted" if steps else "finished")
    assert end == result
    assert without_speed(found) == without_speed(rows)


@pytest.mark.parametrize("name", rest_exhaustive(RECIPES, USUAL.__contains__))
def test_the_weights_and_the_optimizer_are_the_same_to_the_bit(tmp_path, tokens, name):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    straight, broken = Folder(tmp_path / "a"), Folder(tmp_path / "b", every=10**9)
    run(config(RECIPES[name]), tokens, straight)
    for steps in (5, 3):
        run(config(RECIPES[name]), tokens, broken, steps)
    broken.every = 1
    run(config(RECIPES[name]), tokens, broken)
    assert straight.last.keys() == broken.last.keys()
    assert all(torch.equal(tensor, broken.last[key]) for key, tensor in straight.last.items())
    assert any(key.startswith("optimizer.") for key in straight.last)
    if "delayed" in name:
        assert any("amax_history" in key for key in straight.last)
    if "de-oscillated" in name:
        assert sum(key.startswith("deoscillation.") for key in straight.last) == 2 * 8


def test_de_oscillation_changes_the_run_and_says_how_many_weights_it_reset(tmp_path, tokens):
    rows, _ = run(config(RECIPES["weights de-oscillated"]), tokens, None)
    plain, _ = run(config(resolve(RecipeSpec(gemms=["fprop", "dgrad", "wgrad"]))), tokens, None)
    reset = {row["step"]: row.get("weights_reset") for row in rows if row["kind"] == "train"}
    # The window begins after 200 tokens, in step 2; windows end after steps 5, 8 and 11.
    assert reset[1] is None
    assert {step for step, count in reset.items() if count} == {5, 8, 11}
    assert set(reset.values()) > {0, None}
    assert without_speed(rows) != without_speed(plain)
    assert all("weights_reset" not in row for row in plain)


def test_a_snapshot_of_another_recipe_is_refused(tmp_path, tokens):
    folder = Folder(tmp_path, every=10**9)
    run(config(RECIPES["weights de-oscillated"]), tokens, folder, 4)
    with pytest.raises(ValueError, match="a snapshot of another recipe: deoscillation"):
        run(config(Recipe()), tokens, folder)


def test_a_kill_between_checkpoints_goes_back_to_the_last_and_repeats_the_same_rows(tmp_path, tokens):
    whole = config(RECIPES["MXFP4, SR and RHT, signs a call"])
    rows, _ = run(whole, tokens, None)
    folder = Folder(tmp_path, every=4)

    class Killed(BaseException):
        pass

    def kill_at(step):
        def sink(row):
            found.append(row)
            if row["step"] >= step:
                raise Killed

        return sink

    for step in (3, 6, 11):
        found = []
        with pytest.raises(Killed):
            train(whole, kill_at(step), tokens=tokens, checkpoints=folder)
    last = folder.load().step
    assert last == 8
    found = []
    train(whole, found.append, tokens=tokens, checkpoints=folder)
    assert without_speed(found) == [row for row in without_speed(rows) if row["step"] > last]


def test_the_count_of_bad_evaluations_goes_on(tmp_path, tokens):
    bad = config(Recipe(), divergence_loss=0.1, divergence_evals=4)
    _, result = run(bad, tokens, None)
    assert result.state == "diverged"
    folder = Folder(tmp_path, every=10**9)
    run(bad, tokens, folder, 5)
    _, end = run(bad, tokens, folder)
    assert end == result


def test_a_snapshot_of_another_model_is_refused(tmp_path, tokens):
    folder = Folder(tmp_path, every=10**9)
    run(config(Recipe()), tokens, folder, 2)
    wide = config(Recipe())
    object.__setattr__(wide, "model", ModelConfig(width=64, layers=1, heads=2, ffn=96))
    with pytest.raises(ValueError, match=r"another model: model\.blocks\.1"):
        run(wide, tokens, folder)
    object.__setattr__(wide, "model", ModelConfig(width=64, layers=2, heads=2, ffn=128))
    with pytest.raises(ValueError, match="differs in shape"):
        run(wide, tokens, folder)
