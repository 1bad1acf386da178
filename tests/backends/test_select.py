"""Who does which GEMM where: by name, or the fastest native one; and nothing in silence."""

import dataclasses
import os
import re
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from ablate.backends import device, scaled, select
from ablate.backends.device import KNOWN, Device, device_of_arch
from ablate.backends.emulated import EmulatedBackend
from ablate.backends.protocol import Support
from ablate.backends.select import (
    Selection,
    UnfitDeviceError,
    fit_choices,
    load_backend,
    overall_mode,
    quick_self_test,
    run_self_tests,
)
from ablate.backends.testing import suite
from ablate.backends.testing.inputs import policies_of
from ablate.backends.testing.suite import both
from ablate.check.training import config_of
from ablate.execute.task_end import end_of
from ablate.recipes import GemmPolicy, OperandPolicy, RecipeSpec, resolve
from ablate.run import BUILT_IN, backend_names
from ablate.run.config import ModelConfig, ResourcesConfig
from tests.golden import check_answers, rows_of

MXFP4, BF16 = policies_of("mxfp4\nbf16")
B200 = Device(kind="cuda", arch="sm_100", name="B200")
H200 = Device(kind="cuda", arch="sm_90", name="NVIDIA H200")


def gemm_of(text):
    """Read the policies of a GEMM; one stands for both operands."""
    left, *_, right = policies_of(text.replace(" × ", "\n")) * 2
    return GemmPolicy(left=left, right=right)


def answers(line):
    """Say what ``auto`` takes for a GEMM, and what the native back ends say of it, by architecture."""
    gemm = gemm_of(line)
    archs_by_answer = {}
    for known in map(device_of_arch, KNOWN):
        backend, support = Selection("auto").choose(gemm, known)
        answer = f"{backend.name} ({support.mode})"
        for name in ("torch", "triton"):
            support = load_backend(name).support(gemm, known)
            told = support.detail if support.mode == "no" else support.mode
            answer += f"; {name}: {told}"
        archs_by_answer.setdefault(answer, []).append(known.arch)
    return [
        f"{', '.join(archs)}: {answer}" for answer, archs in archs_by_answer.items()
    ]


def test_auto_takes_the_fastest_native_one_and_each_refusal_has_its_reason():
    """Of each GEMM in the file; ``REWRITE=1`` writes the answers anew."""
    pytest.importorskip("triton", reason="Triton is not installed")
    check_answers(Path(__file__).with_name("support.txt"), answers)


def test_a_named_back_end_leaves_high_precision_to_the_device():
    for name, by in (("torch", "emulated"), ("reference", "reference")):
        assert Selection(name).choose(both(BF16), B200)[0].name == by
    _, support = Selection("torch").choose(both(OperandPolicy(format="fp16")), B200)
    assert support.detail.endswith(": back end 'torch' takes no fp16")
    assert "takes no" not in Selection("torch").choose(both(BF16), B200)[1].detail


def test_choices_of_a_whole_recipe():
    spec = RecipeSpec(
        gemms=["fprop", "wgrad"],
        layers=[{"last": 1, "recipe": "bf16"}],
        phases=[{"from_fraction": 0.9, "recipe": "bf16"}],
    )
    choices = Selection("auto").choices(resolve(spec), B200)
    assert [(choice.gemm, choice.backend) for choice in choices] == [
        ("fprop", "torch"), ("dgrad", "emulated"), ("wgrad", "torch"),
        ("fprop by rule 1", "emulated"), ("wgrad by rule 1", "emulated"),
    ]  # fmt: skip
    assert overall_mode(choices) == "native"
    on_cpu = Selection("auto").choices(resolve(spec), device_of_arch("cpu"))
    assert overall_mode(on_cpu) == "emulated"


class OwnBackend(EmulatedBackend):
    """A user's own: native on an architecture that nobody else knows."""

    name = "own"

    def support(self, gemm, device):  # noqa: ARG002  the protocol's signature
        return Support(
            mode="native" if device.arch == "mine" else "no", detail="my own silicon"
        )


def test_a_users_own_back_end_by_entry_point(monkeypatch):
    def register(name, where):
        entry = EntryPoint(name=name, value=where, group="ablate.backends")
        monkeypatch.setattr(
            "ablate.run.entry_points",
            lambda group: EntryPoints([entry]).select(group=group),
        )
        select.load_backend.cache_clear()

    register("own", f"{__name__}:OwnBackend")
    mine = Device(kind="cuda", arch="mine", name="mine")
    assert "own" in backend_names()
    assert Selection("auto").choose(both(MXFP4), mine)[0].name == "own"
    assert Selection("own").choose(both(MXFP4), mine)[0].name == "own"
    register("gone", "no_such_module:Backend")
    with pytest.raises(ValueError, match=r"'gone' \(no_such_module:Backend\) does not"):
        load_backend("gone")
    select.load_backend.cache_clear()


@pytest.mark.parametrize(
    ("name", "arch", "policy", "version", "mode", "detail"),
    rows_of("""
triton   | sm_100 | mxfp4 | 3.4 | no | Triton 3.4 is too old (needs 3.6; pip install -U triton)
triton   | sm_90  | nvfp4 | 3.7 | no | NVFP4 is widened from Triton 3.8 on
triton   | cpu    | mxfp4 | 3.7 | no | tl.dot_scaled is interpreted from Triton 3.8 on
emulated | sm_90  | mxfp4 | 3.4 | emulated | plain torch (Triton 3.4 is too old (needs 3.6; pip install -U triton))
emulated | sm_90  | mxfp4 | 9.0 | emulated | Triton
emulated | sm_90  | mxfp4 × bf16 | 9.0 | emulated | Triton
emulated | sm_90  | fp8_e4m3 row | 9.0 | emulated | plain torch (scale 'row')
"""),
)
def test_what_a_triton_that_is_too_old_or_new_supports_is_one_line(
    monkeypatch, name, arch, policy, version, mode, detail
):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    for module in (device, scaled):
        monkeypatch.setattr(module, "triton_version", lambda: device.release(version))
    support = load_backend(name).support(gemm_of(policy), device_of_arch(arch))
    assert support.mode == mode
    quantised_by = "bf16 GEMM of dequantised values, quantised by "
    assert support.detail.removeprefix(quantised_by) == detail


@pytest.fixture
def config():
    return config_of(
        ModelConfig(), resolve(RecipeSpec(gemms=["fprop", "wgrad"])), "auto", 64
    )


def test_before_a_run_its_gemms_must_fit_the_device(config, monkeypatch):
    choices = fit_choices(config, ResourcesConfig(), "cpu")
    assert {choice.mode for choice in choices} == {"emulated"}
    assert run_self_tests(config, "cpu", allow_failed=False) == []
    native = ResourcesConfig(require_native=True)
    no_native = "no native .* for Fprop on CPU .*`ablate check backends`"
    with pytest.raises(UnfitDeviceError, match=no_native):
        fit_choices(config, native, "cpu")
    named = dataclasses.replace(config, backend="torch")
    cannot = "'torch' cannot do mxfp4 on CPU: .*; backend: auto takes"
    with pytest.raises(UnfitDeviceError, match=cannot):
        fit_choices(named, ResourcesConfig(), "cpu")
    if not torch.cuda.is_available():
        no_gpu = r"^no GPU can be used here \([^\n]+\); set resources.gpus: 0[^\n]+$"
        with pytest.raises(UnfitDeviceError, match=no_gpu):
            fit_choices(config, ResourcesConfig(gpus=1), "cuda")
    monkeypatch.setattr(select, "device_of", lambda _: B200)
    assert {choice.mode for choice in fit_choices(config, native, "cuda")} == {"native"}


@pytest.fixture
def tests_run(monkeypatch, tmp_path):
    """Take the CPU for a GPU; yields the back ends that were tested on it, with their policies."""
    monkeypatch.setenv("ABLATE_CACHE", str(tmp_path))
    for module in (select, suite):
        monkeypatch.setattr(module, "device_of", lambda _: H200)
    tested = []
    test = quick_self_test.__wrapped__

    def counted(name, where, policies, kinds):
        tested.append((name, policies))
        return test(name, where, policies, kinds)

    monkeypatch.setattr(select, "quick_self_test", counted)
    yield tested
    select.load_backend.cache_clear()


class SignLost(EmulatedBackend):
    """Triton 3.6 subtracts from zero where it should change the sign."""

    def quantize(self, x, draw, *, axis):
        quantized = super().quantize(x, draw, axis=axis)
        if draw.policy.is_untouched:
            return quantized
        return dataclasses.replace(quantized, values=quantized.values + 0.0)


def test_emulation_on_a_gpu_must_give_the_references_bits(
    config, monkeypatch, tests_run
):
    monkeypatch.setitem(BUILT_IN, "emulated", f"{__name__}:SignLost")
    select.load_backend.cache_clear()
    fault = (
        r"back end 'emulated' failed: quantised bits: mxfp4: .*, along axis 0: \d+ of 1024 values differ; "
        r"backend: reference or another Triton than .* `ablate check device cpu` "
        r".*allow_failed_self_test: true"
    )
    for _ in range(2):  # a failure is not kept
        with pytest.raises(UnfitDeviceError, match=fault):
            run_self_tests(config, "cpu", allow_failed=False)
    assert tests_run == [("emulated", (BF16, MXFP4))] * 2
    results = run_self_tests(config, "cpu", allow_failed=True)
    assert [result["check"] for result in results if not result["passed"]] == [
        "quantised bits: mxfp4"
    ]
    reference = dataclasses.replace(config, backend="reference")
    assert run_self_tests(reference, "cpu", allow_failed=False) == []


def test_a_self_test_that_passed_is_known_until_something_changes(
    config, monkeypatch, tests_run, tmp_path
):
    def count_tests():
        before = len(tests_run)
        results = run_self_tests(config, "cpu", allow_failed=False)
        by_check = {test["check"]: test.get("figures") for test in results}
        assert by_check["accumulator: bf16"]["kept_1024_apart_bits"] == 24
        return len(tests_run) - before

    assert [count_tests(), count_tests()] == [1, 0]
    record = next(tmp_path.rglob("*.json"))
    whole = record.read_bytes()
    record.write_bytes(whole.replace(b"true", b"True", 1))  # damaged
    assert [count_tests(), count_tests()] == [1, 0]
    record.chmod(0o666)  # others can write to it
    assert count_tests() == 1
    other = dataclasses.replace(H200, name="H100")
    for name in ("hash_of_sources", "triton_build", "driver_version", "device_of"):
        monkeypatch.setattr(select, name, lambda *_: other)
        assert [count_tests(), count_tests()] == [1, 0]


def test_a_run_trains_although_its_self_test_cannot_be_kept(
    config, monkeypatch, tests_run
):
    monkeypatch.setattr(select, "write_record", Mock(side_effect=OSError("no space")))
    for count in (1, 2):
        run_self_tests(config, "cpu", allow_failed=False)
        assert len(tests_run) == count


@pytest.mark.parametrize(("name", "mode"), [("auto", "native"), ("triton", "upcast")])
def test_a_failed_self_test_stops_the_run_unless_the_study_says_otherwise(
    config, monkeypatch, name, mode
):
    device = B200 if mode == "native" else H200
    monkeypatch.setattr(select, "device_of", lambda _: device)
    monkeypatch.setattr(scaled, "triton_fault", lambda: None)
    config = dataclasses.replace(config, backend=name)
    choices = fit_choices(config, ResourcesConfig(), "cuda")
    assert mode in {choice.mode for choice in choices}
    tested = "torch" if name == "auto" else name
    bad = {"backend": tested, "check": "a probe", "passed": False, "detail": "3 differ"}
    monkeypatch.setattr(
        select, "known_or_tested", lambda decisive, *_: [bad] * (decisive[0] == tested)
    )
    assert run_self_tests(config, "cuda", allow_failed=True) == [bad]
    failed = f"back end '{tested}' failed: a probe: 3 differ"
    with pytest.raises(UnfitDeviceError, match=failed):
        run_self_tests(config, "cuda", allow_failed=False)


def test_the_self_test_is_run_once_and_an_error_of_a_driver_is_a_failed_check(
    monkeypatch,
):
    first = quick_self_test("emulated", "cpu")
    assert all(result["passed"] for result in first)
    assert {"exact probe: mxfp4", "accumulator: mxfp4"} <= {
        result["check"] for result in first
    }
    assert quick_self_test("emulated", "cpu") is first

    def broken(*_args, **_options):
        raise RuntimeError("CUDA error: an illegal memory access\nmore lines")

    monkeypatch.setattr(load_backend("emulated"), "multiply", broken)
    results = quick_self_test.__wrapped__("emulated", "cpu")
    details = {result["detail"] for result in results if not result["passed"]}
    assert details == {"RuntimeError: CUDA error: an illegal memory access"}


def test_what_a_gpu_does_wrong_is_one_line_with_the_way_out():
    assert end_of(
        RuntimeError("CUDA error: device-side assert triggered\nmore")
    ).message == (
        "the GPU failed: CUDA error: device-side assert triggered; `ablate check device cuda` tests it"
    )
    assert end_of(UnfitDeviceError("no such path")).message == "no such path"


def test_a_cache_of_triton_in_which_others_can_write_or_wrote_is_not_used(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(device, "triton_version", lambda: (9, 0))
    monkeypatch.setattr(device, "_cache_fault", device._cache_fault.__wrapped__)
    planted = tmp_path / "PLANTED"
    planted.mkdir()
    assert device.triton_fault() is None
    if os.geteuid() == 0:  # only root gives a folder to another user
        os.chown(planted, 65534, 65534)
        assert f"{planted} belongs to another user (remove it)" in device.triton_fault()
    tmp_path.chmod(0o777)
    assert "others can write to" in device.triton_fault()


@pytest.mark.parametrize(
    "take", [lambda: bytearray(1 << 60), lambda: torch.empty(1 << 60)]
)
def test_too_little_memory_is_one_line_with_the_way_out_and_not_tried_again(take):
    with pytest.raises((MemoryError, RuntimeError)) as error:
        take()
    end = end_of(error.value)
    assert (end.state, end.transient) == ("failed", False)
    out = r"out of memory \(.+\); a smaller training.micro_batch_size needs less"
    assert re.match(out, end.message)
