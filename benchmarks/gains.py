"""Gain of quantisers on Gaussian data: the slope of the quantised operand on the exact one, and its error.

    python benchmarks/gains.py [--draws 64] [WORDS OF A NAME]

1 is unbiased. First what 8 random bits lose, exactly; then each policy's gain overall in per cent with the
standard error over blocks or Hadamard groups, and the lowest and the highest gain of a position in the block,
each with the distance from the overall gain in standard errors.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from ablate.backends.protocol import Draw
from ablate.backends.select import load_backend
from ablate.numerics import Key, OperandPolicy
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
