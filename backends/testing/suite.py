"""The conformance suite: the duties of every back end, as checks for pytest, `ablate check` and each run.

    from ablate.backends.testing.suite import checks
    for check in checks(MyBackend(), "cuda"):
        check.run()                 # raises AssertionError with the difference, else returns what it found

A check tests only what ``Backend.support`` claims on the device. All compare with plain torch on the CPU.
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from dataclasses import asdict, replace
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import Tensor

from ablate.backends.device import device_of
from ablate.backends.protocol import Backend, Draw
from ablate.backends.testing.check import Check, FaultError
from ablate.backends.testing.inputs import awkward, inputs, made_up
from ablate.backends.testing.probe import accumulator_bits, exact_product, product, sum_rounding
from ablate.numerics.philox import Key
from ablate.numerics.quantiser import round_operand
from ablate.recipes import GemmPolicy, OperandPolicy, block_shape
from ablate.recipes.policy import Block, Rounding, Scale, Signs, Undo

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ablate.backends.protocol import Operand
    from ablate.backends.testing.check import Told
    from ablate.recipes import Format

KEY = Key(seed=5, layer="blocks.1.ffn.down", gemm="wgrad", operand="dy", step=12_345, call=3)

_EXACT: tuple[Format, ...] = ("mxfp4", "mxfp8", "nvfp4")
_PROBED: tuple[Format, ...] = ("mxfp4", "mxfp8", "fp8_e4m3")
_DIRECTED: tuple[Format, ...] = ("nvfp4", *_PROBED)
_FLAGS = ("permute", "rotated_bf16", "mask")
_FIELDS = {
    word: name
    for name, kind in zip(
        ("scale", "block", "rounding", "undo", "signs"), (Scale, Block, Rounding, Undo, Signs), strict=True
    )
    for word in get_args(kind)
}


def label(policy: OperandPolicy) -> str:
    """Describe a policy in a few words: its differences from the format's default."""
    usual = OperandPolicy(format=policy.format)
    words: list[str] = [policy.format]
    for name in ("scale", "block", "rounding", "prescale", "undo", "hadamard", "signs"):
        value = getattr(policy, name)
        if value != getattr(usual, name):
            words += [f"H{value}" if name == "hadamard" else str(value)]
    return " ".join(words + [flag for flag in _FLAGS if getattr(policy, flag)])


def policies_of(text: str) -> tuple[OperandPolicy, ...]:
    """Return the policies, one a line, that ``label`` describes so; a prescale may be a fraction."""
    return tuple(_policy(*line.split()) for line in text.strip().splitlines())


def _policy(fmt: str, *words: str) -> OperandPolicy:
    found: dict[str, Any] = {"format": fmt}
    for word in words:
        if word in _FLAGS:
            found[word] = True
        elif word in _FIELDS:
            found[_FIELDS[word]] = word
        elif word.startswith("H"):
            found["hadamard"] = int(word[1:])
        else:
            found["prescale"] = float(Fraction(word))
    return OperandPolicy(**found)


POLICIES = policies_of("""
bf16
bf16 H32
mxfp4
mxfp4 H16
mxfp4 H16 step
mxfp4 H32
mxfp4 H32 step
mxfp4 stochastic
mxfp4 stochastic H16
mxfp4 stochastic H16 step
mxfp4 stochastic H32
mxfp4 stochastic H32 step
mxfp4 stochastic 0.75
mxfp4 stochastic 0.75 H16
mxfp4 stochastic 0.75 H16 step
mxfp4 stochastic 0.75 H32
mxfp4 stochastic 0.75 H32 step
mxfp4 even
mxfp4 rceil
mxfp4 ceil
mxfp4 uos
mxfp4 quest
mxfp8
mxfp8 stochastic
mxfp6_e3m2
mxfp6_e3m2 stochastic
mxfp6_e2m3
mxfp6_e2m3 stochastic
mxfp4_e3m0
mxfp4_e3m0 stochastic
mxfp4 32x32
mxfp4 32x32 stochastic 0.75
mxfp4 even stochastic_rocm
mxfp4 nearest_away
mxfp4 nearest_toward_zero
mxfp4 stochastic 0.75 operand
mxfp4 quest H32 mask
mxfp4 stochastic 0.75 H64 call rotated_bf16
mxfp4 stochastic 0.75 H128 layer
mxfp4 H128 layer
mxfp4 H16 call permute
mxfp4 H32 call permute
mxfp4 H64 call permute
mxfp4 H128 call permute
mxfp4 H256
mxfp4 H16 fixed
nvfp4
nvfp4 stochastic
nvfp4 stochastic 16/17
nvfp4 H16 fixed
nvfp4 16x16
nvfp4 ue5m3 16x16
nvfp4 two_level_ue5m3 stochastic 16/17
nvint4
nvint4 stochastic H16
nvfp4 four_six
nvfp4 four_six stochastic 16/17 H64
nvfp4 ms_eden H16 step
nvfp4 ms_eden H32 step
nvfp4 ms_eden H64 step
nvfp4 ms_eden H128 step
nvfp4 ms_eden_unscaled H16 step
nvfp4 ms_eden_unscaled H32 step
nvfp4 ms_eden_unscaled H64 step
nvfp4 ms_eden_unscaled H128 step
fp8_e4m3
fp8_e5m2
fp8_e4m3 stochastic H32
fp8_e4m3 row
fp4_e2m1
fp4_e3m0 row
fp8_e4m3 1x128
fp8_e4m3 128x128
fp4_e2m1 searched
""")
"""Policies of every kind, for both operands."""

QUICK = policies_of("""
mxfp4
mxfp4 stochastic 0.75 H16 step
mxfp4 32x32
mxfp8
nvfp4 H16 fixed
fp8_e4m3
""")
"""The policies of the short form that runs before every native run."""

_normal = partial(made_up, "Gaussian")


def checks(backend: Backend, where: str, policies: tuple[OperandPolicy, ...] = POLICIES) -> Iterator[Check]:
    """Yield the checks for everything that a back end claims on a torch device."""
    device = device_of(where)
    claimed = [policy for policy in policies if backend.support(both(policy), device).mode != "no"]

    def check(kind: str, run: Callable[[Backend, str, Any], str | Told], of: OperandPolicy | Format) -> Check:
        name = label(of) if isinstance(of, OperandPolicy) else of
        return Check(backend=backend.name, kind=kind, of=name, run=partial(run, backend, where, of))

    for policy in claimed:
        yield check("quantised bits", quantised_bits, policy)
    # One product per format and rule: accumulation depends on nothing else in a policy.
    for policy in {(one.format, one.scale): one for one in reversed(claimed)}.values():
        yield check("product", _product, policy)
    formats = {policy.format for policy in claimed}
    yield from (check("exact probe", exact_product, fmt) for fmt in _EXACT if fmt in formats)
    yield from (check("accumulator", accumulator_bits, fmt) for fmt in _PROBED if fmt in formats)
    yield from (check("rounding of sums", sum_rounding, fmt) for fmt in _DIRECTED if fmt in formats)
    for policy in claimed:
        if policy.rounding == "stochastic" and policy.format == "mxfp4" and policy.block == "1x32":
            yield check("stochastic gain", _gain, policy)
            break
    for size in (16, 32, 64):
        rotated = OperandPolicy(format="mxfp8", hadamard=size, signs="step")
        if backend.support(both(rotated), device).mode != "no":
            yield check("Hadamard cancels in the product", _cancels, rotated)


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch use one thread: of many small operations threads wait for one another on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def both(policy: OperandPolicy) -> GemmPolicy:
    """Return a GEMM with this policy on both sides; a mask is for forward operands only, as here."""
    return GemmPolicy(left=policy, right=policy)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal bit for bit, with all NaNs equal."""
    return a.shape == b.shape and not bool(unequal(a, b).any())


def unequal(a: Tensor, b: Tensor) -> Tensor:
    """Return where the bits of two tensors differ, with all NaNs equal."""
    return ((a != b) | (a.signbit() != b.signbit())) & ~(a.isnan() & b.isnan())


def quantised_bits(backend: Backend, where: str, policy: OperandPolicy) -> str:
    """Compare quantised tensors with plain torch's; raise ``FaultError`` where a bit differs."""
    compared = 0
    draw = Draw(policy=policy, key=KEY)
    for name, x in inputs(policy):
        there = x.to(where)
        found = [("", axis, backend.quantize(there, draw, axis=axis)) for axis in (0, 1)]
        at_once = backend.quantize_both(there, draw, draw)
        found += [(" (both at once)", axis, at_once[1 - axis]) for axis in (0, 1)]
        expected = [round_operand(x, policy, axis=axis, key=KEY) for axis in (0, 1)]
        for how, axis, ours in found:
            fault = difference(ours, expected[axis])
            if fault is not None:
                what = f"{name}, along axis {axis}{how}: {fault}"
                raise FaultError(what, {"x": x}, policy=asdict(policy), key=asdict(KEY), axis=axis)
            compared += ours.values.numel()
    return f"{compared} values"


def gradient_back(backend: Backend, where: str, policy: OperandPolicy) -> str:
    """Compare a gradient's way back through an operand with plain torch's."""
    grad = awkward(64, 256, torch.bfloat16)
    for mask in (None, grad > 0):
        there = None if mask is None else mask.to(where)
        ours = backend.gradient_through(grad.to(where), policy, key=KEY, mask=there)
        theirs = Backend.gradient_through(backend, grad, policy, key=KEY, mask=mask)
        assert same_bits(ours.cpu(), theirs), "the gradient's way back differs"
    return f"{2 * grad.numel()} values"


def difference(ours: Operand, theirs: Operand) -> str | None:
    """Say in a few words how an operand differs from one on the CPU; None where the bits are the same."""
    values, descale = ours.values.cpu().float(), ours.descale
    if isinstance(descale, Tensor) and descale.numel() > 1:  # one a row: the reference has them multiplied in
        values = values * (descale.cpu()[:, None] if ours.axis == 1 else descale.cpu()[None, :])
        descale = 1.0
    expected = theirs.values.float()
    if values.shape != expected.shape:
        return f"shape {list(values.shape)} instead of {list(expected.shape)}"
    if different := int(unequal(values, expected).sum()):
        return f"{different} of {values.numel()} values differ"
    ours_is, theirs_is = float(descale), float(theirs.descale)
    if ours_is != theirs_is and not (math.isnan(ours_is) and math.isnan(theirs_is)):
        return f"descale {ours_is} instead of {theirs_is}"
    if theirs.mask is not None and ours.mask is None:
        return "no mask"
    if theirs.mask is not None and ours.mask is not None and not torch.equal(ours.mask.cpu(), theirs.mask):
        return "another mask"
    return None


def _product(backend: Backend, where: str, policy: OperandPolicy) -> str:
    rows, k = block_shape(policy)[0], 256 if max(policy.hadamard, block_shape(policy)[1]) > 32 else 160
    draw = Draw(policy=policy, key=KEY)
    worst = 0.0
    for m, n in ((rows * 3, rows * 2), (rows * 3, rows)) if rows > 1 else ((65, 33), (1, 128), (128, 1)):
        x, w = _normal(m, k, seed=1), _normal(n, k, seed=2)
        ours = product(backend, where, draw, x, w)
        assert ours.shape == (m, n), f"shape {list(ours.shape)} instead of {[m, n]}"
        assert ours.dtype == torch.bfloat16, f"{ours.dtype} instead of bfloat16"
        a, b = (round_operand(one, policy, axis=1, key=KEY) for one in (x, w))
        descale = float(a.descale) * float(b.descale)
        exact = (a.values.double() @ b.values.double().t()) * descale
        magnitude = (a.values.double().abs() @ b.values.double().abs().t()) * abs(descale)
        # One rounding to bf16, and fp32 accumulation of k terms in any order.
        bound = exact.abs() * 2.0**-8 + magnitude * (k * 2.0**-23)
        off = float(((ours.double() - exact).abs() / bound).max())
        if not off <= 1:
            what = f"off by up to {off:.1f} × the bound"
            raise FaultError(what, {"a": x, "b": w}, policy=asdict(policy), key=asdict(KEY))
        worst = max(worst, off)
    return f"within {worst:.2f} of the bound of fp32 accumulation and one rounding"


def _gain(backend: Backend, where: str, policy: OperandPolicy) -> str:
    x = _normal(256, 1024, seed=3)
    total = torch.zeros(256, 1024, dtype=torch.float64)
    draws = 32
    plain = replace(policy, hadamard=0, signs="none", prescale=0.75)
    for step in range(draws):
        done = backend.quantize(x.to(where), Draw(policy=plain, key=replace(KEY, step=step)), axis=1)
        total += done.values.cpu().double() * float(done.descale)
    gain = float((total / draws * x.double()).sum() / x.double().square().sum())
    # The noise of one draw is about 0.15 of the values; averaged over all elements and draws.
    error = 0.15 / math.sqrt(draws * x.numel())
    assert abs(gain - 1) < 6 * error, f"gain {gain:.6f}, expected 1 ± {error:.6f}"
    return f"gain {gain:.6f} ± {error:.6f}"


def _cancels(backend: Backend, where: str, policy: OperandPolicy) -> str:
    x, w = _normal(64, 256, seed=4), _normal(32, 256, seed=5)
    exact = x.double() @ w.double().t()
    ours = product(backend, where, Draw(policy=policy, key=KEY), x, w)
    error = float((ours.double() - exact).norm() / exact.norm())
    assert error < 0.06, f"relative error {error:.3f} against the product without rotation"
    return f"relative error {error:.3f} (MXFP8's own)"
