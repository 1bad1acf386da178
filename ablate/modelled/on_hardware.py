"""What an arm needs on named hardware, *modelled*: memory of a device, whether it fits, and GPU-hours.

The peak memory of a training step is that of its largest moment: the loss, the backward pass of the last
blocks and of the first, and the embedding. Between those activations are freed, and gradients come, evenly.
A block counts by the matrices that torch's autograd keeps of it, and by the most that is alive besides; of
the GEMMs the largest counts. Two operations differ by device: attention is written out with its scores on the
CPU and fused on a GPU; the root mean square norm is fused on a GPU only. ``torch.compile`` may keep less than
counted here. Several devices (FSDP2) share weights, gradients and moments evenly; two blocks at a time are
gathered, and the weights outside the blocks for the whole step. ``docs/planning.md`` says what is not
counted, and how far the result lies from measured peaks.

GPU-hours are ``speed.token_time`` times the run's tokens, with the range of a step's time. Evaluation counts
as forward passes, and recomputed activations as one more forward pass. GPU-hours sum over all devices of a
run. They leave out communication, launches, data and checkpoints. What is emulated on a GPU without FP4 units
has the hours of bf16 times measured factors (``speed.STEP_MS``); elsewhere it has none.

How it fails: unknown hardware is a ``KeyError``; an arm with its own model or trainer gives None.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

from ablate.modelled.hardware import PEAKS, Peaks
from ablate.modelled.speed import (
    FORWARD,
    ModelledFigure,
    emulation_factor,
    gemm_unit,
    operand_bytes,
    seconds_range,
    token_time,
    workload_of,
)
from ablate.recipes import GemmPolicy, LayerRecipe, Recipe
from ablate.recipes.place import phases_of
from ablate.run.architecture import (
    HEAD,
    LinearLayer,
    layer_places,
    linear_layers,
    model_size,
)
from ablate.run.schedule import evaluated_in, plan_steps

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ablate.run.config import ArmConfig, ModelConfig, ResourcesConfig

Memory = Counter[str]
"""Bytes on one device by purpose (``PURPOSES``)."""

PURPOSES = ("weights", "gradients", "optimizer", "activations", "quantised")
"""``weights`` includes their bf16 and gathered copies; ``gradients`` are those of weights; ``optimizer`` has
AdamW's two moments and what de-oscillation keeps; ``activations`` includes their gradients and the logits;
``quantised`` has the copies of operands in low precision (under emulation their dequantised values)."""
_BF16 = 2
_FP32 = 4
_BYTES = {"bf16": _BF16, "fp32": _FP32}

FITS_SHARE = 0.9
"""Usable share of a device's memory: the rest is for uncounted parts and the allocator's losses."""

CPU = "cpu"


@dataclass(frozen=True, kw_only=True, slots=True)
class OnHardware:
    """One arm on one kind of hardware.

    ``capacity_bytes`` and ``fits`` are None for a CPU. ``gpu_hours`` (of one run), with their 95 % range, are
    None where the hardware has no unit for one of the arm's formats. Where the arm ``is_emulated``, they are
    those of bf16 times a measured factor, for which the range does not stand.
    """

    memory: Memory
    capacity_bytes: int | None = None
    fits: bool | None = None
    gpu_hours: ModelledFigure | None = None
    is_emulated: bool = False


@cache  # one `ablate plan` asks several times, of thousands of arms
def on_hardware(
    config: ArmConfig, resources: ResourcesConfig, hardware: str
) -> OnHardware | None:
    """Model what an arm needs on ``hardware`` (of ``PEAKS``, or ``CPU``); None for the user's own code."""
    if not config.model.is_built_in or config.trainer is not None:
        return None
    peaks = None if hardware == CPU else PEAKS[hardware]
    memory = step_memory(config, resources, peaks)
    if peaks is None:
        return OnHardware(memory=memory)
    counts = plan_steps(config.training, resources.devices_per_run)
    work = replace(workload_of(config), devices=resources.devices_per_run)
    gpu_hours = None
    is_emulated = False
    time = token_time(work, config.recipe, hardware)
    if time is not None:
        forward = time.of(*FORWARD)
        in_bf16 = token_time(work, Recipe(), hardware)
        assert in_bf16 is not None  # every hardware multiplies in bf16
        passes = {"recipe": forward, "bf16": in_bf16.of(*FORWARD)}
        evaluated_token = sum(passes[arithmetic] for arithmetic in evaluated_in(config))
        evaluation = counts.evals * config.training.eval_tokens * evaluated_token
        trained_token = time.total
        if resources.activation_checkpointing:
            trained_token += forward
        seconds = counts.tokens * trained_token + evaluation
        gpu_hours = seconds_range(time).times(seconds / time.total / 3600)
    elif peaks.fp4 is None:
        twin = on_hardware(replace(config, recipe=Recipe()), resources, hardware)
        assert twin is not None
        assert twin.gpu_hours is not None
        is_emulated = True
        gpu_hours = twin.gpu_hours.times(emulation_factor(work, config.recipe))
    capacity = round(peaks.capacity * 1e9)
    return OnHardware(
        memory=memory,
        capacity_bytes=capacity,
        fits=memory.total() <= FITS_SHARE * capacity,
        gpu_hours=gpu_hours,
        is_emulated=is_emulated,
    )


def step_memory(
    config: ArmConfig, resources: ResourcesConfig, peaks: Peaks | None
) -> Memory:
    """Model the peak memory of a step on one device of a run.

    On CPUs it is at most 4 % below measured peaks (``benchmarks/memory_model.py``); on two devices 2 of 19
    settings are 20 and 23 % below.
    ``config`` must have a built-in model. The phase of its recipe with the largest memory counts.
    ``peaks`` are those of the hardware; None: of the CPU.
    """
    model = config.model
    training = config.training
    devices = resources.devices_per_run
    is_sharded = devices > 1
    sequences = training.micro_batch_size or max(1, training.batch_size // devices)
    tokens = sequences * training.seq_len
    width = _BF16 * tokens * model.width
    logits = tokens * config.vocab_size
    kept, widest = _block(model, sequences, training.seq_len, on_gpu=peaks is not None)
    waiting = kept  # in a block for its backward pass
    if resources.activation_checkpointing:
        waiting = width
    master = _BYTES[training.master_weights]
    at_use = master
    # A block's weights are gathered in bf16, but not with experts: their router needs fp32.
    if is_sharded and model.experts is None:
        at_use = _BF16
    size = model_size(model, vocab_size=config.vocab_size, seq_len=training.seq_len)
    parameters = size.parameters
    table = config.vocab_size * model.width
    outside = table + model.width
    if not model.tied_head:
        outside += table
    if model.architecture == "gpt":
        outside += training.seq_len * model.width
    of_block = (parameters - outside) // model.layers
    reduced = 0  # bytes of a gradient that is reduced
    if is_sharded:
        reduced = _BYTES[training.reduction]
        if peaks is None:
            reduced *= 2  # gloo makes another copy
    head, gemms = _largest_gemms(config, tokens, at_use, peaks)
    all_gradients = master * parameters // devices
    accumulates = training.batch_size > sequences * devices
    at_first = all_gradients if accumulates else 0
    # The logits in fp32, their gradient, and log-softmax; then the gradient in bf16 for the head's GEMMs.
    activations = (model.layers - 1) * waiting + kept + 3 * width
    loss = Memory(activations=activations, gradients=at_first)
    moments = [
        loss + Memory(activations=3 * _FP32 * logits),
        loss + Memory(activations=_BF16 * logits) + head,
        Memory(
            activations=width,
            gradients=all_gradients + (_BF16 + master) * table + reduced * outside,
        ),
    ]
    # The backward pass of the last block, of the one before and of the first.
    for blocks_after in {0, min(1, model.layers - 1), model.layers - 1}:
        gradients = at_first or master * (table + blocks_after * of_block // devices)
        if is_sharded or not accumulates:
            gradients += at_use * of_block
        if is_sharded and blocks_after:  # the block after is still being reduced
            gradients += reduced * of_block + master * of_block // devices
        activations = (model.layers - 1 - blocks_after) * waiting + 2 * width
        moment = Memory(activations=activations, gradients=gradients)
        if is_sharded:
            moment["weights"] = 2 * at_use * of_block
        moments.append(moment + Memory(activations=widest))
        moments.append(moment + Memory(activations=kept) + gemms)
    optimizer = 2 * master * parameters // devices
    if config.recipe.deoscillate is not None:
        # Two sums, the last value and its quantised one of each weight.
        optimizer += (3 * _FP32 + master) * _weights_on_a_grid(config) // devices
    weights = master * (parameters // devices)
    if is_sharded:
        weights += master * outside
    return Memory(weights=weights, optimizer=optimizer) + max(moments, key=Memory.total)


def _recipes_of_layers(
    config: ArmConfig,
) -> Iterator[tuple[LinearLayer, list[LayerRecipe]]]:
    """Yield each linear layer of a built-in model with the recipes of its phases."""
    layers = linear_layers(config.model, config.vocab_size)
    for layer, place in zip(layers, layer_places(layers).values(), strict=True):
        yield layer, [phase.recipe for phase in phases_of(config.recipe, place)]


def _largest_gemms(
    config: ArmConfig, tokens: int, at_use: int, peaks: Peaks | None
) -> tuple[Memory, Memory]:
    """Find what the largest GEMMs allocate, of the head and of the blocks; parameters as of ``_gemms``."""
    model = config.model
    of_head: list[Memory] = []
    of_blocks: list[Memory] = []
    for layer, recipes in _recipes_of_layers(config):
        rows = tokens
        if model.experts is not None and ".experts." in layer.name:
            rows = tokens * min(model.experts_per_token, model.experts) // model.experts
        shape = (rows, layer.outputs, layer.inputs)
        gemms = of_head if layer.name == HEAD else of_blocks
        gemms += [_gemms(recipe, *shape, at_use, peaks) for recipe in recipes]
    return max(of_head, key=Memory.total), max(of_blocks, key=Memory.total)


def _weights_on_a_grid(config: ArmConfig) -> int:
    """Count the weights that de-oscillation follows in any phase."""
    count = 0
    for layer, recipes in _recipes_of_layers(config):
        if any(recipe.fprop.right.has_fixed_grid for recipe in recipes):
            count += layer.inputs * layer.outputs
    return count


def _block(
    model: ModelConfig, sequences: int, seq_len: int, *, on_gpu: bool
) -> tuple[int, int]:
    """Count the bytes that a block keeps, and those at the widest moment of its backward pass.

    The second are without what its GEMMs allocate and without the gradients of its result and its input.
    """
    is_gpt = model.architecture == "gpt"
    tokens = sequences * seq_len
    width = _BF16 * tokens * model.width  # bytes of a matrix with a row for each token
    norm = width if is_gpt or on_gpu else 4 * width  # kept besides its result
    kv_heads = model.kv_heads or model.heads
    keys = _BF16 * tokens * kv_heads * (model.width // model.heads)
    if on_gpu:  # queries, keys and values, of which Llama rotates all but the values
        scores = 0
        operands = width + 2 * keys
        if not is_gpt:
            operands += width + keys
    else:  # attention is not fused: its products keep copies as wide as the queries, and the scores
        scores = _BF16 * sequences * model.heads * seq_len**2
        operands = 3 * width
    attention = norm + width + operands + scores + width
    feed_forward = norm + width
    matrix = _BF16 * tokens * model.ffn
    experts_at_once = 1
    if model.experts is not None:  # they share the tokens evenly
        experts_at_once = model.experts
        experts = min(model.experts_per_token, model.experts)
        matrix *= experts
        # Each token's input and weighted result of each of its experts, and the router's matrices in fp32.
        feed_forward += width + 3 * experts * width + 3 * _FP32 * tokens * model.experts
    if is_gpt:  # keeps the matrices before and after GELU, and has one gradient besides
        kept_matrices = 2
        gradients = 1
    else:  # SwiGLU keeps gate, up, silu(gate) and their product, and has two gradients besides
        kept_matrices = 4
        gradients = 2
    kept_bytes = attention + feed_forward + kept_matrices * matrix
    in_feed_forward = kept_bytes + gradients * matrix // experts_at_once
    in_attention = attention + 3 * width + 2 * scores
    return kept_bytes, max(in_feed_forward, in_attention)


@cache
def _gemms(
    recipe: LayerRecipe, m: int, n: int, k: int, at_use: int, peaks: Peaks | None
) -> Memory:
    """Count what the backward pass of a layer with weight [n, k] allocates for m rows, without x and dy.

    ``at_use``: bytes per element of the weight as the layer receives it.
    """

    def copies(gemm: GemmPolicy, left: int, right: int) -> int:
        """Bytes of the operands' copies and masks, for operands with so many elements."""
        is_packed = peaks is not None and gemm_unit(gemm, peaks) not in (None, "gemm16")
        total = 0
        for policy, elements in ((gemm.left, left), (gemm.right, right)):
            if policy.is_untouched:
                continue
            if is_packed:
                total += round(operand_bytes(policy) * elements)
            else:
                total += (_FP32 if policy.is_fp32 else _BF16) * elements
            if policy.mask:
                total += elements
        return total

    of_dgrad = copies(recipe.dgrad, m * n, n * k)
    of_wgrad = copies(recipe.wgrad, m * n, m * k)
    cast = 0 if at_use == _BF16 else n * k
    dx = _BF16 * m * k
    takes_operand = recipe.dgrad.right.source != "high_precision"
    if recipe.fprop.left.hadamard and takes_operand and peaks is not None:
        # the gradient goes back through a rotated copy of x in fp32
        dx += 4 * _FP32 * m * k
    return Memory(
        weights=_BF16 * cast,
        gradients=_BF16 * n * k + at_use * cast,
        activations=dx,
        quantised=max(of_dgrad, of_wgrad),
    )
