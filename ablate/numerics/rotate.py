"""The rotation of an operand before quantising, by its policy: permutation, signs, Hadamard, bf16.

H_g is the Sylvester matrix / √g: symmetric, H H = I. A random Hadamard is x D H with D = diag(±1) *before* H;
signs after H would change nothing for a quantiser, since |q(x H D)| = |q(x H)|. The butterfly adds in a fixed
order in fp32 and multiplies once by 1/√g, so that every back end can reproduce its bits. Signs and
permutation are drawn per GEMM (signs ``backward``: for Dgrad and Wgrad together): both operands share them,
so that the rotation cancels in the product.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ablate.numerics.philox import Key, random_words

if TYPE_CHECKING:
    from ablate.recipes import OperandPolicy

FIXED_16 = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
"""The sign vector of NVIDIA's NVFP4 recipe (2509.25149; TransformerEngine)."""


def hadamard_last(x: Tensor, group: int, signs: Tensor | None = None) -> Tensor:
    """Rotate each group of ``group`` neighbours of the last axis of an fp32 tensor.

    Args:
        x: [..., n] with n divisible by ``group``.
        group: a power of two.
        signs: ±1 of shape [group], or None for the deterministic rotation.

    An outlier is spread over its group, and the rotation is its own inverse:

    >>> import torch
    >>> from ablate.numerics import hadamard_last
    >>> row = torch.tensor([[8.0, 0.0, 0.0, 0.0]])
    >>> hadamard_last(row, 4)
    tensor([[4., 4., 4., 4.]])
    >>> hadamard_last(hadamard_last(row, 4), 4)
    tensor([[8., 0., 0., 0.]])
    """
    blocks = x.reshape(-1, group)
    if signs is not None:
        blocks = blocks * signs.to(x.device)
    half = 1
    while half < group:
        pairs = blocks.view(-1, group // (2 * half), 2, half)
        upper = pairs[:, :, 0]
        lower = pairs[:, :, 1]
        blocks = torch.stack((upper + lower, upper - lower), dim=2).view(-1, group)
        half *= 2
    return (blocks * (1.0 / math.sqrt(group))).view(x.shape)


def hadamard_matrix(group: int) -> Tensor:
    """Return H_g in fp64, for references and tests."""
    h = torch.ones(1, 1, dtype=torch.float64)
    while h.shape[0] < group:
        h = torch.cat((torch.cat((h, h), 1), torch.cat((h, -h), 1)), 0)
    return h / math.sqrt(group)


def signs_of(policy: OperandPolicy, key: Key | None) -> Tensor | None:
    """Return the ±1 vector (fp32, [hadamard], on the CPU) of a random Hadamard, or None without signs."""
    if policy.signs == "none":
        return None
    if policy.signs == "fixed" and policy.hadamard == len(FIXED_16):
        return torch.tensor(FIXED_16, dtype=torch.float32)
    return _signs(policy.hadamard, shared_key(policy, key, "signs")).clone()


def permutation_of(policy: OperandPolicy, key: Key | None) -> Tensor | None:
    """Return the permutation (int64, [hadamard]), drawn with the signs or each call; None without one."""
    if not policy.permute:
        return None
    words = random_words(1, policy.hadamard, shared_key(policy, key, "permutation"))[0]
    return words.argsort(stable=True)


def redrawn(policy: OperandPolicy) -> tuple[bool, bool]:
    """Say whether signs and permutation are drawn anew for each step, and for each call of it."""
    return policy.signs not in ("fixed", "layer"), policy.signs not in (
        "fixed",
        "layer",
        "step",
    )


def shared_key(policy: OperandPolicy, key: Key | None, purpose: str) -> Key:
    """Return the key that both operands share; step or call is 0 if ``signs`` does not depend on it."""
    if policy.signs == "fixed":
        return Key(seed=0, layer="", gemm="", operand=f"fixed {purpose}", step=0)
    assert key is not None
    each_step, each_call = redrawn(policy)
    step = key.step if each_step else 0
    call = key.call if each_call else 0
    gemm = "backward" if policy.signs == "backward" else key.gemm
    return replace(key, gemm=gemm, operand=purpose, step=step, call=call)


@lru_cache(maxsize=4096)
def _signs(size: int, key: Key) -> Tensor:
    words = random_words(1, size, key)[0]
    return 1.0 - 2.0 * (words >> 31).to(torch.float32)


def rotate(v: Tensor, policy: OperandPolicy, key: Key | None) -> Tensor:
    """Rotate the last axis of an fp32 tensor by the policy; return the tensor itself without a rotation.

    Args:
        v: [..., n], n divisible by ``policy.hadamard``.
        policy: reads hadamard, signs, permute and rotated_bf16.
        key: as for quantising; required for signs and permutations that are drawn.
    """
    if not policy.hadamard:
        return v
    signs = signs_of(policy, key)
    permutation = permutation_of(policy, key)
    if permutation is not None:
        v = v.reshape(-1, policy.hadamard)[:, permutation.to(v.device)].view(v.shape)
    v = hadamard_last(v, policy.hadamard, signs)
    if policy.rotated_bf16:
        return v.to(torch.bfloat16).to(torch.float32)
    return v


def unrotate(v: Tensor, policy: OperandPolicy, key: Key | None) -> Tensor:
    """Undo ``rotate``, except for its rounding: x D H → x."""
    if not policy.hadamard:
        return v
    signs = signs_of(policy, key)
    v = hadamard_last(v, policy.hadamard)
    if signs is not None:
        v = (v.view(-1, policy.hadamard) * signs.to(v.device)).view(v.shape)
    permutation = permutation_of(policy, key)
    if permutation is not None:
        back = permutation.argsort().to(v.device)
        v = v.reshape(-1, policy.hadamard)[:, back].view(v.shape)
    return v
