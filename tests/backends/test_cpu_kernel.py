"""The compiled quantiser: bits, products of operands with fp32 scales, gradients, and its build."""

import dataclasses
import itertools
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
import torch

from ablate.backends import cpu_build, device
from ablate.backends.cpu_kernel import BlockScaled, Kernel, supports
from ablate.backends.device import cpp_compiler
from ablate.backends.emulated import EmulatedBackend
from ablate.backends.protocol import Backend, Draw
from ablate.backends.testing.inputs import POLICIES, awkward, label, policies_of
from ablate.backends.testing.suite import KEY, difference, one_thread, same_bits
from ablate.base.files import hash_of, write_record
from ablate.numerics import OperandPolicy, round_operand
from ablate.numerics.quantiser import turned
from ablate.recipes import block_shape
from ablate.recipes.policy import Rounding
from ablate.recipes.scale_rules import SCALE_RULES
from tests.backends.near_ties import near_ties
from tests.numerics.strategies import MXFP4, normal, whole

pytestmark = pytest.mark.skipif(cpp_compiler() is None, reason="no C++ compiler here")
EMULATED = EmulatedBackend()
(FP8_ROW,) = policies_of("fp8_e4m3 row")
FP32_SCALES = policies_of("""
fp8_e4m3 row
fp8_e5m2 row
fp8_e4m3 1x128
fp8_e4m3 1x128 stochastic
fp8_e5m2 1x128
fp8_e4m3 128x128
fp4_e2m1 row
fp4_e3m0 row
fp4_e2m1 searched
fp4_e3m0 searched
""")
FOUR_SIX = policies_of("""
nvfp4 four_six
nvfp4 four_six stochastic
nvfp4 four_six_mae
""")


def check_bits(x, policy, axis):
    actual = EMULATED.quantize(x, Draw(policy=policy, key=KEY), axis=axis)
    assert same_bits(actual.values, round_operand(x, policy, axis=axis, key=KEY).values)


@pytest.mark.parametrize("policy", FP32_SCALES, ids=label)
@pytest.mark.parametrize("axis", [0, 1])
def test_bits_for_odd_shapes_strides_and_values(policy, axis):
    tiled = policy.scale in ("1x128", "128x128")
    assert supports(policy)
    for k in (128, 384) if tiled else (1, 33, 130, 200):
        for n in (128, 256) if policy.scale == "128x128" else (1, 31, 65):
            rows, columns = (n, k) if axis == 1 else (k, n)
            wide = awkward(max(rows, 8), max(columns, 8), torch.float32)
            wide = wide[:rows, :columns]
            narrow = wide.to(torch.bfloat16)
            for x in (wide, narrow, narrow.t().contiguous().t()):
                check_bits(x, policy, axis)


def operand(elements, scales, axis):
    return BlockScaled(elements=elements.to(torch.bfloat16), scales=scales, axis=axis)


@pytest.mark.parametrize("axes", [(1, 1), (1, 0), (0, 1), (0, 0)])
@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize(("m", "n"), [(1, 1), (8, 48), (65, 33), (130, 97)])
def test_products_that_fp32_holds_are_exact(axes, blocks, m, n):
    """Whole numbers and scales that are powers of two: every order of adding gives the same sum."""
    k = 384 if blocks > 1 else 301
    sides = []
    for seed, (rows, axis) in enumerate(zip((m, n), axes, strict=True)):
        values = whole(15, rows, k, seed=seed)
        scales = 2.0 ** whole(3, rows, blocks, seed=seed)
        if axis == 0:
            values, scales = values.t().contiguous(), scales.t().contiguous()
        sides.append(operand(values, scales, axis))
    a, b = (turned(side.values, side.axis).double() for side in sides)
    assert torch.equal(EMULATED.multiply(*sides), (a @ b.t()).to(torch.bfloat16))


def test_sums_of_128_are_scaled_and_added_in_fp32():
    """The blocks' sums cancel but for less than fp32 holds beside them: they are added in order."""
    if not cpu_build.loaded()[0].multiplies:
        pytest.skip("this CPU has no products in bf16")
    a = torch.zeros(1, 512)
    b = torch.zeros(1, 512)
    a[0, ::128] = torch.tensor([1.0, 1.0, -1.0, 1.0])
    b[0, ::128] = 1.0
    scales = torch.tensor([[2.0**24, 1.0, 2.0**24, 3.0]])
    ones = torch.ones(1, 4)
    assert EMULATED.multiply(operand(a, scales, 1), operand(b, ones, 1)).item() == 3.0


@pytest.mark.parametrize(
    ("element", "scale"), [(448.0, 1.37 * 2.0**-74), (2.0**-9, 2.0**65)]
)
def test_scales_whose_product_leaves_fp32_go_another_way(element, scale):
    a = operand(torch.full((4, 128), element), torch.full((4, 1), scale), 1)
    b = operand(torch.full((2, 128), element), torch.full((2, 1), scale), 1)
    exact = a.values.double() @ b.values.double().t()
    product = EMULATED.multiply(a, b).double()
    assert torch.allclose(product, exact, rtol=2.0**-8, atol=0)


def test_a_nan_stays_in_its_row_and_column():
    x = normal(40, 256).bfloat16()
    w = normal(24, 256, seed=1).bfloat16()
    x[3, 5] = float("nan")
    w[7, 200] = float("inf")
    draw = Draw(policy=FP8_ROW)
    left, right = (EMULATED.quantize(side, draw, axis=1) for side in (x, w))
    product = EMULATED.multiply(left, right)
    expected = torch.zeros(40, 24, dtype=torch.bool)
    expected[3] = True
    expected[:, 7] = True
    assert torch.equal(product.isnan(), expected)


@pytest.mark.parametrize(
    "policy", policies_of("mxfp4 mask\nmxfp4 H64 call permute mask"), ids=label
)
def test_the_way_back_has_the_bits_of_plain_torch_for_odd_shapes_strides_and_values(
    policy,
):
    for columns in (128, 384) if policy.hadamard else (1, 33, 100):
        grad = normal(37, columns + 5).bfloat16()[:, :columns]
        grad[5, 0] = math.nan
        grad[6, columns // 2] = math.inf
        grad[7] = -0.0
        mask = normal(37, columns, seed=1).bfloat16() > 0
        actual, expected = (
            kind.gradient_through(EMULATED, grad, policy, key=KEY, mask=mask)
            for kind in (EmulatedBackend, Backend)
        )
        assert same_bits(actual, expected)


@pytest.mark.parametrize("fmt", ["mxfp4", "nvfp4"])
def test_quantising_again_has_the_bits_of_quantising_the_dequantised(fmt):
    x = awkward(96, 160, torch.bfloat16).nan_to_num(posinf=1.0)
    first = OperandPolicy(format=fmt, rounding="stochastic", prescale=0.75)
    quantized = EMULATED.quantize(x, Draw(policy=first, key=KEY), axis=1)
    for again, axis in itertools.product(
        policies_of("nvfp4 ms_eden H32 step\nfp8_e4m3 row\nfp4_e2m1 searched"), (0, 1)
    ):
        draw = Draw(policy=again, key=KEY)
        actual = EMULATED.quantize_again(quantized, draw, axis=axis)
        exact = quantized.values.float() * quantized.descale
        reference = round_operand(exact, again, axis=axis, key=KEY)
        assert difference(actual, reference) is None


@pytest.mark.parametrize(
    "policy",
    policies_of(
        "fp8_e4m3\nmxfp4\nmxfp4 stochastic 0.75\nnvfp4 H16 fixed\nfp8_e4m3 1x128"
    ),
    ids=label,
)
def test_any_number_of_threads(policy):
    x = normal(1152, 640).bfloat16()
    products = []
    with one_thread():  # which sets the number back
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            for axis in (0, 1):
                check_bits(x, policy, axis)
            side = EMULATED.quantize(x, Draw(policy=policy, key=KEY), axis=1)
            if isinstance(side, BlockScaled):
                products.append(EMULATED.multiply(side, side))
    assert all(torch.equal(product, products[0]) for product in products)


@pytest.mark.parametrize("columns", [33, 50, 65, 130])
def test_odd_widths_along_the_other_axis(columns):
    for policy in POLICIES:
        if block_shape(policy)[0] == 1:
            check_bits(normal(256, columns).bfloat16(), policy, axis=0)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("policy", FOUR_SIX, ids=label)
def test_four_or_six_where_only_roundings_tell_the_errors_apart(policy, axis):
    for x in near_ties(64, axis):
        check_bits(x, policy, axis)


@pytest.fixture
def anew():
    """Load the kernel anew, now and after the test."""
    cpu_build.loaded.cache_clear()
    yield
    cpu_build.loaded.cache_clear()


def test_a_compiler_is_looked_for_on_the_path_then_among_packages(
    monkeypatch, tmp_path
):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(device, "find_spec", lambda _: None)
    assert cpp_compiler() is None
    monkeypatch.setattr(device, "find_spec", lambda name: name)
    assert cpp_compiler() == (sys.executable, "-m", "ziglang", "c++")
    (tmp_path / "c++").touch(mode=0o700)
    assert cpp_compiler() == (str(tmp_path / "c++"),)


def test_with_a_compiler_the_kernel_is_used_which_knows_rules_and_roundings_by_name():
    # It refuses itself where its bits are not the reference's: then this fails.
    kernel, reason = cpu_build.loaded()
    assert kernel is not None, reason
    rules = {rule.family for rule in SCALE_RULES.values() if "cpp" in rule.kernels}
    assert {name.lower() for name in kernel._rules} == rules
    assert {name.lower() for name in kernel._roundings} == {*get_args(Rounding)}


@pytest.mark.usefixtures("anew")
def test_without_a_compiler_plain_torch_does_it(monkeypatch):
    monkeypatch.setenv("ABLATE_CPU_KERNEL", "off")
    assert cpu_build.loaded()[0] is None
    check_bits(normal(64, 64).bfloat16(), MXFP4, axis=0)


def test_a_build_in_which_a_bit_has_flipped_is_built_anew(monkeypatch, tmp_path, anew):
    cpu_build.loaded()
    built = cpu_build._build_here().target
    monkeypatch.setenv("ABLATE_CACHE", str(tmp_path))
    builds = []

    def build(asked):
        builds.append(asked.target)
        shutil.copy(built, asked.target)
        shutil.copy(built.with_suffix(".json"), asked.target.with_suffix(".json"))

    def load():
        cpu_build.loaded.cache_clear()
        assert cpu_build.loaded()[0] is not None
        return len(builds)

    monkeypatch.setattr(cpu_build, "_compile", build)
    assert [load(), load()] == [1, 1]
    whole = builds[0].read_bytes()
    builds[0].unlink()  # what is mapped into this process stays as it is
    builds[0].write_bytes(whole[:9000] + bytes([whole[9000] ^ 1]) + whole[9001:])
    assert [load(), load()] == [2, 2]
    assert builds[0].read_bytes() == whole


def test_a_kernel_is_kept_where_nobody_else_can_write(monkeypatch, tmp_path):
    shared = tmp_path / "shared"
    private_cache = tmp_path / "own"
    monkeypatch.setenv("ABLATE_CACHE", str(shared))
    monkeypatch.setenv("XDG_CACHE_HOME", str(private_cache))
    folder = cpu_build.folder
    assert folder() == (shared / "kernels", None)
    assert (shared / "kernels").stat().st_mode & 0o777 == 0o700
    (shared / "kernels").chmod(0o777)
    assert folder() == (shared / "kernels", None)  # it is ours: closed
    assert (shared / "kernels").stat().st_mode & 0o022 == 0
    shared.chmod(0o777)
    why = f"others can replace what is in {shared}"
    assert folder() == (private_cache / "ablate" / "kernels", why)
    shutil.rmtree(private_cache)
    private_cache.write_text("no folder")
    private, reason = folder()
    assert (private.stat().st_mode & 0o777, reason) == (0o700, why)


def test_a_library_that_others_can_change_is_not_opened(tmp_path):
    library = tmp_path / "kernel.so"
    library.write_bytes(b"planted")
    write_record(library.with_suffix(".json"), {"hash_of_kernel": hash_of(b"planted")})
    library.chmod(0o755)
    descriptor = cpu_build._open_whole(library)
    assert os.read(descriptor, 0) == b""
    os.close(descriptor)
    for mode in (0o775, 0o757):
        library.chmod(mode)
        assert cpu_build._open_whole(library) is None
    library.chmod(0o755)
    library.write_bytes(b"altered")
    assert cpu_build._open_whole(library) is None


@pytest.mark.exhaustive
@pytest.mark.usefixtures("anew")
def test_a_build_with_wrong_bits_is_not_used(monkeypatch, tmp_path):
    monkeypatch.setenv("ABLATE_CACHE", str(tmp_path))
    monkeypatch.setattr(cpu_build, "_fault", lambda _kernel: "wrong")
    monkeypatch.setattr(cpu_build, "_FLAGS", ("-O0", *cpu_build._FLAGS[1:]))
    assert "does not give the bits" in cpu_build.loaded()[1]
    assert not list(tmp_path.rglob("*.so"))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("instructions", "compiler"),
    [("AVX512", "clang++"), ("AVX2", "g++"), ("DEFAULT", "clang++")],
)
def test_every_width_of_vectors_has_the_bits_of_the_reference(
    monkeypatch, tmp_path, instructions, compiler
):
    widest = torch.backends.cpu.get_cpu_capability()
    is_narrow = widest == "DEFAULT" or (instructions, widest) == ("AVX512", "AVX2")
    if is_narrow or not shutil.which(compiler):
        pytest.skip(f"no {compiler}, or a CPU without {instructions}")
    here = cpu_build._build_here()
    if (instructions, Path(here.compiler[0]).name) == (widest, compiler):
        pytest.skip("the build that all other tests here use")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: instructions)
    flags = cpu_build._build_here().flags
    assert (flags == here.flags) == (instructions == widest)
    target = tmp_path / "kernel.so"
    built_whole(
        dataclasses.replace(here, compiler=(compiler,), flags=flags, target=target)
    )


@pytest.mark.exhaustive
def test_the_compiler_of_a_python_package_has_the_bits_of_the_reference(
    monkeypatch, tmp_path
):
    pytest.importorskip("ziglang", reason="the package ziglang is not installed")
    monkeypatch.setenv("PATH", str(tmp_path))  # no other compiler
    monkeypatch.delenv("CXX", raising=False)
    build = cpu_build._build_here()
    assert build.compiler[1:] == ("-m", "ziglang", "c++")
    built_whole(dataclasses.replace(build, target=tmp_path / "kernel.so"))


def built_whole(build):
    """Build the kernel, which is compared with plain torch by every policy before it is moved into place."""
    assert cpu_build._compile(build) is None
    assert Kernel(build.target, build.sources)


@pytest.mark.exhaustive
def test_it_compiles_for_arm(tmp_path):
    pytest.importorskip("ziglang", reason="the package ziglang is not installed")
    source = Path(cpu_build.__file__).parent / "kernel" / "kernel.cpp"
    command = [sys.executable, "-m", "ziglang", "c++", "-target", "aarch64-linux-gnu"]
    command += {*cpu_build._FLAGS} - {"-march=native", "-shared", "-s"}
    # without what a debugger needs, which takes most of the time
    command += ["-g0", "-c", source, "-o", tmp_path / "kernel.o"]
    caches = dict.fromkeys(cpu_build._CACHES_OF_ZIG, str(tmp_path))
    subprocess.run(command, env=os.environ | caches, check=True)
    machine = (tmp_path / "kernel.o").read_bytes()[18:20]
    assert int.from_bytes(machine, "little") == 183  # EM_AARCH64
