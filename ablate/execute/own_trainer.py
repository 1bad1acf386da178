"""A user's own training function, checked in all that a result is read from: rows, end, and recipe state.

How it fails: a row or an end that does not fit the plan is a ``UserError`` in one line. So is a function that
has ended and did not apply its arm's recipe, or never advanced its state: such a run is not the arm's.
"""

from __future__ import annotations

import inspect
import math
import operator
import reprlib
from typing import TYPE_CHECKING, Any, get_args

from ablate.base.errors import UserError
from ablate.base.user_functions import load_function
from ablate.layers.state import recorded_states
from ablate.recipes import GEMMS
from ablate.run.schedule import plan_steps
from ablate.train import TrainResult
from ablate.train.loop import End

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ablate.recipes import Recipe
    from ablate.run.config import RunConfig

_COUNTS = ("tokens", "step")
_NEEDED = {"train": {*_COUNTS}, "eval": {*_COUNTS, "val_loss"}}


def call(
    name: str,
    config: RunConfig,
    on_metrics: Callable[[dict[str, Any]], None],
    *,
    follows: bool = False,
    **options: Any,
) -> TrainResult:
    """Call the function ``name`` as the built-in trainer is called, and check its rows and its end.

    ``follows``: this process is not the first of several; only the first one's rows count.

    Raises:
        UserError: no such function; a row or an end that is malformed or does not fit the plan; a recipe that
            was not applied; or a state that was never advanced.
        Exception: whatever the function raises.
    """
    start = options["checkpoints"].load() if "checkpoints" in options else None
    rows = _Rows(
        name, config, on_metrics, first_step=0 if start is None else start.step
    )
    with recorded_states() as states:
        result = load_function(name)(config, rows.add, **options)
    if not isinstance(result, TrainResult) or result.state not in get_args(End):
        hint = f"expected TrainResult(state=…, tokens=…, step=…) with a state of {', '.join(get_args(End))}"
        raise UserError(f"trainer {name} returned {reprlib.repr(result)}", hint=hint)
    if result.state == "finished" or result.step > 1:
        for state in states:
            if (fault := state.fault()) is not None:
                raise UserError(f"trainer {name} {fault}")
        applied = [state.recipe.text for state in states]
        if result.recipe is not None:
            applied.append(result.recipe.text)
        _check_recipe(name, config.recipe, applied)
    if result.state == "finished" and not follows:
        rows.check_end(result)
    return result


class _Rows:
    """Passes a trainer's rows on and holds them to the plan. ``last_tokens``: by kind of row."""

    def __init__(
        self,
        name: str,
        config: RunConfig,
        on_metrics: Callable[[dict[str, Any]], None],
        *,
        first_step: int,
    ) -> None:
        self._name = name
        self._on_metrics = on_metrics
        self._first_step = first_step
        self._budget = config.training.tokens
        self._planned_tokens = plan_steps(config.training).tokens
        self._last_tokens = {"train": -1, "eval": -1}

    def add(self, printed: object) -> None:
        """Check a row and pass it on with plain numbers."""
        row = _checked_row(printed)
        if row is None:
            hint = "expected such as {'kind': 'eval', 'tokens': 4096, 'step': 1, 'val_loss': 5.2}, all finite"
            raise UserError(
                f"trainer {self._name} gave on_metrics {reprlib.repr(printed)}",
                hint=hint,
            )
        kind = row["kind"]
        tokens = row["tokens"]
        is_later = tokens > self._last_tokens[kind] and tokens >= max(
            self._last_tokens.values()
        )
        if (
            not is_later
            or tokens > self._planned_tokens
            or row["step"] < self._first_step
        ):
            raise UserError(
                f"trainer {self._name} gave on_metrics a row of kind '{kind}' at step {row['step']}, "
                f"{tokens:,} tokens",
                hint=f"expected steps from {self._first_step} on, as by checkpoints.load(), and tokens that "
                f"rise to {self._planned_tokens:,}, the plan's end",
            )
        self._last_tokens[kind] = tokens
        self._on_metrics(row)

    def check_end(self, result: TrainResult) -> None:
        """Check that a finished run has come to the plan's end and was evaluated there."""
        evaluated = self._last_tokens["eval"]
        is_evaluated = evaluated >= self._budget or result.step <= self._first_step
        if (
            not self._budget <= result.tokens <= self._planned_tokens
            or not is_evaluated
        ):
            raise UserError(
                f"trainer {self._name} finished at {result.tokens:,} tokens, last evaluated at {evaluated:,}",
                hint="expected both at the plan's end: plan_steps(config.training).tokens, "
                f"{self._planned_tokens:,}",
            )


def _check_recipe(name: str, recipe: Recipe, applied: Sequence[str]) -> None:
    """Refuse a trainer that did not apply its arm's recipe; ``applied``: the texts of what it applied."""
    is_plain = all(
        getattr(part, gemm).is_untouched for part in recipe.parts for gemm in GEMMS
    )
    if recipe.text in applied or (is_plain and not applied):
        return
    if applied:
        fault = "called apply_recipe with another recipe"
    else:
        fault = "applied no recipe"
    raise UserError(
        f"trainer {name} {fault}: its run is not the arm's",
        hint="call apply_recipe with config.recipe; who applies it otherwise says so by "
        "TrainResult(recipe=config.recipe, …)",
    )


def check_call(name: str) -> None:
    """Refuse a trainer that cannot be called as ``call`` does; it is imported, and not called.

    Raises:
        UserError: no such function, or one with other parameters.
    """
    options = dict.fromkeys(("tokens", "should_stop", "checkpoints", "device"))
    try:
        inspect.signature(load_function(name)).bind("config", "on_metrics", **options)
    except TypeError as error:
        hint = f"it is called as train(config, on_metrics, *, {', '.join(options)})"
        raise UserError(f"trainer {name}: {error}", hint=hint) from None


def _checked_row(row: Any) -> dict[str, Any] | None:
    """Return the row with plain numbers, for JSON; None if it is malformed or a number is not finite."""
    try:
        kind = row["kind"]
        needed = _NEEDED[kind]
        checked = {"kind": kind}
        for key, value in row.items():
            if key in _COUNTS:
                checked[key] = operator.index(value)
            elif key != "kind":
                checked[key] = float(value)
                if not math.isfinite(checked[key]):
                    return None
    except (AttributeError, KeyError, TypeError, ValueError):
        return None
    return checked if checked.keys() >= needed else None
