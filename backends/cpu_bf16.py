"""Multiply bf16 matrices in fp32 on a CPU without bf16 arithmetic, and round to bf16 once.

torch multiplies bf16 on such a CPU element by element, many times slower than fp32. The meaning is the same:
bf16 operands, sums in fp32, one rounding. Four of ATen's operators are replaced, forward and backward. So
attention, the head and a foreign model's own products change too, without touching their code. Where the CPU
multiplies bf16 itself, nothing changes.
"""

from __future__ import annotations

import os
import platform
import warnings
from functools import cache
from typing import Any

import torch
from torch import Tensor

_OPERATORS = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1}
"""ATen's matrix products, and which argument is the left operand."""
_ONEDNN_WITHOUT_BF16 = ("AVX512_CORE", "AVX512_CORE_VNNI")
"""Values of ONEDNN_MAX_CPU_ISA with which oneDNN takes bf16, but converts it piece by piece."""
_overrides: list[torch.library.Library] = []
"""Kept, because a library's operators are removed when it is deleted."""


@cache
def multiplies_bf16() -> bool:
    """Whether this CPU multiplies bf16 itself, and oneDNN may use that (ONEDNN_MAX_CPU_ISA can forbid it)."""
    if os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper() in _ONEDNN_WITHOUT_BF16:
        return False
    if (
        platform.machine() in ("x86_64", "AMD64")
        and not torch.cpu._is_avx512_bf16_supported()  # noqa: SLF001
    ):
        return False
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())  # noqa: SLF001


@cache
def multiply_in_fp32() -> None:
    """Make this process multiply bf16 matrices in fp32, if its CPU does not multiply bf16 itself."""
    if multiplies_bf16():
        return
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    _overrides.append(library)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Warning only once for all operators")
        for name, left in _OPERATORS.items():
            product = _in_fp32(getattr(torch.ops.aten, name).out, left)
            library.impl(name, product, "CPU")  # type: ignore[no-untyped-call]


def _in_fp32(product: Any, left: int) -> Any:
    def multiply(*operands: Tensor, **factors: float) -> Tensor:
        dtype = operands[left].dtype
        if dtype != torch.bfloat16:
            out: Tensor = product(*operands, **factors, out=operands[left].new_empty(0))
            return out
        wide = [operand.float() for operand in operands]
        rounded: Tensor = product(*wide, **factors, out=wide[left].new_empty(0)).to(
            dtype
        )
        return rounded

    return multiply
