"""*Modelled* time of a training token on named hardware, to estimate an arm's gain without that hardware.

A roofline, summed over the parts of a step, each at a measured share of a published peak (``RATES``): the
GEMMs of every linear layer, at the rate of the wider of the two operands' formats or of memory; quantising
(each tensor is read once in bf16, twice if its scale needs the tensor's largest value first, and written once
for each GEMM that takes it in low precision; a Hadamard rotation happens in the same pass); and what no
recipe changes: attention, norms, activations, residuals and the optimizer.
Communication and launches cost nothing.

How far off a time may be: each kind of kernel is assumed to be off by its own factor exp(s ε), with
independent standard normal ε: devices, software and shapes differ. The log of a step's time is then off by
s √(Σ share²), over the shares of the kernels in it, and the log of a speed-up by
s √(Σ (difference of shares)²): what both recipes have in common cancels. Ranges are 95 %, by Student's t.
They hold for well-tuned data-parallel steps on a few devices, not for what is left out here.

Only the built-in models are supported. How it fails: hardware without a unit for a format gives None;
unknown hardware raises ``KeyError``.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean
from typing import TYPE_CHECKING, Literal, NamedTuple

from ablate.modelled.hardware import PEAKS, Peaks
from ablate.recipes import (
    GEMMS,
    OPERANDS,
    Gemm,
    GemmPolicy,
    LayerRecipe,
    OperandPolicy,
    Recipe,
)
from ablate.recipes.place import phases_of
from ablate.recipes.policy import BLOCKS
from ablate.run.architecture import PRESETS, layer_places, linear_layers
from ablate.run.config import ArmConfig, ModelConfig
from ablate.run.schedule import plan_steps

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


RATES: dict[str, tuple[Literal["bf16", "fp8", "fp4", "memory"], float]] = {
    "gemm16": ("bf16", 0.65),
    "gemm8": ("fp8", 0.61),
    "gemm4": ("fp4", 0.38),
    "memory": ("memory", 0.64),
    "attention16": ("bf16", 0.35),
    "attention8": ("fp8", 0.29),
}
"""What limits a kernel: the published peak, and the share of it that is reached.

``gemm16``, ``gemm8``, ``gemm4`` and ``memory`` are geometric means over the kernels of
``benchmarks/speed_model.py``; ``memory`` is measured on quantising and used wherever data is only moved.
``attention16`` and ``attention8`` are chosen by the calibrated steps
there with such attention: the modelled time of the median one equals the measured time.
"""
KERNEL_SPREAD = 0.13492958546175712
"""s: s² = Σ (r² / Σ share²) / (8 − 2) over the 8 calibrated steps of ``benchmarks/speed_model.py``, where r
is the log of modelled over measured time, and 2 is the number of rates chosen by these steps."""
_T = 2.446804391979525
"""Student's t with 6 degrees of freedom, exceeded by 2.5 %."""

STEP_MS = {
    "bf16": 86.0,
    "mxfp4": 144.0,
    "mxfp4 SR RHT16": 290.0,
    "nvfp4": 276.0,
    "fp8": 302.0,
}
"""Milliseconds of a training step by its recipe: the Llama of 150 M parameters of ``ablate check device``,
8 × 2,048 tokens, eager, on an H200 with torch 2.11 and Triton 3.6 (November 2026). FP4 is emulated there."""

HARDWARE = ("B200", "B300", "MI355X", "H100")

_RESULTS: dict[Gemm, str] = {"fprop": "dy", "dgrad": "x", "wgrad": "w"}
"""For each GEMM, the tensor that has the shape of its result."""
_BF16_BYTES = 2.0
_ADAM_BYTES = 4 * 4 + 3 * 4 + 2
"""Per parameter: read weight, gradient and two moments in fp32; write all but the gradient, and bf16."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model trained on ``devices`` devices with this many tokens per step in total (data parallel).

    ``total_tokens``: the budget, by which a recipe's phases are weighted; needed if one starts at a fraction.
    ``fp8_attention``: attention's products in FP8, as in some public runs; our trainer has none.
    """

    model: ModelConfig
    vocab_size: int
    seq_len: int
    tokens_per_step: int
    devices: int = 1
    total_tokens: int | None = None
    fp8_attention: bool = False


FORWARD = ("fprop", "quantise_forward", "rest_forward")
BACKWARD = ("dgrad", "wgrad", "quantise_backward", "rest_backward")


@dataclass(frozen=True, kw_only=True)
class TokenTime:
    """Seconds per training token on one device, by part of the step and kind of kernel.

    Parts are those of ``FORWARD`` and ``BACKWARD``, and ``optimizer``; it and ``rest_*`` are what no recipe
    changes. Kinds are ``gemm*``, ``attention*``, ``quantise8``, ``quantise4`` and ``pointwise``, by the bits
    that they compute with or write: what is fast or slow together.
    """

    seconds: Mapping[tuple[str, str], float]

    def of(self, *parts: str) -> float:
        """Sum the seconds of some parts, or of the whole step if none is named."""
        return sum(self.by_kernel(*parts).values())

    def by_kernel(self, *parts: str) -> dict[str, float]:
        """Sum the seconds of some parts, or of the whole step if none is named, by kind of kernel."""
        totals: defaultdict[str, float] = defaultdict(float)
        for (part, kernel), seconds in self.seconds.items():
            if not parts or part in parts:
                totals[kernel] += seconds
        return totals

    @property
    def total(self) -> float:
        """Seconds per token of the whole step."""
        return self.of()


@dataclass(frozen=True, kw_only=True)
class ModelledFigure:
    """A modelled figure with its 95 % range."""

    estimate: float
    low: float
    high: float

    def times(self, factor: float) -> ModelledFigure:
        """Multiply the estimate and its range."""
        return ModelledFigure(
            estimate=self.estimate * factor,
            low=self.low * factor,
            high=self.high * factor,
        )


def seconds_range(time: TokenTime) -> ModelledFigure:
    """Model the seconds per token of a whole step, with their range."""
    return _range(time.total, time.by_kernel())


def speed_up(slow: Mapping[str, float], fast: Mapping[str, float]) -> ModelledFigure:
    """Model how many times faster ``fast`` is than ``slow``, both in seconds by kind of kernel."""
    return _range(sum(slow.values()) / sum(fast.values()), slow, fast)


def _range(estimate: float, *sides: Mapping[str, float]) -> ModelledFigure:
    """Find the range by the shares of the kernels in seconds; of two sides by their difference."""
    shares: defaultdict[str, float] = defaultdict(float)
    for sign, seconds in zip((1, -1), sides, strict=False):
        total = sum(seconds.values())
        for kernel, part in seconds.items():
            shares[kernel] += sign * (part / total)
    reach = _T * KERNEL_SPREAD * math.sqrt(sum(share**2 for share in shares.values()))
    return ModelledFigure(
        estimate=estimate,
        low=estimate * math.exp(-reach),
        high=estimate * math.exp(reach),
    )


def workload_of(config: ArmConfig) -> Workload:
    """Read the workload of an arm's own configuration, on one device."""
    return Workload(
        model=config.model,
        vocab_size=config.vocab_size,
        seq_len=config.training.seq_len,
        tokens_per_step=plan_steps(config.training).tokens_per_step,
        total_tokens=config.training.tokens,
    )


LLAMA_8B = Workload(
    model=ModelConfig(**PRESETS["llama3.1-8b"]),
    vocab_size=128_256,
    seq_len=8192,
    tokens_per_step=32 * 8192,
    devices=8,
)
"""Llama 3.1 8B as MLPerf trains it (AMD's v6.0 configuration): global batch 32 of 8,192 tokens, 8 devices."""


@lru_cache(maxsize=1024)  # a report needs each arm's and the baseline's several times
def token_time(work: Workload, recipe: Recipe, hardware: str) -> TokenTime | None:
    """Model the mean time of a token over a run; None if the hardware lacks a unit for one of the phases."""
    peaks = PEAKS[hardware]
    tokens = max(1, work.tokens_per_step // work.devices)
    weights = 0.0
    seconds: defaultdict[tuple[str, str], float] = defaultdict(float)
    for layer, count in _layers(work, recipe).items():
        weights += count * layer.weights
        rows = max(1, round(tokens * layer.token_share))
        elements = {
            "x": rows * layer.inputs,
            "w": layer.weights,
            "dy": rows * layer.outputs,
        }
        for gemm, result in _RESULTS.items():
            policy = layer.recipe.gemm(gemm)
            unit = gemm_unit(policy, peaks)
            if unit is None:
                return None
            left, right = OPERANDS[gemm]
            moved = elements[left] * operand_bytes(policy.left)
            moved += elements[right] * operand_bytes(policy.right)
            moved += elements[result] * _BF16_BYTES
            cost = _slower(2.0 * rows * layer.weights, unit, moved, peaks)
            seconds[gemm, unit] += count * cost / tokens
        for part, kernel, cost in _quantise_seconds(layer.recipe, elements, peaks):
            seconds[part, kernel] += count * cost / tokens
    flops, moved = _rest(work)
    attend = "attention8" if work.fp8_attention else "attention16"
    # Attention's backward recomputes the scores: 5 products where the forward has 2.
    for part, products, passes in (("rest_forward", 1.0, 1), ("rest_backward", 2.5, 2)):
        seconds[part, attend] += products * flops / _rate(peaks, attend)
        seconds[part, "pointwise"] += passes * moved / _rate(peaks, "memory")
    seconds["optimizer", "pointwise"] = (
        weights / work.devices * _ADAM_BYTES / _rate(peaks, "memory") / tokens
    )
    return TokenTime(seconds=seconds)


def emulation_factor(work: Workload, recipe: Recipe) -> float:
    """Model how many times as long as in bf16 a step takes that is emulated, by the factors of ``STEP_MS``.

    Each GEMM counts by a third of its layer's weights. What kind of GPU it is makes no difference here.
    """
    weights = 0.0
    milliseconds = 0.0
    for layer, count in _layers(work, recipe).items():
        weight = layer.weights * layer.token_share * count
        weights += weight
        milliseconds += weight * fmean(
            STEP_MS[_measured_as(layer.recipe.gemm(gemm))] for gemm in GEMMS
        )
    return milliseconds / weights / STEP_MS["bf16"]


def _measured_as(gemm: GemmPolicy) -> str:
    sides = [side for side in gemm.sides if not side.is_untouched]
    if not sides:
        return "bf16"
    if any(side.has_tensor_scale for side in sides):
        return "nvfp4" if min(map(_bits, sides)) == 4 else "fp8"
    if any(side.draws_anew for side in sides):
        return "mxfp4 SR RHT16"
    return "mxfp4"


def fp4_share(work: Workload, recipe: Recipe) -> float:
    """Compute the share of a run's training FLOPs with both operands in FP4.

    FLOPs are those of all linear layers including the head and of causal attention, forward and backward.
    """
    low = 0.0
    whole = 0.0
    for layer, count in _layers(work, recipe).items():
        flops = 2.0 * count * layer.weights * layer.token_share
        for gemm in GEMMS:
            policy = layer.recipe.gemm(gemm)
            whole += flops
            if _bits(policy.left) == _bits(policy.right) == 4:
                low += flops
    attention, _ = _rest(work)
    return low / (whole + 3 * attention)


def _rate(peaks: Peaks, rate: str) -> float:
    """Operations or bytes per second."""
    name, share = RATES[rate]
    peak = getattr(peaks, name)
    assert peak is not None  # ``gemm_unit`` names no unit that hardware lacks
    return float(peak * 1e12 * share)


class _Layer(NamedTuple):
    """What the time of a linear layer depends on."""

    inputs: int
    outputs: int
    token_share: float
    recipe: LayerRecipe

    @property
    def weights(self) -> int:
        return self.inputs * self.outputs


def _layers(work: Workload, recipe: Recipe) -> dict[_Layer, float]:
    """Count equal linear layers.

    A layer counts in each of its phases with the phase's share of the budget.

    Raises:
        ValueError: the recipe has phases, and the budget is unknown.
    """
    layers = linear_layers(work.model, work.vocab_size)
    places = layer_places(layers)
    counts: defaultdict[_Layer, float] = defaultdict(float)
    for layer in layers:
        phases = phases_of(recipe, places[layer.name])
        budget = work.total_tokens or 1
        if len(phases) > 1 and not work.total_tokens:
            raise ValueError("a recipe with phases needs the workload's total_tokens")
        ends = [phase.start(budget) for phase in phases[1:]] + [budget]
        start = 0
        for phase, end in zip(phases, ends, strict=True):
            equal = _Layer(layer.inputs, layer.outputs, layer.token_share, phase.recipe)
            counts[equal] += (end - start) / budget
            start = end
    return counts


def _bits(policy: OperandPolicy) -> float:
    """Bits per element, without scales."""
    if policy.is_high_precision:
        return 16.0
    return float(next(filter(str.isdigit, policy.format)))


def operand_bytes(policy: OperandPolicy) -> float:
    """Compute the bytes per element, including its share of a block's scale."""
    usual_block = BLOCKS.get(policy.format, ("none",))[0]
    scale = {"1x32": 1 / 32, "1x16": 1 / 16}.get(usual_block, 0.0)
    return _bits(policy) / 8 + scale


def gemm_unit(policy: GemmPolicy, peaks: Peaks) -> str | None:
    """Choose the unit of the wider operand; None if a format has none, as E3M0, NVINT4 and IF4 everywhere."""
    formats = (policy.left.format, policy.right.format)
    bits = (_bits(policy.left), _bits(policy.right))
    lacks = (
        any(fmt.endswith(("e3m0", "nvint4", "if4")) for fmt in formats)
        or ("nvfp4" in formats and not peaks.nvfp4)
        or (min(bits) == 4 and peaks.fp4 is None)
        or (min(bits) < 16 and peaks.fp8 is None)
    )
    return None if lacks else f"gemm{max(bits):.0f}"


def _slower(flops: float, unit: str, moved: float, peaks: Peaks) -> float:
    """Seconds of arithmetic or of memory, whichever is longer."""
    return max(flops / _rate(peaks, unit), moved / _rate(peaks, "memory"))


def _quantise_seconds(
    layer: LayerRecipe, elements: dict[str, int], peaks: Peaks
) -> Iterator[tuple[str, str, float]]:
    """Yield (part, kernel, seconds) of quantising each tensor; all its copies are made in the same reads."""
    uses: defaultdict[str, list[OperandPolicy]] = defaultdict(list)
    for _, operand, policy in layer.operands():
        if _bits(policy) < 16:
            uses[operand].append(policy)
    for operand, policies in uses.items():
        # The whole tensor must be read before the first element can be rounded.
        reads = 1
        for policy in policies:
            has_tensor_scale = policy.has_tensor_scale and policy.scale != "delayed"
            if has_tensor_scale or policy.scale == "searched":
                reads = 2
        element_bytes = _BF16_BYTES * reads + sum(map(operand_bytes, policies))
        moved = elements[operand] * element_bytes
        rotations = elements[operand] * sum(
            2.0 * policy.hadamard for policy in policies
        )
        part = "quantise_backward" if operand == "dy" else "quantise_forward"
        kernel = "quantise4" if min(map(_bits, policies)) == 4 else "quantise8"
        yield part, kernel, _slower(rotations, "gemm16", moved, peaks)


def _rest(work: Workload) -> tuple[float, float]:
    """Forward FLOPs of causal attention per token, and bytes of all pointwise operations per token.

    Bytes in bf16: two norms and two residual sums, rotary positions, the feed-forward's activation (per
    expert of the token), and twice the logits.
    """
    model = work.model
    head_dim = model.width // model.heads
    queries = model.heads * head_dim
    keys = (model.kv_heads or model.heads) * head_dim
    attention = 2.0 * model.layers * queries * work.seq_len
    inner = (2 if model.architecture == "gpt" else 3) * model.ffn
    if model.experts is not None:
        inner *= min(model.experts, model.experts_per_token)
    of_layer = 10 * model.width + 2 * (queries + keys) + inner
    elements = model.layers * of_layer + 2 * work.vocab_size
    return attention, elements * _BF16_BYTES
