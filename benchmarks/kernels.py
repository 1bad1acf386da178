"""Triton's quantisers on a GPU: time over a copy of the same matrix, the best tiles, and the host's time.

    python benchmarks/kernels.py [--rows 8192] [--columns 4096] [--tiles]
    python benchmarks/kernels.py --host

Needs torch, Triton, numpy and pydantic alone. Every kernel is timed by itself: outputs are allocated before,
and the cache is flushed between calls (``triton.testing.do_bench``). A policy with its tensor's own largest
magnitude is timed with the pass for it. ``--tiles`` tries tiles and warps for each policy and prints the
best. ``--host`` replaces the kernels by nothing and times calls on the CPU: the host's part.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
import triton

from ablate.backends.device import interpreting
from ablate.backends.protocol import Draw
from ablate.backends.testing.inputs import policies_of
from ablate.backends.triton import launch
from ablate.numerics import Key

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from ablate.recipes import OperandPolicy

NAMES = (
    "mxfp4",
    "mxfp4 stochastic 0.75 H16 step",
    "nvfp4",
    "nvfp4 four_six",
    "fp8_e4m3",
)
GOALS = {
    "mxfp4": (1.3, 2.2),
    NAMES[1]: (2.0, 3.5),
    "nvfp4": (2.2, 3.5),
    NAMES[3]: (3.5, 6),
    "fp8_e4m3": (2, 3),
}
"""Times over a copy that are aimed at: along one axis, along both."""
AXES = {"axis 1": (1,), "axis 0": (0,), "both": (1, 0)}
Tile = tuple[int, int, int]
TILES: list[Tile] = [
    (16, 64, 1), (16, 64, 2), (16, 128, 2), (16, 256, 4), (32, 64, 1), (32, 64, 2), (32, 64, 4),
    (32, 128, 2), (32, 128, 4), (64, 64, 2), (64, 64, 4), (128, 64, 4),
]  # fmt: skip
"""Rows, columns and warps of a program."""
KEY = Key(seed=0, layer="benchmark", gemm="wgrad", operand="dy", step=1)


def draws_of(name: str, axes: tuple[int, ...]) -> dict[int, Draw]:
    (policy,) = policies_of(name)
    return {axis: Draw(policy=policy, key=KEY) for axis in axes}


def prepared(
    x: Tensor, draws: dict[int, Draw], tile: Tile | None = None
) -> Callable[[], None]:
    """Allocate the outputs; return the call that quantises to values, its tensor's scales included."""
    outs = {
        axis: torch.empty(x.shape, dtype=torch.bfloat16, device=x.device)
        for axis in draws
    }

    def call() -> None:
        tensors = launch.tensor_scales(x, draws)
        memory = {
            axis: launch.Memory(outs[axis], tensor=tensors.get(axis)) for axis in draws
        }
        plan = launch.plan_of(x, draws, "values")
        if tile is not None:
            plan = plan._replace(tile_rows=tile[0], tile_columns=tile[1], warps=tile[2])
        launch.launch(x, draws, memory, "values", plan)

    return call


def milliseconds(call: Callable[[], Any], *, repeat_ms: int) -> float:
    if interpreting():  # no device to wait for
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e3
    return float(
        triton.testing.do_bench(
            call, warmup=repeat_ms // 4, rep=repeat_ms, return_mode="median"
        )
    )


def compile_one(name: str, axes: tuple[int, ...], tile: Tile | None) -> bool:
    """Compile one kernel into Triton's cache; return whether the device takes it."""
    try:
        prepared(
            torch.zeros(256, 256, dtype=torch.bfloat16, device="cuda"),
            draws_of(name, axes),
            tile,
        )()
        torch.cuda.synchronize()
    except Exception as error:
        # a tile that does not fit the device: the others are timed
        print(
            f"  {name}, {axes}, {tile}: {str(error).splitlines()[-1][:90]}",
            file=sys.stderr,
        )
        return False
    return True


def compile_all(
    work: list[tuple[str, tuple[int, ...], Tile | None]], processes: int
) -> list[bool]:
    """Compile kernels in processes side by side."""
    if interpreting():
        return [True] * len(work)
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        return list(pool.map(compile_one, *zip(*work, strict=True)))


def fits(tile: Tile, policy: OperandPolicy, axes: tuple[int, ...]) -> bool:
    """Whether a tile holds whole groups along each axis."""
    rows, columns, _ = tile
    block = 16 if policy.format == "nvfp4" else 32
    return (1 not in axes or columns >= policy.hadamard) and (
        0 not in axes or rows >= max(policy.hadamard, block)
    )


def time_tiles(x: Tensor, copy_ms: float, tiles: list[Tile], processes: int) -> None:
    work: list[tuple[str, tuple[int, ...], Tile | None]] = [
        (name, axes, tile)
        for name, axes, tile in itertools.product(NAMES, AXES.values(), tiles)
        if fits(tile, policies_of(name)[0], axes)
    ]
    ratios: dict[tuple[str, tuple[int, ...]], list[tuple[float, str]]] = {}
    for (name, axes, tile), is_compiled in zip(
        work, compile_all(work, processes), strict=True
    ):
        if is_compiled and tile:
            ms = milliseconds(prepared(x, draws_of(name, axes), tile), repeat_ms=20)
            text = f"{ms / copy_ms:.2f} {tile[0]}×{tile[1]}/{tile[2]}"
            ratios.setdefault((name, axes), []).append((ms, text))
    print("best tiles, rows × columns / warps:")
    for (name, axes), pairs in ratios.items():
        axis = next(axis for axis, some in AXES.items() if some == axes)
        print(
            f"{name:<32} {axis:<7} {', '.join(text for _, text in sorted(pairs)[:5])}",
            flush=True,
        )


def time_policies(x: Tensor, copy_ms: float, processes: int) -> None:
    compile_all(
        [(name, axes, None) for name, axes in itertools.product(NAMES, AXES.values())],
        processes,
    )
    for name in NAMES:
        texts = []
        for axis, axes in AXES.items():
            ratio = (
                milliseconds(prepared(x, draws_of(name, axes)), repeat_ms=100) / copy_ms
            )
            texts.append(f"{axis} {ratio:5.2f} (goal {GOALS[name][axis == 'both']})")
        print(f"{name:<32} {'  '.join(texts)}", flush=True)


class Nothing:
    """A kernel that does nothing."""

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return lambda *_, **__: None


def time_host(number: int) -> None:
    """Print microseconds of one call without its kernels: the median of many, each with a new step."""
    x = torch.randn(64, 64).to(torch.bfloat16)
    for name, (axis, axes) in itertools.product(NAMES, AXES.items()):
        (policy,) = policies_of(name)
        times: list[float] = []
        for step in range(number):
            key = Key(seed=0, layer="benchmark", gemm="wgrad", operand="dy", step=step)
            draws = {axis: Draw(policy=policy, key=key) for axis in axes}
            start = time.perf_counter()
            launch.quantise_values(x, draws)
            times.append((time.perf_counter() - start) * 1e6)
        print(f"{name:<32} {axis:<7} {statistics.median(times):6.1f} µs of the host")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--columns", type=int, default=4096)
    parser.add_argument(
        "--tiles", action="store_true", help="try tiles and warps for each policy"
    )
    parser.add_argument(
        "--processes", type=int, default=12, help="compile in so many processes"
    )
    parser.add_argument(
        "--host", action="store_true", help="time the host alone, on the CPU"
    )
    args = parser.parse_args()
    if args.host:
        with patch.multiple(launch, quantise_kernel=Nothing(), scale_kernel=Nothing()):
            return time_host(2000)
    where = "cpu" if interpreting() else "cuda"
    x = torch.randn(args.rows, args.columns, device=where).to(torch.bfloat16)
    y = torch.empty_like(x)
    copy_ms = milliseconds(lambda: y.copy_(x), repeat_ms=100)
    device = "interpreter" if interpreting() else torch.cuda.get_device_name()
    print(f"{device}, torch {torch.__version__}, Triton {triton.__version__}")
    print(
        f"{args.rows}×{args.columns} bf16: a copy takes {copy_ms * 1e3:.1f} µs; times over a copy:",
        flush=True,
    )
    time_policies(x, copy_ms, args.processes)
    if args.tiles:
        time_tiles(x, copy_ms, TILES[5:7] if interpreting() else TILES, args.processes)
    return None


if __name__ == "__main__":
    main()
