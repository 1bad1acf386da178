"""A linear layer's forward and backward pass with all six operands in MXFP4, over plain bf16, in one process.

    python benchmarks/linear.py [--tokens 4096 --inputs 1024 --outputs 1024] [--threads 1]

Timed in turns; the least time of each is compared: processor time with one thread, so that other work on the
machine counts less, else the clock's. The peer quantises the same six operands by torchao's
eager ``to_mx`` and ``dequantize`` before the same bf16 GEMMs, without a Hadamard; it transposes where blocks
lie along the rows, which its quantiser cannot do in place.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

import torch
from machine import in_turns, options, prepare
from torch import Tensor, nn

from ablate.numerics import apply_recipe

if TYPE_CHECKING:
    from collections.abc import Callable

ALL = ["fprop", "dgrad", "wgrad"]
RECIPES = {
    "mxfp4": {"gemms": ALL},
    "mxfp4, DHT16 on all": {"gemms": ALL, "stabiliser": "dht"},
    "mxfp4, SR on all": {"gemms": ALL, "stabiliser": "sr"},
    "mxfp4, SR + RHT16 on all": {"gemms": ALL, "stabiliser": "sr+rht"},
    "tseng (RHT64, SR backward)": {"preset": "tseng"},
    "nvidia-nvfp4, no layer exempt": {"preset": "nvidia-nvfp4", "layers": []},
    "nvidia-nvfp4, accumulate blackwell": {
        "preset": "nvidia-nvfp4",
        "layers": [],
        "accumulate": "blackwell",
    },
    "quartet": {"preset": "quartet"},
    "quartet2": {"preset": "quartet2"},
    "deepseek-v3-fp8": {"preset": "deepseek-v3-fp8"},
    "fp8": {"rest": "fp8"},
    "fp8-rowwise": {"rest": "fp8-rowwise"},
    "alto": {"preset": "alto"},
}


def torchao_layer(weight: Tensor) -> Callable[[Tensor, Tensor], None] | None:
    """Return forward and backward with torchao's quantiser, if it is installed."""
    try:
        from torchao.prototype.mx_formats.mx_tensor import MXTensor
    except ImportError:
        return None

    def q(x: Tensor) -> Tensor:
        return MXTensor.to_mx(x.contiguous(), torch.float4_e2m1fn_x2, 32).dequantize(
            torch.bfloat16
        )

    def work(x: Tensor, dy: Tensor) -> None:
        _ = q(x) @ q(weight).t()
        _ = q(dy) @ q(weight.t()).t()
        _ = q(dy.t()) @ q(x.t()).t()

    return work


def main() -> None:
    args = options(
        __doc__, tokens=4096, inputs=1024, outputs=1024, threads=1, repeats=7
    )
    machine = prepare(args.threads)
    generator = torch.Generator().manual_seed(0)
    x = (
        torch.randn(args.tokens, args.inputs, generator=generator)
        .to(torch.bfloat16)
        .requires_grad_()
    )
    dy = torch.randn(args.tokens, args.outputs, generator=generator).to(torch.bfloat16)

    def passes(layer: nn.Module) -> None:
        layer(x).backward(dy)
        x.grad = None

    work: dict[str, Callable[[], None]] = {}
    for name, recipe in {"bf16": None, **RECIPES}.items():
        model = nn.Sequential(nn.Linear(args.inputs, args.outputs, bias=False)).to(
            torch.bfloat16
        )
        if recipe is not None:
            apply_recipe(model, recipe)
        work[name] = partial(passes, model)
    weight = torch.randn(args.outputs, args.inputs, generator=generator).to(
        torch.bfloat16
    )
    if peer := torchao_layer(weight):
        work["torchao (eager)"] = lambda: peer(x.detach(), dy)
    clock = time.process_time if args.threads == 1 else time.perf_counter
    least = {
        name: min(taken) for name, taken in in_turns(work, args.repeats, clock).items()
    }
    print(
        f"{args.tokens} tokens, {args.inputs} -> {args.outputs}, forward + backward; {machine}"
    )
    for name, seconds in least.items():
        print(
            f"{name:<36} {seconds * 1e3:8.1f} ms  {seconds / least['bf16']:6.2f} x bf16"
        )


if __name__ == "__main__":
    main()
