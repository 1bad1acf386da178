"""Switching diagnostics on changes no bit of a run; what it says is the same after a stop and on resume."""

import dataclasses
import json
import math

import pytest
import torch

from ablate.data.batches import batch, sequence_starts
from ablate.diagnose.recorder import MAX_ROWS, Recorder, sampled_rows
from ablate.layers.linear import QuantLinear
from ablate.recipes import GEMMS, PRESETS, RecipeSpec, resolve
from ablate.recipes.place import places
from ablate.reports.findings.diagnoses import sketch_cosine
from ablate.run.diagnostics import Diagnostics, chosen_layers
from ablate.train import train
from ablate.train.loop import assemble, gradients
from tests.exhaustive import rest_exhaustive

ALL = ["fprop", "dgrad", "wgrad"]
RECIPES = {
    "sr and rht": RecipeSpec(gemms=ALL, stabiliser="sr+rht"),
    "plain": RecipeSpec(gemms=ALL),
    "delayed": RecipeSpec(rest="fp8-delayed"),
}
STEP = 32 * 16  # tokens
SHORT = {"tokens": 12 * STEP, "eval_every_tokens": 3 * STEP, "micro_batch_size": 8}


def run(config, tokens, diagnostics=None, *, speeds=False, **options):
    rows, found = [], []
    observe = diagnostics and (lambda trainee: Recorder(trainee, diagnostics, found.append))
    result = train(config, rows.append, tokens=tokens, observe=observe, **options)
    for row in rows if not speeds else ():
        row.pop("tokens_per_sec", None)
    return result, rows, found


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", rest_exhaustive(RECIPES, lambda name: name == "sr and rht"))
def test_a_run_is_the_same_to_the_bit_with_and_without(make_config, tokens, name):
    config = make_config(RECIPES[name], **SHORT)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    plain = run(config, tokens)
    looked = run(config, tokens, Diagnostics(every_tokens=2 * STEP, layers=["*"]))
    assert looked[:2] == plain[:2]
    assert torch.equal(before, torch.get_rng_state())
    assert plain[2] == []
    assert {row["tokens"] for row in looked[2]} == {2 * n * STEP for n in range(6)}
    gemms = {(row["layer"], row["gemm"]) for row in looked[2]}
    assert len(gemms) == 2 * 4 * 3  # every layer of two blocks, and three GEMMs


OTHERS = Diagnostics(
    every_tokens=4 * STEP,
    draws=2,
    what_if=["mxfp4", {"gemms": ALL, "stabiliser": "sr"}, "te-hybrid-fp8-delayed"],
)


@pytest.mark.exhaustive
def test_other_recipes_are_measured_on_the_runs_tensors_and_train_nothing(make_config, tokens):
    config = make_config(RECIPES["sr and rht"], **SHORT)
    plain = run(config, tokens)
    alone = run(config, tokens, Diagnostics(every_tokens=4 * STEP, draws=2))
    looked = run(config, tokens, OTHERS)
    assert looked[:2] == plain[:2]
    assert [row for row in looked[2] if "what_if" not in row] == alone[2]
    names = list(OTHERS.other_recipes())
    assert {row.get("what_if") for row in looked[2]} == {None, *names}
    own = {(row["step"], row["layer"], row["gemm"]): row for row in alone[2]}
    for row in looked[2]:
        same = own[row["step"], row["layer"], row["gemm"]]
        assert row["exact_energy"] == same["exact_energy"]  # the same tensors
        assert row["data_noise"] == same["data_noise"]
        if row.get("what_if") == "mxfp4":
            assert (row["draws"], row["bias_share"]) == (1, 1.0)
            assert 0.05 < row["relative_error"] < 0.3
        if row.get("what_if") == "te-hybrid-fp8-delayed":
            assert 0.01 < row["relative_error"] < 0.08  # dy in E5M2


@pytest.mark.exhaustive
def test_another_recipes_error_is_that_of_a_run_which_trains_in_it(make_config, tokens):
    """On the first step both runs have the same tensors, but for what the recipe did to them above."""
    in_bf16 = run(
        make_config(**SHORT), tokens, dataclasses.replace(OTHERS, every_tokens=10**9, what_if=["mxfp4"])
    )[2]
    trained = run(make_config(RECIPES["plain"], **SHORT), tokens, Diagnostics(every_tokens=10**9))[2]
    assert (
        len(in_bf16) == len(trained) > 0
    )  # a run in bf16 is measured, too, where the other recipe quantises
    first = {row["gemm"]: row for row in trained if row["layer"] == "blocks.0.attention.qkv"}["fprop"]
    other = {row["gemm"]: row for row in in_bf16 if row["layer"] == "blocks.0.attention.qkv"}["fprop"]
    assert other.pop("what_if") == "mxfp4"
    assert other == first


def test_other_recipes_have_their_own_layers_and_phases(make_config, tokens):
    ruled = {"gemms": ALL, "layers": [{"first": 1, "recipe": "bf16"}],
             "phases": [{"from_tokens": 4 * STEP, "recipe": {"gemms": ["fprop"]}}]}  # fmt: skip
    settings = Diagnostics(every_tokens=4 * STEP, what_if=[ruled], layers=["*"])
    found = run(make_config(**SHORT), tokens, settings)[2]
    assert {row["layer"].partition(".ffn")[0].partition(".att")[0] for row in found} == {"blocks.1"}
    assert {row["gemm"] for row in found if row["step"] == 0} == set(ALL)
    assert {row["gemm"] for row in found if row["step"] > 0} == {"fprop"}


def test_each_recipe_is_measured_at_its_own_layers_alone(make_config, tokens):
    ruled = {"gemms": ["wgrad"], "layers": [{"first": 1, "recipe": "bf16"}]}
    settings = Diagnostics(every_tokens=10**9, what_if=[ruled])
    config = make_config(RECIPES["plain"], model={"layers": 4, "width": 32, "ffn": 32}, **SHORT)
    blocks = {}
    for row in run(config, tokens, settings)[2]:
        blocks.setdefault("what_if" in row, set()).add(row["layer"].split(".")[1])
    assert blocks == {False: {"0", "2", "3"}, True: {"1", "2", "3"}}


class Kept:
    """Checkpoints in memory, to go on from a step."""

    def __init__(self, at=None):
        self.at, self.kept = at, None

    def load(self):
        return self.kept

    def due(self, tokens):
        return tokens == self.at

    def save(self, snapshot):
        tensors = {name: tensor.clone() for name, tensor in snapshot.tensors.items()}
        self.kept = dataclasses.replace(snapshot, tensors=tensors)


@pytest.mark.exhaustive
def test_a_resumed_run_repeats_the_same_rows(make_config, tokens):
    config = make_config(RECIPES["sr and rht"], **SHORT)
    settings = Diagnostics(every_tokens=STEP, layers=["*.down"], draws=2)
    _, rows, found = run(config, tokens, settings)
    kept = Kept(at=5 * STEP)
    run(config, tokens, settings, checkpoints=kept)
    assert kept.kept.step == 5
    _, later, again = run(config, tokens, settings, checkpoints=kept)
    assert again == [row for row in found if row["step"] >= 5]
    assert later == [row for row in rows if row["step"] > 5]


def test_rows_are_plain_data_with_finite_numbers(make_config, tokens):
    _, _, found = run(
        make_config(RECIPES["sr and rht"], **SHORT), tokens, Diagnostics(every_tokens=10**9, draws=3)
    )
    assert {row["step"] for row in found} == {0}
    for row in found:
        json.dumps(row, allow_nan=False)
        assert row["kind"] == "diagnosis"
        assert row["draws"] == 3
        assert 0.05 < row["relative_error"] < 0.5
        assert abs(row["gain"] - 1) < 0.05
        assert (row["data_noise"] is not None) == (row["gemm"] == "wgrad")
        assert len(row["operands"]) == 2
    assert found[2]["data_noise"]["sequences"] == 8


def test_layers_without_anything_to_quantise_are_left_out(make_config, tokens):
    _, _, found = run(make_config(**SHORT), tokens, Diagnostics(every_tokens=STEP))
    assert found == []


def test_the_same_weights_and_tokens_err_alike_and_others_do_not(make_config, tokens):
    config = make_config(RECIPES["plain"], **SHORT)
    _, _, found = run(config, tokens, Diagnostics(every_tokens=STEP, layers=["blocks.1.ffn.down"]))
    sketches = [row["sketch"] for row in found if row["gemm"] == "wgrad"]
    assert sketch_cosine(sketches[0], sketches[0]) == pytest.approx(1)
    assert sketch_cosine(sketches[0], sketches[-1]) < 0.9


@pytest.mark.exhaustive
def test_the_speed_of_steps_leaves_the_measuring_out(make_config, tokens):
    config = make_config(RECIPES["sr and rht"], **SHORT)
    speeds = []
    for every in (10**9, STEP):
        _, rows, _ = run(config, tokens, Diagnostics(every_tokens=every, layers=["*"], draws=24), speeds=True)
        speeds.append(sum(row["tokens_per_sec"] for row in rows if row["kind"] == "train"))
    assert speeds[1] > 0.4 * speeds[0]  # 24 draws of everything take many times a step


def test_ends_and_middle_are_of_the_blocks_that_are_quantised():
    names = [f"blocks.{n}.{part}" for n in range(16) for part in ("qkv", "down")] + ["head"]
    where = places(names, heads=["head"])
    plain = resolve(RecipeSpec(gemms=ALL))
    found = chosen_layers("ends and middle", plain, where.values())
    assert found == [f"blocks.{n}.{part}" for n in (0, 8, 15) for part in ("qkv", "down")]
    nvidia = PRESETS["nvidia-nvfp4"].recipe  # first 2 and last 8 blocks in high precision
    found = chosen_layers("ends and middle", nvidia, where.values())
    assert {name.split(".")[1] for name in found} == {"2", "5", "7"}
    assert chosen_layers(["*.down", "nothing"], plain, where.values())[0] == "blocks.0.down"
    assert chosen_layers("ends and middle", resolve(RecipeSpec()), where.values()) == []


@pytest.mark.parametrize(
    ("rows", "seq_len"), [(4096, 128), (640, 64), (4096, 2048), (1000, 100), (96, 7), (8, 32)]
)
def test_a_sample_of_the_rows_is_whole_sequences_where_it_can_be(rows, seq_len):
    taken, sequences = sampled_rows(rows, seq_len)
    assert 0 < taken <= max(MAX_ROWS, 0)
    assert sequences is None or sequences * seq_len == taken
    assert taken == rows or taken % 256 == 0
    assert sequences is not None or taken == MAX_ROWS or rows % seq_len


def test_micro_batches_after_the_first_and_evaluation_are_not_measured(make_config, tokens):
    config = make_config(RECIPES["plain"], **SHORT)
    trainee = assemble(config, "cpu")
    layers = [m for m in trainee.network.module.modules() if isinstance(m, QuantLinear)]
    seen = []

    def tap(layer, at, dy, x, weight):
        assert (len(dy), weight.shape[1]) == tuple(x.shape)
        seen.append((layer, at.call, len(x)))

    trainee.state.tap = tap
    window = batch(tokens[0], sequence_starts(0, 0, 16, 32, len(tokens[0])), 32)
    gradients(trainee, window, 1.0)
    assert sorted(seen) == sorted((layer.name, call, 8 * 32) for layer in layers for call in (0, 1))
    _, _, found = run(config, tokens, Diagnostics(every_tokens=10**9, layers=["*"]))
    assert len(found) == (len(layers) - 1) * len(GEMMS)  # the head stays in high precision
    assert not any(math.isnan(row["relative_error"]) for row in found)
