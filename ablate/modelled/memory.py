"""*Modelled* peak memory of a training step on one device, by part, so that users know in advance what fits.

The peak is the largest of the step's moments: the loss, each stage of each block's backward pass, and the
embedding. Counted are, tensor by tensor, what a block of ``ablate.models.decoder`` keeps by torch's autograd,
and what a linear layer's GEMMs allocate (``ablate.layers.linear`` and the back ends). Two operations differ
by device: attention is written out with its scores on the CPU and fused on a GPU; the root mean square norm
is fused on a GPU only. ``torch.compile`` may keep less than counted here. Several devices (FSDP2) share
weights, gradients and moments evenly; two blocks at a time are gathered, and the weights outside the blocks
for the whole step.
``docs/planning.md`` says what is not counted. A test compares the result with the measured peak on the CPU.

Only the built-in models are supported. How it fails: unknown hardware raises ``KeyError``.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

from ablate.modelled.hardware import PEAKS
from ablate.modelled.speed import has_unit, operand_bytes
from ablate.models.arithmetic import model_size
from ablate.recipes import GEMMS, row_group
from ablate.recipes.place import phases_of
from ablate.run.architecture import HEAD, layer_places, linear_layers

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ablate.modelled.hardware import Peaks
    from ablate.recipes import Gemm, LayerRecipe, OperandPolicy
    from ablate.run.config import ArmConfig, ModelConfig, ResourcesConfig

Part = Literal["loss", "blocks", "embedding"]

_BF16, _FP32, _INT64 = 2, 4, 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Bytes on one device by purpose.

    ``weights`` includes their bf16 and gathered copies; ``gradients`` are those of weights; ``optimizer``
    holds AdamW's two moments and what de-oscillation keeps; ``activations`` includes their gradients and the
    logits; ``quantised`` holds the copies of operands in low precision (under emulation their dequantised
    values).
    """

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    quantised: int = 0

    @property
    def total(self) -> int:
        """The sum of all parts."""
        return sum(getattr(self, field.name) for field in fields(self))

    def __add__(self, other: Memory) -> Memory:
        names = [field.name for field in fields(self)]
        return Memory(**{name: getattr(self, name) + getattr(other, name) for name in names})


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMemory:
    """The memory at the peak of a step, and ``at``, the part of the step with the peak.

    ``largest_copies``: the largest bytes of quantised copies at any moment, not only at the peak.
    """

    peak: Memory
    at: Part
    largest_copies: int


def step_memory(config: ArmConfig, resources: ResourcesConfig, *, hardware: str | None) -> StepMemory:
    """Return the peak memory of a step on one device of a run.

    ``config`` has a built-in model; of its recipe the phase with the largest memory counts. ``hardware`` is a
    name of ``PEAKS``, or None for the CPU.
    """
    step = _Step(config, resources, hardware)
    parts: dict[Part, list[Memory]] = {
        "loss": list(step.loss()),
        "blocks": list(step.blocks()),
        "embedding": [step.embedding()],
    }
    moments = [(at, moment) for at, found in parts.items() for moment in found]
    at, peak = max(moments, key=lambda found: found[1].total)
    return StepMemory(peak=peak, at=at, largest_copies=max(moment.quantised for _, moment in moments))


class _Step:
    """The moments of one training step on one device."""

    def __init__(self, config: ArmConfig, resources: ResourcesConfig, hardware: str | None) -> None:
        model, vocab_size, training, recipe = config.model, config.vocab_size, config.training, config.recipe
        self._model, self._recipe = model, recipe
        self._peaks = None if hardware is None else PEAKS[hardware]
        self._layers = {layer.name: layer for layer in linear_layers(model, vocab_size)}
        self._places = layer_places(self._layers.values())
        devices = resources.devices_per_run
        sequences = training.micro_batch_size or max(1, training.batch_size // devices)
        self._accumulates = training.batch_size > sequences * devices
        self._twice = resources.activation_checkpointing
        self._pass = _Pass(
            model=model,
            sequences=sequences,
            seq_len=training.seq_len,
            on_gpu=hardware is not None,
            rows_multiple=max(
                (
                    row_group(phase.recipe)
                    for name, place in self._places.items()
                    if ".experts." in name
                    for phase in phases_of(recipe, place)
                ),
                default=1,
            ),
        )
        kept, self._stages = _block_stages(self._pass)
        self._kept = self._pass.rows(model.width) if self._twice else kept  # per block, until its backward
        self._logits = sequences * training.seq_len * vocab_size
        self._sharded = devices > 1
        self._master = _FP32 if training.master_weights == "fp32" else _BF16
        # A block's weights are gathered in bf16, but not with experts: their router needs fp32.
        self._in_block = _BF16 if self._sharded and model.experts is None else self._master
        parameters = model_size(model, vocab_size=vocab_size, seq_len=training.seq_len).parameters
        self._table, self._tied = vocab_size * model.width, model.tied_head
        self._head = self._master * self._table
        outside = self._table * (1 if model.tied_head else 2) + model.width
        outside += training.seq_len * model.width if model.architecture == "gpt" else 0
        of_block = (parameters - outside) // model.layers
        self._gradients = self._master * parameters // devices
        self._gradients_of_block = self._master * of_block // devices
        self._gathered = Memory(weights=2 * self._in_block * of_block if self._sharded else 0)
        # A tied head's gradient waits for the embedding's; a sharded head's waits for the end of the pass.
        self._waiting = self._head if self._tied or self._sharded else 0
        # Gradients are copied together to be reduced, and the result is added; gloo makes another copy.
        reduced = (_FP32 if training.reduction == "fp32" else _BF16) * (1 if self._pass.on_gpu else 2)
        self._reducing_block = self._sharded * (reduced * of_block + self._gradients_of_block)
        self._reducing_outside = self._sharded * reduced * outside
        followed = 0  # by de-oscillation: two sums, the last value and its quantised one of each weight
        if recipe.deoscillate is not None:
            followed = sum(
                layer.inputs * layer.outputs
                for name, layer in self._layers.items()
                if any(p.recipe.fprop.right.has_fixed_grid for p in phases_of(recipe, self._places[name]))
            )
        self._held = Memory(
            weights=self._master * (parameters // devices + (outside if self._sharded else 0)),
            optimizer=2 * self._master * parameters // devices
            + (3 * _FP32 + self._master) * followed // devices,
        )

    def loss(self) -> Iterator[Memory]:
        """Yield the moments from the loss to the last block: everything is kept, and the logits exist."""
        work = self._pass
        kept = self._model.layers * self._kept
        above = kept + work.norm + work.rows(self._model.width)  # the last norm, and the head's input
        # Log-softmax in fp32, kept, and the gradients before and after it; the second in bf16.
        yield self._at(above + 3 * _FP32 * self._logits)
        yield self._at(above + (_FP32 + _BF16) * self._logits)
        for moment in self._gemms(HEAD, work.tokens)[0]:
            yield self._at(above + _BF16 * self._logits) + moment
        finished = self._head - self._waiting
        yield self._at(kept + _norm_backward(work), finished=finished, working=self._waiting)

    def blocks(self) -> Iterator[Memory]:
        """Yield the moments of the blocks' backward pass."""
        last = self._model.layers - 1
        for index in reversed(range(self._model.layers)):
            below = index * self._kept + self._twice * self._pass.rows(self._model.width)
            finished = self._head - self._waiting + (last - index) * self._gradients_of_block
            reducing = self._reducing_block if index < last else 0  # the previous block
            in_block = 0
            for stage in self._stages:
                here = self._gathered + self._at(
                    below + stage.live,
                    finished=finished + (0 if self._sharded else in_block),
                    working=self._waiting + reducing + (in_block if self._sharded else 0),
                )
                if stage.layer is None:
                    yield here
                    continue
                moments, gradient = self._gemms(f"blocks.{index}.{stage.layer}", stage.rows)
                for moment in moments:
                    yield here + moment
                in_block += gradient

    def embedding(self) -> Memory:
        """Return the last moment: the embedding's gradient in bf16, and its cast to the weights' dtype."""
        finished = self._head - self._waiting + self._model.layers * self._gradients_of_block
        working = self._waiting + (_BF16 + self._master) * self._table + self._reducing_outside
        return self._at(self._pass.rows(self._model.width), finished=finished, working=working)

    def _at(self, activations: int, *, finished: int = 0, working: int = 0) -> Memory:
        """Return a moment without the GEMMs' allocations.

        ``finished``: bytes of this pass's final gradients; if passes accumulate, all gradients exist already.
        ``working``: bytes of all other gradients.
        """
        gradients = working + (self._gradients if self._accumulates else finished)
        return self._held + Memory(gradients=gradients, activations=activations)

    def _gemms(self, name: str, rows: int) -> tuple[list[Memory], int]:
        """Return the moments of a layer's Dgrad and Wgrad without duplicates, and its gradient's bytes."""
        layer = self._layers[name]
        at_use = self._master if layer.is_head else self._in_block
        moments = [
            moment
            for phase in phases_of(self._recipe, self._places[name])
            for moment in _moments(phase.recipe, rows, layer.outputs, layer.inputs, at_use, self._peaks)
        ]
        return moments, at_use * layer.inputs * layer.outputs


@dataclass(frozen=True, kw_only=True, slots=True)
class _Pass:
    """One forward and backward pass on a device: ``sequences`` of ``seq_len`` tokens."""

    model: ModelConfig
    sequences: int
    seq_len: int
    on_gpu: bool
    rows_multiple: int = 1
    """The number of rows of an expert's input is padded to a multiple of this."""

    @property
    def tokens(self) -> int:
        """Tokens of the pass."""
        return self.sequences * self.seq_len

    def rows(self, width: int) -> int:
        """Return the bytes of a bf16 matrix of this width with one row per token."""
        return _BF16 * self.tokens * width

    @property
    def norm(self) -> int:
        """Bytes that a norm keeps in addition to its result."""
        inputs = self.rows(self.model.width)
        if self.model.architecture == "llama" and not self.on_gpu:
            return 4 * inputs  # the input and the normalised input, both in fp32
        return inputs + _FP32 * self.tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class _Stage:
    """A moment of a block's backward pass: the bytes of the block alive, and the layer whose GEMMs run.

    ``live`` counts kept tensors that are still needed, and gradients of activations. It excludes the memory
    that the GEMMs of ``layer`` (its name within the block) allocate for ``rows`` rows.
    """

    live: int
    layer: str | None = None
    rows: int = 0


def _block_stages(work: _Pass) -> tuple[int, list[_Stage]]:
    """Return the bytes that a block keeps, and the stages of its backward pass in order."""
    attention_kept, attention_stages = _attention(work)
    residual = work.rows(work.model.width)  # the gradient that flows past both halves
    if work.model.experts is None:  # SwiGLU or GELU after its norm
        kept, stages = _dense(work.model, "ffn", work.tokens, work.rows(work.model.ffn))
        in_norm = work.norm + residual
        ffn_kept, ffn_stages = in_norm + kept, [*_above(in_norm, stages), _Stage(live=_norm_backward(work))]
    else:
        ffn_kept, ffn_stages = _experts(work)
    below = attention_kept + residual
    return attention_kept + ffn_kept, [*_above(below, ffn_stages), *_above(residual, attention_stages)]


def _norm_backward(work: _Pass) -> int:
    """Return the bytes alive in a norm's backward pass: kept tensors, gradients and their products."""
    inputs = work.rows(work.model.width)
    if work.model.architecture == "llama" and not work.on_gpu:
        return work.norm + inputs + 3 * 2 * inputs  # in fp32
    return work.norm + 2 * inputs


def _above(below: int, stages: list[_Stage]) -> list[_Stage]:
    """Return stages with more bytes alive."""
    return [replace(stage, live=below + stage.live) for stage in stages]


def _dense(model: ModelConfig, name: str, rows: int, ffn: int) -> tuple[int, list[_Stage]]:
    """Return the bytes kept in addition to the input, and the stages down to the input's gradient.

    ``ffn``: bytes of a matrix with these rows and the inner width. Kept: the first layer's result and the
    second layer's input; SwiGLU also keeps silu(gate).
    """
    if model.architecture == "gpt":
        return 2 * ffn, [
            _Stage(live=2 * ffn, layer=f"{name}.down", rows=rows),
            _Stage(live=3 * ffn),  # the first layer's result, and the gradients before and after GELU
            _Stage(live=ffn, layer=f"{name}.up", rows=rows),
        ]
    return 4 * ffn, [
        _Stage(live=4 * ffn, layer=f"{name}.down", rows=rows),
        _Stage(live=6 * ffn),  # gate, up and silu(gate), the product's gradient and those of its two factors
        _Stage(live=2 * ffn, layer=f"{name}.gate_up", rows=rows),
    ]


def _experts(work: _Pass) -> tuple[int, list[_Stage]]:
    """Return the bytes and stages of a mixture of experts and its norm; experts share the tokens evenly."""
    model = work.model
    assert model.experts is not None
    width = work.rows(model.width)
    seen = work.tokens * min(model.experts_per_token, model.experts) // model.experts
    filled = seen + (work.rows_multiple - 1) // 2
    taken, padded = _BF16 * seen * model.width, _BF16 * filled * model.width
    inner = _BF16 * filled * model.ffn
    dense, _ = _dense(model, "", filled, inner)
    # Per expert: its padded input, its result, the weighted result, and the indices of its tokens.
    expert = dense + 2 * padded + taken + 2 * _INT64 * seen
    router = 2 * width + 3 * _FP32 * work.tokens * model.experts  # the router's input and output, in fp32
    below = work.norm + router
    # Gradients of the experts' sum and of their common input; of an expert's input and result.
    flowing = 2 * width + 2 * padded
    stages = [
        stage
        for index in reversed(range(model.experts))
        for stage in _above(
            below + index * expert + flowing, _dense(model, f"ffn.experts.{index}", filled, inner)[1]
        )
    ]
    stages += [_Stage(live=below + 3 * width), _Stage(live=_norm_backward(work))]
    return below + model.experts * expert, stages


def _attention(work: _Pass) -> tuple[int, list[_Stage]]:
    """Return the bytes that attention and its norm keep, and its stages down to the block's input."""
    model, width = work.model, work.rows(work.model.width)
    head_dim = model.width // model.heads
    kv_heads = model.heads if model.kv_heads is None else model.kv_heads
    keys = work.rows(kv_heads * head_dim)
    all_heads = width + 2 * keys
    rotated = width + keys if model.architecture == "llama" else 0
    below = work.norm + width  # the norm, and the input of q, k and v
    if work.on_gpu:
        # v (and GPT's q and k) are views of the whole result of one layer, which therefore stays in memory.
        core = all_heads + rotated + _FP32 * work.sequences * model.heads * work.seq_len
        backward = core + width + width + 2 * width + 2 * keys  # out and its gradient, dq in fp32, dk, dv
    else:
        # Batched products keep copies of q, k and v, except for a single sequence; then each key and value
        # head is still copied for every head that shares it.
        one = rotated + (2 * width if keys < width else all_heads)
        scores = _BF16 * work.sequences * model.heads * work.seq_len**2
        core = (3 * width if work.sequences > 1 else one) + scores
        backward = core + 2 * width + 2 * scores  # of out and v, of the probabilities and the scores
    return below + core + width, [
        _Stage(live=below + core + width, layer="attention.out", rows=work.tokens),
        _Stage(live=below + backward),
        _Stage(live=below + 2 * width + 2 * all_heads),  # gradients of q, k, v, joined and rotated back
        _Stage(live=below + all_heads, layer="attention.qkv", rows=work.tokens),
        _Stage(live=_norm_backward(work)),
    ]


@lru_cache(maxsize=1024)
def _moments(
    recipe: LayerRecipe, m: int, n: int, k: int, at_use: int, peaks: Peaks | None
) -> tuple[Memory, ...]:
    """Return the allocations in the backward pass of a layer with weight [n, k] for m rows, beside x and dy.

    ``at_use``: bytes per element of the weight as the layer receives it.
    """
    native = {name: peaks is not None and has_unit(recipe.gemm(name), peaks) for name in GEMMS}

    def copy(gemm: Gemm, policy: OperandPolicy, elements: int) -> int:
        """Return the bytes of an operand's copy for its GEMM."""
        if policy.is_untouched:
            return 0
        emulated = _FP32 if policy.is_fp32 else _BF16
        return round(((operand_bytes(policy) if native[gemm] else emulated) + policy.mask) * elements)

    def scratch(gemm: Gemm, elements: int) -> int:
        """Return what an emulated GEMM's result takes before a factor is applied; on a GPU and after it."""
        sides = (recipe.gemm(gemm).left, recipe.gemm(gemm).right)
        if native[gemm]:
            return 0
        if any(side.has_tensor_scale for side in sides):
            return (_BF16 if peaks is None else 2 * _FP32) * elements
        is_scaled = any(side.prescale != 1 and side.undo == "accumulator" for side in sides)
        return _BF16 * is_scaled * elements

    def back(forward: OperandPolicy, *, doubly: bool) -> int:
        """Return the bytes per element for taking a gradient back through a forward operand's quantiser."""
        masked = _BF16 + 1 if forward.mask else 0
        rotated = doubly and forward.hadamard
        if peaks is None:
            return masked + (_BF16 if forward.mask or rotated else 0)
        return masked + (4 * _FP32 if rotated else 0)

    cast = 0 if at_use == _BF16 else _BF16 * n * k
    dgrad, wgrad, fprop = recipe.dgrad, recipe.wgrad, recipe.fprop
    dx, dw = _BF16 * m * k, _BF16 * n * k

    doubly = dgrad.right.source != "high_precision"
    copies = copy("dgrad", dgrad.left, m * n) + (copy("fprop", fprop.right, n * k) if doubly else 0)
    in_dgrad = Memory(weights=cast, quantised=copies, activations=dx)
    moments = [
        in_dgrad + Memory(quantised=copy("dgrad", dgrad.right, n * k), activations=scratch("dgrad", m * k)),
        in_dgrad + Memory(activations=back(fprop.left, doubly=doubly) * m * k),
    ]
    kept = copy("fprop", fprop.right, n * k) if doubly and fprop.right.mask else 0
    doubly = wgrad.right.source != "high_precision"
    copies = copy("wgrad", wgrad.left, m * n) + (copy("fprop", fprop.left, m * k) if doubly else 0)
    in_wgrad = Memory(quantised=copies + kept, activations=dx, gradients=dw)
    moments += [
        in_wgrad + Memory(quantised=copy("wgrad", wgrad.right, m * k), gradients=scratch("wgrad", n * k)),
        in_wgrad + Memory(weights=cast, gradients=back(fprop.right, doubly=doubly) * n * k),
    ]
    if at_use != _BF16:
        moments.append(in_wgrad + Memory(weights=cast, gradients=at_use * n * k))
    return tuple(moments)
