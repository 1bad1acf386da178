"""The diagnosis of a layer, and that of a run, no bit of which it changes."""

import copy
import dataclasses
import json

import numpy as np
import pytest
import torch
from torch import nn

from ablate.backends.protocol import dequantised
from ablate.diagnose.measure import data_noise
from ablate.diagnose.recorder import (
    MAX_ROWS,
    Recorder,
    Tapped,
    diagnose_gemm,
    draws_of,
    sampled_rows,
)
from ablate.layers.linear import Pass
from ablate.layers.state import EVAL_CALL, Position
from ablate.numerics import apply_recipe
from ablate.recipes import (
    PRESETS,
    GemmPolicy,
    OperandPolicy,
    Recipe,
    RecipeSpec,
    resolve,
)
from ablate.recipes.place import places
from ablate.run.diagnostics import Diagnostics, chosen_layers
from tests.curves import Kept, curve
from tests.exhaustive import rest_exhaustive
from tests.numerics.strategies import normal
from tests.tensors import assert_same

AT = Position(step=3, call=0, tokens=0)
ALL = ["fprop", "dgrad", "wgrad"]
PLAIN = {"gemms": ALL}
SR = {"gemms": ALL, "stabiliser": "sr"}
RHT = {"gemms": ["wgrad"], "stabiliser": "rht"}
NVIDIA = dataclasses.replace(PRESETS["nvidia-nvfp4"].recipe, rules=(), phases=())


def tapped_of(recipe, tokens=128, sequences=4, size=(64, 96)):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(*size, bias=False))
    apply_recipe(model, recipe, seed=5)
    weight = model[0].weight.detach().bfloat16()
    x = normal(tokens, size[0]).bfloat16()
    dy = normal(tokens, size[1], seed=1).bfloat16()
    return Tapped(layer=model[0], at=AT, dy=dy, x=x, weight=weight, sequences=sequences)


def diagnosed(tapped, draws=2):
    passes = draws_of(tapped.layer.recipe_at(0), draws)
    return {
        gemm: diagnose_gemm(tapped, gemm, draws=count) for gemm, count in passes.items()
    }


def test_the_exact_products_are_those_of_the_same_bf16_tensors():
    tapped = tapped_of(PLAIN)
    x, dy, w = (t.double() for t in (tapped.x, tapped.dy, tapped.weight))
    exact = {"fprop": x @ w.t(), "dgrad": dy @ w, "wgrad": dy.t() @ x}
    tensors = {"dy": tapped.dy, "x": tapped.x, "weight": tapped.weight}
    for gemm, diagnosis in diagnosed(tapped).items():
        output = Pass(tapped.layer, AT, **tensors).product(gemm).double()
        error = output - exact[gemm]
        figures = diagnosis["product"]
        relative = float(error.norm() / exact[gemm].norm())
        assert figures["relative_error"] == pytest.approx(relative, rel=1e-3)
        assert 0.1 < relative < 0.3
        energy = float(exact[gemm].square().sum())
        assert figures["exact_energy"] == pytest.approx(energy, rel=1e-4)


@pytest.mark.parametrize(
    ("recipe", "gemms", "draws", "low", "high"),
    [
        (PLAIN, ALL, 1, 1, 1),
        (PLAIN | {"stabiliser": "dht"}, ALL, 1, 1, 1),
        (SR, ALL, 16, -0.02, 0.02),
        # It rounds dy alone stochastically: the error of x in Wgrad, about half of the energy, stays.
        (NVIDIA, ["wgrad"], 16, 0.2, 0.6),
        (RHT | {"signs": "layer"}, ["wgrad"], 1, 1, 1),  # drawn once in training
        (RHT | {"signs": "step"}, ["wgrad"], 16, 0, 0.5),
        ("bf16", [], 1, 0, 0),
        ({"gemms": [], "rest": "fp8"}, ALL, 1, 1, 1),
    ],
)
def test_what_stays_the_same_in_every_draw_is_bias(recipe, gemms, draws, low, high):
    diagnoses = diagnosed(tapped_of(recipe), draws=16)
    assert set(gemms) <= diagnoses.keys()
    assert all(diagnosis["operands"] for diagnosis in diagnoses.values())
    for gemm in gemms:
        figures = diagnoses[gemm]["product"]
        assert figures["draws"] == draws
        assert low <= figures["bias_share"] <= high
        if recipe is SR:
            assert figures["gain"] == pytest.approx(1, abs=0.01)
            for operand in diagnoses[gemm]["operands"].values():
                assert operand["clipped"] == 0


def test_rows_that_the_blocks_do_not_divide_are_filled_up_with_zeros():
    whole = tapped_of(PLAIN, tokens=64, sequences=None)
    part = dataclasses.replace(whole, dy=whole.dy[:50], x=whole.x[:50])
    zeroed = dataclasses.replace(whole, dy=whole.dy.clone(), x=whole.x.clone())
    zeroed.dy[50:] = zeroed.x[50:] = 0
    expected = diagnosed(zeroed)
    for gemm, diagnosis in diagnosed(part).items():
        # Products of other sizes are summed in another order on some CPUs.
        error = expected[gemm]["product"]["relative_error"]
        assert diagnosis["product"]["relative_error"] == pytest.approx(error, rel=1e-6)


def test_of_an_operand_from_the_forward_pass_the_second_quantisation_is_measured():
    plain = OperandPolicy(format="nvfp4")
    fprop = GemmPolicy(left=plain, right=plain)
    rotated = dataclasses.replace(plain, hadamard=16)

    def tapped(source):
        right = dataclasses.replace(rotated, source=source)
        wgrad = GemmPolicy(left=rotated, right=right)
        return tapped_of(Recipe(fprop=fprop, wgrad=wgrad))

    twice = tapped("forward_bf16")
    planned = twice.layer.plan(AT.tokens, twice.x.device).operand("fprop", "x")
    forward = dequantised(twice.layer.operand(twice.x, planned, AT)).bfloat16()
    once = dataclasses.replace(tapped("high_precision"), x=forward)
    figures, expected = (
        diagnosed(made)["wgrad"]["operands"]["x"] for made in (twice, once)
    )
    assert figures == expected


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_published_recipe_can_be_diagnosed(name):
    recipe = dataclasses.replace(PRESETS[name].recipe, rules=(), phases=())
    for diagnosis in diagnosed(tapped_of(recipe, tokens=256, size=(256, 256))).values():
        assert 0 < diagnosis["product"]["relative_error"] < 0.6, diagnosis
        assert abs(diagnosis["product"]["gain"] - 1) < 0.2
        for figures in diagnosis["operands"].values():
            assert figures["relative_error"] < 0.4
            assert figures["gain"] == pytest.approx(1, abs=0.15)


def test_draws_of_diagnostics_are_not_trainings():
    tapped = tapped_of(SR | {"stabiliser": "sr+rht"})
    dy = tapped.layer.plan(0, tapped.dy.device).operand("wgrad", "dy")
    keys = [
        dy.key(Position(step=step, call=0, tokens=0).redrawn(redraw))
        for step in (0, 1, 7, 1_000_000)
        for redraw in (1, 2, 1023)
    ]
    assert len({key.step for key in keys}) == 12
    assert all(key.step >= 1 << 31 and key.call == EVAL_CALL for key in keys)


def test_nothing_is_changed_by_looking_neither_delayed_scales_nor_torchs_generator():
    tapped = tapped_of("te-hybrid-fp8-delayed")
    tapped.layer.get_buffer("amax_history")[:, 2] = 3.0
    tapped.layer.get_buffer("amax_step")[:, 2] = 2
    before = copy.deepcopy(dict(tapped.layer.named_buffers()))
    state = torch.get_rng_state()
    diagnoses = diagnosed(tapped)
    assert torch.equal(state, torch.get_rng_state())
    assert_same(dict(tapped.layer.named_buffers()), before)
    # The past's largest magnitude, 3, was used: the tensors' own largest values clip.
    assert diagnoses["fprop"]["operands"]["x"]["clipped"] > 0


@pytest.mark.parametrize("sequences", [8, None, 1, 3])
def test_the_noise_of_the_data_is_that_of_the_exact_weight_gradient(sequences):
    tapped = tapped_of({"gemms": ["wgrad"]}, tokens=264, sequences=sequences)
    noise = diagnosed(tapped)["wgrad"]["data_noise"]
    assert (noise is None) == (sequences != 8)  # too few parts
    if noise is not None:
        dy = tapped.dy.double().view(4, 66, -1)
        parts = dy.mT @ tapped.x.double().view(4, 66, -1)
        energies = parts.square().sum((1, 2)).tolist()
        expected = data_noise(energies, float(parts.sum(0).square().sum()), 8)
        assert noise == pytest.approx(expected, rel=1e-4)


STEP = 32 * 16  # tokens
SHORT = {"tokens": 6 * STEP, "eval_every_tokens": 3 * STEP, "micro_batch_size": 8}
RECIPES = {
    "sr and rht": RecipeSpec(gemms=ALL, stabiliser="sr+rht"),
    "plain": RecipeSpec(gemms=ALL),
    "delayed": RecipeSpec(rest="fp8-delayed"),
}


def run(config, tokens, diagnostics=None, **options):
    diagnosed_rows = []

    def observe(trainee):
        if diagnostics is None:
            return None
        return Recorder(trainee, diagnostics, diagnosed_rows.append)

    return curve(config, tokens, observe=observe, **options), diagnosed_rows


@pytest.mark.parametrize("name", rest_exhaustive(RECIPES, "sr and rht".__eq__))
def test_a_run_is_the_same_to_the_bit_with_and_without(make_config, tokens, name):
    config = make_config(RECIPES[name], **SHORT)
    before = torch.get_rng_state()
    plain, _ = run(config, tokens)
    settings = Diagnostics(every_tokens=2 * STEP, layers=["*"], draws=2)
    looked, diagnosed_rows = run(config, tokens, settings)
    assert looked == plain
    assert torch.equal(before, torch.get_rng_state())
    assert {row["tokens"] for row in diagnosed_rows} == {2 * n * STEP for n in range(3)}
    # Every layer of two blocks but the head, three GEMMs, and the first micro-batch alone.
    assert len(diagnosed_rows) == 3 * 2 * 4 * 3
    for row in diagnosed_rows:
        json.dumps(row, allow_nan=False)
        assert row["kind"] == "diagnosis"
        if row["gemm"] == "wgrad":
            assert row["data_noise"]["sequences"] == 8
        else:
            assert row["data_noise"] is None


def test_a_recipe_is_measured_at_its_own_layers_and_phases(make_config, tokens):
    ruled = RecipeSpec(
        gemms=ALL,
        layers=[{"first": 1, "recipe": "bf16"}],
        phases=[{"from_tokens": 4 * STEP, "recipe": {"gemms": ["fprop"]}}],
    )
    config = make_config(ruled, model={"layers": 4, "width": 32, "ffn": 32}, **SHORT)
    blocks, gemms = set(), {}
    for row in run(config, tokens, Diagnostics(every_tokens=4 * STEP, draws=2))[1]:
        blocks.add(row["layer"].split(".")[1])
        gemms.setdefault(row["step"], set()).add(row["gemm"])
    assert blocks == {"1", "2", "3"}
    assert gemms == {0: set(ALL), 4: {"fprop"}}
    # nothing is quantised
    assert run(make_config(**SHORT), tokens, Diagnostics(every_tokens=STEP))[1] == []


@pytest.mark.exhaustive
def test_a_resumed_run_repeats_the_same_rows(make_config, tokens):
    config, kept = make_config(RECIPES["sr and rht"], **SHORT), Kept([3 * STEP])
    settings = Diagnostics(every_tokens=STEP, layers=["*.down"], draws=2)
    (_, rows), diagnosed_rows = run(config, tokens, settings, checkpoints=kept)
    (_, later), again = run(config, tokens, settings, checkpoints=kept)
    assert again == [row for row in diagnosed_rows if row["step"] >= 3]
    assert later == [row for row in rows if row["step"] > 3]


def test_ends_and_middle_are_of_the_blocks_that_are_quantised():
    names = [f"blocks.{n}.{part}" for n in range(16) for part in ("qkv", "down")]
    where = places([*names, "head"], heads=["head"]).values()
    plain = resolve(RecipeSpec(gemms=ALL))
    # of which the first 2 and the last 8 blocks are in high precision
    nvidia = PRESETS["nvidia-nvfp4"].recipe
    for recipe, blocks in ((plain, (0, 8, 15)), (nvidia, (2, 5, 7)), (Recipe(), ())):
        expected = [name for n in blocks for name in names[2 * n : 2 * n + 2]]
        assert chosen_layers("ends and middle", recipe, where) == expected
    assert chosen_layers(["*.down", "nothing"], plain, where)[0] == "blocks.0.down"


def test_the_load_of_experts_is_the_share_of_their_choices(make_config, tokens):
    config = make_config(model={"experts": 4, "layers": 1}, **SHORT)
    _, diagnosed_rows = run(config, tokens, Diagnostics(every_tokens=2 * STEP))
    assert [(row["kind"], row["layer"], row["step"]) for row in diagnosed_rows] == [
        ("load", "blocks.0.ffn", step) for step in (0, 2, 4)
    ]
    for row in diagnosed_rows:
        # two of each of the STEP / 2 tokens
        choices = np.multiply(row["shares"], STEP)
        assert choices.round().sum() == STEP
        assert choices == pytest.approx(choices.round(), rel=1e-5)
        assert row["busiest"] == pytest.approx(4 * max(row["shares"]), rel=1e-5)


@pytest.mark.parametrize(
    ("rows", "seq_len"),
    [(4096, 128), (640, 64), (4096, 2048), (1000, 100), (96, 7), (8, 32)],
)
def test_a_sample_of_the_rows_is_whole_sequences_where_it_can_be(rows, seq_len):
    taken, sequences = sampled_rows(rows, seq_len)
    assert 0 < taken <= MAX_ROWS
    assert sequences is None or sequences * seq_len == taken
    assert taken == rows or taken % 256 == 0
    assert sequences is not None or taken == MAX_ROWS or rows % seq_len
