"""The duties of every back end, as checks for pytest, `ablate check device` and each run on a GPU.

    from ablate.backends.testing.suite import checks
    for check in checks(MyBackend(), "cuda"):
        check.run()                 # raises AssertionError with the difference, else returns what it found

A check tests only what ``Backend.support`` claims on the device. All compare with plain torch on the CPU.

The exact probe: random codes with block scales 2^−1…2^1 and K ≤ 4096 keep every partial sum of products a
multiple of 2^−4 below 2^20: 24 bits. So every true fp32 accumulation, in any order and rounded any way, gives
the exact sum, and one rounding to bf16 gives known bits. An accumulator with fewer bits gives differences:
2^p + 1 − 2^p shows how many bits it has. Three quarters of a last place, added to a sum, show which way it is
rounded. Both are properties of the hardware: the suite tells them, and they are no fault unless sums keep
fewer bits than on any known device. The bound of a product follows from the bits that were measured.
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ablate.backends.device import device_of
from ablate.backends.protocol import Backend, Draw, dequantised
from ablate.backends.testing import Check, FaultError, Told
from ablate.backends.testing.inputs import (
    POLICIES,
    awkward,
    grid_of,
    inputs,
    label,
    made_up,
    policies_of,
)
from ablate.numerics.formats import E2M1
from ablate.numerics.philox import Key
from ablate.numerics.quantiser import round_operand
from ablate.recipes import GemmPolicy, OperandPolicy, block_shape, group_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from ablate.backends.protocol import Operand

KEY = Key(
    seed=5, layer="blocks.1.ffn.down", gemm="wgrad", operand="dy", step=12_345, call=3
)
_FP32_BITS = 24
NARROWEST_BITS = 14
"""What sums keep of FP8 products on Hopper, within 128 of them: no known accumulator keeps less."""
_PROBED = ("bf16", "mxfp4", "mxfp8", "fp8_e4m3")
"""Formats whose range is wide enough for ``accumulator_of``."""


def checks(
    backend: Backend, where: str, policies: tuple[OperandPolicy, ...] = POLICIES
) -> Iterator[Check]:
    """Yield the checks for everything that a back end claims on a torch device."""
    device = device_of(where)
    claimed = [
        policy
        for policy in policies
        if backend.support(both(policy), device).mode != "no"
    ]
    formats = {policy.format for policy in claimed}
    # One product per format and rule: accumulation depends on nothing else in a policy.
    rules = {(policy.format, policy.scale): policy for policy in reversed(claimed)}
    probed = dict.fromkeys(map(_plain, claimed))
    work: list[tuple[str, Callable[..., str | Told], Iterable[OperandPolicy]]] = [
        ("quantised bits", quantised_bits, claimed),
        ("product", _product, rules.values()),
        ("exact probe", exact_product, policies_of("mxfp4\nmxfp8\nnvfp4")),
        (
            "accumulator",
            accumulator_bits,
            (policy for policy in probed if policy.format in _PROBED),
        ),
        (
            "rounding of sums",
            sum_rounding,
            policies_of("nvfp4\nmxfp4\nmxfp8\nfp8_e4m3"),
        ),
    ]
    for kind, run, chosen in work:
        for policy in chosen:
            if policy.format in formats:
                call = partial(run, backend, where, policy)
                yield Check(backend=backend.name, kind=kind, of=label(policy), run=call)


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch use one thread: in many small operations on a busy machine threads wait for one another."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def both(policy: OperandPolicy) -> GemmPolicy:
    """Make a GEMM with this policy on both sides: a forward GEMM, so that a mask is allowed."""
    return GemmPolicy(left=policy, right=policy)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal bit for bit, with all NaNs equal."""
    return a.shape == b.shape and not bool(unequal(a, b).any())


def unequal(a: Tensor, b: Tensor) -> Tensor:
    """Find the elements whose bits differ, with all NaNs equal: a bool tensor."""
    return ((a != b) | (a.signbit() != b.signbit())) & ~(a.isnan() & b.isnan())


def quantised_bits(backend: Backend, where: str, policy: OperandPolicy) -> str:
    """Compare quantised tensors with plain torch's; raise ``FaultError`` where a bit differs."""
    compared = 0
    draw = Draw(policy=policy, key=KEY)
    for name, x in inputs(policy):
        on_device = x.to(where)
        along_rows, along_columns = backend.quantize_both(on_device, draw, draw)
        for axis, at_once in ((0, along_columns), (1, along_rows)):
            expected = round_operand(x, policy, axis=axis, key=KEY)
            alone = backend.quantize(on_device, draw, axis=axis)
            for suffix, operand in (("", alone), (", both axes at once", at_once)):
                if fault := difference(operand, expected):
                    raise FaultError(
                        f"{name}, along axis {axis}{suffix}: {fault}", {"x": x}
                    )
                compared += x.numel()
    return f"{compared} values"


def gradient_back(backend: Backend, where: str, policy: OperandPolicy) -> str:
    """Compare ``gradient_through`` with plain torch's; raise ``AssertionError`` where a bit differs."""
    grad = awkward(64, 256, torch.bfloat16)
    for mask in (None, grad > 0):
        mask_on_device = None if mask is None else mask.to(where)
        result = backend.gradient_through(
            grad.to(where), policy, key=KEY, mask=mask_on_device
        )
        expected = Backend.gradient_through(backend, grad, policy, key=KEY, mask=mask)
        assert same_bits(result.cpu(), expected), "the gradient's way back differs"
    return f"{2 * grad.numel()} values"


def difference(operand: Operand, expected: Operand) -> str | None:
    """Say in a few words how an operand differs from one on the CPU; None where the bits are the same."""
    values = operand.values.cpu().float()
    descale = operand.descale
    # one per row; the reference's values have them
    if isinstance(descale, Tensor) and descale.numel() > 1:
        values = dequantised(operand).cpu()
        descale = 1.0
    if values.shape != expected.values.shape:
        return f"shape {list(values.shape)} instead of {list(expected.values.shape)}"
    if different := int(unequal(values, expected.values.float()).sum()):
        return f"{different} of {values.numel()} values differ"
    descale = float(descale)
    expected_descale = float(expected.descale)
    if descale != expected_descale and not (
        math.isnan(descale) and math.isnan(expected_descale)
    ):
        return f"descale {descale} instead of {expected_descale}"
    if expected.mask is None:
        return None
    if operand.mask is None or not torch.equal(operand.mask.cpu(), expected.mask):
        return "another mask"
    return None


def product(
    backend: Backend, where: str, policy: OperandPolicy, a: Tensor, b: Tensor
) -> Tensor:
    """Quantise and multiply A and B by a back end on a torch device; return A Bᵀ on the CPU."""
    draw = Draw(policy=policy, key=KEY)
    left = backend.quantize(a.to(where), draw, axis=1)
    right = backend.quantize(b.to(where), draw, axis=1)
    return backend.multiply(left, right).cpu()


@dataclass(frozen=True)
class Accumulator:
    """The bits that sums keep ``within`` each ``group`` of products (0: of all), and ``across`` groups."""

    within: int = _FP32_BITS
    group: int = 0
    across: int = _FP32_BITS

    def __str__(self) -> str:
        if not self.group:
            return f"{self.within} bits"
        return f"{self.within} bits within {self.group} products, {self.across} across"


def accumulator_of(
    backend: Backend, where: str, policy: OperandPolicy
) -> tuple[Accumulator, dict[int, int]]:
    """Measure what sums keep; return it, and the bits by the distance of terms in elements.

    The bits are the smallest p with 2^p + 1 − 2^p ≠ 1, at most 24.
    """
    # FP8 has one scale for the tensor: a 448 opposite a 0 makes it 1. Both sides share the ratio of the
    # terms, since E4M3 alone spans only 18 powers of two.
    is_fp8 = policy.format == "fp8_e4m3"
    first = 8 if is_fp8 else 1
    powers = 2.0 ** torch.arange(first, _FP32_BITS)
    right = (1.0, 1.0)
    if is_fp8:
        powers *= 2.0**-17
        right = (2.0**8, 2.0**-9)
    left = (powers, torch.ones_like(powers))
    bits: dict[int, int] = {}
    for gap in (32, 128, 1024):
        # A wrong factor is a fault of the product, and no lost bit.
        is_kept = (
            _cancelled(backend, where, policy, gap, a=left, b=right) / right[1] - 1
        ).abs() < 0.5
        lost = [
            first + row
            for row, kept_term in enumerate(is_kept.tolist())
            if not kept_term
        ]
        bits[gap] = min([_FP32_BITS, *lost])
    group = next((gap for gap in bits if bits[gap] > bits[32]), 0)
    across = min(bits[gap] for gap in bits if gap >= group)
    return Accumulator(bits[32] if group else across, group, across), bits


def _plain(policy: OperandPolicy) -> OperandPolicy:
    """Return the policy that shows the accumulator of a policy's products: FP8 by row is another kernel."""
    is_fp8_by_row = policy.format == "fp8_e4m3" and policy.scale == "row"
    return OperandPolicy(format=policy.format, scale="row" if is_fp8_by_row else "none")


def _product(backend: Backend, where: str, policy: OperandPolicy) -> str:
    sums = Accumulator()
    if policy.format in _PROBED:
        sums, _ = accumulator_of(backend, where, _plain(policy))
    assert min(sums.within, sums.across) >= NARROWEST_BITS, (
        f"sums keep {sums}, none known under {NARROWEST_BITS}"
    )
    rows = block_shape(policy)[0]
    k = 256 if group_size(policy) > 32 else 160
    shapes = [(65, 33), (1, 128), (128, 1)]
    if rows > 1:
        shapes = [(rows * 3, rows * 2), (rows * 3, rows)]
    worst = 0.0
    for m, n in shapes:
        x = made_up("Gaussian", m, k, seed=1)
        w = made_up("Gaussian", n, k, seed=2)
        # Few products, in other columns for each row: what sums may lose then hides no wrong factor.
        x *= (torch.arange(m)[:, None] + torch.arange(k)) % 16 == 0
        result = product(backend, where, policy, x, w)
        assert result.shape == (m, n), f"shape {list(result.shape)} instead of {[m, n]}"
        assert result.dtype == torch.bfloat16, f"{result.dtype} instead of bfloat16"
        exact, bound = _exact_and_bound(policy, x, w, sums)
        error = float(
            ((result.double() - exact).abs() / bound.clamp_min(2.0**-133)).max()
        )
        if not error <= 1:
            raise FaultError(
                f"off by up to (1 + {error - 1:.2g}) × the bound", {"a": x, "b": w}
            )
        worst = max(worst, error)
    return f"within {worst:.2f} of the bound of sums that keep {sums}, and one rounding"


def _exact_and_bound(
    policy: OperandPolicy, x: Tensor, w: Tensor, sums: Accumulator
) -> tuple[Tensor, Tensor]:
    """Return the exact product of the quantised operands, fp64, and by how much sums may miss it."""
    left = round_operand(x, policy, axis=1, key=KEY)
    right = round_operand(w, policy, axis=1, key=KEY)
    a = left.values.double()
    b = right.values.double()
    descale = float(left.descale) * float(right.descale)
    exact = (a @ b.t()) * descale
    magnitude = (a.abs() @ b.abs().t()) * abs(descale)
    # A term is cut once where it is aligned with a larger one, and each sum once: in a group at most two
    # last places for each product that is not zero.
    k = x.shape[1]
    group = sums.group or k
    terms = (a != 0).double() @ (b != 0).double().t()
    lost = (terms.clamp(max=group) + 1) * 2.0 ** (
        2 - sums.within
    ) + k / group * 2.0 ** (1 - sums.across)
    return exact, exact.abs() * 2.0**-8 + magnitude * lost  # and one rounding to bf16


def exact_product(backend: Backend, where: str, policy: OperandPolicy) -> str:
    """Multiply operands that fp32 accumulates exactly; raise ``AssertionError`` if a product is not exact."""
    compared = 0
    for k in (32, 416, 4096):
        a = _exact_operand(policy, k, seed=k)
        b = _exact_operand(policy, k, seed=k + 1)
        left = round_operand(a, policy, axis=1)
        right = round_operand(b, policy, axis=1)
        sums = (left.values.double() @ right.values.double().t()).float()
        exact = (sums * (float(left.descale) * float(right.descale))).to(torch.bfloat16)
        if different := int((product(backend, where, policy, a, b) != exact).sum()):
            message = f"{different} of {exact.numel()} products are not those of an fp32 accumulator"
            raise FaultError(
                f"{message}; its width is under 'accumulator'", {"a": a, "b": b}
            )
        compared += exact.numel()
    return f"{compared} products equal to the bit"


def _exact_operand(policy: OperandPolicy, k: int, *, seed: int) -> Tensor:
    """Make values [64, k] that quantising leaves unchanged: E2M1's, which MXFP8 and NVFP4 can hold too.

    Each block of 16 has a 6, which gives it the intended scale.
    """
    generator = torch.Generator().manual_seed(seed)
    values = grid_of(E2M1)[torch.randint(0, 8, (64, k), generator=generator)]
    values *= 1 - 2.0 * torch.randint(0, 2, (64, k), generator=generator)
    values[:, ::16] = 6.0
    scales = 2.0 ** torch.randint(-1, 2, (64, k // 32), generator=generator)
    if policy.format == "nvfp4":
        scales[:, 0] = 2.0  # the tensor's largest value, the same in every tensor
    return (values * scales.repeat_interleave(32, dim=1)).to(torch.bfloat16)


def _cancelled(
    backend: Backend,
    where: str,
    policy: OperandPolicy,
    gap: int,
    *,
    a: tuple[Tensor, Tensor],
    b: tuple[float, float],
) -> Tensor:
    """Return what is left of a large term, a small one and the large one taken away, for each row.

    The terms are ``gap`` elements apart. ``a``: A's large and small values, one a row; ``b``: B's there.
    Other values meet zeros: they give blocks and tensors scales that hold the rest.
    """
    large, small = a
    left = torch.zeros(len(large), 4 * gap)
    left[:, 0] = large
    left[:, gap] = small
    left[:, 2 * gap] = -large
    right = torch.zeros(16, 4 * gap)
    for column, value in ((0, b[0]), (gap, b[1]), (2 * gap, b[0])):
        right[:, column] = value
        right[:, column + 1] = 1.5 * value
    largest = {"nvfp4": 448.0 * 6, "fp8_e4m3": 448.0}.get(policy.format, 0.0)
    left[:, 3 * gap] = largest
    right[:, 3 * gap + 1] = largest
    return product(
        backend, where, policy, left.to(torch.bfloat16), right.to(torch.bfloat16)
    ).float()[:, 0]


def accumulator_bits(backend: Backend, where: str, policy: OperandPolicy) -> Told:
    """Tell the number of bits that sums keep; the terms lie within one instruction and across many."""
    accumulator, bits = accumulator_of(backend, where, policy)
    figures = {f"kept_{gap}_apart_bits": float(number) for gap, number in bits.items()}
    return Told(f"sums keep {accumulator}, of fp32's {_FP32_BITS}", figures)


_DIRECTIONS = {
    (1.0, -1.0, 1.0, -1.0): "to nearest",
    (0.0, -1.0, 1.0, 0.0): "toward zero",
    (0.0, -1.0, 0.0, -1.0): "down",
    (1.0, 0.0, 1.0, 0.0): "up",
    (0.75, -0.75, 0.75, -0.75): "not at all (more than 24 bits, or another order)",
    (0.0, 0.0, 0.0, 0.0): "small terms cut off",
}
"""What is left, in last places, of ±1.5·2^16 ± three quarters of its last place ∓ 1.5·2^16."""


def sum_rounding(backend: Backend, where: str, policy: OperandPolicy) -> Told:
    """Tell which way sums are rounded: Blackwell's NVFP4 is published to add groups of 64 toward zero.

    The three terms are 64, 128 or 1,024 elements apart, each in a group of its own.
    """
    large = torch.tensor([384.0, 384.0, -384.0, -384.0])
    small = torch.tensor([1.0, -1.0, 1.0, -1.0]) * 2.0**-4 * 1.5
    directions = []
    for gap in (64, 128, 1024):
        sums = _cancelled(
            backend, where, policy, gap, a=(large, small), b=(256.0, 2.0**-4)
        )
        last_places = tuple((sums * 2.0**7).tolist())
        direction = _DIRECTIONS.get(last_places, f"unknown, {last_places} last places")
        directions.append(f"{direction} {gap} apart")
    return Told(f"between groups of products: {'; '.join(directions)}")
