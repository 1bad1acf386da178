"""Data that several tests of the numerics share."""

import numpy as np
import torch

from ablate.numerics import Key, OperandPolicy

UE5M3_CODES = np.arange(255)
UE5M3_VALUES = np.where(
    UE5M3_CODES < 8,
    UE5M3_CODES / 8 * 2.0**-14,
    (1 + UE5M3_CODES % 8 / 8) * 2.0 ** (UE5M3_CODES // 8 - 15),
)
MXFP4 = OperandPolicy(format="mxfp4")
KEY = Key(seed=0, layer="a", gemm="wgrad", operand="x", step=3)


GOES_UP = {  # by the distances from both neighbours, the lower code, and the share of the random bits
    "nearest": lambda below, above, low, _u: (
        (above < below) | ((above == below) & (low % 2 == 1))
    ),
    "nearest_away": lambda below, above, _low, _u: above <= below,
    "nearest_toward_zero": lambda below, above, _low, _u: above < below,
    "stochastic": lambda below, above, _low, u: below / (below + above) > u,
    "stochastic_8bit": lambda below, above, _low, u: (
        np.floor(u * 256) / 256 >= above / (below + above)
    ),
}


def to_grid(values, grid, rounding="nearest", u=None):
    """Round to a grid of magnitudes by code, by searching it; saturate."""
    magnitude = np.minimum(np.abs(values), grid[-1])
    low = np.minimum(np.searchsorted(grid, magnitude, side="right") - 1, len(grid) - 2)
    up = GOES_UP[rounding](magnitude - grid[low], grid[low + 1] - magnitude, low, u)
    return np.copysign(grid[low + up], values).astype(np.float32)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def whole(most, *shape, seed=0):
    """Whole numbers from -most to most."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-most, most + 1, shape, generator=generator)


def special_blocks():
    """Random bits, narrow exponents, ties, maxima just under powers of two, ±0, subnormals; no NaN or Inf."""
    bits = whole(2**31 - 1, 512, 32, seed=1).to(torch.int32)
    floats = bits.view(torch.float32)
    narrow = bits[:64] & 0x3FFFFF | 0x3F800000
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0] * 4).repeat(20, 1)
    ties = ties * 2.0 ** torch.arange(-10, 10)[:, None]
    below = torch.nextafter(2.0 ** torch.arange(-20.0, 20), torch.tensor(0.0))[:, None]
    under = below * normal(40, 32).clamp(-1, 1)
    under[:, :1] = below
    zeros = normal(8, 32)
    zeros[:, ::2] = -0.0
    small = normal(216, 32) * 1e-3
    small[:16] *= 2.0**-118
    blocks = (floats, narrow.view(torch.float32), ties, under, zeros, small)
    blocks = torch.cat(blocks)
    return blocks[torch.isfinite(blocks).all(1)]
