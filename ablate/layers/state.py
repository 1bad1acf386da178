"""The state that the layers of one model share: recipe, back end, and the position of the random streams.

A layer reads the position (step, call, tokens) in its forward pass and saves it as a small tensor. So the
backward pass draws from its own forward's streams, even if the trainer has moved on.
"""

from __future__ import annotations

import operator
import traceback
import warnings
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from torch import distributed
from torch.optim import optimizer

from ablate.layers.position import EVAL_CALL, Position
from ablate.layers.recompute import Calls
from ablate.recipes.place import LayerPlace, phases_of
from ablate.run.schedule import plan_steps

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor

    from ablate.backends.protocol import Operand
    from ablate.backends.select import Selection
    from ablate.recipes import Gemm, LayerRecipe, Recipe
    from ablate.recipes.coverage import Coverage
    from ablate.run.config import Fork

_FORWARDS_WITHOUT_ADVANCE = 1000
"""Training passes after which a state should have advanced, where the weights tell nothing."""
_NOT_ADVANCED = (
    "{} without state.advance(): {} of this recipe move on with it (call state.advance(tokens) after each "
    "optimizer step)"
)


@dataclass(kw_only=True)
class Moves:
    """What of a recipe moves on with its state, and whether the state did; it outlives both.

    ``by_step``: names what does not move on without ``advance``, in words for a message; ``by_tokens``: what
    does not without the tokens.
    """

    recipe: Recipe
    by_step: str
    by_tokens: str
    start: tuple[int, int] | None = None
    step: bool = False
    tokens: bool = False

    def trained(self, step: int, tokens: int) -> None:
        """Note a forward pass in training, with the state's step and tokens."""
        if self.start is None:
            self.start = step, tokens
        self.step = self.step or step != self.start[0]
        self.tokens = self.tokens or tokens != self.start[1]

    def fault(self) -> str | None:
        """Return how a trainer, the subject of the sentence, kept the recipe from moving; None if not."""
        if self.start is None:
            return None
        remedy = "after each optimizer step call state.advance(tokens), with the tokens of that step"
        if not self.step and self.by_step:
            how, still = "never called state.advance()", self.by_step
        elif not self.tokens and self.by_tokens:
            how, still = "called state.advance() without tokens", self.by_tokens
        else:
            return None
        return f"{how}: {still} of the recipe stayed as at the start, which is another arm ({remedy})"


_recorded: list[Moves] | None = None


@contextmanager
def recorded_states() -> Iterator[list[Moves]]:
    """Collect what is known of all states that are made in this block."""
    global _recorded  # noqa: PLW0603  a process trains one run at a time
    before, _recorded = _recorded, []
    try:
        yield _recorded
    finally:
        _recorded = before


class WeightObserver(Protocol):
    """What takes in the weights after each optimizer step: ``ablate.layers.deoscillation``."""

    def step(self) -> int | None:
        """Take in the weights; return how many were changed, None where that was not looked at."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint must hold."""

    def load_state_dict(self, found: Mapping[str, Any]) -> None:
        """Restore it, after the weights and the position of the streams."""


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
    does not. ``deoscillation``, if set, takes in the weights whenever the state advances. ``check``, if set,
    is asked when it first advances what is wrong with the model, for a warning.
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
    watch: Callable[[str, Gemm, str, Operand], None] | None = field(default=None, repr=False)
    tap: Callable[[str, Position, Tensor, Tensor, Tensor], None] | None = field(default=None, repr=False)
    coverage: Coverage | None = field(default=None, repr=False)
    calls: Calls = field(default_factory=Calls, repr=False)
    deoscillation: WeightObserver | None = field(default=None, repr=False)
    check: Callable[[RecipeState], str | None] | None = field(default=None, repr=False)
    moves: Moves = field(init=False, repr=False)
    _warned: bool = field(default=False, repr=False)

    def __post_init__(self) -> None:
        self.seed = _whole(self.seed)
        self.moves = _moves(self.recipe)
        if _recorded is not None:
            _recorded.append(self.moves)

    @property
    def deoscillates(self) -> bool:
        """Whether weights are reset at any time."""
        recipes = (self.recipe, *([] if self.fork is None else [self.fork.recipe]))
        return any(recipe.deoscillate is not None for recipe in recipes)

    def advance(self, tokens: int = 0) -> None:
        """Advance by one optimizer step with this many training tokens."""
        check, self.check = self.check, None
        if check is not None and (fault := check(self)) is not None:
            warnings.warn(fault, stacklevel=2)
        self.step += 1
        self.tokens += tokens
        self.moves.step, self.moves.tokens = True, self.moves.tokens or tokens > 0
        if self.deoscillation is not None:
            self.deoscillation.step()

    def position(self, layer: str, *, training: bool, version: int | None = None) -> Position:
        """Return the position of a layer's forward pass, which is counted unless the trainer counts.

        ``version``: of the layer's weight, which changes with each optimizer step; None if it tells nothing.

        Raises:
            RuntimeError: activation checkpointing recomputes a pass, and it is not known which.
        """

        def new() -> Position:
            call = self.call
            if training:
                self.moves.trained(self.step, self.tokens)
            if call is None and training:
                call, changes = self.calls.next_in_training(layer, self.step, version)
                # One change may be of an optimizer that goes to and fro within a step, as SAM's.
                if changes == 2 and self.moves.by_step and not _is_within_a_step():
                    self.warn_once(_NOT_ADVANCED.format("two changes of the weights", self.moves.by_step))
                elif call + 1 == _FORWARDS_WITHOUT_ADVANCE and self.moves.by_step and not self.step:
                    passes = f"{_FORWARDS_WITHOUT_ADVANCE} training passes"
                    self.warn_once(_NOT_ADVANCED.format(passes, self.moves.by_step))
            elif call is None:
                call = EVAL_CALL + self.calls.next_in_evaluation(layer)
            return Position(step=self.step, call=call, tokens=self.tokens)

        return self.calls.position(layer, new, counts=self.call is None)

    def stream_of(self, operand: str) -> str:
        """Return the name of an operand's stream of noise in this replica."""
        replica = self.replica
        if replica is None:
            is_one = not (distributed.is_available() and distributed.is_initialized())
            replica = 0 if is_one else distributed.get_rank()
        return operand if operand == "w" or not replica else f"{operand} of replica {replica}"

    def state_dict(self) -> dict[str, Any]:
        """Return what the streams, phases and de-oscillation go on from, for a checkpoint."""
        follower = self.deoscillation
        return {
            "seed": self.seed, "step": int(self.step), "tokens": int(self.tokens),
            "calls": self.calls.state_dict(),
            **({} if follower is None else {"deoscillation": follower.state_dict()}),
        }  # fmt: skip

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go on where another state was saved; load the model's weights first.

        Raises:
            ValueError: what was saved is no such state, or has another seed.
        """
        expected = self.state_dict().keys()
        if saved.keys() != expected:
            keys = ", ".join(map(str, saved)) or "nothing"
            raise ValueError(f"expected a state with {', '.join(expected)}, got {keys}")
        if saved["seed"] != self.seed:
            raise ValueError(f"the state was saved with seed {saved['seed']}, but this one has {self.seed}")
        self.step, self.tokens = saved["step"], saved["tokens"]
        self.calls.load_state_dict(saved["calls"])
        if self.deoscillation is not None:
            self.deoscillation.load_state_dict(saved["deoscillation"])

    def phases(self, place: LayerPlace) -> tuple[tuple[int, LayerRecipe], ...]:
        """Return the (first token, recipe) pairs of a layer, newest first.

        Raises:
            ValueError: a phase starts at a fraction of the budget and the budget is unknown.
        """
        starts = _starts(self.recipe, place, self.total_tokens)
        if (fork := self.fork) is None:
            return starts
        before = _starts(fork.recipe, place, plan_steps(fork.training).tokens)
        now = next(recipe for start, recipe in starts if start <= fork.tokens)
        later = (one for one in starts if one[0] > fork.tokens)
        earlier = (one for one in before if one[0] < fork.tokens)
        return (*later, (fork.tokens, now), *earlier)

    def warn_once(self, fault: str) -> None:
        """Warn of how the state is kept, once for all layers."""
        if not self._warned:
            self._warned = True
            warnings.warn(fault, stacklevel=2)


def _is_within_a_step() -> bool:
    """Whether an optimizer runs this pass itself, as L-BFGS runs many within a step."""
    return any(frame.f_code.co_filename == optimizer.__file__ for frame, _ in traceback.walk_stack(None))


def _moves(recipe: Recipe) -> Moves:
    policies = [policy for part in recipe.parts for _, _, policy in part.operands()]
    later = ["phases"] * any(phase.from_tokens or phase.from_fraction for phase in recipe.phases)
    if (reset := recipe.deoscillate) is not None and (reset.from_tokens or reset.from_fraction):
        later.append("de-oscillation")
    steps = {
        "signs": any(policy.signs == "step" for policy in policies),
        "delayed scales": any(policy.scale == "delayed" for policy in policies),
        "phases": "phases" in later,
        "de-oscillation": reset is not None,
    }
    return Moves(
        recipe=recipe,
        by_step=", ".join(name for name, moves in steps.items() if moves),
        by_tokens=", ".join(later),
    )


def _whole(seed: Any) -> int:
    """Return a whole number as an int, so that a number has one stream, whatever type it came in."""
    try:
        if not isinstance(seed, bool):
            return operator.index(seed)
    except TypeError:
        pass
    raise ValueError(f"seed {seed!r} is no whole number (expected an int, as seed=3)")


def _starts(
    recipe: Recipe, place: LayerPlace, total_tokens: int | None
) -> tuple[tuple[int, LayerRecipe], ...]:
    starts = [(phase.start(total_tokens), phase.recipe) for phase in phases_of(recipe, place)]
    return tuple(sorted(starts, key=lambda start: start[0], reverse=True))
