"""The Triton quantiser's bandwidth on a GPU, as a share of a plain copy's, in one process.

    python benchmarks/quantise_gpu.py [--size 8192] [--repeats 50]

A copy reads and writes 2 bytes an element. Quantising to MXFP4 along rows and columns at once reads 2 and
writes 2 × (½ + 1/32). Both are bound by memory; what is printed is bytes moved in a second.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from typing import TYPE_CHECKING

import torch

from ablate.backends.protocol import Draw
from ablate.backends.select import load_backend
from ablate.backends.testing.bench import elapsed_ms
from ablate.numerics import Key, OperandPolicy

if TYPE_CHECKING:
    from collections.abc import Callable

KEY = Key(seed=0, layer="benchmark", gemm="wgrad", operand="dy", step=1)
POLICIES = {
    "nearest": OperandPolicy(format="mxfp4"),
    "nearest, H16": OperandPolicy(format="mxfp4", hadamard=16),
    "SR": OperandPolicy(format="mxfp4", rounding="stochastic", prescale=0.75),
    "SR, RHT16": OperandPolicy(
        format="mxfp4", rounding="stochastic", prescale=0.75, hadamard=16, signs="step"
    ),
    "SR, RHT64": OperandPolicy(
        format="mxfp4", rounding="stochastic", prescale=0.75, hadamard=64, signs="step"
    ),
    "MXFP8": OperandPolicy(format="mxfp8"),
    "NVFP4, H16": OperandPolicy(format="nvfp4", hadamard=16, signs="fixed"),
}


def written_bytes(policy: OperandPolicy) -> float:
    """Return the bytes that one copy of an element takes."""
    return {"mxfp4": 0.5 + 1 / 32, "mxfp8": 1 + 1 / 32, "nvfp4": 0.5 + 1 / 16}[policy.format]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("no GPU here")
    x = torch.randn(args.size, args.size).to(torch.bfloat16).to(args.device)
    backend = load_backend("triton")
    work: dict[str, tuple[float, Callable[[], object]]] = {"copy": (4.0, x.clone)}
    for name, policy in POLICIES.items():
        draw = Draw(policy=policy, key=KEY)
        reads = 4.0 if policy.format == "nvfp4" else 2.0  # once more for the tensor's amax
        one = written_bytes(policy)
        work[f"{name}, both"] = (reads + 2 * one, lambda d=draw: backend.quantize_both(x, d, d))
        work[f"{name}, rows"] = (reads + one, lambda d=draw: backend.quantize(x, d, axis=1))
        work[f"{name}, columns"] = (reads + one, lambda d=draw: backend.quantize(x, d, axis=0))
    times: dict[str, list[float]] = {name: [] for name in work}
    for turn in range(3 + args.repeats):
        for name, (_, call) in work.items():
            elapsed = elapsed_ms(call, args.device)
            if turn >= 3:
                times[name].append(elapsed)
    copied = 4.0 * x.numel() / statistics.median(times["copy"])
    name_of_device = torch.cuda.get_device_name() if args.device == "cuda" else args.device
    print(f"{args.size} × {args.size} bf16, {name_of_device}")
    for name, (bytes_per_element, _) in work.items():
        median = statistics.median(times[name])
        rate = bytes_per_element * x.numel() / median
        print(f"{name:<22} {median:8.3f} ms {rate / 1e6:9.1f} GB/s {rate / copied:6.0%} of a copy")


if __name__ == "__main__":
    main()
