"""Times: of GEMMs and of training steps.

Figures that are compared are medians, measured in turns. Emulated times are those of the emulation and say
nothing of FP4 hardware; ``mode`` tells which it is. A rate above the device's published peak is a failure,
because then clock or product is wrong.
"""

from __future__ import annotations

import itertools
import shutil
import statistics
import time
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ablate.backends.device import device_of
from ablate.backends.protocol import Backend, Draw
from ablate.backends.select import Selection, overall_mode
from ablate.backends.testing import Check, Skip, Told, ending
from ablate.backends.testing.suite import both
from ablate.check.training import config_of, trained
from ablate.modelled.hardware import peak_tflops
from ablate.numerics.philox import Key
from ablate.recipes import OPERANDS, Format, OperandPolicy, Recipe, read_recipe
from ablate.run.architecture import PRESETS
from ablate.run.config import ModelConfig
from ablate.train.probe import time_steps

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from ablate.check import Setup

MODELS: dict[str, ModelConfig] = {
    "llama-tiny": ModelConfig(**PRESETS["llama-tiny"]),
    "llama 150M": ModelConfig(
        **PRESETS["llama3.2-1b"]
        | {"width": 896, "layers": 12, "heads": 14, "kv_heads": 14, "ffn": 2432}
    ),
    "llama3.2-1b": ModelConfig(**PRESETS["llama3.2-1b"]),
}
"""The models whose steps are timed, by name."""

_WARM_UPS = 3
_FORMATS: tuple[Format, ...] = ("bf16", "fp8_e4m3", "mxfp8", "mxfp4", "nvfp4")


class Shape(NamedTuple):
    """The size of a linear layer's pass: tokens M, in-features K, out-features N."""

    tokens: int
    inputs: int
    outputs: int


def time_gemm(
    policy: OperandPolicy, shape: Shape, backend_name: str, where: str, *, repeats: int
) -> tuple[str, dict[str, float]]:
    """Time Fprop of a layer on a torch device, beside bf16 and FP8 (one scale per tensor).

    Return the mode, and figures by name. TFLOP/s and the share of the device's published peak are of the
    multiplication alone; the speeds over bf16 and FP8 include quantising.

    Raises:
        ValueError: an unsupported GEMM, or a shape that the policy's groups do not divide.
    """
    device = device_of(where)
    auto = Selection("auto")
    backend, support = Selection(backend_name).choose(both(policy), device)
    fp8 = OperandPolicy(format="fp8_e4m3")
    bf16 = OperandPolicy()
    tensors = []
    for seed, rows in enumerate((shape.tokens, shape.outputs)):
        draw = torch.Generator().manual_seed(seed)
        drawn = torch.randn(rows, shape.inputs, generator=draw)
        tensors.append(drawn.to(torch.bfloat16).to(where))
    work = [
        *_work(backend, policy, tensors),
        *_work(auto.of(both(fp8), where), fp8, tensors),
        _work(auto.of(both(bf16), where), bf16, tensors)[1],
    ]
    medians = medians_ms(work, where, repeats)
    quantise_ms, multiply_ms, fp8_quantise_ms, fp8_multiply_ms, bf16_ms = medians
    total_ms = quantise_ms + multiply_ms
    tflops = 2 * shape.tokens * shape.outputs * shape.inputs / multiply_ms / 1e9
    figures = {
        "TFLOP_per_s": tflops,
        "quantise_ms": quantise_ms,
        "multiply_ms": multiply_ms,
        "speed_over_bf16": bf16_ms / total_ms,
        "speed_over_fp8": (fp8_quantise_ms + fp8_multiply_ms) / total_ms,
    }
    peak = peak_tflops(device.name, policy.format) if support.mode == "native" else None
    if peak:
        figures["share_of_peak"] = tflops / peak
    return support.mode, figures


def _work(
    backend: Backend, policy: OperandPolicy, tensors: Sequence[Tensor]
) -> tuple[Callable[[], object], Callable[[], object]]:
    """Make two calls: one quantises both operands, the other multiplies already quantised operands."""
    draws = []
    for name in OPERANDS["fprop"]:
        key = Key(seed=0, layer="bench", gemm="fprop", operand=name, step=1)
        draws.append(Draw(policy=policy, key=key))

    def quantise() -> list[Any]:
        return list(map(partial(backend.quantize, axis=1), tensors, draws))

    left, right = quantise()
    return quantise, lambda: backend.multiply(left, right)


def medians_ms(
    work: Sequence[Callable[[], object]], where: str, repeats: int
) -> list[float]:
    """Measure the calls in turns; return each one's median time in milliseconds, without warm-ups."""
    measured: list[list[float]] = [[] for _ in work]
    for turn in range(_WARM_UPS + repeats):
        for times, call in zip(measured, work, strict=True):
            elapsed = elapsed_ms(call, where)
            if turn >= _WARM_UPS:
                times.append(elapsed)
    medians = [statistics.median(times) for times in measured]
    assert min(medians) > 0, "the clock stands still"
    return medians


def elapsed_ms(call: Callable[[], object], where: str) -> float:
    """Time one call on a torch device in milliseconds: a GPU by its own events."""
    if torch.device(where).type != "cuda":
        started = time.perf_counter()
        call()
        return (time.perf_counter() - started) * 1e3
    make_event: Any = torch.cuda.Event
    begin = make_event(enable_timing=True)
    end = make_event(enable_timing=True)
    begin.record()
    call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


def rates(setup: Setup) -> Iterator[Check]:
    """Yield checks of the rate of each format's GEMM at some shapes, by each back end that claims it."""
    shapes = [Shape(1024, 1024, 1024)]
    if setup.on_gpu:
        shapes = [
            Shape(8192, 2048, 8192),
            Shape(8192, 4096, 4096),
            Shape(8192, 4096, 14336),
            Shape(4096, 8192, 8192),
        ]
    for shape, fmt, (name, backend) in itertools.product(
        shapes, _FORMATS, setup.backends.items()
    ):
        policy = OperandPolicy(format=fmt)
        # bf16 is the device's own GEMM, whatever the back end.
        is_its_own = name == "emulated" or not policy.is_high_precision
        if is_its_own and backend.support(both(policy), setup.device).mode != "no":
            yield Check(
                backend=name,
                of=f"{fmt} {shape.tokens}×{shape.outputs}×{shape.inputs}",
                run=partial(_rate, setup, name, policy, shape),
            )


def _rate(setup: Setup, name: str, policy: OperandPolicy, shape: Shape) -> Told:
    repeats = 20 if setup.on_gpu else 3
    mode, figures = time_gemm(policy, shape, name, setup.where, repeats=repeats)
    share = figures.get("share_of_peak", 0.0)
    rate = f"{figures['TFLOP_per_s']:.0f} TFLOP/s"
    assert share <= 1, f"{rate}, {share:.2f} times the published peak"
    return Told(mode, figures)


def steps(setup: Setup) -> Iterator[Check]:
    """Yield checks of the time of a training step of each model, in bf16 and with each recipe.

    A recipe is timed emulated and, where it can be, native; all are timed compiled and not.
    On a CPU only llama-tiny is timed.
    """
    recipes = [("bf16", "emulated", read_recipe("bf16"))]
    for backend, name, recipe in trained(setup):
        mode = overall_mode(Selection(backend).choices(recipe, setup.device))
        if backend == "emulated" or mode == "native":
            recipes.append((f"{name} {mode}", backend, recipe))
    for model in MODELS:
        if not setup.on_gpu and model != "llama-tiny":
            skip = Skip("on a CPU llama-tiny alone is timed")
            yield Check(of=model, run=partial(ending, skip))
            continue
        for name, backend, recipe in recipes:
            time_it = partial(_step, setup, model, recipe, backend)
            for way, compiled in (("not compiled", False), ("compiled", True)):
                yield Check(
                    backend=backend,
                    of=f"{model}, {name}, {way}",
                    run=partial(time_it, compiled=compiled),
                )


def _step(
    setup: Setup, model: str, recipe: Recipe, backend: str, *, compiled: bool
) -> Told:
    if compiled and not (setup.on_gpu or any(map(shutil.which, ("g++", "clang++")))):
        raise Skip("torch.compile needs a C++ compiler on a CPU")
    if model == "llama-tiny":
        sequences, positions, vocab_size = 8, 128, 256
    else:
        sequences, positions, vocab_size = 4, 2048, 32_000
    config = config_of(
        MODELS[model],
        recipe,
        backend,
        vocab_size,
        tokens=sequences * positions,
        seq_len=positions,
        batch_size=sequences,
        compile=compiled,
    )
    num_steps, warmup = (5, 3) if setup.on_gpu else (1, 1)
    try:
        times = time_steps(
            config, device=setup.where, steps=num_steps, warmup=warmup, repeats=3
        )
    except torch.OutOfMemoryError:
        raise Skip("out of the device's memory") from None
    finally:
        torch.compiler.reset()
        if setup.on_gpu:
            torch.cuda.empty_cache()
    seconds = statistics.median(times.sec_per_step)
    figures = {
        "step_ms": seconds * 1e3,
        "tokens_per_s": times.tokens_per_step / seconds,
    }
    if times.peak_memory_bytes is not None:
        figures["peak_memory_GB"] = times.peak_memory_bytes / 1e9
    return Told(f"{sequences} × {positions} tokens, {times.launch}", figures)
