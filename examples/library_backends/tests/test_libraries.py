"""Optional libraries by stand-ins that take what the real ones document: nobody here has the real ones."""

import dataclasses
import sys
import types
from functools import partial

import pytest
import torch

from ablate.backends.device import device_of_arch
from ablate.backends.packed import Packed
from ablate.backends.protocol import Draw
from ablate.backends.select import Selection, load_backend
from ablate.backends.testing.suite import both
from ablate.recipes import OperandPolicy
from ablate.run import backend_names

MXFP4 = OperandPolicy(format="mxfp4")
SR = OperandPolicy(format="mxfp4", rounding="stochastic", prescale=0.75)
LIBRARIES = {
    "qutlass": "sm_120",
    "quack": "sm_100",
    "primus_turbo": "gfx950",
    "primus_turbo_flydsl": "gfx950",
    "aiter": "gfx950",
}


def exact(left, right):
    return left.values.float() @ right.values.float().t()


def product(a, a_scales, b, b_scales, fmt="mxfp4"):
    """What a GEMM over packed operands with plain rows of scales gives."""
    operands = []
    for side in ((a, a_scales), (b, b_scales)):
        codes, scales = (part.view(torch.uint8) for part in side)
        operands.append(
            Packed(format=fmt, codes=codes, scales=scales, descale=1.0, axis=1)
        )
    return exact(*operands)


def unswizzled(scales, rows, columns):
    """Undo cuBLAS's layout of scale bytes, tiles of 128 rows × 4 columns."""
    tiles = scales.view(torch.uint8).view(-(-rows // 128), -(-columns // 4), 32, 4, 4)
    padded = tiles.permute(0, 3, 2, 1, 4).flatten(0, 2).flatten(1)
    return padded[:rows, :columns]


@pytest.fixture
def stand_in(monkeypatch):
    """Put empty modules of these names in the place of a library's; the last one is returned."""

    def put(*names):
        for name in names:
            module = types.ModuleType(name)
            module.__spec__ = types.SimpleNamespace(name=name)
            monkeypatch.setitem(sys.modules, name, module)
        return module

    return put


@pytest.fixture
def qutlass(stand_in):
    def gemm(fmt, block, a, b, a_scales, b_scales, alpha):
        assert alpha.shape == (1,)
        columns = a.shape[1] * 2 // block
        left = unswizzled(a_scales, a.shape[0], columns)
        right = unswizzled(b_scales, b.shape[0], columns)
        return (product(a, left, b, right, fmt) * alpha).to(torch.bfloat16)

    module = stand_in("qutlass")
    module.matmul_mxf4_bf16_tn = partial(gemm, "mxfp4", 32)
    module.matmul_nvf4_bf16_tn = partial(gemm, "nvfp4", 16)
    return load_backend("qutlass")


@dataclasses.dataclass
class QuackOperand:
    """A stand-in for quack's container: K is last in storage, ``mT`` swaps what it says of it."""

    qdata: torch.Tensor
    scale: torch.Tensor
    format: str
    is_turned: bool = False

    @classmethod
    def from_parts(cls, qdata, scale, fmt):
        block = 16 if fmt == "nvfp4" else 32
        rows, columns = qdata.shape[0], qdata.shape[1] * 2 // block
        assert scale.shape == (-(-rows // 128), -(-columns // 4), 32, 4, 4)
        assert scale.element_size() == 1
        assert rows % 8 == qdata.shape[1] % 16 == 0  # rows of 16 bytes, of bf16, too
        return cls(qdata, scale, fmt)

    @property
    def mT(self):  # noqa: N802 (its name)
        return dataclasses.replace(self, is_turned=True)

    @property
    def parts(self):
        block = 16 if self.format == "nvfp4" else 32
        columns = self.qdata.shape[1] * 2 // block
        return self.qdata, unswizzled(self.scale, len(self.qdata), columns)


@pytest.fixture
def quack(stand_in):
    def gemm(a, b, *, alpha, out_dtype, tuned):
        assert (a.is_turned, b.is_turned, tuned) == (False, True, False)
        assert alpha.shape == (1,)
        return (product(*a.parts, *b.parts, a.format) * alpha).to(out_dtype)

    stand_in("quack", "quack.blockscaled")
    stand_in("quack.blockscaled.operand").BlockScaledOperand = QuackOperand
    stand_in("quack.gemm_interface").gemm = gemm
    return load_backend("quack")


def check_typed(a, a_scales, b, b_scales, rows, k):
    """Codes and scales in torch's types, filled up to multiples of ``rows`` and ``k`` elements."""
    for codes, scales in ((a, a_scales), (b, b_scales)):
        assert codes.dtype == torch.float4_e2m1fn_x2
        assert scales.dtype == torch.float8_e8m0fnu
        assert scales.shape == (codes.shape[0], codes.shape[1] // 16)
        assert codes.shape[0] % rows == codes.shape[1] * 2 % k == 0


@pytest.fixture
def primus_turbo(stand_in, monkeypatch):
    def gemm(a, a_scales, b, b_scales, out_dtype, *how):
        assert how == (False, True, False, "MX_BLOCKWISE")
        check_typed(a, a_scales, b, b_scales, rows=16, k=128)
        return product(a, a_scales, b, b_scales).to(out_dtype)

    stand_in("primus_turbo", "primus_turbo.pytorch")
    kernels = types.SimpleNamespace(hipblaslt_gemm_fp4=gemm)
    monkeypatch.setattr(torch.ops, "primus_turbo_cpp_extension", kernels, raising=False)
    return load_backend("primus_turbo")


@pytest.fixture
def primus_turbo_flydsl(stand_in):
    def gemm(a, a_scales, b, b_scales, *, out_dtype):
        check_typed(a, a_scales, b, b_scales, rows=256, k=256)
        return product(a, a_scales, b, b_scales).to(out_dtype)

    stand_in("primus_turbo", "primus_turbo.flydsl", "primus_turbo.flydsl.gemm")
    kernel = stand_in("primus_turbo.flydsl.gemm.gemm_mxfp4_kernel")
    kernel.gemm_mxfp4_flydsl_kernel = gemm
    return load_backend("primus_turbo_flydsl")


@pytest.fixture(name="aiter")
def aiter_library(stand_in):
    """Any order will do for its shuffles, as long as each operand takes its own."""

    def shuffle_weight(x, *, layout):
        assert layout == (16, 16)
        return x.flip(0)

    def gemm(a, b, a_scales, b_scales, dtype, bpreshuffle):
        assert bpreshuffle
        return product(a, a_scales.flip(1), b.flip(0), b_scales.flip(1)).to(dtype)

    library = stand_in("aiter")
    library.gemm_a4w4 = gemm
    library.dtypes = types.SimpleNamespace(fp4x2=torch.uint8, fp8_e8m0=torch.uint8)
    stand_in("aiter.ops")
    stand_in("aiter.ops.shuffle").shuffle_weight = shuffle_weight
    stand_in("aiter.utility")
    utils = stand_in("aiter.utility.fp4_utils")
    utils.e8m0_shuffle = lambda x: x.flip(1).contiguous()
    return load_backend("aiter")


def operands(backend, policy, m, n, k):
    generator = torch.Generator().manual_seed(m + n)
    return [
        backend.quantize(
            torch.randn(rows, k, generator=generator), Draw(policy=policy), axis=1
        )
        for rows in (m, n)
    ]


@pytest.mark.parametrize("name", LIBRARIES)
@pytest.mark.parametrize(("m", "n", "k"), [(128, 256, 256), (7, 33, 96), (0, 3, 32)])
def test_the_call_gives_the_product(name, m, n, k, request):
    backend = request.getfixturevalue(name)
    left, right = operands(backend, MXFP4, m, n, k)
    product = backend.multiply(left, right)
    assert torch.equal(product, exact(left, right).to(torch.bfloat16))
    assert (
        backend.support(both(MXFP4), device_of_arch(LIBRARIES[name])).mode == "native"
    )


@pytest.mark.parametrize("name", ["qutlass", "quack"])
def test_nvfp4_and_the_factor_of_a_prescale_are_taken(name, request):
    backend = request.getfixturevalue(name)
    left, right = operands(backend, OperandPolicy(format="nvfp4"), 40, 24, 80)
    expected = exact(left, right) * (left.descale * right.descale)
    assert torch.allclose(backend.multiply(left, right).float(), expected, rtol=2**-8)
    assert backend.support(both(SR), device_of_arch(LIBRARIES[name])).mode == "native"


@pytest.mark.parametrize("fmt", ["mxfp4", "nvfp4"])
def test_the_real_quack_reads_our_codes_and_scales(fmt, monkeypatch):
    """What needs no GPU of it: the operand, and its values."""
    pytest.importorskip("quack.blockscaled.operand", exc_type=ImportError)
    interface = types.ModuleType("quack.gemm_interface")
    interface.gemm = lambda a, b, **_: a.dequantize().float() @ b.dequantize().float()
    monkeypatch.setitem(sys.modules, "quack.gemm_interface", interface)
    backend = load_backend("quack")
    left, right = operands(backend, OperandPolicy(format=fmt), 40, 24, 96)
    product = backend.multiply(left, right)
    assert torch.allclose(product, exact(left, right), rtol=2**-7)


@pytest.mark.parametrize("name", ["primus_turbo", "primus_turbo_flydsl", "aiter"])
def test_a_prescale_is_refused_where_there_is_no_factor(name, request):
    support = request.getfixturevalue(name).support(both(SR), device_of_arch("gfx950"))
    assert (support.mode, "prescale" in support.detail) == ("no", True)


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_library_that_is_not_installed_says_how_to_get_it(name):
    support = load_backend(name).support(both(MXFP4), device_of_arch(LIBRARIES[name]))
    assert support.mode == "no"
    assert "is not installed (see github.com/" in support.detail
    with pytest.raises(ValueError, match="is not installed"):
        Selection(name).choose(both(MXFP4), device_of_arch(LIBRARIES[name]))
    assert (
        "is for"
        in load_backend(name).support(both(MXFP4), device_of_arch("cpu")).detail
    )


@pytest.mark.parametrize("name", LIBRARIES)
def test_the_study_file_knows_the_name_by_its_entry_point(name):
    assert name in backend_names()
    assert type(load_backend(name)).__module__ == "ablate_libraries"
