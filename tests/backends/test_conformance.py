"""The conformance suite over the back ends that run on a CPU, and what only they owe."""

import ctypes
import dataclasses
import itertools
import os
import shutil
from pathlib import Path

import pytest
import torch

from ablate.backends.gemms.blackwell import BlackwellEmulated, add_toward_zero
from ablate.backends.gemms.emulated import EmulatedBackend
from ablate.backends.protocol import Draw
from ablate.backends.quantisers import cpu_kernel
from ablate.backends.select import load_backend
from ablate.backends.testing.probe import sum_rounding
from ablate.backends.testing.suite import KEY, POLICIES, checks, same_bits
from ablate.base.files import hash_of, write_record
from ablate.numerics import OperandPolicy, round_operand
from ablate.recipes import block_shape
from tests.backends.near_ties import near_ties

MXFP4 = OperandPolicy(format="mxfp4")
STOCHASTIC = dataclasses.replace(MXFP4, rounding="stochastic", prescale=0.75)
NVFP4 = OperandPolicy(format="nvfp4")
FOUR_SIX = OperandPolicy(format="nvfp4", scale="four_six")
BACKENDS = ["reference", "emulated", "torch"]
USUAL = "emulated"
"""The back end of studies without a GPU; the others are held to the same by CI."""


@pytest.mark.parametrize(
    "check",
    [
        pytest.param(check, id=f"{name}: {check.name}", marks=[] if name == USUAL else pytest.mark.exhaustive)
        for name in BACKENDS
        for check in checks(load_backend(name), "cpu")
    ],
)
def test_conformance(check):
    assert check.run()


class Shifted(EmulatedBackend):
    """Wrong in one way at a time."""

    fault, calls = "", itertools.count()

    def quantize(self, x, draw, *, axis):
        if self.fault == "axis":
            axis = 1 - axis % 2 if x.shape[0] == x.shape[1] else axis
        if self.fault in ("step", "signs") and draw.key:
            step = next(self.calls) if self.fault == "signs" else draw.key.step + 1
            draw = dataclasses.replace(draw, key=dataclasses.replace(draw.key, step=step))
        done = super().quantize(x, draw, axis=axis)
        if self.fault == "descale":
            return dataclasses.replace(done, descale=done.descale * 1.0000001)
        if self.fault == "gain":
            return dataclasses.replace(done, values=done.values * 1.01)
        if self.fault == "sign of zero":
            return dataclasses.replace(done, values=done.values + 0.0)
        return done

    def multiply(self, a, b):
        product = super().multiply(a, b)
        if self.fault == "narrow":  # an accumulator of 16 bits
            return self._narrow(a, b)
        return product * 1.004 if self.fault == "output" else product

    @staticmethod
    def _narrow(a, b):
        left, right = a.contraction_last.float(), b.contraction_last.float()
        total = torch.zeros(left.shape[0], right.shape[0])
        for k in range(left.shape[1]):
            total = total + left[:, k : k + 1] * right[:, k]
            total = ((total.view(torch.int32) + 128) & ~0xFF).view(torch.float32)
        return (total * a.descale * b.descale).to(torch.bfloat16)


@pytest.mark.parametrize(
    ("fault", "caught_by"),
    [
        ("axis", "quantised bits: mxfp4"),
        ("step", "quantised bits: mxfp4 stochastic"),
        ("descale", "quantised bits: mxfp4"),
        ("sign of zero", "quantised bits: mxfp4"),
        ("output", "product: mxfp4"),
        ("narrow", "exact probe: mxfp4"),
        ("gain", "stochastic gain: mxfp4 stochastic"),
        ("signs", "Hadamard cancels in the product: mxfp8 H16 step"),
    ],
)
def test_a_wrong_back_end_fails(fault, caught_by):
    wrong = Shifted()
    wrong.fault = fault
    chosen = (MXFP4, dataclasses.replace(MXFP4, rounding="stochastic"))
    by_name = {check.name: check for check in checks(wrong, "cpu", chosen)}
    with pytest.raises(AssertionError):
        by_name[caught_by].run()
    if fault == "narrow":
        assert by_name["accumulator: mxfp4"].run().detail == "sums keep 16 bits, fewer than the 24 of fp32"


def nearest(total, group):
    return (total + group).float().double()


def down(total, group):
    exact = total + group
    rounded = exact.float()
    lower = torch.nextafter(rounded, torch.tensor(-torch.inf))
    return torch.where(rounded.double() > exact, lower, rounded).double()


class Rounding(EmulatedBackend):
    """Adds groups of 64 products in their order, rounding in one way."""

    add = staticmethod(nearest)

    def multiply(self, a, b):
        total = 0.0
        pairs = zip(a.contraction_last.split(64, 1), b.contraction_last.split(64, 1), strict=True)
        for left, right in pairs:
            total = self.add(torch.zeros(()) + total, (left.double() @ right.double().t()).float().double())
        return (total * a.descale * b.descale).to(torch.bfloat16)


def at_once(_total, group):
    return _total + group  # more than 24 bits


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4", "mxfp8", "fp8_e4m3"])
@pytest.mark.parametrize(
    ("add", "found"),
    [
        (nearest, "to nearest"),
        (add_toward_zero, "toward zero"),
        (down, "down"),
        (lambda total, group: -down(-total, -group), "up"),
        (at_once, "not at all here (more than 24 bits, or another order)"),
        (lambda total, group: total + group * (group.abs() > 1), "small terms cut off"),
    ],
    ids=["nearest", "toward zero", "down", "up", "wide", "cut off"],
)
def test_the_probe_tells_which_way_sums_are_rounded(fmt, add, found):
    backend = Rounding()
    backend.add = add
    by_name = {check.name: check for check in checks(backend, "cpu", (OperandPolicy(format=fmt),))}
    assert by_name[f"rounding of sums: {fmt}"].run().detail == f"between groups of products: {found}"


def test_the_probe_tells_where_directions_differ():
    class Late(Rounding):
        def multiply(self, a, b):
            self.add = nearest if a.values.shape[1] < 512 else add_toward_zero
            return super().multiply(a, b)

    told = sum_rounding(Late(), "cpu", "nvfp4")
    assert told.detail == "between groups of products: to nearest 64 apart; toward zero 128, 1024 apart"


def test_the_model_of_blackwell_is_what_the_probe_calls_toward_zero():
    told = sum_rounding(BlackwellEmulated(), "cpu", "nvfp4")
    assert told.detail == "between groups of products: toward zero"


@pytest.mark.parametrize(
    "policy",
    [
        OperandPolicy(format="fp8_e4m3"),
        MXFP4,
        STOCHASTIC,
        dataclasses.replace(NVFP4, hadamard=16, signs="fixed"),
    ],
    ids=str,
)
def test_any_number_of_threads_and_any_strides(policy):
    backend = load_backend("emulated")
    x = torch.randn(1056, 544, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    strided = torch.zeros(1056, 600, dtype=torch.bfloat16)[:, :544].copy_(x)
    before = torch.get_num_threads()
    try:
        for axis in (0, 1):
            expected = round_operand(x, policy, axis=axis, key=KEY).values
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                for other in (x, strided, x.t().contiguous().t()):
                    ours = backend.quantize(other, Draw(policy=policy, key=KEY), axis=axis)
                    assert same_bits(ours.values, expected)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("columns", [33, 50, 65, 130])
def test_odd_widths_along_the_other_axis(columns):
    x = torch.randn(256, columns, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    for policy in (policy for policy in POLICIES if block_shape(policy)[0] == 1):
        ours = load_backend("emulated").quantize(x, Draw(policy=policy, key=KEY), axis=0).values
        assert same_bits(ours, round_operand(x, policy, axis=0, key=KEY).values)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("policy", [FOUR_SIX, dataclasses.replace(FOUR_SIX, rounding="stochastic")], ids=str)
def test_four_or_six_where_only_roundings_tell_the_errors_apart(policy, axis):
    for x in near_ties(64, axis):
        ours = load_backend("emulated").quantize(x, Draw(policy=policy, key=KEY), axis=axis)
        assert same_bits(ours.values, round_operand(x, policy, axis=axis, key=KEY).values)


def test_bad_operands_are_refused_by_every_back_end():
    for name in BACKENDS:
        with pytest.raises(ValueError, match="32 does not divide 40"):
            load_backend(name).quantize(torch.zeros(2, 40), Draw(policy=MXFP4), axis=1)
    with pytest.raises(ValueError, match="no back end 'fast'"):
        load_backend("fast")


@pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler here")
def test_with_a_compiler_the_kernel_is_used():
    # It refuses itself where its bits are not the reference's: then this fails.
    library, reason = cpu_kernel.loaded()
    assert library is not None, reason


def test_without_a_compiler_plain_torch_does_it(monkeypatch):
    monkeypatch.setenv("ABLATE_CPU_KERNEL", "off")
    cpu_kernel.loaded.cache_clear()
    try:
        assert cpu_kernel.loaded()[0] is None
        x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
        values = load_backend("emulated").quantize(x, Draw(policy=MXFP4), axis=0).values
        assert torch.equal(values, round_operand(x, MXFP4, axis=0).values)
    finally:
        cpu_kernel.loaded.cache_clear()


@pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler here")
def test_a_build_in_which_a_bit_has_flipped_is_built_anew(monkeypatch, tmp_path):
    cpu_kernel.loaded()
    usual = cpu_kernel._build_here().target
    monkeypatch.setenv("ABLATE_CACHE", str(tmp_path))
    builds = []

    def build(asked):
        builds.append(asked.target)
        shutil.copy(usual, asked.target)
        shutil.copy(usual.with_suffix(".json"), asked.target.with_suffix(".json"))

    def load():
        cpu_kernel.loaded.cache_clear()
        assert cpu_kernel.loaded()[0] is not None
        return len(builds)

    monkeypatch.setattr(cpu_kernel, "_compile", build)
    try:
        assert [load(), load()] == [1, 1]
        whole = builds[0].read_bytes()
        builds[0].unlink()  # what is mapped into this process stays as it is
        builds[0].write_bytes(whole[:9000] + bytes([whole[9000] ^ 1]) + whole[9001:])
        assert [load(), load()] == [2, 2]
        assert builds[0].read_bytes() == whole
    finally:
        cpu_kernel.loaded.cache_clear()


def test_a_kernel_is_kept_where_nobody_else_can_write(monkeypatch, tmp_path):
    shared, own = tmp_path / "shared", tmp_path / "own"
    monkeypatch.setenv("ABLATE_CACHE", str(shared))
    monkeypatch.setenv("XDG_CACHE_HOME", str(own))
    folder = cpu_kernel.folder
    assert folder() == (shared / "kernels", None)
    assert (shared / "kernels").stat().st_mode & 0o777 == 0o700
    (shared / "kernels").chmod(0o777)
    assert folder() == (shared / "kernels", None)  # it is ours: closed
    assert (shared / "kernels").stat().st_mode & 0o022 == 0
    shared.chmod(0o777)
    assert folder() == (own / "ablate" / "kernels", f"others can replace what is in {shared}")
    shutil.rmtree(own)
    own.write_text("no folder")
    private, why = folder()
    assert (private.stat().st_mode & 0o777, why) == (0o700, f"others can replace what is in {shared}")


def test_a_library_that_others_can_change_is_not_opened(tmp_path):
    library = tmp_path / "kernel.so"
    library.write_bytes(b"planted")
    write_record(library.with_suffix(".json"), {"hash_of_kernel": hash_of(b"planted")})
    library.chmod(0o755)
    descriptor = cpu_kernel._open_whole(library)
    assert os.read(descriptor, 0) == b""
    os.close(descriptor)
    for mode in (0o775, 0o757):
        library.chmod(mode)
        assert cpu_kernel._open_whole(library) is None
    library.chmod(0o755)
    library.write_bytes(b"altered")
    assert cpu_kernel._open_whole(library) is None


@pytest.mark.exhaustive
def test_a_build_with_wrong_bits_is_not_used(monkeypatch, tmp_path):
    monkeypatch.setenv("ABLATE_CACHE", str(tmp_path))
    monkeypatch.setattr(cpu_kernel, "_bits_agree", lambda _library: False)
    monkeypatch.setattr(
        cpu_kernel, "_FLAGS", tuple("-O0" if "-O" in flag else flag for flag in cpu_kernel._FLAGS)
    )
    cpu_kernel.loaded.cache_clear()
    try:
        reason = cpu_kernel.loaded()[1]
        assert "does not give the bits" in reason or "no C++ compiler" in reason
        assert not list(tmp_path.rglob("*.so"))
    finally:
        cpu_kernel.loaded.cache_clear()


@pytest.mark.exhaustive
@pytest.mark.parametrize("compiler", ["g++", "clang++"])
@pytest.mark.parametrize("instructions", ["AVX512", "AVX2", "DEFAULT"])
def test_every_width_of_vectors_has_the_bits_of_the_reference(monkeypatch, tmp_path, instructions, compiler):
    widest = torch.backends.cpu.get_cpu_capability()
    if not shutil.which(compiler) or (instructions, widest) == ("AVX512", "AVX2") or widest == "DEFAULT":
        pytest.skip(f"no {compiler}, or a CPU without {instructions}")
    if (instructions, Path(cpu_kernel._compiler()).name) == (widest, compiler):
        pytest.skip("the build that all other tests here use")
    target = tmp_path / "kernel.so"
    build = dataclasses.replace(
        cpu_kernel._build_here(), compiler=compiler, flags=cpu_kernel._flags(instructions), target=target
    )
    assert cpu_kernel._compile(build) is None
    library = ctypes.CDLL(str(target))
    cpu_kernel._declare(library)
    monkeypatch.setattr(cpu_kernel, "loaded", lambda: (library, "of a test"))
    found = [check for check in checks(load_backend("emulated"), "cpu") if check.kind == "quantised bits"]
    assert len(found) == len(POLICIES)
    for check in found:
        check.run()
