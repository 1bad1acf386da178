"""The state that the layers of one model share: recipe, back end, and the position of the random streams.

A layer reads the position (step, call, tokens) in its forward pass and saves it as a small tensor. So the
backward pass draws from its own forward's streams, even if the trainer has moved on.

Activation checkpointing runs a region of a model again in the backward pass. The built-in trainer sets the
call itself and moves on after the backward pass, so a recomputed layer finds the position that it had. Other
loops pass ``context_fn=recompute_contexts`` to ``torch.utils.checkpoint``. Without it a recomputation repeats
the only pass whose backward pass is still to come; if there are several, it is a ``RuntimeError``.
"""

from __future__ import annotations

import operator
import warnings
from collections import Counter, defaultdict
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

from ablate.base.errors import UserError
from ablate.recipes.place import LayerPlace, phases_of
from ablate.run.schedule import plan_steps

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator

    from torch import Tensor

    from ablate.backends.protocol import Operand
    from ablate.backends.select import Selection
    from ablate.recipes import Gemm, LayerRecipe, Recipe
    from ablate.recipes.coverage import Coverage
    from ablate.run.config import Fork

EVAL_CALL = 1 << 31
"""First call number of forward passes in evaluation, distinct from all calls in training."""
_REDRAW_STEP = 1 << 31
_REDRAWS = 1 << 10
_MOST_OPEN = 64
_PLACED_ON = ("cuda",)


@dataclass(frozen=True, kw_only=True)
class Position:
    """Optimizer step, forward pass within it (gradient accumulation), and training tokens seen before it.

    ``redraw`` n > 0 is the n-th draw of diagnostics. Values that training draws anew per step or pass then
    come from streams that training never reads; values that it draws once stay the same.
    """

    step: int
    call: int
    tokens: int
    redraw: int = 0

    @property
    def stream_step(self) -> int:
        """The step number used by the random streams."""
        if not self.redraw:
            return self.step
        assert self.redraw < _REDRAWS
        return _REDRAW_STEP + (self.step * _REDRAWS + self.redraw) % _REDRAW_STEP

    def redrawn(self, redraw: int) -> Position:
        """Make the position of a draw of diagnostics; delayed scales do not record what it multiplies."""
        return replace(self, call=EVAL_CALL, redraw=redraw)


@dataclass
class _Region:
    """Note the positions of the layers that run in a ``with`` block, or repeat them. ``used``: how many."""

    positions: dict[Hashable, list[Position]]
    repeats: bool
    used: Counter[Hashable] = field(default_factory=Counter)

    def __enter__(self) -> None:
        self.used.clear()
        _running.set((*_running.get(), self))

    def __exit__(self, *_: object) -> None:
        _running.set(_running.get()[:-1])


_running: ContextVar[tuple[_Region, ...]] = ContextVar("_running", default=())
"""The checkpointed regions that this thread runs, innermost last."""


def recompute_contexts() -> tuple[_Region, _Region]:
    """Make the layers of a checkpointed region draw the same when it is recomputed.

    Pass it to ``torch.utils.checkpoint`` as ``context_fn``. A layer may run several times in a region, and
    regions may be nested and recomputed in any order::

        checkpoint(block, x, use_reentrant=False, context_fn=recompute_contexts)
    """
    positions: dict[Hashable, list[Position]] = {}
    return _Region(positions, repeats=False), _Region(positions, repeats=True)


_recorded: list[RecipeState] | None = None


@contextmanager
def recorded_states() -> Iterator[list[RecipeState]]:
    """Collect all states that are made in this block."""
    global _recorded  # noqa: PLW0603  a process trains one run at a time
    outer = _recorded
    _recorded = []
    try:
        yield _recorded
    finally:
        _recorded = outer


@dataclass
class _Passes:
    """A layer's forward passes: in training within ``step``, in evaluation, those without backward yet."""

    step: int = -1
    training: int = 0
    evaluation: int = 0
    open: set[Position] = field(default_factory=set)


@dataclass(kw_only=True)
class RecipeState:
    """State shared by the layers of one model and advanced by its trainer.

    ``seed`` is a whole number; anything else is a ``ValueError``.
    ``call`` is the forward pass within a step; with None every layer counts its own. ``replica``: which of
    the model's replicas this process trains, each on data of its own; with None the rank in torch's default
    process group. Replicas share what one pass over all their data would draw once: signs, permutations and
    the noise of weights. The noise of activations and gradients is each replica's own.
    ``total_tokens`` is the budget, required by phases that start at a fraction of it. ``fork``: the recipe of
    the tokens before it and the budget that belongs to that recipe. ``watch``, if set, sees every quantised
    operand: (layer's name, GEMM, operand's name, the operand). ``tap``, if set, sees the tensors of each
    backward pass: (layer's name, its forward's position, dy [M, N] bf16, x [M, K] bf16, the weight [N, K]);
    it must change nothing. ``coverage``: what the recipe reaches in a model that others built, and what it
    does not. ``beside``: by place in the code, the layers whose weights are multiplied there, past them.
    ``deoscillation``, if set, follows the weights whenever the state advances. ``check``, if set, is called
    when the state first advances; what it returns is warned of, and ends a run of a study. ``positions``:
    while passes are captured as a CUDA graph, by the call of each its step and call on the device (int64 [2]).
    """

    recipe: Recipe
    backend: Selection
    seed: int
    step: int = 0
    call: int | None = 0
    tokens: int = 0
    replica: int | None = 0
    total_tokens: int | None = None
    fork: Fork | None = None
    watch: Callable[[str, Gemm, str, Operand], None] | None = field(
        default=None, repr=False
    )
    tap: Callable[[str, Position, Tensor, Tensor, Tensor], None] | None = field(
        default=None, repr=False
    )
    coverage: Coverage | None = field(default=None, repr=False)
    beside: defaultdict[str, set[str]] = field(
        default_factory=lambda: defaultdict(set), repr=False
    )
    deoscillation: Any = field(default=None, repr=False)
    check: Callable[[RecipeState], str | None] | None = field(default=None, repr=False)
    positions: dict[int, Tensor] | None = field(default=None, repr=False)
    _passes: dict[str, _Passes] = field(default_factory=dict, repr=False)
    _began: tuple[int, int] | None = field(default=None, repr=False)
    """Step and tokens of the first pass in training."""
    _moving: dict[str, bool] = field(default_factory=dict, repr=False)
    """What of the recipe moves with the steps, and whether it needs their tokens."""
    _warned: bool = field(default=False, repr=False)
    _placed: dict[torch.device, tuple[tuple[int, int], Tensor]] = field(
        default_factory=dict, repr=False
    )
    """By GPU: step and call, and the tensor there that holds them."""

    def __post_init__(self) -> None:
        if isinstance(self.seed, bool) or not hasattr(self.seed, "__index__"):
            raise ValueError(
                f"seed {self.seed!r} is no whole number (expected an int, as seed=3)"
            )
        # a number has one stream, whatever type it came in
        self.seed = operator.index(self.seed)
        for part in self.recipe.parts:
            if any(policy.signs == "step" for policy in part.policies):
                self._moving["signs"] = False
        for phase in self.recipe.phases:
            if phase.from_tokens or phase.from_fraction:
                self._moving["phases"] = True
        reset = self.recipe.deoscillate
        if reset is not None:
            has_start = bool(reset.from_tokens or reset.from_fraction)
            self._moving["de-oscillation"] = has_start
        if _recorded is not None:
            _recorded.append(self)

    @property
    def deoscillates(self) -> bool:
        """Whether weights are reset at any time."""
        if self.fork is not None and self.fork.recipe.deoscillate is not None:
            return True
        return self.recipe.deoscillate is not None

    def advance(self, tokens: int = 0) -> None:
        """Advance by one optimizer step with this many training tokens."""
        if self.check is not None:
            fault = self.check(self)
            self.check = None
            if fault is not None and _recorded is not None:
                raise UserError(fault)  # a study's run: it is not the arm's
            if fault is not None:
                warnings.warn(fault, stacklevel=2)
        self.step += 1
        self.tokens += tokens
        if self.deoscillation is not None:
            self.deoscillation.step()

    def fault(self) -> str | None:
        """Say how a trainer kept the recipe from moving, in words that follow its name; None if not."""
        if self._began is None:
            return None
        first_step, first_tokens = self._began
        omission = "never called state.advance()"
        parts = list(self._moving)
        if self.step != first_step:
            omission = "called state.advance() without tokens"
            parts = [part for part in parts if self._moving[part]]
            if self.tokens != first_tokens:
                return None
        if not parts:
            return None
        return (
            f"{omission}: {', '.join(parts)} of the recipe stayed as at the start, which is another arm "
            "(after each optimizer step call state.advance(tokens), with the tokens of that step)"
        )

    def position(self, layer: str, *, training: bool) -> Position:
        """Return the position of a layer's forward pass; count the pass unless the trainer counts.

        Raises:
            RuntimeError: activation checkpointing recomputes a pass, and it is not known which.
        """
        key = (id(self), layer)
        position: Position | None = None
        noting: list[_Region] = []
        for region in reversed(_running.get()):
            if region.repeats:
                noted = region.positions.get(key, [])
                turn = region.used[key]
                region.used[key] += 1
                if turn < len(noted):
                    position = noted[turn]
                break
            noting.append(region)
        if position is None:
            position = self._next(layer, training=training)
        for region in noting:
            region.positions.setdefault(key, []).append(position)
        return position

    def _next(self, layer: str, *, training: bool) -> Position:
        """Return the position of a pass that no region repeats."""
        self.note_start(training=training)
        if self.call is not None:
            return Position(step=self.step, call=self.call, tokens=self.tokens)
        passes = self._passes.setdefault(layer, _Passes())
        if torch._C._current_graph_task_id() != -1:  # noqa: SLF001  within a backward pass, as torch asks it
            if len(passes.open) != 1:
                raise RuntimeError(
                    f"layer {layer}: a backward pass recomputes one of {len(passes.open)} forward passes and "
                    "does not say which, so its noise is unknown (outside of a compiled graph, pass "
                    "context_fn=ablate.numerics.recompute_contexts to checkpoint(…, use_reentrant=False))"
                )
            return next(iter(passes.open))
        if not training:
            passes.evaluation += 1
            return Position(
                step=self.step,
                call=EVAL_CALL + passes.evaluation - 1,
                tokens=self.tokens,
            )
        if passes.step != self.step:
            passes.step = self.step
            passes.training = 0
            passes.open.clear()
        position = Position(step=self.step, call=passes.training, tokens=self.tokens)
        passes.training += 1
        if len(passes.open) < _MOST_OPEN:
            passes.open.add(position)
        return position

    def placed(self, at: Position, device: torch.device) -> Tensor | None:
        """Return step and call on a GPU (int64 [2]) for kernels that are launched next; None on a CPU.

        It is one tensor for each device, and it is written when the position moves, not copied from the CPU.
        """
        if device.type not in _PLACED_ON:
            return None
        if self.positions is not None:
            return self.positions[at.call]
        numbers = (at.stream_step, at.call)
        written, tensor = self._placed.get(device, (None, None))
        if tensor is None:
            tensor = torch.empty(2, dtype=torch.int64, device=device)
        if written != numbers:
            tensor[0].fill_(at.stream_step)
            tensor[1].fill_(at.call)
            self._placed[device] = (numbers, tensor)
        return tensor

    def note_start(self, *, training: bool) -> None:
        """Note where training began, to say later whether its loop has moved on."""
        if training and self._began is None:
            self._began = self.step, self.tokens

    def backward_done(self, layer: str, at: Position) -> None:
        """Note that the gradients of a pass were computed."""
        if layer in self._passes:
            self._passes[layer].open.discard(at)

    @property
    def replica_number(self) -> int:
        """Which of the model's replicas this process trains."""
        if self.replica is not None:
            return self.replica
        if distributed.is_initialized():
            return distributed.get_rank()
        return 0

    def stream_of(self, operand: str) -> str:
        """Name an operand's stream of noise in this replica; all replicas share that of weights."""
        replica = self.replica_number
        if operand == "w" or not replica:
            return operand
        return f"{operand} of replica {replica}"

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint must hold for the streams, phases and de-oscillation to continue."""
        calls: dict[str, list[int]] = {}
        for layer, passes in self._passes.items():
            calls[layer] = [passes.step, passes.training, passes.evaluation]
        saved: dict[str, Any] = {
            "seed": self.seed,
            "step": int(self.step),
            "tokens": int(self.tokens),
            "calls": calls,
        }
        if self.deoscillation is not None:
            saved["deoscillation"] = self.deoscillation.state_dict()
        return saved

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Continue where another state was saved; load the model's weights first.

        Raises:
            ValueError: what was saved is not such a state, or has another seed.
        """
        expected = self.state_dict().keys()
        if saved.keys() != expected:
            keys = ", ".join(map(str, saved)) or "nothing"
            raise ValueError(f"expected a state with {', '.join(expected)}, got {keys}")
        if saved["seed"] != self.seed:
            raise ValueError(
                f"the state was saved with seed {saved['seed']}, but this one has {self.seed}"
            )
        self.step = saved["step"]
        self.tokens = saved["tokens"]
        self._passes = {
            name: _Passes(*counts) for name, counts in saved["calls"].items()
        }
        if self.deoscillation is not None:
            self.deoscillation.load_state_dict(saved["deoscillation"])

    def phases(self, place: LayerPlace) -> tuple[tuple[int, LayerRecipe], ...]:
        """List the (first token, recipe) pairs of a layer, newest first.

        Raises:
            ValueError: a phase starts at a fraction of the budget and the budget is unknown.
        """
        starts = _starts(self.recipe, place, self.total_tokens)
        fork = self.fork
        if fork is None:
            return starts
        before_fork = _starts(fork.recipe, place, plan_steps(fork.training).tokens)
        at_fork = next(recipe for start, recipe in starts if start <= fork.tokens)
        later = [(start, recipe) for start, recipe in starts if start > fork.tokens]
        earlier = [
            (start, recipe) for start, recipe in before_fork if start < fork.tokens
        ]
        return (*later, (fork.tokens, at_fork), *earlier)

    def warn_once(self, fault: str) -> None:
        """Warn of a wrong use of the state, once for all layers."""
        if not self._warned:
            self._warned = True
            warnings.warn(fault, stacklevel=2)


def _starts(
    recipe: Recipe, place: LayerPlace, total_tokens: int | None
) -> tuple[tuple[int, LayerRecipe], ...]:
    starts = [
        (phase.start(total_tokens), phase.recipe) for phase in phases_of(recipe, place)
    ]
    return tuple(sorted(starts, key=lambda start: start[0], reverse=True))
