"""The big studies, without their data: runs, recipes by row, arithmetic, and what fits where."""

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from ablate.modelled.on_hardware import CPU, on_hardware
from ablate.plan import build_plan
from ablate.plan.layers import layer_groups
from ablate.study import load_study

BIG = ("llama31-8b-mlperf", "nvfp4-llama", "tseng-gpt")
CARRIED = yaml.safe_load(
    Path(__file__).with_name("carried.yaml").read_text(encoding="utf-8")
)
SET_UP = CARRIED.pop("set up")


@pytest.fixture(scope="module")
def plans():
    return {
        name: build_plan(load_study(name), without_data=True)
        for name in {*BIG, *CARRIED}
    }


@pytest.mark.parametrize("name", CARRIED)
def test_every_row_of_the_published_tables_is_an_arm_and_quantises_what_it_says(
    plans, name
):
    carried = {}
    for arm in plans[name].arms:
        counts = carried.setdefault(arm.name, Counter())
        for group in layer_groups(arm.config.recipe, arm.layers, arm.tokens):
            counts[group.recipe] += group.count
    assert carried == CARRIED[name]


@pytest.mark.parametrize("name", SET_UP)
def test_it_is_set_up_as_published(plans, name):
    planned = plans[name]
    for arm in planned.arms:
        parts = vars(arm) | {
            "training": arm.config.training,
            "target": planned.target,
            "plan": planned,
        }
        for part, expected in SET_UP[name].items():
            assert {key: getattr(parts[part], key) for key in expected} == expected


@pytest.mark.parametrize("name", BIG)
def test_the_hours_on_the_page_are_those_of_the_plan(plans, name):
    page = (Path(__file__).parents[2] / "docs" / "planning.md").read_text()
    row = rf"`{name}` \|.*\| (\d+)(?: of 8 devices)? \| ([\d,]+) on (\w+), ([\d,]+) on (\w+) \|"
    runs, *rest = re.search(row, page).groups()
    assert int(runs) == len(list(plans[name].runs()))
    for hours, hardware in (rest[:2], rest[2:]):
        total = sum(
            on_hardware(arm.config, arm.resources, hardware).gpu_hours.estimate
            * len(arm.runs)
            for arm in plans[name].arms
        )
        assert round(total) == int(hours.replace(",", ""))


def test_what_fits_is_said_both_ways_and_hours_need_a_unit_for_the_format(plans):
    def at(study, name, hardware, **changes):
        arm = plans[study].arm(name)
        return on_hardware(arm.config, replace(arm.resources, **changes), hardware)

    mlperf = ("llama31-8b-mlperf", "fp8")
    fits = [at(*mlperf, name).fits for name in ("B200", "MI355X", "H200", "H100", CPU)]
    assert fits == [True, True, True, False, None]
    twice = at(*mlperf, "H100", activation_checkpointing=True)
    assert twice.fits
    assert twice.gpu_hours.estimate > at(*mlperf, "H100").gpu_hours.estimate
    assert not at(*mlperf, "B200", devices_per_run=1).fits

    on_old = at("nvfp4-llama", "NVFP4", "H100")
    in_bf16 = at("nvfp4-llama", "bf16", "H100")
    assert (on_old.is_emulated, in_bf16.is_emulated) == (True, False)
    assert on_old.gpu_hours.estimate > 1.5 * in_bf16.gpu_hours.estimate
    assert at("llama31-8b-mlperf", "fp8", "A100").is_emulated
    emulated = at("nvfp4-llama", "NVFP4", "MI355X")
    assert (emulated.gpu_hours, emulated.fits) == (None, True)
