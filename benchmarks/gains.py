"""Gain of quantisers: the slope of the quantised operand on the exact one, and its error.

    python benchmarks/gains.py [--draws 64] [WORDS OF A NAME]
    python benchmarks/gains.py table [--draws 4]
    python benchmarks/gains.py sums

1 is unbiased. First what 8 random bits lose, exactly; then each policy's gain on Gaussian data overall in per
cent with the standard error over blocks or Hadamard groups, and the lowest and the highest gain of a position
in the block, each with the distance from the overall gain in standard errors.

``table``: for each format and distribution of operands the gain less 1 and the relative error, both in per
cent, of nearest and of stochastic rounding. ``sums``: the error of Hopper's sums.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from ablate.backends.modelled_sums import summed_by_hopper
from ablate.backends.protocol import Draw
from ablate.backends.select import load_backend
from ablate.backends.testing.inputs import KINDS, made_up
from ablate.numerics import GemmPolicy, Key, OperandPolicy, round_operand
from ablate.numerics.formats import E2M1, rounded
from ablate.numerics.rotate import rotate
from ablate.recipes import block_shape, group_size

if TYPE_CHECKING:
    from torch import Tensor

ROWS, COLUMNS = 2048, 1024
_MXFP4 = OperandPolicy(format="mxfp4")
_NVFP4 = OperandPolicy(format="nvfp4")
_SR: dict[str, Any] = {"rounding": "stochastic"}
_RHT: dict[str, Any] = {"signs": "step"}
POLICIES = {
    "mxfp4 SR": replace(_MXFP4, **_SR),
    "mxfp4 SR, 3/4": replace(_MXFP4, prescale=0.75, **_SR),
    "nvfp4 nearest": _NVFP4,
    "nvfp4 SR": replace(_NVFP4, **_SR),
    "nvfp4 SR, 16/17": replace(_NVFP4, prescale=16 / 17, **_SR),
    "four or six, SR": replace(_NVFP4, scale="four_six", **_SR),
    "four or six, SR, 16/17": replace(
        _NVFP4, scale="four_six", prescale=16 / 17, **_SR
    ),
    "MS-EDEN 32": replace(_NVFP4, scale="ms_eden", hadamard=32, **_RHT),
    "MS-EDEN 128": replace(_NVFP4, scale="ms_eden", hadamard=128, **_RHT),
    "MS-EDEN unscaled 32": replace(
        _NVFP4, scale="ms_eden_unscaled", hadamard=32, **_RHT
    ),
    "MS-EDEN unscaled 128": replace(
        _NVFP4, scale="ms_eden_unscaled", hadamard=128, **_RHT
    ),
}


def products(policy: OperandPolicy, draws: int) -> tuple[Tensor, Tensor]:
    """Return exact × quantised and exact², fp64 [groups, size of a group], in the rotated basis."""
    backend, size = load_backend("emulated"), group_size(policy)
    found: list[list[Tensor]] = [[], []]
    for draw in range(draws):
        key = Key(seed=draw, layer="gains", gemm="wgrad", operand="x", step=0)
        x = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(draw))
        done = backend.quantize(x, Draw(policy=policy, key=key), axis=1)
        exact = rotate(x, policy, key).double().view(-1, size)
        found[0].append(
            exact * done.values.double().view(-1, size) * float(done.descale)
        )
        found[1].append(exact * exact)
    return torch.cat(found[0]), torch.cat(found[1])


TABLE = {
    "mxfp4 floor": _MXFP4,
    "mxfp4 even": replace(_MXFP4, scale="even"),
    "mxfp4 rceil": replace(_MXFP4, scale="rceil"),
    "nvfp4": _NVFP4,
    "nvfp4 four_six": replace(_NVFP4, scale="four_six"),
    "nvint4": OperandPolicy(format="nvint4"),
    "if4": OperandPolicy(format="if4"),
    "mxfp8": OperandPolicy(format="mxfp8"),
    "fp4_e2m1": OperandPolicy(format="fp4_e2m1"),
    "fp4_e3m0": OperandPolicy(format="fp4_e3m0"),
    "fp8_e4m3": OperandPolicy(format="fp8_e4m3"),
    "fp8_e5m2": OperandPolicy(format="fp8_e5m2"),
}
"""Each format, MXFP4 with the scale rules that recipes use. Stochastic rounding is without a prescale."""


def gain_and_error(policy: OperandPolicy, kind: str, draws: int) -> tuple[float, float]:
    """Return the gain less 1 of a policy on operands of a kind, and its relative error (root mean square)."""
    backend = load_backend("emulated")
    product = energy = squares = 0.0
    for draw in range(draws):
        key = Key(seed=draw, layer="gains", gemm="wgrad", operand="x", step=0)
        x = made_up(kind, ROWS, COLUMNS, seed=draw)
        operand = backend.quantize(x, Draw(policy=policy, key=key), axis=1)
        quantised = operand.values.double() * float(operand.descale)
        exact = x.double()
        product += float((exact * quantised).sum())
        energy += float((exact * exact).sum())
        squares += float((quantised - exact).square().sum())
    return product / energy - 1, (squares / energy) ** 0.5


def print_table(draws: int) -> None:
    """Print a row for each format: of each kind of operand what nearest and stochastic rounding do."""
    print("| format | " + " | ".join(KINDS) + " |")
    print("|---" * (1 + len(KINDS)) + "|")
    for name, policy in TABLE.items():
        cells = []
        for kind in KINDS:
            nearest = gain_and_error(policy, kind, draws)
            drawn = gain_and_error(replace(policy, **_SR), kind, draws)
            gains, errors = zip(nearest, drawn, strict=True)
            cells.append(
                "; ".join(
                    (
                        " / ".join(f"{100 * gain:+.2f}" for gain in gains),
                        " / ".join(f"{100 * error:.1f}" for error in errors),
                    )
                )
            )
        print(f"| `{name}` | " + " | ".join(cells) + " |", flush=True)


def print_sums() -> None:
    """Print the relative error of Hopper's sums of Gaussian operands, beside their rounding to bf16."""
    policy = OperandPolicy(format="fp8_e4m3")
    for depth in (512, 4096):
        draw = torch.Generator().manual_seed(depth)
        sides = []
        for rows in (64, 256):
            x = torch.randn(rows, depth, generator=draw)
            sides.append(round_operand(x, policy, axis=1).values)
        exact = sides[0].double() @ sides[1].double().t()
        errors = {"rounding to bf16": exact.to(torch.bfloat16).double() - exact}
        gemm = GemmPolicy(left=policy, right=policy, accumulate="hopper")
        errors["hopper"] = summed_by_hopper(sides[0], sides[1], gemm).double() - exact
        texts = [
            f"{name} {float(e.norm() / exact.norm()):.3%}" for name, e in errors.items()
        ]
        print(f"K = {depth:,}: {', '.join(texts)}")


def ratio(product: Tensor, energy: Tensor) -> tuple[Tensor, Tensor]:
    """Return the ratio of the sums over the first dimension, and its standard error."""
    gain = product.sum(0) / energy.sum(0)
    rest = product - gain * energy
    return gain, rest.std(0) / len(product) ** 0.5 / energy.mean(0)


def lost_by_eight_bits(size: int, *, powers_of_two: bool) -> float:
    """Integrate what 8 random bits lose of a Gaussian block, over all 256 draws and its largest value."""
    t = (torch.arange(6 * 2**11) + 0.5) / 2**11  # none at which another draw goes up
    draws = torch.arange(256)[:, None] << 24
    lost = rounded(t, E2M1, "stochastic_8bit", draws).double().mean(0) - t
    # It is a saw; its mean over a tooth stands for it, for all else hardly changes within one.
    t, lost = (one.double().view(-1, 16).mean(1) for one in (t, lost))
    loss = 0.0
    for hundredth in range(1, 700):
        amax = hundredth / 100
        scale = 2.0 ** math.ceil(math.log2(amax / 6)) if powers_of_two else amax / 6
        density = torch.where(t * scale < amax, torch.exp(-((t * scale) ** 2) / 2), 0.0)
        density *= (2 / math.pi) ** 0.5 * 2**-7 * scale
        below, of_others = (
            float(density.sum()),
            float((density * t * lost).sum()) * scale**2,
        )
        of_largest = (
            powers_of_two
            * amax
            * float(lost[min(int(amax / scale * 2**7), 767)])
            * scale
        )
        of_block = (size - 1) * below ** (size - 2) * of_others + below ** (
            size - 1
        ) * of_largest
        loss += math.exp(-(amax**2) / 2) * (2 / math.pi) ** 0.5 / 100 * of_block
    return loss


def main() -> None:
    """Print the gain of each policy."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--draws", type=int, default=64)
    parser.add_argument("words", nargs="*")
    options = parser.parse_args()
    if options.words == ["table"]:
        print_table(options.draws)
        return
    if options.words == ["sums"]:
        print_sums()
        return
    for name, size, powers_of_two in (
        ("two-level", 16, False),
        ("mxfp4 rceil", 32, True),
    ):
        loss = lost_by_eight_bits(size, powers_of_two=powers_of_two)
        print(f"8 random bits, {name}: {loss:+.3%}")
    print(f"{options.draws * ROWS * COLUMNS:,} values each")
    for name, policy in POLICIES.items():
        if " ".join(options.words) not in name:
            continue
        product, energy = products(policy, options.draws)
        gain, error = ratio(product.sum(1), energy.sum(1))
        block = block_shape(policy)[1]
        by_position, errors = ratio(product.view(-1, block), energy.view(-1, block))
        low, high = int(by_position.argmin()), int(by_position.argmax())
        ends = ", ".join(
            f"{by_position[at]:.5f} ({(by_position[at] - gain) / errors[at]:+.1f} errors) at {at}"
            for at in (low, high)
        )
        print(
            f"{name:24} {gain:.6f} ({(gain - 1) * 100:+.4f} % ± {error * 100:.4f}); by position {ends}",
            flush=True,
        )


if __name__ == "__main__":
    main()
