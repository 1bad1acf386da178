"""How many runs share a GPU, on machines that are made up."""

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from ablate.plan import build_plan, estimate, shares
from ablate.plan.estimate import FLOPS_PER_GPU, START_SEC
from ablate.plan.plan import StudyProgress
from ablate.plan.shares import (
    Machine,
    sharing_text,
    this_machine,
)
from tests.plan.conftest import identify

STUDY = """\
name: s
baseline: a
target: null
seeds: 4
base:
  resources: {gpus: auto}
arms:
  a: {recipe: bf16}
  b: {recipe: mxfp4}
"""
H200 = Machine(cores=16, gpus=1, gpu_name="NVIDIA H200", gpu_bytes=141 * 10**9)
NO_GPU = Machine(cores=16)
SMALL = replace(H200, gpu_bytes=3 * 10**9)
EIGHT = "8 runs at a time on each GPU, 1.1 of 141 GB each (NVIDIA H200)"
ONE = "1 run at a time on each GPU"

# what the base says of the resources, and more of it; the machines; the share of each run, and what is said
CASES = [
    ("gpus: auto", "", [H200], 0.125, EIGHT),
    ("gpus: auto", "", [NO_GPU, H200], 0.125, EIGHT),
    ("gpus: auto", "", [NO_GPU], 0, None),
    # by cores; Ray counts in ten-thousandths
    ("gpus: auto", "", [replace(H200, cores=6)], 0.1666, "6 runs at a time"),
    ("gpus: auto", "", [replace(H200, gpus=8)], 0.5, "2 runs at a time"),
    ("gpus: auto", "", [replace(H200, cores=4, gpus=8)], 1, ONE),
    # by memory: two contexts and little more
    ("gpus: auto", "", [SMALL], 0.5, "2 runs at a time on each GPU, 1.1 of 3 GB each"),
    ("gpus: auto", "", [replace(H200, gpu_bytes=10**8)], 1, ONE),
    ("gpus: auto", "", [replace(H200, gpu_name="unheard of", gpu_bytes=0)], 1, ONE),
    # a share suits every machine
    ("gpus: auto", "", [H200, SMALL], 0.5, "2 runs at a time on each GPU, 1.1 of 3 GB"),
    ("gpus: auto", "  model: {preset: llama2-7b}\n", [H200], 1, f"{ONE}, "),
    # runs on several devices, and what is not modelled
    ("gpus: auto, devices_per_run: 2", "", [H200], 1, None),
    ("gpus: auto, cpus: 16", "", [H200], 1, f"{ONE}, "),
    ("gpus: auto", "  trainer: t.py:run\n", [H200], 1, f"{ONE} (NVIDIA H200)"),
    ("gpus: auto", "  model: {function: 'my_model.py:build'}\n", [H200], 1, ONE),
    # numbers in the file stay
    ("gpus: 0", "", [H200], 0, None),
    ("gpus: 2", "", [H200], 2, None),
    ("gpus: 0.25", "", [H200], 0.25, "4 runs at a time on each GPU, 1.1 of 141 GB"),
    ("gpus: 0.25", "", [NO_GPU], 0.25, "4 runs at a time on each GPU"),
]


@pytest.mark.parametrize(("resources", "more", "machines", "share", "said"), CASES)
def test_how_many_runs_share_a_gpu(study, resources, more, machines, share, said):
    loaded = study(STUDY.replace("gpus: auto}\n", f"{resources}}}\n{more}"))
    plan = build_plan(loaded, identify, machines=lambda: machines)
    assert [arm.resources.gpus for arm in plan.arms] == [share, share]
    sentence = sharing_text(loaded, plan.arms, lambda: machines)
    assert sentence == said or sentence.startswith(said)


def test_ids_do_not_depend_on_the_share(study):
    ids = set()
    for number, machine in (
        ("auto", H200),
        ("auto", NO_GPU),
        ("0.5", NO_GPU),
        ("1", NO_GPU),
    ):
        loaded = study(STUDY.replace("auto", number))
        plan = build_plan(loaded, identify, machines=lambda machine=machine: [machine])
        ids.add(tuple(run.id for _, run in plan.runs()))
    assert len(ids) == 1


@pytest.mark.parametrize("tokens_per_sec", [10.0, 1e9])
def test_runs_side_by_side_take_their_share_of_the_time_but_compute_no_faster_than_the_gpu(
    study, tokens_per_sec
):
    plan = build_plan(study(STUDY), identify, machines=lambda: [H200])
    speeds = dict.fromkeys("ab", tokens_per_sec)
    progress = StudyProgress(states={}, tokens_per_sec=speeds)
    costs = estimate(plan, progress, cores=16)
    seconds = costs.run_seconds["a"]
    work = seconds * tokens_per_sec * plan.arm("a").size.flops_per_token
    expected = max(8 * seconds / 8, 8 * work / FLOPS_PER_GPU)
    assert costs.wall_seconds - START_SEC == pytest.approx(expected)


@pytest.fixture
def machine(monkeypatch):
    """Describe a machine with this driver and a torch that sees these GPUs; None: an import of it fails."""

    def make(driver, torch):
        monkeypatch.setattr(shares, "_DRIVERS", (driver,))
        monkeypatch.setitem(sys.modules, "torch", torch)
        this_machine.cache_clear()
        (machine,) = this_machine()
        return machine.gpus, machine.gpu_name, machine.gpu_bytes

    yield make
    this_machine.cache_clear()


def test_this_machine_is_asked_by_torch_where_it_has_a_driver(machine):
    small = SimpleNamespace(name="NVIDIA A100-SXM4-40GB", total_memory=40)
    large = SimpleNamespace(name="NVIDIA H200", total_memory=141)
    for gpus, expected in (
        ([large, small], (2, small.name, 40)),
        ([], (0, "", 0)),
    ):
        cuda = SimpleNamespace(
            is_available=lambda gpus=gpus: bool(gpus),
            device_count=gpus.__len__,
            get_device_properties=gpus.__getitem__,
        )
        assert machine("/dev/null", SimpleNamespace(cuda=cuda)) == expected
    assert machine("/dev/no-driver", None) == (0, "", 0)
