"""Quantise-dequantise of a bf16 matrix: nanoseconds an element, and peers in the same process.

    python benchmarks/quantise.py [--size 4096] [--threads 1]

Both axes without a transposed copy. Each policy is timed several times, in turns, and the least time is
printed: the work is fixed, so what is above the least is the machine's. Memory is kept between calls as the
trainer keeps it (``ablate.train.loop``), for the peers too. Peers: torchao's eager ``to_mx`` followed by
``dequantize``, and microxcaling where it is installed; both quantise along the last axis only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from machine import in_turns, options, prepare

from ablate.backends.protocol import Draw
from ablate.backends.select import load_backend
from ablate.numerics import Key, OperandPolicy

if TYPE_CHECKING:
    from collections.abc import Callable

KEY = Key(seed=0, layer="benchmark", gemm="wgrad", operand="x", step=1)
SR = {"rounding": "stochastic", "prescale": 0.75}
POLICIES = {
    "mxfp4 nearest": OperandPolicy(format="mxfp4"),
    "mxfp4 nearest, even": OperandPolicy(format="mxfp4", scale="even"),
    "mxfp4 nearest, H16": OperandPolicy(format="mxfp4", hadamard=16),
    "mxfp4 nearest, RHT16": OperandPolicy(format="mxfp4", hadamard=16, signs="step"),
    "mxfp4 nearest, H64": OperandPolicy(format="mxfp4", hadamard=64),
    "mxfp4 nearest, 32x32": OperandPolicy(format="mxfp4", block="32x32"),
    "mxfp4 SR": OperandPolicy(format="mxfp4", **SR),
    "mxfp4 SR, H16": OperandPolicy(format="mxfp4", hadamard=16, **SR),
    "nvfp4 nearest": OperandPolicy(format="nvfp4"),
    "nvfp4 SR": OperandPolicy(format="nvfp4", rounding="stochastic"),
    "nvfp4 four or six": OperandPolicy(format="nvfp4", scale="four_six"),
    "mxfp8 nearest": OperandPolicy(format="mxfp8"),
    "fp8 E4M3, tensor": OperandPolicy(format="fp8_e4m3"),
}


def torchao_peer(x: torch.Tensor) -> Callable[[], object] | None:
    """Return torchao's eager quantise-dequantise, if it is installed."""
    try:
        from torchao.prototype.mx_formats.mx_tensor import MXTensor
    except ImportError:
        return None
    return lambda: MXTensor.to_mx(x, torch.float4_e2m1fn_x2, 32).dequantize(
        torch.bfloat16
    )


def microxcaling_peer(x: torch.Tensor) -> Callable[[], object] | None:
    """Return microxcaling's quantise-dequantise, if it is installed."""
    try:
        from mx import mx_ops
    except ImportError:
        return None
    quantise = mx_ops._quantize_mx  # noqa: SLF001  the function that its own layers call
    return lambda: quantise(x, 8, "fp4_e2m1", axes=[-1], block_size=32, round="even")


def main() -> None:
    args = options(__doc__, size=4096, threads=1, repeats=5)
    machine = prepare(args.threads)
    x = torch.randn(
        args.size, args.size, generator=torch.Generator().manual_seed(0)
    ).to(torch.bfloat16)
    backend = load_backend("emulated")
    work: dict[str, Callable[[], object]] = {"clone": x.clone}
    for name, policy in POLICIES.items():
        for axis in (1, 0):
            work[f"{name}, axis {axis}"] = lambda p=policy, a=axis: backend.quantize(
                x, Draw(policy=p, key=KEY), axis=a
            )
    peers = {"torchao (eager)": torchao_peer(x), "microxcaling": microxcaling_peer(x)}
    work |= {name: call for name, call in peers.items() if call}
    least = {name: min(taken) for name, taken in in_turns(work, args.repeats).items()}
    print(f"{args.size}x{args.size} bf16; {machine}")
    ours = max(least["mxfp4 nearest, axis 0"], least["mxfp4 nearest, axis 1"])
    for name, seconds in least.items():
        ratio = f"{seconds / least['clone']:6.2f} x clone"
        if name in peers:
            ratio = f"{seconds / ours:6.1f} x ours (mxfp4 nearest, the slower axis)"
        print(f"{name:<32} {seconds / x.numel() * 1e9:7.2f} ns/element  {ratio}")
    for name in (name for name, call in peers.items() if call is None):
        print(f"{name:<32} not installed")


if __name__ == "__main__":
    main()
