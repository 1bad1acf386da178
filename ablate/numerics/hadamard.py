"""Walsh–Hadamard rotations along the contraction axis: H_g = Sylvester matrix / √g, symmetric, H H = I.

Deterministic: x H. Random: x D H with D = diag(±1) applied *before* H and the same D on both operands.
Signs after H would change nothing for a quantiser, since |q(x H D)| = |q(x H)|.
The butterfly adds in a fixed order in fp32 and multiplies once by 1/√g, so that every back end can
reproduce its bits.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def hadamard_last(x: Tensor, group: int, signs: Tensor | None = None) -> Tensor:
    """Rotate each group of ``group`` neighbours of the last axis of an fp32 tensor.

    Args:
        x: [..., n] with n divisible by ``group``.
        group: a power of two.
        signs: ±1 of shape [group], or None for the deterministic rotation.
    """
    blocks = x.reshape(-1, group)
    if signs is not None:
        blocks = blocks * signs.to(x.device)
    half = 1
    while half < group:
        pairs = blocks.view(-1, group // (2 * half), 2, half)
        upper, lower = pairs[:, :, 0], pairs[:, :, 1]
        blocks = torch.stack((upper + lower, upper - lower), dim=2).view(-1, group)
        half *= 2
    scale = torch.tensor(1.0 / math.sqrt(group), dtype=torch.float32)
    return (blocks * scale.to(x.device)).view(x.shape)


def hadamard_matrix(group: int) -> Tensor:
    """Return H_g in fp64, for references and tests."""
    h = torch.ones(1, 1, dtype=torch.float64)
    while h.shape[0] < group:
        h = torch.cat((torch.cat((h, h), 1), torch.cat((h, -h), 1)), 0)
    return h / math.sqrt(group)
