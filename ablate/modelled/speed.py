"""*Modelled* time of a training token on named hardware, to estimate an arm's gain without that hardware.

A roofline, summed over the parts of a step, each at a fixed share of the published peak: the GEMMs of every
linear layer, at the rate of the wider of the two operands' formats or of memory; quantising (each tensor is
read once in bf16, twice if its scale needs the tensor's largest value first, and written once for each GEMM
that takes it in low precision; a Hadamard rotation happens in the same pass); and what no recipe changes.
Communication and launches cost nothing. The shares are not fitted to data: ``docs/report.md`` compares the
result with published figures.

Only the built-in models are supported. How it fails: hardware without a unit for a format gives None;
unknown hardware raises ``KeyError``.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from ablate.modelled.hardware import PEAKS
from ablate.recipes import GEMMS, OPERANDS, PRESETS, Recipe
from ablate.recipes.place import LayerPlace, phases_of
from ablate.run.architecture import LinearLayer, layer_places, linear_layers
from ablate.run.config import ModelConfig
from ablate.run.schedule import plan_steps

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ablate.modelled.hardware import Peaks
    from ablate.recipes import Gemm, GemmPolicy, LayerRecipe, OperandPolicy
    from ablate.run.config import ArmConfig

GEMM_SHARE = 0.7
ATTENTION_SHARE = 0.4
MEMORY_SHARE = 0.8
"""Shares of the published peaks that a good GEMM, fused attention and a streaming kernel reach."""

HARDWARE = ("B200", "B300", "MI355X", "H100")

_UNNAMED = LayerPlace(name="", block=None, num_blocks=0, is_head=False)
"""A layer that no rule matches."""
_BF16_BYTES = 2.0
_BITS = {"4": 4.0, "6": 6.0, "8": 8.0}
_ADAM_BYTES = 4 * 4 + 3 * 4 + 2
"""Per parameter: read weight, gradient and two moments in fp32; write all but the gradient, and bf16."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model trained on ``devices`` devices with this many tokens per step in total (data parallel)."""

    model: ModelConfig
    vocab_size: int
    seq_len: int
    tokens_per_step: int
    devices: int = 1

    @property
    def device_tokens(self) -> int:
        """Tokens per step on one device."""
        return max(1, self.tokens_per_step // self.devices)


@dataclass(frozen=True, kw_only=True)
class TokenTime:
    """Seconds per training token on one device. ``rest``: the part that no recipe changes."""

    fprop: float
    dgrad: float
    wgrad: float
    quantise_forward: float
    quantise_backward: float
    rest_forward: float
    rest_backward: float
    optimizer: float

    @property
    def backward(self) -> float:
        """Dgrad and Wgrad with their quantising, and the backward pass of the rest."""
        return self.dgrad + self.wgrad + self.quantise_backward + self.rest_backward

    @property
    def total(self) -> float:
        """The time of a whole step per token."""
        return self.fprop + self.quantise_forward + self.rest_forward + self.backward + self.optimizer


def workload_of(config: ArmConfig) -> Workload:
    """Return a study's own workload, on one device."""
    return Workload(
        model=config.model,
        vocab_size=config.vocab_size,
        seq_len=config.training.seq_len,
        tokens_per_step=plan_steps(config.training).tokens_per_step,
    )


LLAMA_8B = Workload(
    model=ModelConfig(width=4096, layers=32, heads=32, kv_heads=8, ffn=14336, tied_head=False),
    vocab_size=128_256,
    seq_len=8192,
    tokens_per_step=32 * 8192,
    devices=8,
)
"""Llama 3.1 8B as MLPerf trains it (AMD's v6.0 configuration): global batch 32 of 8,192 tokens, 8 devices."""

LLAMA_70B_BLOCK = Workload(
    model=ModelConfig(width=8192, layers=1, heads=64, kv_heads=8, ffn=28672, tied_head=False),
    vocab_size=1,
    seq_len=4096,
    tokens_per_step=4 * 4096,
)
"""One decoder block of Llama 2 70B with a negligible head: the shapes of the estimate by Tseng et al."""


@lru_cache(maxsize=1024)  # a report needs each arm's and the baseline's several times
def token_time(work: Workload, recipe: Recipe, hardware: str) -> TokenTime | None:
    """Return the modelled time of a token in the run's last phase, or None without the required units."""
    peaks = PEAKS[hardware]
    tokens, weights = work.device_tokens, 0
    seconds = dict.fromkeys((*GEMMS, "quantise_forward", "quantise_backward"), 0.0)
    for linear, layer in _layers(work, recipe):
        width, outputs = linear.inputs, linear.outputs
        weights += width * outputs
        seen = max(1, round(tokens * linear.token_share))
        elements = {"x": seen * width, "w": width * outputs, "dy": seen * outputs}
        for name in GEMMS:
            found = _gemm_seconds(layer.gemm(name), name, elements, 2.0 * seen * width * outputs, peaks)
            if found is None:
                return None
            seconds[name] += found / tokens
        for part, found in _quantise_seconds(layer, elements, peaks):
            seconds[part] += found / tokens
    attention, moved = _rest(work)
    attend, stream = _rate(peaks.bf16, ATTENTION_SHARE), _rate(peaks.memory, MEMORY_SHARE)
    return TokenTime(
        **seconds,
        rest_forward=attention / attend + moved / stream,
        # Attention's backward recomputes the scores: 5 products where the forward has 2.
        rest_backward=2.5 * attention / attend + 2 * moved / stream,
        optimizer=weights / work.devices * _ADAM_BYTES / stream / tokens,
    )


def mean_token_time(work: Workload, recipe: Recipe, hardware: str, total_tokens: int) -> float | None:
    """Return modelled seconds per token over a whole run, phases weighted by their share of the tokens.

    None if the hardware lacks the units for any phase.
    """
    phases = phases_of(replace(recipe, rules=()), _UNNAMED)
    starts = [*(phase.start(total_tokens) for phase in phases), total_tokens]
    total = 0.0
    for phase, (start, end) in zip(phases, itertools.pairwise(starts), strict=True):
        now = phase.recipe
        whole = replace(recipe, fprop=now.fprop, dgrad=now.dgrad, wgrad=now.wgrad, phases=())
        found = token_time(work, whole, hardware)
        if found is None:
            return None
        total += found.total * (end - start) / total_tokens
    return total


def fp4_share(work: Workload, recipe: Recipe) -> float:
    """Return the share of the training FLOPs with both operands in FP4.

    FLOPs are those of all linear layers including the head and of causal attention, forward and backward.
    """
    low = whole = 0.0
    for linear, layer in _layers(work, recipe):
        flops = 2.0 * linear.inputs * linear.outputs * linear.token_share
        for name in GEMMS:
            policy = layer.gemm(name)
            whole += flops
            low += flops * all(_bits(side) == 4 for side in (policy.left, policy.right))
    attention, _ = _rest(work)
    return low / (whole + 3 * attention)


@dataclass(frozen=True, kw_only=True)
class PublishedSpeed:
    """A published speed-up and the modelled one; ``at_least`` means that the source gives a lower bound."""

    what: str
    source: str
    published: float
    at_least: bool
    modelled: float

    @property
    def deviation(self) -> float:
        """Return modelled over published, minus one."""
        return self.modelled / self.published - 1


def published_checks() -> tuple[PublishedSpeed, ...]:
    """Return the modelled results for the settings with published speed-ups."""
    fp8, bf16 = PRESETS["te-hybrid-fp8"].recipe, Recipe()

    def ratio(work: Workload, slow: Recipe, fast: str, hardware: str, part: str) -> float:
        times = [token_time(work, recipe, hardware) for recipe in (slow, PRESETS[fast].recipe)]
        assert times[0] is not None
        assert times[1] is not None  # MI355X and B200 have every unit
        return float(getattr(times[0], part) / getattr(times[1], part))

    amd, tseng = "AMD 2605.09825 (measured there)", "Tseng et al. 2502.20586, abstract (estimated there)"
    step = "step of Llama 3.1 8B on MI355X, MXFP4 with DHT16 on all GEMMs against FP8"
    block = "backward pass of a Llama 2 70B block, tseng against"
    rows = (
        (step, amd, 1.20, False, (LLAMA_8B, fp8, "amd-fdw-dht16", "MI355X", "total")),
        (f"{block} FP8, on B200", tseng, 1.3, True, (LLAMA_70B_BLOCK, fp8, "tseng-fp8", "B200", "backward")),
        (f"{block} BF16, on B200", tseng, 1.7, True, (LLAMA_70B_BLOCK, bf16, "tseng", "B200", "backward")),
    )
    return tuple(
        PublishedSpeed(
            what=what, source=source, published=published, at_least=at_least, modelled=ratio(*setting)
        )
        for what, source, published, at_least, setting in rows
    )


def _rate(peak_tera: float, share: float) -> float:
    return peak_tera * 1e12 * share


def _layers(work: Workload, recipe: Recipe) -> Iterator[tuple[LinearLayer, LayerRecipe]]:
    """Yield every linear layer with its recipe in the last phase."""
    layers = linear_layers(work.model, work.vocab_size)
    where = layer_places(layers)
    for layer in layers:
        yield layer, phases_of(recipe, where[layer.name])[-1].recipe


def _bits(policy: OperandPolicy) -> float:
    """Return the bits per element, without scales."""
    if policy.is_high_precision:
        return 16.0
    return next(bits for digit, bits in _BITS.items() if digit in policy.format.partition("_")[0])


def operand_bytes(policy: OperandPolicy) -> float:
    """Return the bytes per element, including its share of a block's scale."""
    block = {"mxfp": 1 / 32, "nvfp": 1 / 16}.get(policy.format[:4], 0.0)
    return _bits(policy) / 8 + block


def _peak(policy: GemmPolicy, peaks: Peaks) -> float | None:
    """Return the rate of the wider operand; None without a unit for a format (E3M0 has none anywhere)."""
    if any(side.format.endswith("e3m0") for side in (policy.left, policy.right)):
        return None
    bits = max(_bits(policy.left), _bits(policy.right))
    if min(_bits(policy.left), _bits(policy.right)) == 4 and peaks.fp4 is None:
        return None
    if not peaks.nvfp4 and "nvfp4" in (policy.left.format, policy.right.format):
        return None
    return peaks.bf16 if bits == 16 else peaks.fp8 if bits > 4 else peaks.fp4


def has_unit(policy: GemmPolicy, peaks: Peaks) -> bool:
    """Whether hardware multiplies both quantised operands in their packed form."""
    return max(_bits(policy.left), _bits(policy.right)) < 16 and _peak(policy, peaks) is not None


def _gemm_seconds(
    policy: GemmPolicy, name: Gemm, elements: dict[str, int], flops: float, peaks: Peaks
) -> float | None:
    peak = _peak(policy, peaks)
    if peak is None:
        return None
    left, right = OPERANDS[name]
    result = {"fprop": "dy", "dgrad": "x", "wgrad": "w"}[name]  # the tensor of the same shape
    moved = (
        elements[left] * operand_bytes(policy.left)
        + elements[right] * operand_bytes(policy.right)
        + elements[result] * _BF16_BYTES
    )
    return max(flops / _rate(peak, GEMM_SHARE), moved / _rate(peaks.memory, MEMORY_SHARE))


_WHOLE_TENSOR = ("tensor", "two_level", "four_six", "ms_eden", "searched")
"""Scale rules that need the tensor's largest value before they can round the first element."""


def _quantise_seconds(
    layer: LayerRecipe, elements: dict[str, int], peaks: Peaks
) -> Iterator[tuple[str, float]]:
    """Yield (part, seconds) for each tensor quantised to low precision, all its copies in one read."""
    uses: dict[str, list[OperandPolicy]] = {}
    for _, operand, policy in layer.operands():
        if _bits(policy) < 16:
            uses.setdefault(operand, []).append(policy)
    for operand, policies in uses.items():
        reads = 2 if any(policy.scale in _WHOLE_TENSOR for policy in policies) else 1
        moved = elements[operand] * (_BF16_BYTES * reads + sum(map(operand_bytes, policies)))
        rotations = sum(2.0 * policy.hadamard for policy in policies) * elements[operand]
        seconds = max(moved / _rate(peaks.memory, MEMORY_SHARE), rotations / _rate(peaks.bf16, GEMM_SHARE))
        yield ("quantise_backward" if operand == "dy" else "quantise_forward"), seconds


def _rest(work: Workload) -> tuple[float, float]:
    """Return a token's forward FLOPs of causal attention, and its bytes of all pointwise operations.

    Bytes in bf16: two norms and two residual sums, rotary positions, the feed-forward's activation (per
    expert of the token), and twice the logits.
    """
    model = work.model
    head_dim = model.width // model.heads
    queries = model.heads * head_dim
    keys = (model.heads if model.kv_heads is None else model.kv_heads) * head_dim
    attention = 2.0 * model.layers * queries * work.seq_len
    inner = (2 if model.architecture == "gpt" else 3) * model.ffn
    inner *= 1 if model.experts is None else min(model.experts, model.experts_per_token)
    elements = model.layers * (10 * model.width + 2 * (queries + keys) + inner) + 2 * work.vocab_size
    return attention, elements * _BF16_BYTES
