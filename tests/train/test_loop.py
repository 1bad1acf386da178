import math
from types import SimpleNamespace

import pytest
import torch

from ablate.backends.emulated import EmulatedBackend
from ablate.base.errors import UserError
from ablate.recipes import RecipeSpec
from ablate.train import evaluation, loop, step, train
from ablate.train.evaluation import evaluate
from ablate.train.group import Layout
from ablate.train.step import assemble
from tests.curves import Kept, after, curve, losses

ALL = ["fprop", "dgrad", "wgrad"]


def test_a_run_learns_and_reports_on_the_token_axis(make_config, tokens):
    torch.manual_seed(7)
    before = torch.get_rng_state()
    result, rows = curve(make_config(), tokens)
    assert torch.equal(torch.get_rng_state(), before)
    assert (result.state, result.tokens, result.step) == ("finished", 16_384, 32)
    assert [row["tokens"] for row in rows if row["kind"] == "eval"] == [
        4096,
        8192,
        12_288,
        16_384,
    ]
    assert losses(rows)[0] < 1.05 * math.log(64)
    assert losses(rows)[-1] < losses(rows)[0] - 0.5
    train_rows = [row for row in rows if row["kind"] == "train"]
    assert train_rows[-1]["tokens"] == 16_384
    assert set(train_rows[0]) == {"kind", "tokens", "step", "lr", "loss", "grad_norm"}


def test_arms_with_one_seed_share_weights_and_data_order(make_config, tokens):
    # With a learning rate of next to nothing, the only thing left is the initial model on the same batches.
    found = []
    for recipe in (RecipeSpec(), RecipeSpec(rest="fp8")):
        _, rows = curve(make_config(recipe, learning_rate=1e-12, tokens=2048), tokens)
        found.append([row["loss"] for row in rows if row["kind"] == "train"])
    assert found[0] == pytest.approx(found[1], rel=2e-3)
    assert found[0] != found[1]


SHORT = {"tokens": 3072, "eval_every_tokens": 1024, "eval_tokens": 1024}


def test_micro_batches_see_the_same_sequences(make_config, tokens):
    whole, parts = (
        losses(curve(make_config(**SHORT, **size), tokens)[1])
        for size in ({}, {"micro_batch_size": 4})
    )
    assert parts == pytest.approx(whole, abs=0.02)


def test_the_first_validation_windows_are_evaluated_where_the_study_says_so(
    make_config, tokens
):
    train_tokens, validation_tokens = tokens
    short = {"tokens": 1024, "eval_every_tokens": 512, "eval_tokens": 512}
    first = losses(curve(make_config(eval_windows="first", **short), tokens)[1])
    assert first == losses(
        curve(make_config(**short), (train_tokens, validation_tokens[: 512 + 1]))[1]
    )
    assert first != losses(curve(make_config(**short), tokens)[1])


@pytest.mark.parametrize(
    "recipe",
    [
        RecipeSpec(gemms=ALL, stabiliser="sr+rht", signs="call"),
        RecipeSpec(gemms=["dgrad"], rest="fp8-delayed"),
    ],
)
def test_evaluating_in_bf16_as_well_changes_no_other_bit(make_config, tokens, recipe):
    by = {
        evaluated_in: curve(
            make_config(recipe, evaluate_in=evaluated_in, **SHORT), tokens
        )[1]
        for evaluated_in in ("recipe", "bf16", "both")
    }
    beside = [row.pop("val_loss_bf16") for row in by["both"] if row["kind"] == "eval"]
    assert by["both"] == by["recipe"]
    assert beside == losses(by["bf16"])
    assert all(
        one != other for one, other in zip(beside, losses(by["recipe"]), strict=True)
    )
    trained = [[row for row in rows if row["kind"] == "train"] for rows in by.values()]
    assert trained[0] == trained[1] == trained[2]


def test_an_evaluation_in_bf16_is_that_of_a_bf16_model_with_the_same_weights(
    make_config, tokens
):
    config = make_config(RecipeSpec(gemms=ALL), evaluate_in="both", **SHORT)
    trainee = assemble(config, "cpu")
    other = assemble(make_config(**SHORT), "cpu")
    other.module.load_state_dict(trainee.module.state_dict())
    found = evaluate(trainee, tokens[1])
    assert (
        found["val_loss_bf16"]
        == evaluate(other, tokens[1])["val_loss"]
        != found["val_loss"]
    )


def test_a_bf16_fprop_is_evaluated_once_for_both_from_its_phase_on(
    make_config, tokens, monkeypatch
):
    counts, per_row = [], []
    own = evaluation._mean_loss
    monkeypatch.setattr(
        evaluation, "_mean_loss", lambda *given: (counts.append(1), own(*given))[1]
    )

    def note(row):
        if row["kind"] == "eval":
            per_row.append(len(counts))
            counts.clear()
            assert (row["val_loss"] == row["val_loss_bf16"]) == (per_row[-1] == 1)

    recipe = RecipeSpec(
        gemms=ALL,
        phases=[{"from_fraction": 0.66, "recipe": RecipeSpec(gemms=["wgrad"])}],
    )
    train(make_config(recipe, evaluate_in="both", **SHORT), note, tokens=tokens)
    assert per_row == [2, 1, 1]  # an evaluation at the start of a phase is within it


def test_the_time_of_an_observer_is_none_of_a_steps(make_config, tokens, monkeypatch):
    now, rows = [0.0], []

    def pass_by(sec=1.0):
        now[0] += sec
        return now[0]

    monkeypatch.setattr(loop, "time", SimpleNamespace(perf_counter=pass_by))
    observer = SimpleNamespace(before=lambda _: None, after=lambda: pass_by(1e6))
    train(make_config(**SHORT), rows.append, tokens=tokens, observe=lambda _: observer)
    assert {row["tokens_per_sec"] for row in rows if row["kind"] == "train"} == {
        512 / 2
    }


def test_no_random_draw_is_used_twice_in_a_run(make_config, tokens, monkeypatch):
    keys = []
    original = EmulatedBackend.quantize

    def spy(self, x, draw, *, axis):
        # the head is in high precision and draws nothing
        keys.extend([draw.key] if draw.key else [])
        return original(self, x, draw, axis=axis)

    monkeypatch.setattr(EmulatedBackend, "quantize", spy)
    recipe = RecipeSpec(gemms=ALL, stabiliser="sr")
    curve(
        make_config(
            recipe,
            tokens=1536,
            micro_batch_size=8,
            eval_every_tokens=512,
            eval_tokens=512,
        ),
        tokens,
    )
    assert len(set(keys)) == len(keys)
    assert {key.step for key in keys} == {0, 1, 2}
    assert {key.call for key in keys if key.gemm == "wgrad"} == {0, 1}
    # evaluation has streams of its own
    assert {key.gemm for key in keys if key.call > 1} == {"fprop"}


@pytest.mark.parametrize(
    ("gemm", "operand", "what"),
    [("wgrad", "dy", "gradient norm"), ("fprop", "x", "loss")],
)
def test_a_divergence_names_layer_gemm_and_operand(
    make_config, tokens, monkeypatch, gemm, operand, what
):
    original = EmulatedBackend.quantize

    def break_one_operand(self, x, draw, *, axis):
        key = draw.key
        operand_key = (key.step, key.layer, key.gemm, key.operand) if key else ()
        if operand_key == (3, "blocks.1.ffn.down", gemm, operand):
            x = x.clone()
            x[40, 5] = float("nan")
        return original(self, x, draw, axis=axis)

    monkeypatch.setattr(EmulatedBackend, "quantize", break_one_operand)
    result, _ = curve(make_config(RecipeSpec(gemms=ALL, stabiliser="sr")), tokens)
    assert (result.state, result.step, result.tokens) == ("diverged", 4, 4 * 512)
    place = f"{gemm.capitalize()}'s {operand} of blocks.1.ffn.down"
    assert result.message == f"non-finite training {what}: first in {place}"


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "model", [{"layers": 1}, {"experts": 4}], ids=["dense", "experts"]
)
def test_compiled_blocks_train_alike_whatever_was_compiled_before(
    make_config, tokens, model
):
    settings = {
        "recipe": RecipeSpec(gemms=ALL, stabiliser="sr"),
        "model": model,
        "tokens": 2048,
    }
    config = make_config(**settings, eval_every_tokens=512, compile=True)
    # No block may be left in eager: these are four for each frame, in training and in evaluation.
    with torch._dynamo.config.patch(
        recompile_limit=3, fail_on_recompile_limit_hit=True
    ):
        compiled = curve(config, tokens)[1]
        snapshots = Kept()
        first = curve(config, tokens, checkpoints=snapshots, should_stop=after(2))[1]
        assert first + curve(config, tokens, checkpoints=snapshots)[1] == compiled
        assert (
            curve(config, tokens, layout=Layout(checkpoint_activations=True))[1]
            == compiled
        )
    plain = losses(curve(make_config(**settings, eval_every_tokens=512), tokens)[1])
    # Fused operations round less often.
    assert losses(compiled) == pytest.approx(plain, abs=0.02)
    assert losses(compiled) != plain


def test_nothing_is_compiled_into_a_folder_in_which_others_can_write(
    make_config, tmp_path, monkeypatch
):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    tmp_path.chmod(0o777)
    with pytest.raises(UserError, match="others can write to"):
        assemble(make_config(compile=True), "cpu")


@pytest.fixture
def read_at_once(monkeypatch):
    """This CPU as a GPU whose steps are eager; return how to train there without reading late."""
    monkeypatch.setattr(step, "_GRAPHS_ON", ("cpu",))
    monkeypatch.setattr(loop, "why_eager", lambda *_, **__: "no graph here")

    def train_at_once(*given):
        with monkeypatch.context() as patch:
            patch.setattr(
                loop, "why_read_at_once", lambda *_, **__: "it is compared with"
            )
            return curve(*given)

    return train_at_once


def test_figures_that_are_read_late_are_the_same(
    make_config, tokens, monkeypatch, read_at_once
):
    config = make_config(tokens=10_240, eval_every_tokens=10_240, micro_batch_size=4)
    expected = read_at_once(config, tokens)[1]
    reads = []
    own = loop.read_figures
    monkeypatch.setattr(
        loop,
        "read_figures",
        lambda group, steps: (reads.append(len(steps)), own(group, steps))[1],
    )
    snapshots = Kept()
    first = curve(config, tokens, checkpoints=snapshots, should_stop=after(5))[1]
    assert first + curve(config, tokens, checkpoints=snapshots)[1] == expected
    assert max(reads) == 2 == config.training.tokens // 512 // 10  # from row to row


@pytest.mark.parametrize(("gemm", "operand"), [("wgrad", "dy"), ("fprop", "x")])
def test_a_divergence_that_is_read_late_is_that_of_its_own_step(
    make_config, tokens, monkeypatch, read_at_once, gemm, operand
):
    original = EmulatedBackend.quantize
    steps = []

    def break_one_operand(self, x, draw, *, axis):
        key = draw.key
        steps.append(key.step if key else 0)
        operand_key = (key.step, key.layer, key.gemm, key.operand) if key else ()
        if operand_key == (4, "blocks.1.ffn.down", gemm, operand):
            x = x.clone()
            x[40, 5] = float("nan")
        return original(self, x, draw, axis=axis)

    monkeypatch.setattr(EmulatedBackend, "quantize", break_one_operand)
    # rows of 3 steps
    config = make_config(
        RecipeSpec(gemms=ALL, stabiliser="sr"), eval_every_tokens=16_384
    )
    expected = read_at_once(config, tokens)
    assert (max(steps), expected[0].step, expected[0].state) == (4, 5, "diverged")
    assert curve(config, tokens) == expected
    assert max(steps) == 5  # a step was taken before the figures were read


def test_from_a_step_that_diverged_on_the_weights_stay(make_config, tokens):
    trainee = assemble(make_config(), "cpu")
    trainee.optimizer.found_inf = torch.zeros(())
    before = [parameter.detach().clone() for parameter in trainee.module.parameters()]
    for figures, moves in (
        ([1.0, 2.0], True),
        ([1.0, math.inf], False),
        ([1.0, 2.0], False),
    ):
        window = tokens[0][: 16 * 33].reshape(16, 33).astype("int64")
        step.set_gradients(trainee, step.on_device(window, "cpu"), 1.0)
        step.skip_if_diverged(
            trainee.optimizer, torch.tensor(figures, dtype=torch.float64)
        )
        step.take_step(trainee)
        now = [parameter.detach().clone() for parameter in trainee.module.parameters()]
        assert (
            any(not torch.equal(a, b) for a, b in zip(now, before, strict=True))
            is moves
        )
        before = now
