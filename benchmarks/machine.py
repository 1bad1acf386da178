"""What a CPU benchmark ran on, in a line, and torch made as fast there as the trainer makes it."""

from __future__ import annotations

import torch

from ablate.backends.cpu_bf16 import multiplies_bf16, multiply_in_fp32
from ablate.backends.select import load_backend
from ablate.execute.environment import cpu_name


def prepare(threads: int) -> str:
    """Set the threads, let bf16 products take the fastest way of this CPU, and describe the machine."""
    torch.set_num_threads(threads)
    multiply_in_fp32()
    instructions = torch.backends.cpu.get_cpu_capability()
    products = "multiplies bf16" if multiplies_bf16() else "multiplies bf16 in fp32, rounded once"
    return (
        f"{cpu_name()}, {instructions}, {products}; {load_backend('emulated').detail()}; {threads} thread(s)"
    )
