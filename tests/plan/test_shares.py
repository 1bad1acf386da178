"""How many runs share a GPU, on machines that are made up."""

import sys
from types import SimpleNamespace

import pytest

from ablate.plan import build_plan, estimate, shares
from ablate.plan.estimate import FLOPS_PER_GPU, START_SEC
from ablate.plan.plan import StudyProgress
from ablate.plan.shares import (
    CONTEXT_BYTES,
    Machine,
    run_bytes,
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


def machine(**changes):
    return Machine(**{**vars(H200), **changes})


@pytest.fixture
def gpus(study):
    """Plan a study on machines; return the number of GPUs of each arm, and the sentence about it."""

    def make(text, *machines):
        loaded = study(text)
        plan = build_plan(loaded, identify, machines=lambda: machines)
        sentence = sharing_text(loaded, plan.arms, lambda: machines)
        return [arm.resources.gpus for arm in plan.arms], sentence

    return make


def test_eight_runs_share_a_large_gpu_and_the_plan_says_what_each_takes(gpus, study):
    loaded = study(STUDY)
    plan = build_plan(loaded, identify, machines=lambda: [H200])
    arm = plan.arm("b")
    size = run_bytes(arm.config, arm.resources, H200.gpu_name)
    assert size > CONTEXT_BYTES
    sentence = (
        f"8 runs at a time on each GPU, {size / 1e9:.1f} of 141 GB each (NVIDIA H200)"
    )
    assert gpus(STUDY, H200) == ([0.125, 0.125], sentence)


@pytest.mark.parametrize(
    ("machines", "share"),
    [
        ([NO_GPU], 0),
        ([machine(cores=6)], 0.1666),  # by cores; Ray counts in ten-thousandths
        ([machine(cores=16, gpus=8)], 0.5),
        ([machine(cores=4, gpus=8)], 1),
        (
            [machine(gpu_bytes=3 * 10**9)],
            0.5,
        ),  # by memory: two contexts and little more
        ([machine(gpu_bytes=10**8)], 1),
        ([machine(gpu_name="unheard of", gpu_bytes=0)], 1),
        ([NO_GPU, H200], 0.125),
        ([H200, machine(gpu_bytes=3 * 10**9)], 0.5),  # a share suits every machine
    ],
)
def test_memory_and_cores_of_the_smallest_machine_decide(gpus, machines, share):
    assert gpus(STUDY, *machines)[0] == [share, share]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("{gpus: auto}", "{gpus: auto, devices_per_run: 2}"),
        ("{gpus: auto}", "{gpus: auto, cpus: 16}"),
        ("base:\n", "base:\n  trainer: t.py:run\n"),
        ("base:\n", "base:\n  model: {function: 'my_model.py:build'}\n"),
    ],
)
def test_what_is_not_modelled_and_runs_on_several_devices_take_whole_gpus(
    gpus, before, after
):
    assert gpus(STUDY.replace(before, after), H200)[0] == [1, 1]


def test_a_large_model_has_the_gpu_alone(gpus):
    large = STUDY.replace("base:\n", "base:\n  model: {preset: llama2-7b}\n")
    counts, sentence = gpus(large, H200)
    assert counts == [1, 1]
    assert sentence.startswith("1 run at a time on each GPU, ")


def test_numbers_in_the_file_stay_and_only_shares_are_spoken_of(gpus):
    def of(number):
        return gpus(STUDY.replace("auto", number), H200)

    assert of("0") == ([0, 0], None)
    assert of("2") == ([2, 2], None)
    counts, sentence = of("0.25")
    assert counts == [0.25, 0.25]
    assert sentence.startswith("4 runs at a time on each GPU, ")
    assert (
        gpus(STUDY.replace("auto", "0.25"), NO_GPU)[1] == "4 runs at a time on each GPU"
    )


def test_ids_do_not_depend_on_the_share(study):
    def ids(number, *machines):
        plan = build_plan(
            study(STUDY.replace("auto", number)), identify, machines=lambda: machines
        )
        return [run.id for _, run in plan.runs()]

    assert (
        ids("auto", H200)
        == ids("auto", NO_GPU)
        == ids("0.5", NO_GPU)
        == ids("1", NO_GPU)
    )


def test_runs_side_by_side_take_their_share_of_the_time_but_compute_no_faster_than_the_gpu(
    study,
):
    def wall(tokens_per_sec):
        plan = build_plan(study(STUDY), identify, machines=lambda: [H200])
        speeds = {arm.name: tokens_per_sec for arm in plan.arms}
        costs = estimate(
            plan, StudyProgress(states={}, tokens_per_sec=speeds), cores=16
        )
        work = (
            costs.run_seconds["a"] * tokens_per_sec * plan.arm("a").size.flops_per_token
        )
        return plan, costs.run_seconds["a"], work, costs.wall_seconds - START_SEC

    _, seconds, _, slow = wall(10.0)
    assert slow == pytest.approx(8 * seconds / 8)
    _, seconds, work, fast = wall(1e9)
    assert fast == pytest.approx(8 * work / FLOPS_PER_GPU)
    assert fast > seconds


@pytest.fixture
def torch_with(monkeypatch):
    """Let this machine have a driver, and a torch that sees these GPUs."""

    def make(*gpus):
        cuda = SimpleNamespace(
            is_available=lambda: bool(gpus), device_count=lambda: len(gpus),
            get_device_properties=lambda index: gpus[index],
        )  # fmt: skip
        monkeypatch.setattr(shares, "_DRIVERS", ("/dev/null",))
        monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
        this_machine.cache_clear()
        return this_machine()

    yield make
    this_machine.cache_clear()


def test_this_machine_is_asked_by_torch_where_it_has_a_driver(torch_with):
    small = SimpleNamespace(name="NVIDIA A100-SXM4-40GB", total_memory=40)
    large = SimpleNamespace(name="NVIDIA H200", total_memory=141)
    (described,) = torch_with(large, small)
    assert described == Machine(
        cores=described.cores, gpus=2, gpu_name=small.name, gpu_bytes=40
    )
    assert torch_with()[0].gpus == 0


def test_without_a_driver_torch_is_not_loaded(monkeypatch):
    monkeypatch.setattr(shares, "_DRIVERS", ("/dev/no-driver",))
    monkeypatch.setitem(sys.modules, "torch", None)  # an import of it fails
    this_machine.cache_clear()
    assert this_machine()[0].gpus == 0
