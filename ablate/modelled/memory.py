"""*Modelled* peak memory of a training step on one device, by part, so that users know in advance what fits.

The peak is the largest of the step's moments: the loss, each stage of each block's backward pass, and the
embedding. ``activations`` counts the tensors that autograd keeps, this module what a linear layer's GEMMs
allocate (``ablate.layers.linear`` and the back ends). Several devices (FSDP2) share weights, gradients and
moments evenly; two blocks at a time are gathered, and the weights outside the blocks for the whole step.
``docs/planning.md`` says what is not counted. A test compares the result with the measured peak on the CPU.

Only the built-in models are supported. How it fails: unknown hardware raises ``KeyError``.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Literal

from ablate.modelled.activations import Pass, block_stages, norm_backward
from ablate.modelled.hardware import PEAKS
from ablate.modelled.speed import has_unit, operand_bytes
from ablate.models.arithmetic import model_size
from ablate.recipes import GEMMS, row_group
from ablate.recipes.place import phases_of
from ablate.run.architecture import HEAD, layer_places, linear_layers

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ablate.modelled.hardware import Peaks
    from ablate.recipes import Gemm, GemmPolicy, LayerRecipe, OperandPolicy
    from ablate.run.config import ArmConfig, ResourcesConfig

Part = Literal["loss", "blocks", "embedding"]

_BF16, _FP32 = 2, 4


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
        self._pass = Pass(
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
        kept, self._stages = block_stages(self._pass)
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
        self._held = Memory(
            weights=self._master * (parameters // devices + (outside if self._sharded else 0)),
            optimizer=2 * self._master * parameters // devices + self._deoscillation() // devices,
        )

    def _deoscillation(self) -> int:
        """Return the bytes of two sums, the last value and its quantised one of each weight followed."""
        if self._recipe.deoscillate is None:
            return 0
        followed = sum(
            layer.inputs * layer.outputs
            for name, layer in self._layers.items()
            if any(p.recipe.fprop.right.has_fixed_grid for p in phases_of(self._recipe, self._places[name]))
        )
        return (3 * _FP32 + self._master) * followed

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
        yield self._at(kept + norm_backward(work), finished=self._head - self._waiting, working=self._waiting)

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


@lru_cache(maxsize=1024)
def _moments(
    recipe: LayerRecipe, m: int, n: int, k: int, at_use: int, peaks: Peaks | None
) -> tuple[Memory, ...]:
    """Return the allocations in the backward pass of a layer with weight [n, k] for m rows, beside x and dy.

    ``at_use``: bytes per element of the weight as the layer receives it.
    """
    native = {name: peaks is not None and has_unit(recipe.gemm(name), peaks) for name in GEMMS}

    def copy(gemm: Gemm, policy: OperandPolicy, elements: int) -> int:
        return round(_copy_bytes(policy, native=native[gemm]) * elements)

    def scratch(gemm: Gemm, elements: int) -> int:
        return 0 if native[gemm] else _scratch_bytes(recipe.gemm(gemm), on_gpu=peaks is not None) * elements

    back = partial(_back_bytes, on_gpu=peaks is not None)
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


def _copy_bytes(policy: OperandPolicy, *, native: bool) -> float:
    """Return the bytes per element of an operand's copy for its GEMM; 0 if the operand is used unchanged."""
    if policy.is_untouched:
        return 0.0
    if native:
        return operand_bytes(policy) + policy.mask
    return (_FP32 if policy.is_fp32 else _BF16) + policy.mask


def _scratch_bytes(gemm: GemmPolicy, *, on_gpu: bool) -> int:
    """Return the scratch bytes per element of an emulated GEMM's result, before a factor is applied."""
    sides = (gemm.left, gemm.right)
    whole = any(side.has_tensor_scale for side in sides)
    if whole and on_gpu:
        return 2 * _FP32  # in fp32 before and after the factor
    return _BF16 if whole or any(side.prescale != 1 and side.undo == "accumulator" for side in sides) else 0


def _back_bytes(forward: OperandPolicy, *, doubly: bool, on_gpu: bool) -> int:
    """Return the bytes per element for taking a gradient back through a forward operand's quantiser."""
    masked = _BF16 + 1 if forward.mask else 0
    rotated = doubly and forward.hadamard
    if not on_gpu:
        return masked + (_BF16 if forward.mask or rotated else 0)
    return masked + (4 * _FP32 if rotated else 0)
