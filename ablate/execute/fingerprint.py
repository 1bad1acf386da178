"""The fingerprint of a device's arithmetic: a hash of the bits of small fixed products.

A run's id holds its configuration, and not the machine. But oneDNN, MKL, ATen and the libraries of GPUs
choose their instructions and the order of their sums by the machine, by their version and by environment
variables, so that equal runs can end with other bits. Runs of equal fingerprints add in the same order, as
far as these products show it.

An operator that a device lacks counts as one more kind of arithmetic.
"""

from __future__ import annotations

import os
from functools import cache
from typing import TYPE_CHECKING

from ablate.base.files import hash_of

if TYPE_CHECKING:
    from torch import Tensor

_VARIABLES = (
    "ATEN_CPU_CAPABILITY", "CUBLAS_WORKSPACE_CONFIG", "DNNL_MAX_CPU_ISA", "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS", "NVIDIA_TF32_OVERRIDE", "ONEDNN_DEFAULT_FPMATH_MODE", "ONEDNN_MAX_CPU_ISA",
)  # fmt: skip
_LENGTH = 12


def arithmetic_settings() -> dict[str, str]:
    """Return the environment variables that are set and choose a library's instructions."""
    return {name: os.environ[name] for name in _VARIABLES if name in os.environ}


@cache
def fingerprint(device: str) -> str:
    """Return the fingerprint of a torch device, with as many threads as this process has now."""
    import torch

    from ablate.backends.cpu_bf16 import multiply_in_fp32

    multiply_in_fp32()
    parts = []
    for dtype in (torch.float32, torch.bfloat16):
        x, w = _numbers(96, 320, 1).to(device, dtype), _numbers(112, 320, 7).to(device, dtype)
        try:
            parts += [_bits(one) for one in _products(x, w)]
        except RuntimeError as error:
            parts.append(type(error).__name__.encode())
    return hash_of(b"".join(parts))[:_LENGTH]


def _products(x: Tensor, w: Tensor) -> list[Tensor]:
    """Return what a step is made of: the three GEMMs, attention, and functions of one operand."""
    import torch
    from torch.nn import functional

    y = x @ w.t()
    heads = x[:64].view(1, 4, 16, 320)[..., :32]
    return [
        y,
        y @ w,
        y.t() @ x,
        functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True),
        torch.softmax(x, -1),
        functional.silu(x),
        torch.rsqrt(x.pow(2).mean(-1)),
    ]


def _numbers(rows: int, columns: int, start: int) -> Tensor:
    """Return numbers in [-0.5, 0.5) that are the same everywhere: integers over a power of two."""
    import torch

    places = torch.arange(start, start + rows * columns, dtype=torch.int64)
    return (
        ((places * 2654435761 % 2**32).to(torch.float64) / 2**32 - 0.5).to(torch.float32).view(rows, columns)
    )


def _bits(tensor: Tensor) -> bytes:
    import torch

    return tensor.contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes()
