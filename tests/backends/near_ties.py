"""Matrices for four-or-six in which only roundings tell the errors of many blocks apart."""

import torch


def near_ties(number, axis):
    """Yield matrices [64, 64] with blocks of 16 along an axis, each with sizes and units of its own."""
    generator = torch.Generator().manual_seed(0)
    # On the grid under both block scales, or midway between a value of one and a value of the other.
    multiples = torch.tensor([0.0, 1.5, 3.0, 0.625, 0.875, 2.125, 4.25])
    for unit in torch.rand(number, generator=generator).tolist():
        x = multiples[torch.randint(0, 7, (64, 4, 16), generator=generator)]
        x[..., 0] = 6.0
        sizes = unit * 2.0 ** -torch.randint(0, 8, (64, 4, 1), generator=generator)
        x = (sizes * x).reshape(64, 64)
        yield x if axis == 1 else x.t().contiguous()
