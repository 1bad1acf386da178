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

from ablate.modelled.hardware import PEAKS
from ablate.modelled.speed import (
    FORWARD,
    Range,
    emulation_factor,
    gemm_unit,
    operand_bytes,
    seconds_range,
    token_time,
    workload_of,
)
from ablate.recipes import Recipe
from ablate.recipes.place import phases_of
from ablate.run.architecture import HEAD, layer_places, linear_layers, model_size
from ablate.run.schedule import evaluated_in, plan_steps

if TYPE_CHECKING:
    from ablate.modelled.hardware import Peaks
    from ablate.recipes import GemmPolicy, LayerRecipe
    from ablate.run.config import ArmConfig, ModelConfig, ResourcesConfig

Memory = Counter[str]
"""Bytes on one device by purpose (``PURPOSES``)."""

PURPOSES = ("weights", "gradients", "optimizer", "activations", "quantised")
"""``weights`` includes their bf16 and gathered copies; ``gradients`` are those of weights; ``optimizer`` has
AdamW's two moments and what de-oscillation keeps; ``activations`` includes their gradients and the logits;
``quantised`` has the copies of operands in low precision (under emulation their dequantised values)."""
_BF16, _FP32 = 2, 4

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
    gpu_hours: Range | None = None
    is_emulated: bool = False


@cache  # one `ablate plan` asks several times, of thousands of arms
def on_hardware(config: ArmConfig, resources: ResourcesConfig, hardware: str) -> OnHardware | None:
    """Model what an arm needs on ``hardware`` (of ``PEAKS``, or ``CPU``); None for the user's own code."""
    if not config.model.is_built_in or config.trainer is not None:
        return None
    peaks = None if hardware == CPU else PEAKS[hardware]
    memory = step_memory(config, resources, peaks)
    if peaks is None:
        return OnHardware(memory=memory)
    training = config.training
    counts = plan_steps(training, resources.devices_per_run)
    work = replace(workload_of(config), devices=resources.devices_per_run)
    gpu_hours, is_emulated = None, False
    if (time := token_time(work, config.recipe, hardware)) is not None:
        forward = time.of(*FORWARD)
        twice = forward if resources.activation_checkpointing else 0.0
        in_bf16 = token_time(work, Recipe(), hardware)
        assert in_bf16 is not None  # every hardware multiplies in bf16
        passes = {"recipe": forward, "bf16": in_bf16.of(*FORWARD)}
        evaluation = counts.evals * training.eval_tokens * sum(passes[one] for one in evaluated_in(config))
        seconds = counts.tokens * (time.total + twice) + evaluation
        gpu_hours = seconds_range(time).times(seconds / time.total / 3600)
    elif peaks.fp4 is None:
        twin = on_hardware(replace(config, recipe=Recipe()), resources, hardware)
        assert twin is not None
        assert twin.gpu_hours is not None
        is_emulated = True
        gpu_hours = twin.gpu_hours.times(emulation_factor(work, config.recipe))
    capacity = round(peaks.capacity * 1e9)
    fits = memory.total() <= FITS_SHARE * capacity
    return OnHardware(
        memory=memory, capacity_bytes=capacity, fits=fits, gpu_hours=gpu_hours, is_emulated=is_emulated
    )


def step_memory(config: ArmConfig, resources: ResourcesConfig, peaks: Peaks | None) -> Memory:
    """Model the peak memory of a step on one device of a run.

    On CPUs it is at most 4 % below measured peaks (``benchmarks/memory_model.py``); on two devices 2 of 19
    settings are 20 and 23 % below.
    ``config`` must have a built-in model. The phase of its recipe with the largest memory counts.
    ``peaks`` are those of the hardware; None: of the CPU.
    """
    model, training, recipe = config.model, config.training, config.recipe
    layers = linear_layers(model, config.vocab_size)
    devices, is_sharded = resources.devices_per_run, resources.devices_per_run > 1
    sequences = training.micro_batch_size or max(1, training.batch_size // devices)
    tokens = sequences * training.seq_len
    width, logits = _BF16 * tokens * model.width, tokens * config.vocab_size
    kept, widest = _block(model, sequences, training.seq_len, on_gpu=peaks is not None)
    waiting = width if resources.activation_checkpointing else kept  # in a block for its backward pass
    master = _FP32 if training.master_weights == "fp32" else _BF16
    # A block's weights are gathered in bf16, but not with experts: their router needs fp32.
    at_use = _BF16 if is_sharded and model.experts is None else master
    parameters = model_size(model, vocab_size=config.vocab_size, seq_len=training.seq_len).parameters
    table = config.vocab_size * model.width
    outside = table * (1 if model.tied_head else 2) + model.width
    outside += training.seq_len * model.width if model.architecture == "gpt" else 0
    of_block = (parameters - outside) // model.layers
    # Gradients are copied together to be reduced, and the result is added; gloo makes another copy.
    reduced = is_sharded * (_FP32 if training.reduction == "fp32" else _BF16) * (1 if peaks else 2)

    of_gemms: dict[bool, list[Memory]] = {True: [], False: []}  # of the head, and of blocks
    followed = 0  # by de-oscillation: two sums, the last value and its quantised one of each weight
    for layer, place in zip(layers, layer_places(layers).values(), strict=True):
        phases = [phase.recipe for phase in phases_of(recipe, place)]
        if recipe.deoscillate is not None and any(one.fprop.right.has_fixed_grid for one in phases):
            followed += layer.inputs * layer.outputs
        rows = tokens
        if model.experts is not None and ".experts." in layer.name:
            rows = tokens * min(model.experts_per_token, model.experts) // model.experts
        of_gemms[layer.name == HEAD] += (
            _gemms(one, rows, layer.outputs, layer.inputs, at_use, peaks) for one in set(phases)
        )
    head, gemms = (max(of_gemms[is_head], key=Memory.total) for is_head in (True, False))
    all_gradients = master * parameters // devices
    at_first = all_gradients if training.batch_size > sequences * devices else 0  # passes accumulate
    # The logits in fp32, their gradient, and log-softmax; then the gradient in bf16 for the head's GEMMs.
    loss = Memory(activations=(model.layers - 1) * waiting + kept + 3 * width, gradients=at_first)
    moments = [
        loss + Memory(activations=3 * _FP32 * logits),
        loss + Memory(activations=_BF16 * logits) + head,
        Memory(activations=width, gradients=all_gradients + (_BF16 + master) * table + reduced * outside),
    ]
    # The backward pass of the last block, of the one before and of the first.
    for done in {0, min(1, model.layers - 1), model.layers - 1}:
        gradients = at_first or master * (table + done * of_block // devices)
        if is_sharded or not at_first:
            gradients += at_use * of_block
        if is_sharded and done:  # the block after is still being reduced
            gradients += reduced * of_block + master * of_block // devices
        here = Memory(
            weights=is_sharded * 2 * at_use * of_block,
            activations=(model.layers - 1 - done) * waiting + 2 * width,
            gradients=gradients,
        )
        moments += [here + Memory(activations=widest), here + Memory(activations=kept) + gemms]
    held = Memory(
        weights=master * (parameters // devices + is_sharded * outside),
        optimizer=2 * master * parameters // devices + (3 * _FP32 + master) * followed // devices,
    )
    return held + max(moments, key=Memory.total)


def _block(model: ModelConfig, sequences: int, seq_len: int, *, on_gpu: bool) -> tuple[int, int]:
    """Count the bytes that a block keeps, and those at the widest moment of its backward pass.

    The second are without what its GEMMs allocate and without the gradients of its result and its input.
    """
    is_gpt, tokens = model.architecture == "gpt", sequences * seq_len
    width = _BF16 * tokens * model.width  # bytes of a matrix with a row for each token
    norm = width if is_gpt or on_gpu else 4 * width  # kept besides its result
    kv_heads = model.heads if model.kv_heads is None else model.kv_heads
    keys = _BF16 * tokens * kv_heads * (model.width // model.heads)
    # Attention: queries, keys and values, of which all but the values are rotated. Where it is not fused,
    # products keep copies instead, as wide as the queries, and the scores.
    taken, scores = width + 2 * keys + (0 if is_gpt else width + keys), 0
    if not on_gpu:
        taken, scores = 3 * width, _BF16 * sequences * model.heads * seq_len**2
    attention = norm + width + taken + scores + width
    # The feed-forward: GPT keeps the matrices before and after GELU; SwiGLU gate, up, silu(gate) and their
    # product. Backward, GPT has one gradient besides and SwiGLU two.
    inner, more = (2, 1) if is_gpt else (4, 2)
    matrix = _BF16 * tokens * model.ffn
    feed_forward, at_once = norm + width, 1
    if model.experts is not None:  # they share the tokens evenly
        each, at_once = min(model.experts_per_token, model.experts), model.experts
        matrix *= each
        # Each token's input and weighted result of each of its experts, and the router's matrices in fp32.
        feed_forward += width + 3 * each * width + 3 * _FP32 * tokens * model.experts
    kept = attention + feed_forward + inner * matrix
    return kept, max(kept + more * matrix // at_once, attention + 3 * width + 2 * scores)


@cache
def _gemms(recipe: LayerRecipe, m: int, n: int, k: int, at_use: int, peaks: Peaks | None) -> Memory:
    """Count what the backward pass of a layer with weight [n, k] allocates for m rows, without x and dy.

    ``at_use``: bytes per element of the weight as the layer receives it.
    """

    def copies(gemm: GemmPolicy, left: int, right: int) -> int:
        """Bytes of the operands' copies and masks, for operands with so many elements."""
        # Multiplied in their packed form.
        is_native = peaks is not None and gemm_unit(gemm, peaks) not in (None, "gemm16")
        return sum(
            round((operand_bytes(policy) if is_native else _FP32 if policy.is_fp32 else _BF16) * elements)
            + policy.mask * elements
            for policy, elements in ((gemm.left, left), (gemm.right, right))
            if not policy.is_untouched
        )

    quantised = max(copies(recipe.dgrad, m * n, n * k), copies(recipe.wgrad, m * n, m * k))
    cast = 0 if at_use == _BF16 else n * k
    # A gradient goes back through a rotated copy of x in fp32.
    is_back = recipe.fprop.left.hadamard and recipe.dgrad.right.source != "high_precision" and peaks
    dx = (_BF16 + 4 * _FP32 * bool(is_back)) * m * k
    gradients = _BF16 * n * k + at_use * cast
    return Memory(weights=_BF16 * cast, gradients=gradients, activations=dx, quantised=quantised)
