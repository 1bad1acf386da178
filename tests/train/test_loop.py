import itertools
import math
from types import SimpleNamespace
from unittest.mock import Mock

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
SR = RecipeSpec(gemms=ALL, stabiliser="sr")


def trained(rows):
    return [row for row in rows if row["kind"] == "train"]


def test_a_run_learns_and_reports_on_the_token_axis(make_config, tokens):
    torch.manual_seed(7)
    before = torch.get_rng_state()
    result, rows = curve(make_config(), tokens)
    assert torch.equal(torch.get_rng_state(), before)
    assert (result.state, result.tokens, result.step) == ("finished", 16_384, 32)
    evaluated = [row["tokens"] for row in rows if row["kind"] == "eval"]
    assert evaluated == [4096, 8192, 12_288, 16_384]
    assert losses(rows)[0] < 1.05 * math.log(64)
    assert losses(rows)[-1] < losses(rows)[0] - 0.5
    first, *_, last = trained(rows)
    assert last["tokens"] == 16_384
    assert set(first) == {"kind", "tokens", "step", "lr", "loss", "grad_norm"}


def test_arms_with_one_seed_share_weights_and_data_order(make_config, tokens):
    # With a learning rate of next to nothing, the only thing left is the initial model on the same batches.
    found = []
    for recipe in (RecipeSpec(), RecipeSpec(rest="fp8")):
        _, rows = curve(make_config(recipe, learning_rate=1e-12, tokens=2048), tokens)
        found.append([row["loss"] for row in trained(rows)])
    assert found[0] == pytest.approx(found[1], rel=2e-3)
    assert found[0] != found[1]


SHORT = {"tokens": 3072, "eval_every_tokens": 1024, "eval_tokens": 1024}


def test_micro_batches_see_the_same_sequences(make_config, tokens):
    _, whole = curve(make_config(**SHORT), tokens)
    _, parts = curve(make_config(**SHORT, micro_batch_size=4), tokens)
    assert losses(parts) == pytest.approx(losses(whole), abs=0.02)


def test_the_first_validation_windows_are_evaluated_where_the_study_says_so(
    make_config, tokens
):
    train_tokens, validation_tokens = tokens
    short = {"tokens": 1024, "eval_every_tokens": 512, "eval_tokens": 512}
    first = curve(make_config(eval_windows="first", **short), tokens)
    alone = (train_tokens, validation_tokens[: 512 + 1])
    assert first == curve(make_config(**short), alone)
    assert first != curve(make_config(**short), tokens)


@pytest.mark.parametrize(
    "recipe",
    [
        RecipeSpec(gemms=ALL, stabiliser="sr+rht", signs="call"),
        RecipeSpec(gemms=["dgrad"], rest="fp8-delayed"),
    ],
)
def test_evaluating_in_bf16_as_well_changes_no_other_bit(make_config, tokens, recipe):
    def rows_of(evaluate_in):
        return curve(make_config(recipe, evaluate_in=evaluate_in, **SHORT), tokens)[1]

    by_recipe, in_bf16, both = map(rows_of, ("recipe", "bf16", "both"))
    beside = [row.pop("val_loss_bf16") for row in both if row["kind"] == "eval"]
    assert both == by_recipe
    assert beside == losses(in_bf16)
    assert not {*beside} & {*losses(by_recipe)}
    assert trained(in_bf16) == trained(both)


def test_an_evaluation_in_bf16_is_that_of_a_bf16_model_with_the_same_weights(
    make_config, tokens
):
    recipe = RecipeSpec(gemms=ALL)
    trainee = assemble(make_config(recipe, evaluate_in="both", **SHORT), "cpu")
    other = assemble(make_config(**SHORT), "cpu")
    other.module.load_state_dict(trainee.module.state_dict())
    found = evaluate(trainee, tokens[1])
    assert found["val_loss_bf16"] == evaluate(other, tokens[1])["val_loss"]
    assert found["val_loss_bf16"] != found["val_loss"]


def test_a_bf16_fprop_is_evaluated_once_for_both_from_its_phase_on(
    make_config, tokens, monkeypatch
):
    evaluated = Mock(wraps=evaluation._mean_loss)
    monkeypatch.setattr(evaluation, "_mean_loss", evaluated)
    late = {"from_fraction": 0.66, "recipe": RecipeSpec(gemms=["wgrad"])}
    recipe = RecipeSpec(gemms=ALL, phases=[late])
    _, rows = curve(make_config(recipe, evaluate_in="both", **SHORT), tokens)
    in_bf16 = [row["val_loss_bf16"] for row in rows if row["kind"] == "eval"]
    assert in_bf16[0] != losses(rows)[0]
    assert in_bf16[1:] == losses(rows)[1:]  # also at the start of the phase
    assert evaluated.call_count == 2 + 1 + 1


def test_the_time_of_an_observer_is_none_of_a_steps(make_config, tokens, monkeypatch):
    now, rows = itertools.count(), []
    monkeypatch.setattr(loop, "time", SimpleNamespace(perf_counter=now.__next__))
    long = SimpleNamespace(before=id, after=lambda: [*itertools.islice(now, 1000)])
    train(make_config(**SHORT), rows.append, tokens=tokens, observe=lambda _: long)
    assert {row["tokens_per_sec"] for row in trained(rows)} == {512 / 2}


@pytest.fixture
def seen_draws(monkeypatch):
    """Note the keys of all draws; put a NaN into the operand of one that ``is_broken``."""
    original = EmulatedBackend.quantize

    def watch(is_broken):
        keys = []

        def quantize(self, x, draw, *, axis):
            if draw.key:  # the head is in high precision and draws nothing
                keys.append(draw.key)
                if is_broken(draw.key):
                    x = x.clone()
                    x[40, 5] = math.nan
            return original(self, x, draw, axis=axis)

        monkeypatch.setattr(EmulatedBackend, "quantize", quantize)
        return keys

    return watch


def is_of(step, gemm, operand):
    expected = (step, "blocks.1.ffn.down", gemm, operand)
    return lambda key: (key.step, key.layer, key.gemm, key.operand) == expected


def test_no_random_draw_is_used_twice_in_a_run(make_config, tokens, seen_draws):
    keys = seen_draws(lambda _: False)
    evaluated = {"eval_every_tokens": 512, "eval_tokens": 512}
    curve(make_config(SR, tokens=1536, micro_batch_size=8, **evaluated), tokens)
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
    make_config, tokens, seen_draws, gemm, operand, what
):
    seen_draws(is_of(3, gemm, operand))
    result, _ = curve(make_config(SR), tokens)
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
    settings = {"model": model, "tokens": 2048, "eval_every_tokens": 512}
    config = make_config(SR, **settings, compile=True)
    # No block may be left in eager: these are four for each frame, in training and in evaluation.
    limit = {"recompile_limit": 3, "fail_on_recompile_limit_hit": True}
    with torch._dynamo.config.patch(limit):
        compiled = curve(config, tokens)[1]
        snapshots = Kept()
        first = curve(config, tokens, checkpoints=snapshots, should_stop=after(2))[1]
        assert first + curve(config, tokens, checkpoints=snapshots)[1] == compiled
        again = Layout(checkpoint_activations=True)
        assert curve(config, tokens, layout=again)[1] == compiled
    plain = losses(curve(make_config(SR, **settings), tokens)[1])
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
            patch.setattr(loop, "why_read_at_once", lambda *_, **__: "compared with")
            return curve(*given)

    return train_at_once


def test_figures_that_are_read_late_are_the_same(
    make_config, tokens, monkeypatch, read_at_once
):
    config = make_config(tokens=10_240, eval_every_tokens=10_240, micro_batch_size=4)
    expected = read_at_once(config, tokens)[1]
    reads = []

    def read_figures(group, steps):
        reads.append(len(steps))
        return step.read_figures(group, steps)

    monkeypatch.setattr(loop, "read_figures", read_figures)
    snapshots = Kept()
    first = curve(config, tokens, checkpoints=snapshots, should_stop=after(5))[1]
    assert first + curve(config, tokens, checkpoints=snapshots)[1] == expected
    assert max(reads) == 2 == config.training.tokens // 512 // 10  # from row to row


@pytest.mark.parametrize(("gemm", "operand"), [("wgrad", "dy"), ("fprop", "x")])
def test_a_divergence_that_is_read_late_is_that_of_its_own_step(
    make_config, tokens, seen_draws, read_at_once, gemm, operand
):
    keys = seen_draws(is_of(4, gemm, operand))
    config = make_config(SR, eval_every_tokens=16_384)  # rows of 3 steps
    expected = read_at_once(config, tokens)
    assert (expected[0].step, expected[0].state) == (5, "diverged")
    assert max(key.step for key in keys) == 4
    assert curve(config, tokens) == expected
    # a step was taken before the figures were read
    assert max(key.step for key in keys) == 5
