"""What an arm needs on named hardware, *modelled*: memory of a device, whether it fits, and GPU-hours.

The peak memory of a training step, by part, is the largest of the step's moments: the loss, each stage of
each block's backward pass, and the embedding. Each tensor is counted that a block of
``ablate.models.decoder`` keeps by torch's autograd, or that a linear layer's GEMMs allocate
(``ablate.layers.linear`` and the back ends). Two operations differ by device: attention is written out with
its scores on the CPU and fused on a GPU; the root mean square norm is fused on a GPU only. ``torch.compile``
may keep less than counted here. Several devices (FSDP2) share weights, gradients and moments evenly; two
blocks at a time are gathered, and the weights outside the blocks for the whole step.
``docs/planning.md`` says what is not counted. A test compares the result with the measured peak on the CPU.

GPU-hours are ``speed.token_time`` times the run's tokens, with the range of a step's time. Evaluation counts
as forward passes, and recomputed activations as one more forward pass. GPU-hours sum over all devices of a
run. They leave out communication, launches, data and checkpoints. Emulated formats have no GPU-hours.

How it fails: unknown hardware is a ``KeyError``; an arm with its own model or trainer gives None.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Literal, NamedTuple

from ablate.modelled.hardware import PEAKS
from ablate.modelled.speed import (
    FORWARD,
    Range,
    has_unit,
    operand_bytes,
    seconds_range,
    token_time,
    workload_of,
)
from ablate.recipes import Recipe, row_group
from ablate.recipes.place import phases_of
from ablate.run.architecture import HEAD, layer_places, linear_layers, model_size
from ablate.run.schedule import evaluated_in, plan_steps

if TYPE_CHECKING:
    from ablate.modelled.hardware import Peaks
    from ablate.recipes import GemmPolicy, LayerRecipe, OperandPolicy
    from ablate.run.config import ArmConfig, ModelConfig, ResourcesConfig

Part = Literal["loss", "blocks", "embedding"]
Memory = Counter[str]
"""Bytes on one device by purpose (``PURPOSES``)."""

PURPOSES = ("weights", "gradients", "optimizer", "activations", "quantised")
"""``weights`` includes their bf16 and gathered copies; ``gradients`` are those of weights; ``optimizer`` has
AdamW's two moments and what de-oscillation keeps; ``activations`` includes their gradients and the logits;
``quantised`` has the copies of operands in low precision (under emulation their dequantised values)."""
_BF16, _FP32, _INT64 = 2, 4, 8

FITS_SHARE = 0.9
"""Usable share of a device's memory: the rest is for uncounted parts and the allocator's losses."""

CPU = "cpu"


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMemory:
    """The memory at the peak of a step, and ``at``, the part of the step with the peak.

    ``largest_copies``: the largest bytes of quantised copies at any moment, not only at the peak.
    """

    peak: Memory
    at: Part
    largest_copies: int


@dataclass(frozen=True, kw_only=True, slots=True)
class OnHardware:
    """One arm on one kind of hardware.

    ``capacity_bytes`` and ``fits`` are None for a CPU. ``gpu_hours`` (of one run), with their 95 % range, are
    None where the hardware has no unit for one of the arm's formats.
    """

    memory: StepMemory
    capacity_bytes: int | None
    fits: bool | None
    gpu_hours: Range | None


@cache  # one `ablate plan` asks several times, of thousands of arms
def on_hardware(config: ArmConfig, resources: ResourcesConfig, hardware: str) -> OnHardware | None:
    """Model what an arm needs on ``hardware`` (of ``PEAKS``, or ``CPU``); None for the user's own code."""
    if not config.model.is_built_in or config.trainer is not None:
        return None
    where = None if hardware == CPU else hardware
    memory = step_memory(config, resources, hardware=where)
    if where is None:
        return OnHardware(memory=memory, capacity_bytes=None, fits=None, gpu_hours=None)
    training = config.training
    counts = plan_steps(training, resources.devices_per_run)
    work = replace(workload_of(config), devices=resources.devices_per_run)
    gpu_hours = None
    if (time := token_time(work, config.recipe, hardware)) is not None:
        forward = time.of(*FORWARD)
        twice = forward if resources.activation_checkpointing else 0.0
        in_bf16 = token_time(work, Recipe(), hardware)
        assert in_bf16 is not None  # every hardware multiplies in bf16
        passes = {"recipe": forward, "bf16": in_bf16.of(*FORWARD)}
        evaluation = counts.evals * training.eval_tokens * sum(passes[one] for one in evaluated_in(config))
        seconds = counts.tokens * (time.total + twice) + evaluation
        gpu_hours = seconds_range(time).times(seconds / time.total / 3600)
    capacity = round(PEAKS[hardware].capacity * 1e9)
    fits = memory.peak.total() <= FITS_SHARE * capacity
    return OnHardware(memory=memory, capacity_bytes=capacity, fits=fits, gpu_hours=gpu_hours)


def step_memory(config: ArmConfig, resources: ResourcesConfig, *, hardware: str | None) -> StepMemory:
    """Model the peak memory of a step on one device of a run.

    ``config`` must have a built-in model. The phase of its recipe with the largest memory counts.
    ``hardware`` is a name of ``PEAKS``, or None for the CPU.
    """
    model, training, recipe = config.model, config.training, config.recipe
    peaks = None if hardware is None else PEAKS[hardware]
    layers = {layer.name: layer for layer in linear_layers(model, config.vocab_size)}
    phases = {name: phases_of(recipe, place) for name, place in layer_places(tuple(layers.values())).items()}
    devices, twice = resources.devices_per_run, resources.activation_checkpointing
    is_sharded = devices > 1
    sequences = training.micro_batch_size or max(1, training.batch_size // devices)
    tokens = sequences * training.seq_len
    multiples = [row_group(one.recipe) for name in phases if ".experts." in name for one in phases[name]]
    block = _block(model, sequences, training.seq_len, max(multiples, default=1), on_gpu=peaks is not None)
    width = _BF16 * tokens * model.width
    kept = width if twice else block.kept  # per block, until its backward pass
    logits = tokens * config.vocab_size
    master = _FP32 if training.master_weights == "fp32" else _BF16
    # A block's weights are gathered in bf16, but not with experts: their router needs fp32.
    at_use = _BF16 if is_sharded and model.experts is None else master
    parameters = model_size(model, vocab_size=config.vocab_size, seq_len=training.seq_len).parameters
    table = config.vocab_size * model.width
    outside = table * (1 if model.tied_head else 2) + model.width
    outside += training.seq_len * model.width if model.architecture == "gpt" else 0
    of_block = (parameters - outside) // model.layers
    of_block_gradients = master * of_block // devices
    # A tied head's gradient waits for the embedding's; a sharded head's waits for the end of the pass.
    waiting = master * table if model.tied_head or is_sharded else 0
    of_head = master * table - waiting
    # Gradients are copied together to be reduced, and the result is added; gloo makes another copy.
    reduced = is_sharded * (_FP32 if training.reduction == "fp32" else _BF16) * (1 if peaks else 2)
    followed = 0  # by de-oscillation: two sums, the last value and its quantised one of each weight
    if recipe.deoscillate is not None:
        followed = sum(
            layer.inputs * layer.outputs
            for name, layer in layers.items()
            if any(one.recipe.fprop.right.has_fixed_grid for one in phases[name])
        )
    held = Memory(
        weights=master * (parameters // devices + is_sharded * outside),
        optimizer=2 * master * parameters // devices + (3 * _FP32 + master) * followed // devices,
    )
    accumulates = training.batch_size > sequences * devices
    moments: list[tuple[Part, Memory]] = []

    def note(
        at: Part, activations: int, *, finished: int = 0, working: int = 0, layer: str | None = None,
        rows: int = tokens, element: int = master, gathered: int = 0,
    ) -> None:  # fmt: skip
        """Note a moment, or those of a layer's Dgrad and Wgrad for ``rows`` rows, in every phase.

        ``finished``: bytes of this pass's final gradients; if passes accumulate, all gradients exist already.
        ``working``: bytes of all other gradients. ``element``: bytes of a weight as the layer receives it.
        ``gathered``: bytes of weights.
        """
        gradients = working + (master * parameters // devices if accumulates else finished)
        here = held + Memory(weights=gathered, gradients=gradients, activations=activations)
        if layer is None:
            moments.append((at, here))
            return
        shape = layers[layer]
        for phase in phases[layer]:
            of_gemms = _gemm_moments(phase.recipe, rows, shape.outputs, shape.inputs, element, peaks)
            moments.extend((at, here + one) for one in of_gemms)

    # From the loss to the last block everything is kept, and the logits exist.
    above = model.layers * kept + block.norm + width  # the last norm, the head's input
    # Log-softmax in fp32, kept, and the gradients before and after it; the second in bf16.
    note("loss", above + 3 * _FP32 * logits)
    note("loss", above + (_FP32 + _BF16) * logits)
    note("loss", above + _BF16 * logits, layer=HEAD)
    note("loss", model.layers * kept + block.norm_backward, finished=of_head, working=waiting)
    for done, index in enumerate(reversed(range(model.layers))):
        # Of the block before, while its gradients are reduced.
        before = (reduced * of_block + is_sharded * of_block_gradients) if done else 0
        own = 0  # gradients of this block
        for live, name, rows in block.stages:
            layer = name and f"blocks.{index}.{name}"
            note(
                "blocks", index * kept + twice * width + live, layer=layer, rows=rows, element=at_use,
                finished=of_head + done * of_block_gradients + (0 if is_sharded else own),
                working=waiting + before + is_sharded * own, gathered=is_sharded * 2 * at_use * of_block,
            )  # fmt: skip
            if layer is not None:
                own += at_use * layers[layer].inputs * layers[layer].outputs
    # The embedding's gradient in bf16, and its cast to the weights' dtype.
    note(
        "embedding", width, finished=of_head + model.layers * of_block_gradients,
        working=waiting + (_BF16 + master) * table + reduced * outside,
    )  # fmt: skip
    at, peak = max(moments, key=lambda found: found[1].total())
    return StepMemory(peak=peak, at=at, largest_copies=max(one["quantised"] for _, one in moments))


class _Stage(NamedTuple):
    """A moment of a block's backward pass: the bytes of the block alive, and the layer whose GEMMs run.

    ``live`` counts kept tensors that are still needed, and gradients of activations. It excludes the memory
    that the GEMMs of ``layer`` (its name within the block) allocate for ``rows`` rows.
    """

    live: int
    layer: str | None = None
    rows: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class _Block:
    """A block: the bytes that it keeps, and the stages of its backward pass in order.

    ``norm``: bytes that a norm keeps in addition to its result. ``norm_backward``: bytes alive in a norm's
    backward pass: kept tensors, gradients and their products.
    """

    kept: int
    stages: list[_Stage]
    norm: int
    norm_backward: int


def _block(model: ModelConfig, sequences: int, seq_len: int, rows_multiple: int, *, on_gpu: bool) -> _Block:
    """Count a block for some sequences of ``seq_len`` tokens.

    ``rows_multiple``: the number of rows of an expert's input is padded to a multiple of this.
    """
    is_gpt, tokens = model.architecture == "gpt", sequences * seq_len
    width = _BF16 * tokens * model.width  # bytes of a matrix with a row for each token
    norm, norm_backward = width + _FP32 * tokens, 3 * width + _FP32 * tokens
    if not is_gpt and not on_gpu:  # in fp32: the input and the normalised input
        norm, norm_backward = 4 * width, 11 * width
    # Of the feed-forward's inner matrices these are alive. GPT keeps the first layer's result and the second
    # layer's input, and has the gradients before and after GELU; SwiGLU keeps gate, up, silu(gate) and their
    # product, and has the product's gradient and those of its two factors.
    down, between, up = (2, 3, 1) if is_gpt else (4, 6, 2)

    def dense(name: str, rows: int, below: int) -> list[_Stage]:
        inner = _BF16 * rows * model.ffn
        return [
            _Stage(below + down * inner, f"{name}.down", rows),
            _Stage(below + between * inner),
            _Stage(below + up * inner, f"{name}.{'up' if is_gpt else 'gate_up'}", rows),
        ]

    # Attention and its norm.
    kv_heads = model.heads if model.kv_heads is None else model.kv_heads
    keys = _BF16 * tokens * kv_heads * (model.width // model.heads)
    all_heads = width + 2 * keys
    rotated = 0 if is_gpt else width + keys
    below = norm + width  # the norm, and the input of q, k and v
    if on_gpu:
        # v (and GPT's q and k) are views of the whole result of one layer, which therefore stays in memory.
        core = all_heads + rotated + _FP32 * sequences * model.heads * seq_len
        backward = core + width + width + 2 * width + 2 * keys  # out and its gradient, dq in fp32, dk, dv
    else:
        # Batched products keep copies of q, k and v, except for a single sequence; then each key and value
        # head is still copied for every head that shares it.
        one = rotated + (2 * width if keys < width else all_heads)
        scores = _BF16 * sequences * model.heads * seq_len**2
        core = (3 * width if sequences > 1 else one) + scores
        backward = core + 2 * width + 2 * scores  # of out and v, of the probabilities and the scores
    kept = below + core + width
    attention = [  # the gradient that flows past it, its own, then that of its norm
        _Stage(width + kept, "attention.out", tokens),
        _Stage(width + below + backward),
        _Stage(width + below + 2 * width + 2 * all_heads),  # of q, k, v, joined and rotated back
        _Stage(width + below + all_heads, "attention.qkv", tokens),
        _Stage(width + norm_backward),
    ]
    # The feed-forward and its norm, while all of attention is kept.
    past, below = kept + width, norm + width
    if model.experts is None:
        stages = dense("ffn", tokens, past + below)
        kept += below + down * _BF16 * tokens * model.ffn
    else:  # experts share the tokens evenly
        seen = tokens * min(model.experts_per_token, model.experts) // model.experts
        filled = seen + (rows_multiple - 1) // 2
        taken, padded = _BF16 * seen * model.width, _BF16 * filled * model.width
        # Per expert: its padded input, its result, the weighted result, and the indices of its tokens.
        expert = down * _BF16 * filled * model.ffn + 2 * padded + taken + 2 * _INT64 * seen
        below += width + 3 * _FP32 * tokens * model.experts  # the router's input and output, in fp32
        # Gradients of the experts' sum and of their common input; of an expert's input and result.
        flowing = past + below + 2 * width + 2 * padded
        stages = []
        for index in reversed(range(model.experts)):
            stages += dense(f"ffn.experts.{index}", filled, flowing + index * expert)
        stages.append(_Stage(past + below + 3 * width))
        kept += below + model.experts * expert
    stages += [_Stage(past + norm_backward), *attention]
    return _Block(kept=kept, stages=stages, norm=norm, norm_backward=norm_backward)


@lru_cache(maxsize=1024)
def _gemm_moments(
    recipe: LayerRecipe, m: int, n: int, k: int, at_use: int, peaks: Peaks | None
) -> tuple[Memory, ...]:
    """Allocations in the backward pass of a layer with weight [n, k] for m rows, without x and dy.

    ``at_use``: bytes per element of the weight as the layer receives it.
    """
    fprop, dgrad, wgrad = recipe.fprop, recipe.dgrad, recipe.wgrad

    def copy(gemm: GemmPolicy, policy: OperandPolicy, elements: int) -> int:
        """Bytes of an operand's copy for its GEMM, and of its mask."""
        if policy.is_untouched:
            return 0
        each = _FP32 if policy.is_fp32 else _BF16
        if peaks is not None and has_unit(gemm, peaks):
            return round((operand_bytes(policy) + policy.mask) * elements)
        return (each + policy.mask) * elements

    def scratch(gemm: GemmPolicy, elements: int) -> int:
        """Bytes of an emulated GEMM's result before a factor is applied; on a GPU also after it."""
        sides = (gemm.left, gemm.right)
        if peaks is not None and has_unit(gemm, peaks):
            return 0
        if any(side.has_tensor_scale for side in sides):
            return (_BF16 if peaks is None else 2 * _FP32) * elements
        return _BF16 * elements * any(side.prescale != 1 and side.undo == "accumulator" for side in sides)

    def back(forward: OperandPolicy, elements: int, *, doubly: bool) -> int:
        """Bytes for taking a gradient back through a forward operand's quantiser."""
        each = _BF16 + 1 if forward.mask else 0
        rotated = doubly and forward.hadamard
        if peaks is None:
            each += _BF16 if forward.mask or rotated else 0
        elif rotated:
            each += 4 * _FP32
        return each * elements

    cast = 0 if at_use == _BF16 else _BF16 * n * k
    dx, dw = _BF16 * m * k, _BF16 * n * k
    # If an operand of the backward pass was quantised in the forward pass, its copy is made again.
    w_again, x_again = (gemm.right.source != "high_precision" for gemm in (dgrad, wgrad))
    w_copy = copy(fprop, fprop.right, n * k) if w_again else 0
    x_copy = copy(fprop, fprop.left, m * k) if x_again else 0
    in_dgrad = Memory(weights=cast, quantised=copy(dgrad, dgrad.left, m * n) + w_copy, activations=dx)
    kept = w_copy if fprop.right.mask else 0
    copies = copy(wgrad, wgrad.left, m * n) + x_copy + kept
    in_wgrad = Memory(quantised=copies, activations=dx, gradients=dw)
    moments = [
        in_dgrad + Memory(quantised=copy(dgrad, dgrad.right, n * k), activations=scratch(dgrad, m * k)),
        in_dgrad + Memory(activations=back(fprop.left, m * k, doubly=w_again)),
        in_wgrad + Memory(quantised=copy(wgrad, wgrad.right, m * k), gradients=scratch(wgrad, n * k)),
        in_wgrad + Memory(weights=cast, gradients=back(fprop.right, n * k, doubly=x_again)),
    ]
    if at_use != _BF16:
        moments.append(in_wgrad + Memory(weights=cast, gradients=at_use * n * k))
    return tuple(moments)
