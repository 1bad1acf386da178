"""The big studies, on stand-ins for their data: runs, recipes by row, arithmetic, and what fits where."""

from __future__ import annotations

import gzip
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from ablate.base.errors import UserError
from ablate.modelled.on_hardware import CPU, on_hardware
from ablate.modelled.speed import token_time, workload_of
from ablate.modelled.spread import seconds_range
from ablate.plan import build_plan
from ablate.plan.layers import layer_groups
from ablate.run.architecture import layer_places
from ablate.study import load_study, shipped_studies

BIG = ("llama31-8b-mlperf", "nvfp4-llama", "tseng-gpt")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The studies beside stand-ins: shards of one line each, and tokenizers of the right size."""
    folder = tmp_path_factory.mktemp("big")
    for name in BIG:
        shutil.copy(shipped_studies()[name], folder)
    (folder / "c4" / "en").mkdir(parents=True)
    names = [f"c4-train.{index:05d}-of-01024.json.gz" for index in range(768, 784)]
    for name in (*names, "c4-validation.00000-of-00008.json.gz"):
        with gzip.open(folder / "c4" / "en" / name, "wt") as shard:
            shard.write(json.dumps({"text": f"a document of {name}"}) + "\n")
    (folder / "wikipedia").mkdir()
    (folder / "wikipedia" / "0.jsonl").write_text(json.dumps({"text": "an article"}) + "\n")
    for name, size in (("Llama-3.1-8B", 128_256), ("gpt2", 50_257)):
        tokens = {f"t{index}": index for index in range(size - 1)} | {"<|endoftext|>": size - 1}
        (folder / name).mkdir()
        (folder / name / "tokenizer.json").write_text(json.dumps({"model": {"vocab": tokens}}))
    return folder


@pytest.fixture(scope="module")
def plans(folder):
    return {name: build_plan(load_study(folder / f"{name}.yaml")) for name in BIG}


@pytest.mark.parametrize("name", BIG)
def test_without_the_data_all_but_the_ids_is_the_same(plans, name):
    full_plan = plans[name]
    assert len({run.id for _, run in full_plan.runs()}) == len(full_plan.arms) * 5
    assert (full_plan.missing, full_plan.dropped, full_plan.folded) == ((), (), ())
    shipped = load_study(name)
    with pytest.raises(UserError, match="no such tokenizer file or folder"):
        build_plan(shipped)
    planned = build_plan(shipped, without_data=True)
    assert len(planned.missing) == 1
    assert {run.id for _, run in planned.runs()} == {""}
    for arm, full in zip(planned.arms, full_plan.arms, strict=True):
        config = replace(arm.config, data=full.config.data, data_digest=full.config.data_digest)
        assert replace(arm, runs=full.runs, config=config) == full


def test_a_tokenizer_of_another_size_is_refused(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "other")
    shutil.copy(tmp_path / "other" / "gpt2" / "tokenizer.json", tmp_path / "other" / "Llama-3.1-8B")
    said = r"tokenizer\.json: the tokenizer has 50,257 tokens, but data\.vocab_size is 128,256"
    with pytest.raises(UserError, match=said):
        build_plan(load_study(tmp_path / "other" / "llama31-8b-mlperf.yaml"))


def test_mlperf_is_set_up_as_published(plans):
    planned = plans["llama31-8b-mlperf"]
    assert (planned.target.kind, planned.target.value, planned.baseline) == ("val_loss", 3.3, "fp8")
    for arm in planned.arms:
        batches, training = arm.batches, arm.config.training
        assert (batches.tokens_per_step, batches.warmup_steps, batches.steps) == (32 * 8192, 64, 9216)
        assert batches.evals == 294_912 / 12_288
        assert training.eval_tokens == 1024 * 8192
        assert (training.learning_rate, training.schedule) == (8e-4, "constant")
        assert (training.beta1, training.beta2, training.adam_eps) == (0.9, 0.95, 1e-5)
        assert (training.weight_decay, training.grad_clip, training.eval_windows) == (0.1, 1.0, "first")
        assert arm.size.parameters == 8_030_261_248
        assert arm.resources.devices_per_run == 8


def test_mlperf_has_every_row_of_the_table_on_all_layers_of_all_blocks(plans):
    rows = {arm.name: arm for arm in build_plan(load_study("amd-ladder")).arms}
    arms = plans["llama31-8b-mlperf"].arms
    del rows["F+D+W deosc"]  # not of the table
    assert [arm.name for arm in arms] == list(rows)
    for arm in arms:
        assert arm.config.recipe == rows[arm.name].config.recipe
        assert arm.description == rows[arm.name].description
        found = groups(arm)
        assert [(count, text) for count, text, _ in found[1:]] == [(1, "bf16")]
        assert found[0][0] == 32 * 4
        assert "bf16" not in found[0][1]


def groups(arm):
    found = layer_groups(arm.config.recipe, layer_places(arm.layers).values(), arm.batches.tokens)
    return [(group.count, group.recipe, group.names) for group in found]


def test_tseng_quantises_the_backward_pass_of_the_published_model(plans):
    planned = plans["tseng-gpt"]
    texts = {arm.name: groups(arm)[0] for arm in planned.arms}
    assert {name: text for name, (_, text, _) in texts.items() if name != "bf16"} == {
        "MXFP4 backward": "Fprop bf16; Dgrad+Wgrad mxfp4",
        "+ RHT": "Fprop bf16; Dgrad+Wgrad mxfp4 ties away RHT(call)64+bf16",
        "+ RHT + SR": "Fprop bf16; Dgrad+Wgrad mxfp4 SR RHT(call)64+bf16",
    }
    assert [count for name, (count, *_) in texts.items() if name != "bf16"] == [24 * 4] * 3
    arm = planned.arms[0]
    assert (arm.batches.tokens_per_step, arm.config.training.learning_rate) == (64 * 1024, 1.5e-4)
    assert arm.batches.tokens == pytest.approx(33e9, rel=1e-5)
    assert 3.4e8 < arm.size.parameters < 3.6e8


def test_nvfp4_goes_without_one_part_at_a_time(plans):
    arms = {arm.name: arm for arm in plans["nvfp4-llama"].arms}
    for name, blocks in (("NVFP4", 27), ("no SR", 27), ("no blocks in BF16", 32), ("plain", 32)):
        assert max(groups(arms[name]))[0] == blocks * 4
    kept = next(names for _, text, names in groups(arms["NVFP4"]) if text == "bf16")
    assert all("0,28-31" in name for name in kept if name != "head")
    parts = {
        "no SR": lambda policy: policy.rounding == "stochastic",
        "no Hadamard": lambda policy: policy.hadamard,
        "no 2-D weights": lambda policy: policy.block == "16x16",
    }

    def has(name):
        policies = [policy for _, _, policy in arms[name].config.recipe.operands()]
        return {part: [bool(of(policy)) for policy in policies] for part, of in parts.items()}

    whole = has("NVFP4")
    none = {part: [False] * 6 for part in parts}
    assert all(map(any, whole.values()))
    assert has("plain") == none
    for part in parts:
        assert has(part) == whole | {part: none[part]}
        assert arms[part].config.recipe.rules == arms["NVFP4"].config.recipe.rules


@pytest.mark.parametrize("name", BIG)
def test_the_hours_on_the_page_are_those_of_the_plan(plans, name):
    page = (Path(__file__).parents[2] / "docs" / "planning.md").read_text()
    runs, *rest = re.search(
        rf"`{name}` \|.*\| (\d+)(?: of 8 devices)? \| ([\d,]+) on (\w+), ([\d,]+) on (\w+) \|", page
    ).groups()
    assert int(runs) == len(list(plans[name].runs()))
    for hours, hardware in (rest[:2], rest[2:]):
        total = sum(
            on_hardware(arm.config, arm.resources, hardware).gpu_hours.estimate * len(arm.runs)
            for arm in plans[name].arms
        )
        assert round(total) == int(hours.replace(",", ""))


def test_what_fits_is_said_both_ways(plans):
    arm = plans["llama31-8b-mlperf"].arms[0]

    def at(hardware, **changes):
        return on_hardware(arm.config, replace(arm.resources, **changes), hardware)

    fits = [at(name).fits for name in ("B200", "MI355X", "H200", "H100", CPU)]
    assert fits == [True, True, True, False, None]
    twice = at("H100", activation_checkpointing=True)
    assert twice.fits
    assert twice.gpu_hours.estimate > at("H100").gpu_hours.estimate
    assert not at("B200", devices_per_run=1).fits


def test_hours_are_those_of_the_modelled_token_and_none_without_a_unit(plans):
    arms = {arm.name: arm for arm in plans["nvfp4-llama"].arms}

    def at(name, hardware):
        return on_hardware(arms[name].config, arms[name].resources, hardware)

    emulated = at("NVFP4", "MI355X")
    assert (emulated.gpu_hours, emulated.fits) == (None, True)
    hours = {name: at(name, "B200").gpu_hours for name in ("NVFP4", "fp8", "bf16")}
    assert hours["NVFP4"].estimate < hours["fp8"].estimate < hours["bf16"].estimate
    work = replace(workload_of(arms["fp8"].config), devices=8)
    step = seconds_range(token_time(work, arms["fp8"].config.recipe, "B200"))
    assert hours["fp8"].high / hours["fp8"].low == pytest.approx(step.high / step.low, rel=0.01)
    # No more than everything at the peak: 6ND in BF16.
    ideal = arms["bf16"].size.flops_per_token * arms["bf16"].tokens / 2250e12 / 3600
    assert ideal < hours["bf16"].estimate < 3 * ideal
